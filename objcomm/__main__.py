"""``python -m objcomm``: look at ranks before a job, and at their records after it."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from objcomm.bootstrap.doctor.command import add_to
from objcomm.errors import UsageError
from objcomm.observe.inspect.dumps import Dump, read
from objcomm.observe.inspect.report import Places, conclude, heading, sections
from objcomm.observe.inspect.rows import corrected, estimate, match
from objcomm.observe.inspect.trace import trace


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and carry it out; return the exit status."""
    arguments = _parser().parse_args(argv)
    status: int = arguments.run(arguments)
    return status


def _inspect(arguments: argparse.Namespace, inspecting: argparse.ArgumentParser) -> int:
    if arguments.last < 1:
        inspecting.error(f"--last must be at least 1, it is {arguments.last}")
    try:
        dumps = read(arguments.files)
        report = inspect(dumps, arguments.last, arguments.trace)
    except UsageError as error:
        inspecting.error(str(error))
    except OSError as error:
        inspecting.error(f"--trace {arguments.trace}: {error.strerror}")
    try:
        sys.stdout.write(report)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def inspect(dumps: Sequence[Dump], last: int, trace_path: Path | None = None) -> str:
    """The report on some dumps; writes a trace too, if there is a path for it.

    Args:
        dumps: one for each rank, in the order of ranks.
        last: how many calls of each lane to show.
        trace_path: where the trace goes.

    Raises:
        OSError: the trace can't be written.
    """
    clocks = estimate(match(dumps), dumps)
    dumps = corrected(dumps, clocks)
    rows = match(dumps)
    places = Places(rows)
    lines = [*heading(dumps, clocks), *sections(rows, places, last), "", conclude(rows, places)]
    if trace_path is not None:
        trace_path.write_text(json.dumps(trace(rows, dumps, clocks)), encoding="ascii")
        lines.append(f"trace: {trace_path} (open it at https://ui.perfetto.dev)")
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m objcomm",
        description="Looks at ranks before a job, and at what they have written after it.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspecting = commands.add_parser(
        "inspect",
        help="lay the ranks' dumps side by side and say where they part",
        description="Reads what objcomm.recorder.dump, or an error with a record folder, wrote on "
        "each rank; matches the ranks' calls; prints them; and says where the ranks part. Lines "
        "marked > are calls in which they do.",
        epilog="Example: python -m objcomm inspect records/ --trace trace.json",
    )
    inspecting.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a rank's dump; or a folder, of which every objcomm-*.json is read",
    )
    inspecting.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the calls as a Chrome trace, for https://ui.perfetto.dev",
    )
    inspecting.add_argument(
        "--last",
        type=int,
        default=20,
        metavar="N",
        help="show the last N calls of each lane (default: %(default)s); marked ones always",
    )
    inspecting.set_defaults(run=lambda arguments: _inspect(arguments, inspecting))
    add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
