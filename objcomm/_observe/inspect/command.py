"""The command ``python -m objcomm inspect``: a report that compares the dumps of all ranks."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from objcomm._observe.inspect.dumps import Dump, read
from objcomm._observe.inspect.report import common_folder, conclude, heading, sections
from objcomm._observe.inspect.rows import corrected, estimate, match
from objcomm._observe.inspect.trace import trace
from objcomm._observe.terminal import show
from objcomm.errors import UsageError


def run(arguments: argparse.Namespace, refuse: Callable[[str], Any]) -> int:
    """Run the command; return the exit status.

    Args:
        arguments: the arguments as parsed by ``python -m objcomm``.
        refuse: prints that an argument is wrong, and exits the program.
    """
    if arguments.last < 1:
        refuse(f"--last must be at least 1, not {arguments.last}")
    try:
        dumps = read(arguments.files)
        report = inspect(dumps, arguments.last, arguments.trace)
    except UsageError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"--trace {arguments.trace}: {error.strerror}")
    show(report)
    return 0


def inspect(dumps: Sequence[Dump], last: int, trace_path: Path | None = None) -> str:
    """Return the report on some dumps; also write a trace if a path is given.

    Args:
        dumps: one dump per rank, in rank order.
        last: how many calls of each lane to show.
        trace_path: the file for the trace.

    Raises:
        OSError: the trace cannot be written.
    """
    clocks = estimate(match(dumps), dumps)
    dumps = corrected(dumps, clocks)
    rows = match(dumps)
    folder = common_folder(rows)
    lines = [*heading(dumps, clocks), *sections(rows, folder, last), "", conclude(rows, folder)]
    if trace_path is not None:
        trace_path.write_text(json.dumps(trace(rows, dumps, clocks)), encoding="ascii")
        lines.append(f"trace: {trace_path} (open it at https://ui.perfetto.dev)")
    return "\n".join(lines) + "\n"
