"""Run examples as ``__main__``, one after the other in one process: imports take longest.

``torchrun --nproc-per-node 3 -m tests.example_runner FOLDER NAME...`` writes the output of each
rank of each example to ``FOLDER/NAME.RANK``, with the traceback if it failed.
"""

import contextlib
import os
import runpy
import sys
import traceback
from pathlib import Path

_EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, printed: Path) -> bool:
    """Run one example and return whether it succeeded."""
    with printed.open("w") as stdout, contextlib.redirect_stdout(stdout):
        try:
            runpy.run_path(str(_EXAMPLES / f"{name}.py"), run_name="__main__")
        except BaseException:  # noqa: BLE001  # the test shows whatever it raises
            traceback.print_exc(file=stdout)
            return False
    return True


def main(folder: str, *names: str) -> int:
    """Run all examples up to the first that fails."""
    rank = os.environ.get("RANK", "0")
    return 0 if all(run(name, Path(folder) / f"{name}.{rank}") for name in names) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
