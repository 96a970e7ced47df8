"""The demo's settings, read from a TOML file.

Does not know about ranks: reading raises one exception, and the job decides which ranks see it.
"""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_type_hints

SAMPLE = Path(__file__).with_name("digits.toml")
REFUSED = 2  # exit status of a job that can't use its config and has printed why
_TEST_SHARES = (0.1, 0.9)  # within these, each of a hundred ranks has images of both sets


class ConfigError(Exception):
    """A settings file can't be used; the arguments are the file and what is wrong with it."""

    def __str__(self) -> str:
        path, reason = self.args
        return f"cannot use the config {str(path)!r}: {reason}; a sample is {SAMPLE}"


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of one run; ``digits.toml`` explains them."""

    seed: int
    test_share: float
    hidden: int
    epochs: int
    batch_size: int
    learning_rate: float

    def problems(self) -> list[str]:
        """Describe what is wrong with the values; empty if they are valid."""
        found = [
            f"{name} must be of type {kind.__name__}, it is {value!r}"
            for name, kind in get_type_hints(Config).items()
            if type(value := getattr(self, name)) is not kind
        ]
        if found:
            return found
        if not 0 <= self.seed < 2**32:
            found.append("seed must lie between 0 and 2**32 - 1")
        least, most = _TEST_SHARES
        if not least <= self.test_share <= most:
            found.append(f"test_share must lie between {least} and {most}")
        found += [
            f"{name} must be positive"
            for name in ("hidden", "epochs", "batch_size", "learning_rate")
            if not getattr(self, name) > 0
        ]
        return found


def read_config(path: Path) -> Config:
    """Read and check a settings file.

    Raises:
        ConfigError: the file is missing, unreadable or not TOML, or its settings are not those of
            ``Config``.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(path, error.strerror or str(error)) from error
    except ValueError as error:  # wrong encoding or syntax
        raise ConfigError(path, f"it is not TOML: {error}") from error
    names = {field.name for field in fields(Config)}
    if missing := sorted(names - table.keys()):
        raise ConfigError(path, f"it lacks {', '.join(missing)}")
    if unknown := sorted(table.keys() - names):
        raise ConfigError(path, f"there is no setting {', '.join(unknown)}")
    config = Config(**table)
    if problems := config.problems():
        raise ConfigError(path, "; ".join(problems))
    return config
