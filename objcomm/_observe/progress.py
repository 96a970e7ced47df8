"""A bar that shows how far a large transfer has come: tqdm's, on the group's first rank.

Is told of bytes and knows nothing of where they go. tqdm is imported when there is something to
show, so a call that ends soon does not pay for it.
"""

import contextlib
import sys
import time
from importlib.util import find_spec
from typing import Any

from objcomm.errors import MissingDependencyError

# What takes less is over before it can be read.
_PATIENCE_SECONDS = 0.5


class Bar:
    """The bytes of one call; used by the one thread that moves them.

    What can't be shown, for instance because standard error is closed, is not shown: other ranks
    wait for this call, so it must not fail for that.
    """

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._began = 0.0
        self._total = 0
        self._moved = 0
        self._bar: Any = None
        self._is_over = False

    def expect(self, nbytes: int) -> None:
        """So many more bytes are to move."""
        self._began = self._began or time.monotonic()
        self._total += nbytes
        if self._bar is not None:
            self._bar.total = self._total

    def moved(self, nbytes: int) -> None:
        """So many have moved."""
        self._moved += nbytes
        if self._is_over:
            return
        try:
            if self._bar is not None:
                self._bar.update(nbytes)
            elif self._is_worth_it():
                self._bar = _opened(self._operation, self._moved, self._total)
        except Exception:  # noqa: BLE001  # see above
            self._is_over = True

    def close(self) -> None:
        """The call has ended, well or by an error: leave the terminal at the start of a line."""
        self._is_over = True
        bar, self._bar = self._bar, None
        if bar is not None:
            with contextlib.suppress(Exception):  # as above
                bar.close()

    def _is_worth_it(self) -> bool:
        is_long = time.monotonic() - self._began >= _PATIENCE_SECONDS
        return is_long and self._moved < self._total


def bar_for(operation: str, rank: int) -> Bar | None:
    """What shows how far one call has come; None on all ranks but the group's first.

    Args:
        operation: its name.
        rank: this rank, within the group.

    Raises:
        MissingDependencyError: tqdm is not installed, on whatever rank.
    """
    if find_spec("tqdm") is None:
        raise MissingDependencyError("tqdm", "tqdm")
    return None if rank else Bar(operation)


def _opened(operation: str, moved: int, total: int) -> Any:
    from tqdm.auto import tqdm  # noqa: PLC0415  # 50 ms, and an extra; auto: a widget in a notebook

    return tqdm(
        desc=operation,
        initial=moved,
        total=total,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        dynamic_ncols=True,
        leave=None,  # stays unless it is below a bar of the program's own
        file=_Unfailing(sys.stderr),
    )


class _Unfailing:
    """A stream of whose errors nobody hears.

    When one comes out of a write, tqdm keeps its lock, for which the next bar of every other thread
    would then wait for ever.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(Exception):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(Exception):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __eq__(self, other: object) -> bool:  # tqdm.write asks, to clear the bars of a terminal
        return bool(self._stream == other)

    def __hash__(self) -> int:
        return hash(self._stream)
