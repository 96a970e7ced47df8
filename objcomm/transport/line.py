"""Runs jobs one after another, beside the thread that ordered them."""

import threading
from collections import deque
from collections.abc import Callable

# A thread takes 60 us to start, and a burst of calls should need one only.
_LINGER_SECONDS = 1.0


class Line:
    """A queue of jobs with one thread, which comes with the first job and goes when idle."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_busy = False

    @property
    def is_idle(self) -> bool:
        """Whether every job is done."""
        return not self._is_busy and not self._jobs

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the line's own, which carries out a job just now."""
        return self._thread is threading.current_thread()

    def submit(self, job: Callable[[], None]) -> None:
        """Do ``job``, which must not raise, after all jobs before it.

        Raises:
            RuntimeError: this process can start no more threads.
        """
        with self._changed:
            if self._thread is None:
                thread = _Runner(self, self._run, self._name)
                thread.start()
                self._thread = thread
            self._jobs.append(job)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until every job is done; no job may."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_idle)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: bool(self._jobs), _LINGER_SECONDS):
                    self._thread = None
                    return
                self._is_busy = True  # before the queue is empty: nobody may take it for idle
                job = self._jobs.popleft()
            job()
            del job  # it holds the caller's objects


class _Runner(threading.Thread):
    """The thread of a line."""

    def __init__(self, line: Line, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.line = line


def are_lines_busy() -> bool:
    """Whether any line of this process has a job, or lets go of what one has held."""
    return any(
        isinstance(each, _Runner) and not each.line.is_idle for each in threading.enumerate()
    )
