"""A progress bar for large transfers: tqdm's, on the group's first rank.

The bar counts bytes, and does not know where they go. tqdm is imported only once there is something
to show, so short calls do not pay for it.
"""

import contextlib
import sys
import time
from importlib.util import find_spec
from typing import Any

from objcomm.errors import MissingDependencyError

# A bar for a shorter transfer would disappear before it could be read.
_PATIENCE_SECONDS = 0.5


class Bar:
    """The progress of one call. Used only by the thread that moves its bytes.

    Errors while showing the bar, for example because standard error is closed, are ignored: other
    ranks wait for this call, so it must not fail because of them.
    """

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._began = 0.0
        self._total = 0
        self._moved = 0
        self._bar: Any = None
        self._is_over = False

    def expect(self, nbytes: int) -> None:
        """Add to the total number of bytes to move."""
        self._began = self._began or time.monotonic()
        self._total += nbytes
        if self._bar is not None:
            self._bar.total = self._total

    def moved(self, nbytes: int) -> None:
        """Record that bytes have moved."""
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
        """Close the bar after the call, leaving the cursor at the start of a line."""
        self._is_over = True
        bar, self._bar = self._bar, None
        if bar is not None:
            with contextlib.suppress(Exception):  # as above
                bar.close()

    def _is_worth_it(self) -> bool:
        is_long = time.monotonic() - self._began >= _PATIENCE_SECONDS
        return is_long and self._moved < self._total


def bar_for(operation: str, rank: int) -> Bar | None:
    """Return the bar of one call; None on all ranks but the group's first.

    Args:
        operation: the name of the operation.
        rank: this rank's group rank.

    Raises:
        MissingDependencyError: tqdm is not installed on this rank. Raised on any rank.
    """
    if find_spec("tqdm") is None:
        raise MissingDependencyError("tqdm", "tqdm")
    return None if rank else Bar(operation)


def _opened(operation: str, moved: int, total: int) -> Any:
    from tqdm.auto import tqdm  # noqa: PLC0415  # takes 50 ms, optional; auto: widget in notebooks

    return tqdm(
        desc=operation,
        initial=moved,
        total=total,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        dynamic_ncols=True,
        leave=None,  # stays, unless it is nested below one of the program's own bars
        file=_Unfailing(sys.stderr),
    )


class _Unfailing:
    """A stream that suppresses the errors of another stream.

    If a write raises, tqdm does not release its lock, and the next bar of any other thread would
    wait for it forever.
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

    def __eq__(self, other: object) -> bool:  # used by tqdm.write to clear bars on a terminal
        return bool(self._stream == other)

    def __hash__(self) -> int:
        return hash(self._stream)
