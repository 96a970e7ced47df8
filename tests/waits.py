"""How tests wait: for an event, with a deadline that only a hang reaches.

`within` is for the few tests in which a duration is the promise itself; those are marked ``timed``.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self, TypeVar

__all__ = ["PATIENCE_S", "Slowness", "wait_until", "within"]

#: How long a test waits for something that must happen. Two other suites may run beside it.
PATIENCE_S = 60.0

_LOOK_S = 0.01

T = TypeVar("T")


def wait_until(look: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """Look again and again until there is something true to see, and return it."""
    until = time.monotonic() + patience_s
    while not (seen := look()):
        assert time.monotonic() < until, f"waited {patience_s:g} s in vain for {what}"
        time.sleep(_LOOK_S)
    return seen


class Slowness:
    """How late this machine wakes a thread just now, as a factor: 1 where it has time to spare.

    A thread asks again and again to be woken after 10 ms. What objcomm does within a promised time
    is a chain of such wake-ups, in this process and in others, and each is as late as these.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._wakes = 0
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def factor(self) -> float:
        """The factor since the block began; at least 1."""
        return max(1.0, (time.monotonic() - self._began) / (_LOOK_S * max(1, self._wakes)))

    def _measure(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._wakes += 1


@contextlib.contextmanager
def within(promised_s: float) -> Iterator[None]:
    """Hold a promised duration, of as many seconds as this machine makes of one just now."""
    with Slowness() as slowness:
        began = time.monotonic()
        yield
        took_s, factor = time.monotonic() - began, slowness.factor()
    assert took_s <= promised_s * factor, (
        f"took {took_s:.2f} s; {promised_s:g} s were promised, "
        f"on a machine that wakes its threads {factor:.2f} times as late as it should"
    )
