"""Which line of the program each thread of this process is on.

The program is what neither objcomm, nor Python's library, nor an installed package is made of. A
thread that is in none of it, as one of a package that was started by ``python -m``, is at its
innermost line outside objcomm.
"""

import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Collection
from types import FrameType
from typing import NamedTuple

from objcomm._wire.failure_message import is_own

# Where packages are that were installed for another interpreter, as PYTHONPATH may name.
_INSTALLED = tuple(f"{os.sep}{each}{os.sep}" for each in ("site-packages", "dist-packages"))

# Samples further apart say nothing of the time between them. Ranks that wait ask others where they
# are once a second; of a thousand ranks each does so every four seconds.
_CONSECUTIVE_SECONDS = 10.0


class Running(NamedTuple):
    """Where one thread is in the program.

    Attributes:
        thread: its number.
        line: ``file:line``.
        function: that it is in; empty at the top of a module.
        seconds: since when it was found there each time it was looked at.
    """

    thread: int
    line: str
    function: str
    seconds: float

    @property
    def text(self) -> str:
        """Line and function."""
        return f"{self.line} in {self.function}" if self.function else self.line


class StackSampler:
    """Looks where threads are, and remembers for how long they have been there."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Running, float]] = {}
        paths = sysconfig.get_paths()
        library = {paths[each] for each in ("stdlib", "platstdlib", "purelib", "platlib")}
        self._outside = (*(folder + os.sep for folder in library), "<frozen ")

    def sample(self, threads: Collection[int], now: float) -> tuple[Running, ...]:
        """Where some threads are.

        Args:
            threads: their numbers; one that is in no Python function is left out.
            now: seconds of ``time.monotonic``.
        """
        frames, before = frames_by_thread(), self._last
        self._last = {}
        found = []
        for thread in threads:
            if thread not in frames:
                continue
            here = self._running(thread, frames[thread])
            known, looked_at = before.get(thread, (here, now))
            is_same = known[:3] == here[:3] and now - looked_at <= _CONSECUTIVE_SECONDS
            if is_same:
                here = known._replace(seconds=known.seconds + now - looked_at)
            self._last[thread] = here, now
            found.append(here)
        return tuple(found)

    def _running(self, thread: int, innermost: FrameType) -> Running:
        frame: FrameType | None = innermost
        packaged = None
        while frame is not None:
            name = frame.f_code.co_filename
            is_objcomms = is_own(name)
            is_installed = name.startswith(self._outside) or any(
                each in name for each in _INSTALLED
            )
            if not (is_objcomms or is_installed):
                break
            packaged = packaged or (None if is_objcomms else frame)
            frame = frame.f_back
        frame = frame or packaged or innermost
        code = frame.f_code
        function = "" if code.co_name == "<module>" else code.co_qualname
        return Running(thread, f"{code.co_filename}:{frame.f_lineno}", function, 0.0)


def frames_by_thread() -> dict[int, FrameType]:
    """The innermost frame of each other thread, found without a garbage collection meanwhile.

    The calling thread's is left out: a caller that keeps the result in a variable would be in a
    cycle with it, and what threads have in their variables would live until the next collection.

    Before 3.11.9 Python keeps a lock for it that a thread which ends waits for, together with the
    interpreter's own. A collection that gives the latter away, as a tensor's destructor does, is
    the end of the whole process then: nothing runs any more (python/cpython#106883; seen in a soak
    over Gloo).
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        frames = sys._current_frames()  # noqa: SLF001  # documented by CPython
        del frames[threading.get_ident()]
        return frames
    finally:
        if is_collecting:
            gc.enable()
