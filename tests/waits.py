"""How tests wait: for an event, with a deadline that only a hang reaches.

`within` is for the few tests of a promised duration; they are marked ``timed``.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Self, TypeVar

__all__ = ["PATIENCE_S", "Slowness", "wait_until", "within"]

#: How long a test waits for something that must happen, even while two other suites run.
PATIENCE_S = 120.0

_LOOK_S = 0.01

T = TypeVar("T")


def wait_until(look: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """Call ``look`` until it returns something true, and return that."""
    until = time.monotonic() + patience_s
    while not (seen := look()):
        assert time.monotonic() < until, f"waited {patience_s:g} s in vain for {what}"
        time.sleep(_LOOK_S)
    return seen


# Reports that it has started, then alternates 40 ms of sleep and 10 ms of work until the pipe is
# closed, at least once, and prints how many times longer that took. A separate process, because a
# thread would share the interpreter with the code that is measured.
_BESIDE = """
import select, sys, time
print(flush=True)
began, turns = time.perf_counter(), 0
while not turns or not select.select([sys.stdin], [], [], 0)[0]:
    time.sleep(0.04)
    until = time.thread_time() + 0.01
    while time.thread_time() < until:
        pass
    turns += 1
print((time.perf_counter() - began) / (0.05 * turns))
"""


class Slowness:
    """How slow this machine is during a block, as a factor: 1 if it has nothing else to do.

    What objcomm does within a promised time is a chain of wake-ups, each followed by some work. A
    process beside it also wakes up and works, and measures the delay.

    Attributes:
        factor: at least 1; available after the block.
    """

    factor: float

    def __enter__(self) -> Self:
        self._beside = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BESIDE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._beside.stdout is not None:
            self._beside.stdout.readline()  # or a short block may be over before it starts
        return self

    def __exit__(self, *_: object) -> None:
        self.factor = max(1.0, float(self._beside.communicate()[0]))


@contextlib.contextmanager
def within(promised_s: float) -> Iterator[None]:
    """Check a promised duration, scaled to the current speed of this machine."""
    with Slowness() as slowness:
        began = time.monotonic()
        yield
        took_s = time.monotonic() - began
    assert took_s <= promised_s * slowness.factor, (
        f"took {took_s:.2f} s; {promised_s:g} s were promised, "
        f"on a machine that takes {slowness.factor:.2f} times as long as it should"
    )
