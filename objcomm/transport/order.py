"""Threads one after another, and threads that wait to be useful."""

import queue
import threading
from collections.abc import Callable
from types import TracebackType

# A crew's idle thread waits so long for its next job.
_IDLE_SECONDS = 5.0


class Order:
    """Lets threads do something one after another, in the order in which they asked.

    Attributes:
        waiting: how many have asked and are not through.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = threading.Event()
        self._last.set()
        self.waiting = 0

    def take(self) -> "Place":
        """A place behind all that were taken before; every one must be entered once."""
        with self._lock:
            before, self._last = self._last, threading.Event()
            self.waiting += 1
            return Place(self, before, self._last)

    def left(self) -> None:
        """One is through."""
        with self._lock:
            self.waiting -= 1


class Place:
    """A place in an order; entered as a context it waits for its turn."""

    def __init__(self, order: Order, before: threading.Event, mine: threading.Event) -> None:
        self._order = order
        self._before = before
        self._mine = mine

    def __enter__(self) -> None:
        try:
            self._before.wait()
        except BaseException:  # Ctrl-C
            threading.Thread(target=self._skip, name="objcomm-order", daemon=True).start()
            raise

    def _skip(self) -> None:
        self._before.wait()
        self._end()

    def _end(self) -> None:
        self._mine.set()
        self._order.left()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()


class Crew:
    """Does each job on a thread of its own, because each may wait; idle threads are used again.

    Attributes:
        under_way: jobs that are not done.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self.under_way = 0
        self._is_closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Do ``job``, which must not raise, soon.

        Raises:
            RuntimeError: this process can start no more threads.
        """
        with self._lock:
            has_idle = self._idle > 0
            if not has_idle:
                _Hand(self).start()  # first: what can't be done must not be begun
            self._idle -= has_idle
            self.under_way += 1
        self._jobs.put(job)

    def close(self) -> None:
        """Let each thread end after its job; what comes later is still done."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, 0
            self.under_way += idle
        for _ in range(idle):
            self._jobs.put(_nothing)

    def run(self) -> None:
        """Do jobs, on a thread of the crew's."""
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._idle > 0:  # else a job is on its way
                        self._idle -= 1
                        return
                continue
            job()
            del job  # it holds the caller's objects
            with self._lock:
                self.under_way -= 1
                if self._is_closed:
                    return
                self._idle += 1


class _Hand(threading.Thread):
    """One thread of a crew."""

    def __init__(self, crew: Crew) -> None:
        super().__init__(target=crew.run, name="objcomm-crew", daemon=True)
        self.crew = crew


def are_hands_busy() -> bool:
    """Whether any crew of this process has a job under way."""
    return any(isinstance(each, _Hand) and each.crew.under_way for each in threading.enumerate())


def _nothing() -> None:
    """Wakes an idle thread."""
