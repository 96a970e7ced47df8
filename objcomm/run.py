"""``python -m objcomm.run train.py``: run a program with torch's object collectives replaced.

Puts a folder with a ``sitecustomize`` on ``PYTHONPATH``, and then replaces itself with the Python
that runs the program. There, ``sitecustomize`` replaces the functions when torch is imported. This
also works in every Python process that the program starts. Knows command lines and the environment;
``compat.program`` knows what to replace and what to report.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

_STARTUP = Path(__file__).with_name("compat") / "startup"
_NAME = "objcomm.run"

_LAUNCHERS = {"accelerate", "deepspeed", "mpiexec", "mpirun", "srun", "torchrun"}

_EPILOG = """\
Everything else is the same as without it: the program's arguments, __main__, exit status,
tracebacks, and the processes that it starts. Start every rank this way:

  torchrun --nproc-per-node=4 -m objcomm.run train.py --lr 0.1
  torchrun --nproc-per-node=4 -m objcomm.run -m package.train
  srun python -m objcomm.run --report train.py
  python -m objcomm.run -m accelerate.commands.launch train.py
"""


def main(argv: Sequence[str] | None = None, typed: str = f"python -m {_NAME}") -> NoReturn:
    """Replace this process with the program that its command line names.

    Args:
        argv: the arguments after ``objcomm run``; None for ``python -m objcomm.run``.
        typed: the command that the user typed.
    """
    program, has_report = _parsed(sys.argv[1:] if argv is None else argv, typed)
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]
    if argv is not None and sys.modules["__main__"].__spec__ is None:
        options = before[:-1]  # before the path of the console command
    else:
        options = _interpreter_options(before, _NAME if argv is None else "objcomm")
    paths = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_STARTUP), *paths])
    os.environ["OBJCOMM_RUN"] = f"{os.getpid()} {int(has_report)} {sys.prefix}"
    os.execv(sys.executable, [sys.executable, *options, *program])  # noqa: S606  # our own Python, no shell


def _parsed(argv: Sequence[str], typed: str) -> tuple[Sequence[str], bool]:
    """Return the program's part of the command line, and whether a report is requested.

    Everything after the script or ``-m`` belongs to the program, options included.
    """
    parser = argparse.ArgumentParser(
        prog=typed,
        usage="%(prog)s [--report] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description="Runs a program with torch's object collectives replaced by objcomm's, "
        "wherever it imports\nthem. Rank 0 prints one line that says so to standard error.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="when it ends, rank 0 prints how many calls all ranks made, how many bytes they "
        "moved, how long they took, and the program's slowest lines",
    )
    own = next((at for at, each in enumerate(argv) if not each.startswith("--")), len(argv))
    if argv[own : own + 1] == ["-h"]:
        own += 1
    arguments = parser.parse_args(argv[:own])
    program = argv[own:]
    if not program or program == ["-m"]:
        parser.error("name a script, or a module after -m")
    if program[0].startswith("-") and not program[0].startswith("-m"):
        parser.error(f"{program[0]} is not an option; name a script, or a module after -m")
    if program[0] in _LAUNCHERS and not Path(program[0]).exists():
        parser.error(
            f"{program[0]} starts the ranks, so it comes first, and runs this on each: "
            f"see the examples of {typed} --help"
        )
    if sys.flags.ignore_environment or sys.flags.no_site:
        parser.error(
            "Python's options -E, -I and -S keep it from reading PYTHONPATH or sitecustomize, by "
            "which torch's functions are replaced; leave them out"
        )
    return program, arguments.report


def _interpreter_options(before: Sequence[str], name: str = _NAME) -> list[str]:
    """Return Python's own options from the arguments up to and including ``-m`` and this name."""
    *options, last = before
    if last == name:
        last = options.pop()  # "-m", or combined letters that end in it: "-um"
    letters = last.removesuffix(name).removesuffix("m")
    return options if letters == "-" else [*options, letters]


if __name__ == "__main__":
    main()
