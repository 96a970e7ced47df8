"""Which line of the program each thread of this process is executing.

The program is all code outside objcomm, Python's library and installed packages. For a thread
without such code, as in a package started by ``python -m``, the innermost line outside objcomm is
used.
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

# Folders of packages installed for another interpreter, to which PYTHONPATH may point.
_INSTALLED = tuple(f"{os.sep}{each}{os.sep}" for each in ("site-packages", "dist-packages"))

# Samples further apart prove nothing about the time in between. Waiting ranks ask others for
# their snapshots once a second, or every four seconds in a group of 4,000.
_CONSECUTIVE_SECONDS = 10.0


class Running(NamedTuple):
    """Where one thread is in the program.

    Attributes:
        thread: ident of the thread.
        line: ``file:line``.
        function: the function that it executes; empty at module level.
        seconds: for how long consecutive samples have found it there.
    """

    thread: int
    line: str
    function: str
    seconds: float

    @property
    def text(self) -> str:
        """The line and the function as text."""
        return f"{self.line} in {self.function}" if self.function else self.line


class StackSampler:
    """Samples the positions of threads, and remembers for how long they have not changed."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Running, float]] = {}
        paths = sysconfig.get_paths()
        library = {paths[each] for each in ("stdlib", "platstdlib", "purelib", "platlib")}
        self._outside = (*(folder + os.sep for folder in library), "<frozen ")

    def sample(self, threads: Collection[int], now: float) -> tuple[Running, ...]:
        """Return the positions of some threads.

        Args:
            threads: idents of the threads; a thread that does not execute Python code is left out.
            now: the time, in seconds of ``time.monotonic``.
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
    """Return the innermost frame of each other thread, with garbage collection disabled.

    The calling thread's frame is left out: if the caller kept the result in a variable, there would
    be a cycle, and local variables of all threads would stay alive until the next collection.

    Before 3.11.9, Python holds a lock here that an ending thread waits for while it holds the
    GIL. If a garbage collection releases the GIL, as a tensor's destructor does, the whole process
    deadlocks (python/cpython#106883; seen in a soak test over Gloo).
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
