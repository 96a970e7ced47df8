"""Runs examples as ``__main__``, one after another in one process: imports cost more than they do.

``torchrun --nproc-per-node 3 -m tests.example_runner FOLDER NAME...`` leaves what each rank of each
example printed in ``FOLDER/NAME.RANK``, with the traceback if it failed.
"""

import contextlib
import os
import runpy
import sys
import traceback
from pathlib import Path

_EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, printed: Path) -> bool:
    """Run one example and say whether it ended well."""
    with printed.open("w") as stdout, contextlib.redirect_stdout(stdout):
        try:
            runpy.run_path(str(_EXAMPLES / f"{name}.py"), run_name="__main__")
        except BaseException:  # noqa: BLE001  # whatever it raises is what the test shows
            traceback.print_exc(file=stdout)
            return False
    return True


def main(folder: str, *names: str) -> int:
    """Run them all, up to the first that fails."""
    rank = os.environ.get("RANK", "0")
    return 0 if all(run(name, Path(folder) / f"{name}.{rank}") for name in names) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
