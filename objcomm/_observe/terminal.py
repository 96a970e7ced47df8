"""Text for a terminal: tables, what may be shown there, and a reader that has gone.

And what a program says by its exit status.
"""

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


def printable(text: str) -> str:
    """Without what would move a terminal's cursor or change its colours."""
    return "".join(each if each.isprintable() else " " for each in text)


def aligned(rows: Sequence[Sequence[str]], *, is_right: bool = False) -> list[str]:
    """The rows of a table as lines, in columns.

    Args:
        rows: their cells, as many as each has.
        is_right: whether all columns but the first are aligned to the right. Otherwise a row's last
            cell may be long and does not widen its column.
    """
    widths: dict[int, int] = defaultdict(int)
    for row in rows:
        for at, cell in enumerate(row if is_right else row[:-1]):
            widths[at] = max(widths[at], len(cell))
    return [
        "  ".join(
            cell.rjust(widths[at]) if is_right and at else cell.ljust(widths[at])
            for at, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def show(text: str) -> None:
    """Print a report; that its reader has gone is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end_badly(error: BaseException) -> None:
    """Write an error while the interpreter ends, and let its exit status be 120.

    No exit handler can choose the status, and ``os._exit`` would skip the other handlers and what
    the program has yet to flush. Where standard error can't be flushed at the very end Python's
    own status is 120 (see ``sys.exit``), so that is what happens here.
    """
    kind = type(error)
    text = f"{kind.__module__}.{kind.__qualname__}: {error}\nobjcomm: exit status 120\n"
    with contextlib.suppress(Exception):  # it may be closed
        sys.stderr.write(text)
        sys.stderr.flush()
    sys.stderr = _LastUnflushed(sys.stderr)


class _LastUnflushed:
    """A standard error whose last flush fails, when all exit handlers are over."""

    closed = False  # else Python would not flush it

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, if there is anything to write to."""
        return 0 if self._stream is None else self._stream.write(text)

    def flush(self) -> None:
        """As the module says."""
        if self._stream is not None and not self._stream.closed:
            self._stream.flush()
        if sys.is_finalizing():
            raise OSError
