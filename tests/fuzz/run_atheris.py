"""Coverage-guided fuzzing: ``python -m tests.fuzz.run_atheris plain -max_total_time=60``.

Arguments after the target's name go to libFuzzer. New inputs are kept in ``fuzz-out/``; put those
that show a defect into ``corpus/``, which the suite replays.
"""

import random
import sys
import warnings
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["objcomm"]):
    import objcomm
    from tests.fuzz.mutate import seeds, variant
    from tests.fuzz.targets import TARGETS, attempt

_CORPUS = Path(__file__).parent / "corpus"


def main(arguments: list[str]) -> None:
    """Fuzz up to libFuzzer's limits; a defect ends the process with its input."""
    if len(arguments) < 2 or arguments[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz.run_atheris {{{','.join(TARGETS)}}} [options]")
    name = arguments[1]
    found = Path("fuzz-out") / name
    found.mkdir(parents=True, exist_ok=True)
    for at, raw in enumerate(seeds(name)):
        (found / f"seed-{at}").write_bytes(raw)
    warnings.simplefilter("ignore")  # torch and numpy warn about odd sizes and dtypes

    def mutated(raw: bytes, nbytes_max: int, seed: int) -> bytes:
        # A checksum would reject a byte changed at random.
        try:
            return variant(random.Random(seed), name, raw)[:nbytes_max]
        except (objcomm.WireError, IndexError):
            changed: bytes = atheris.Mutate(raw, nbytes_max)
            return changed

    options = ["-timeout=2", "-rss_limit_mb=2048", *arguments[2:], str(found), str(_CORPUS / name)]
    atheris.Setup([arguments[0], *options], lambda raw: attempt(name, raw), custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
