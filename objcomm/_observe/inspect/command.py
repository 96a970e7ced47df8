"""``python -m objcomm inspect``: ranks' dumps laid side by side, in one report."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from objcomm._observe.inspect.dumps import Dump, read
from objcomm._observe.inspect.report import Places, conclude, heading, sections
from objcomm._observe.inspect.rows import corrected, estimate, match
from objcomm._observe.inspect.trace import trace
from objcomm._observe.terminal import show
from objcomm.errors import UsageError


def run(arguments: argparse.Namespace, refuse: Callable[[str], Any]) -> int:
    """Carry out what the command line asks for; return the exit status.

    Args:
        arguments: as ``python -m objcomm`` has parsed them.
        refuse: says that an argument is wrong, and ends the program.
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
