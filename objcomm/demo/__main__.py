"""``python -m objcomm.demo``: start the demo's ranks on this machine and wait for them."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import objcomm
from objcomm.demo.config import SAMPLE

_INTERRUPTED = 130  # as a shell reports Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run the job; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m objcomm.demo",
        description="Train a small network on handwritten digits with several ranks, and gather "
        "and reduce what they find with objcomm.",
    )
    parser.add_argument(
        "--config", type=Path, default=SAMPLE, help="a TOML file (default: the sample, %(default)s)"
    )
    parser.add_argument(
        "--nproc", type=int, default=4, help="how many ranks to start (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder to write (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    if arguments.nproc < 1:
        parser.error(f"--nproc must be at least 1, not {arguments.nproc}")
    if arguments.out.exists() and not arguments.out.is_dir():
        parser.error(f"--out must be a folder, {str(arguments.out)!r} is none")
    program = [f"--config={arguments.config}", f"--out={arguments.out}"]
    try:
        return max(objcomm.launch(run_job, arguments.nproc, program, joined=False))
    except KeyboardInterrupt:  # the ranks have ended
        return _INTERRUPTED


def run_job(program: Sequence[str]) -> int:
    """Run the job on one rank; return its exit status.

    The job is imported here, so that only the ranks spend time on it.
    """
    from objcomm.demo import job  # noqa: PLC0415  # see above

    return job.main(program)


if __name__ == "__main__":
    sys.exit(main())
