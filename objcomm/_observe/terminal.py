"""Text for a terminal: tables, escaping and closed pipes; and the exit status of a program."""

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


def printable(text: str) -> str:
    """Replace characters that could move a terminal's cursor or change its colors with spaces."""
    return "".join(each if each.isprintable() else " " for each in text)


def aligned(rows: Sequence[Sequence[str]], *, is_right: bool = False) -> list[str]:
    """Format the rows of a table as lines with aligned columns.

    Args:
        rows: the cells of each row; rows may differ in length.
        is_right: whether all columns except the first are right-aligned. Otherwise a row's last
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


def show(text: str) -> bool:
    """Print a report; return whether anyone can still read it. A closed pipe is not an error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def end_badly(error: BaseException) -> None:
    """Print an error while the interpreter shuts down, and make the exit status 120.

    An exit handler cannot choose the status, and ``os._exit`` would skip the other handlers and
    unflushed output. If standard error cannot be flushed at the very end, Python exits with status
    120 (see ``sys.exit``), so this function makes that happen.
    """
    kind = type(error)
    text = f"{kind.__module__}.{kind.__qualname__}: {error}\nobjcomm: exit status 120\n"
    with contextlib.suppress(Exception):  # standard error may be closed
        sys.stderr.write(text)
        sys.stderr.flush()
    sys.stderr = _LastUnflushed(sys.stderr)


class _LastUnflushed:
    """A standard error whose last flush, after all exit handlers, fails."""

    closed = False  # otherwise Python would not flush it

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, if there is a stream to write to."""
        return 0 if self._stream is None else self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream; raise OSError during interpreter shutdown."""
        if self._stream is not None and not self._stream.closed:
            self._stream.flush()
        if sys.is_finalizing():
            raise OSError
