"""The commands that the first pages tell their readers to run."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: The pages that a reader follows from top to bottom, and that have all the steps needed.
PAGES = ("docs/index.md", "docs/quickstart.md", "README.md")

_FENCE = re.compile(r"^```(python|text)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Step(NamedTuple):
    """A command on a page.

    Attributes:
        words: the command line.
        shown: the output that the page shows for it.
    """

    words: list[str]
    shown: list[str]


def programs(page: Path) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield each program of a page with the commands below it; empty for those before the first."""
    source, below = "", list[list[str]]()
    for kind, content in _FENCE.findall(page.read_text(encoding="utf-8")):
        if kind == "python":
            yield source, below
            source, below = content, []
        else:
            below += [line.split() for line in content.splitlines() if line]
    yield source, below


def steps(page: Path, folder: Path) -> Iterator[Step]:
    """Yield the commands of a page in order; the program of each is in the folder by then."""
    for source, below in programs(page):
        for words in below:
            if words[0] in {"python", "torchrun"}:
                (folder / words[-1]).write_text(source, encoding="utf-8")
            yield Step(words, _shown(source) if words[0] != "pip" else [])


def _shown(source: str) -> list[str]:
    """Return the comments right below a ``print``."""
    shown, is_below = [], False
    for line in map(str.strip, source.splitlines()):
        if is_below and line.startswith("# "):
            shown.append(line.removeprefix("# "))
        else:
            is_below = line.startswith("print(")
    return shown
