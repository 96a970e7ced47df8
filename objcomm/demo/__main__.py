"""``python -m objcomm.demo``: start the demo's ranks on this machine and wait for them."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from objcomm.demo.config import REFUSED, SAMPLE


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
        parser.error(f"--nproc must be at least 1, it is {arguments.nproc}")
    if arguments.out.exists() and not arguments.out.is_dir():
        parser.error(f"--out must be a folder, {str(arguments.out)!r} is none")
    return launch(arguments.config, arguments.nproc, arguments.out)


def launch(config: Path, nproc: int, out: Path) -> int:
    """Run ``objcomm.demo.job`` on ``nproc`` ranks, as ``torchrun`` on the command line would.

    Raises:
        ChildFailedError: a rank failed in a way that the job did not foresee.
    """
    # A refusing job has said why; torchrun would log each rank's exit status below it. What it
    # logs of other failures stands in its exception, too.
    logging.disable(logging.ERROR)
    program = ["-m", "objcomm.demo.job", f"--config={config}", f"--out={out}"]
    try:
        # --standalone: torchrun picks a free port by itself.
        torchrun.main(["--standalone", f"--nproc-per-node={nproc}", *program])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode == REFUSED:
            return REFUSED
        raise
    except SignalException as stopped:  # Ctrl-C, say; torchrun has ended the ranks
        return 128 + stopped.sigval  # as a shell reports it
    return 0


if __name__ == "__main__":
    sys.exit(main())
