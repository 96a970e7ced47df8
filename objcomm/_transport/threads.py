"""Threads that run one job, jobs in order, or many jobs at a time; and a queue for taking turns.

A signal handler, a destructor or a weak reference callback runs on a thread that may be between any
two steps of this package, with locks held, and may call anything in it. So every lock is reentrant.
What it protects is consistent wherever a handler can run, or an ``Alone`` inside the lock refuses
re-entry. An Event is not safe, because a handler may find its internal lock held.
"""

import heapq
import itertools
import queue
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from objcomm.errors import UsageError

T = TypeVar("T")

_ABANDONED = "the connections were closed before everything sent over them was taken"


class AbandonedError(RuntimeError):
    """A wait was given up by the thread that had delegated it."""


class Signal:
    """Lets threads wait until another thread, or a handler on the same thread, sets it.

    Attributes:
        is_set: whether it was set.
    """

    __slots__ = ("_lock", "is_set")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.is_set = False

    def set(self, _: object = None) -> None:
        """Set it; further calls have no effect. The argument lets this be a future's callback."""
        if not self.is_set:
            self.is_set = True  # no other thread runs between these two
            self._lock.release()

    def wait(self, seconds: float = -1) -> bool:
        """Wait for at most ``seconds``; negative means no limit. Return whether it is set."""
        if not self.is_set and self._lock.acquire(timeout=seconds):
            self._lock.release()  # for the next waiting thread
        return self.is_set


class Alone:
    """A context manager that a thread can't enter twice, inside a lock that keeps others out.

    It is for steps between which the state is inconsistent. A handler that tries to enter it gets
    an error instead of inconsistent state.
    """

    __slots__ = ("_is_entered", "_what")

    def __init__(self, what: str) -> None:
        """Name what a thread can't do twice at the same time.

        Args:
            what: what is done in the block, for the error's text.
        """
        self._what = what
        self._is_entered = False

    def __enter__(self) -> None:
        if self._is_entered:
            raise UsageError(interrupted(self._what))
        self._is_entered = True

    def __exit__(self, *raised: object) -> None:
        self._is_entered = False


def interrupted(what: str) -> str:
    """Return the error text for a wait for something that the same thread has interrupted."""
    return (
        f"a signal's handler or a destructor has interrupted {what} on this thread, which "
        "resumes only when that returns; set a flag there and communicate after the call"
    )


# Locks that other threads need to make progress.
_guards: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

#: How long a wait may take before objcomm checks whether it can end at all.
SUSPICIOUS_SECONDS = 0.25


def guard() -> Any:
    """Return a reentrant lock that ``check_uninterrupted`` checks."""
    lock = threading.RLock()
    _guards[lock] = None
    return lock


def check_uninterrupted(what: str) -> None:
    """Check that a wait of this thread can end: no thread may wait while it holds a guard.

    Args:
        what: the wait, for the error's text.

    Raises:
        UsageError: a handler or destructor waits, and has interrupted steps that other threads wait
            for.
    """
    for reference in _guards.keyrefs():
        lock = reference()
        if lock is not None and lock._is_owned():  # noqa: SLF001  # as Condition does
            raise UsageError(f"{what}: {interrupted('a step of objcomm')}")


# How long an idle thread of a pool waits for its next job.
_IDLE_SECONDS = 5.0


def carried_out(job: Callable[[], T], outcome: Future[T]) -> None:
    """Run ``job``, and store its result or exception in ``outcome``.

    A traceback refers to this frame, and through it to its callers. Nothing here refers back to the
    exception after the return. Each caller has to ensure the same for itself.
    """
    try:
        result = job()
    except BaseException as error:  # noqa: BLE001  # raised by the waiting thread
        outcome.set_exception(error)
    else:
        outcome.set_result(result)
    finally:
        del job, outcome


class TicketQueue:
    """Lets threads proceed one after another, in the order in which they took their places.

    Attributes:
        places: those that are taken, in order.
    """

    def __init__(self) -> None:
        # Each step is one atomic operation of the dictionary, and needs no lock.
        self.places: OrderedDict[Ticket, None] = OrderedDict()
        self._admission = threading.RLock()  # it knows its owner
        self._is_admitting: Callable[[], bool] = self._admission._is_owned  # type: ignore[attr-defined]  # noqa: SLF001  # as Condition does

    @property
    def waiting(self) -> int:
        """Number of places that are taken."""
        return len(self.places)

    def is_held_up(self, place: "Ticket") -> bool:
        """Return whether the calling thread itself blocks the turn that it waits for."""
        me = threading.get_ident()
        return self._is_admitting() or any(
            each.owner == me
            for each in itertools.takewhile(lambda each: each is not place, self._copy())
        )

    def admit(self) -> None:
        """Notify the first place that its turn has come, unless it was notified.

        Loops, in one thread at a time, instead of recursing: each of a thousand places may be left
        as soon as its turn comes, and leaving one calls this.
        """
        while True:
            try:
                first = next(iter(self.places), None)
            except RuntimeError:  # it has changed in the meantime
                continue
            if first is None or first.turn.is_set:
                return
            if self._is_admitting() or not self._admission.acquire(blocking=False):
                return  # the thread that is admitting checks again
            try:
                if first.on_turn is not None:
                    first.on_turn()
                first.turn.set()
            finally:
                self._admission.release()

    def _copy(self) -> list["Ticket"]:
        while True:
            try:
                return list(self.places)
            except RuntimeError:  # as above
                continue


class Ticket:
    """A place in an order, which must be left whether its turn has come or not.

    Also a context manager that leaves it at the end.

    Attributes:
        turn: set when all places taken before this one have been left.
        on_turn: see the constructor.
        owner: the thread that leaves it; 0 while that is undecided.
    """

    def __init__(self, order: TicketQueue, on_turn: Callable[[], object] | None = None) -> None:
        """Create a ticket without a place yet, so that a ``with`` block can begin before ``take``.

        Args:
            order: the order in which it is a place.
            on_turn: called when its turn comes, if no thread waits for that; on any thread, and
                perhaps more than once.
        """
        self._order = order
        self.on_turn = on_turn
        self.turn = Signal()
        self.owner = 0

    def take(self) -> None:
        """Take a place behind all others."""
        self._order.places[self] = None
        self._order.admit()

    def enter(self, seconds: float) -> bool:
        """Wait for its turn for at most ``seconds``; return whether it has come.

        Raises:
            UsageError: a handler waits for a place that its own thread has taken.
        """
        if self.turn.is_set:
            return True
        if self._order.is_held_up(self):
            raise UsageError(interrupted("a call that comes first"))
        return self.turn.wait(seconds)

    def leave(self) -> None:
        """Leave the place, so that the next one can proceed; may be repeated."""
        self._order.places.pop(self, None)
        self._order.admit()  # each time: Ctrl-C may have come between the two steps

    def __enter__(self) -> Self:
        self.owner = threading.get_ident()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()


class OnceThread:
    """At most one thread, however its start is interrupted.

    A start interrupted by Ctrl-C may or may not have succeeded. So the next request starts it
    again, and if there are two threads, the second does nothing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._claim = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the thread has started."""
        return self._thread is not None

    @property
    def is_alive(self) -> bool:
        """Whether it has started and not ended."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Start the thread with ``job`` unless it has begun; returns immediately.

        Raises:
            RuntimeError: this process can't start more threads; the next call tries again.
        """
        if self._thread is None:
            threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True).start()

    def do_here(self, job: Callable[[], None]) -> None:
        """Run ``job`` on the calling thread, unless another one has begun it."""
        self._run(job)

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has finished its job, if it has started, for at most ``seconds``.

        Returns immediately on the thread that runs the job.
        """
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(seconds)

    def _run(self, job: Callable[[], None]) -> None:
        if self._claim.acquire(blocking=False):
            self._thread = threading.current_thread()
            job()


class ThreadPool:
    """Runs each job on a separate thread, because each may wait; reuses idle threads.

    Attributes:
        under_way: number of unfinished jobs.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = guard()
        self._idle = 0
        self.under_way = 0
        self._is_closed = False
        self._is_given_up = False

    @property
    def is_idle(self) -> bool:
        """Whether every job that was not given up is finished."""
        return not self.under_way

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` soon; it must not raise.

        Raises:
            RuntimeError: this process can't start more threads.
        """
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                # First, because a job that can't be run must not be queued.
                _Worker(self, self.run, "objcomm-pool").start()
            self.under_way += not self._is_given_up
        self._jobs.put(job)

    def close(self) -> None:
        """Let each thread end after its job; later jobs are still run."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, 0
            self.under_way += idle
        for _ in range(idle):
            self._jobs.put(_nothing)

    def give_up(self) -> None:
        """Stop counting jobs, because some may never finish."""
        with self._lock:
            self._is_given_up, self.under_way = True, 0

    def run(self) -> None:
        """Run jobs, on a thread of the pool."""
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._idle > 0:  # otherwise a job is about to come
                        self._idle -= 1
                        return
                continue
            job()
            del job  # it refers to the caller's objects
            with self._lock:
                self.under_way -= not self._is_given_up
                if self._is_closed:
                    return
                self._idle += 1


# A thread that only computes keeps the interpreter to itself for 5 ms, which delays others, such as
# those that move bytes. Hence a pause between two jobs.
_PAUSE_SECONDS = 50e-6


class SerialQueue:
    """Runs jobs one after another, on a thread borrowed from a pool while there are any.

    If Ctrl-C interrupts the borrowing, there may be two threads for a while.
    """

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._lock = guard()
        self._jobs: deque[Callable[[], None]] = deque()
        self._has_thread = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job``, which must not raise, after all jobs before it.

        Raises:
            RuntimeError: this process can't start more threads.
        """
        with self._lock:
            self._jobs.append(job)
            if self._has_thread:
                return
            self._has_thread = True  # first, so that a handler borrows no second thread
            try:
                self._pool.submit(self._run)
            except BaseException:
                self._has_thread = False
                self._jobs.remove(job)
                raise

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._has_thread = False
                    return
                job = self._jobs.popleft()
            job()
            del job  # it refers to the caller's objects
            if self._jobs:
                time.sleep(_PAUSE_SECONDS)


# A wait that can still end does so as soon as its thread is scheduled, even on a busy machine.
_LAST_TURN_SECONDS = 1.0


class Apart:
    """Runs waits on separate threads, so that the caller can stop waiting.

    A thread that is stuck in C++ can't be woken. It stays there, with all that it refers to.
    """

    def __init__(self, last_turn_seconds: float = _LAST_TURN_SECONDS) -> None:
        """Begin without a thread.

        Args:
            last_turn_seconds: how long a wait that was given up may still take to end.
        """
        self._last_turn_seconds = last_turn_seconds
        self._pool = ThreadPool()
        self._lock = threading.RLock()  # a destructor may abandon it at any step
        self._callers: set[Signal] = set()
        self._is_abandoned = False

    def do(self, job: Callable[[], None]) -> None:
        """Run ``job``, which waits, on a thread, and raise what it raises.

        Raises:
            AbandonedError: it was given up, before or during this call, and has not ended since.
        """
        ended: Future[None] = Future()
        is_woken = Signal()
        run = partial(_run, job, ended, is_woken)
        with self._lock:
            self._callers.add(is_woken)
            if self._is_abandoned:
                is_woken.set()
        try:
            try:
                self._pool.submit(run)
            except RuntimeError:  # no more threads: this one waits
                if self._is_abandoned:
                    raise AbandonedError(_ABANDONED) from None
                run()
            is_woken.wait()
            # It may have ended, but its thread was not scheduled to report that.
            if not ended.done() and not wait([ended], self._last_turn_seconds).done:
                raise AbandonedError(_ABANDONED)
            ended.result()
        finally:
            del ended, run  # a traceback refers to this frame, and its future to the error
            with self._lock:
                self._callers.discard(is_woken)

    def abandon(self) -> None:
        """Make all waits that have not ended raise, including later ones."""
        with self._lock:
            self._is_abandoned = True
            callers = tuple(self._callers)
        self._pool.close()  # no idle thread needs to wait for jobs
        self._pool.give_up()
        for each in callers:
            each.set()


def done_within(
    seconds: float,
    job: Callable[[], T],
    undo: Callable[[T], object] = lambda _: None,
    is_woken: Signal | None = None,
) -> T:
    """Run ``job`` on a thread and return its result; abandon the thread if it takes too long.

    Args:
        seconds: how long to wait for it.
        job: runs in the caller's context.
        undo: called with the job's result if the caller has stopped waiting.
        is_woken: once it is set, the caller stops waiting.

    Raises:
        TimeoutError: it took too long.
        AbandonedError: the caller was woken first.
    """
    ended: Future[T] = Future()
    is_woken = is_woken or Signal()
    ended.add_done_callback(is_woken.set)
    pool = ThreadPool()
    try:
        try:
            pool.submit(partial(copy_context().run, _do_errand, job, undo, ended))
        except RuntimeError:  # no more threads: this one runs it
            return job()
        pool.close()  # its thread ends after the job
        try:
            is_in_time = is_woken.wait(seconds)
        except BaseException:  # Ctrl-C
            if not ended.cancel() and ended.exception() is None:
                undo(ended.result())
            raise
        if ended.cancel():
            if is_in_time:
                raise AbandonedError(_ABANDONED)
            raise TimeoutError(f"it took longer than {seconds:.3g} s")
        return ended.result()
    finally:
        del ended, pool  # as in ``Apart.do``


def _do_errand(job: Callable[[], T], undo: Callable[[T], object], ended: Future[T]) -> None:
    outcome: Future[T] = Future()
    try:
        carried_out(job, outcome)
        error = outcome.exception()
        if not ended.set_running_or_notify_cancel():
            if error is None:
                undo(outcome.result())
        elif error is None:
            ended.set_result(outcome.result())
        else:
            ended.set_exception(error)
    finally:
        error = None
        del job, undo, ended, outcome  # as in ``carried_out``


def _run(job: Callable[[], None], ended: Future[None], is_woken: Signal) -> None:
    try:
        carried_out(job, ended)
    finally:
        is_woken.set()
        del ended  # as in ``do``


def _nothing() -> None:
    """Wake an idle thread."""


# A thread takes 60 µs to start, and a series of calls should need only one.
_LINGER_SECONDS = 1.0


class SerialExecutor:
    """A queue of jobs with one thread, which starts with the first job and ends when idle."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition(guard())
        self._thread: threading.Thread | None = None
        self._is_busy = False

    @property
    def is_idle(self) -> bool:
        """Whether all jobs are finished."""
        return not self._is_busy and not self._jobs

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is this executor's own, and is running a job."""
        return self._thread is threading.current_thread()

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job``, which must not raise, after all jobs before it.

        Raises:
            RuntimeError: this process can't start more threads.
        """
        with self._changed:
            if self._thread is None:
                # Before the start, so that a handler that submits a job starts no second thread.
                self._thread = _Worker(self, self._run, self._name)
                try:
                    self._thread.start()
                except BaseException:
                    self._thread = None
                    raise
            self._jobs.append(job)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all jobs are finished; jobs must not call this."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_idle)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                is_idle = not self._changed.wait_for(lambda: bool(self._jobs), _LINGER_SECONDS)
                if is_idle and not self._jobs:  # a destructor may have added one
                    self._thread = None
                    return
                self._is_busy = True  # before the queue is empty, so that it never looks idle
                job = self._jobs.popleft()
            job()
            del job  # it refers to the caller's objects


class _Worker(threading.Thread):
    """The thread of a SerialExecutor or of a ThreadPool."""

    def __init__(
        self, owner: ThreadPool | SerialExecutor, target: Callable[[], None], name: str
    ) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.owner = owner


def are_workers_busy() -> bool:
    """Return whether any ThreadPool or SerialExecutor runs a job, or still drops its objects."""
    return any(
        isinstance(each, _Worker) and not each.owner.is_idle for each in threading.enumerate()
    )


class Alarm:
    """Something to do at a certain time.

    Attributes:
        ring: does it; None once it is canceled or done.
    """

    __slots__ = ("ring",)

    def __init__(self, ring: Callable[[], object]) -> None:
        self.ring: Callable[[], object] | None = ring


class AlarmClock:
    """Calls functions at given times on one thread, which starts on demand and ends when idle."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition(guard())
        # The numbers order equal times, so that no Python code runs while the heap is sifted.
        self._alarms: list[tuple[float, int, Alarm]] = []
        self._numbers = itertools.count()
        self._unwanted = 0
        self._thread: threading.Thread | None = None

    def set(self, seconds: float, ring: Callable[[], object]) -> Alarm:
        """Call ``ring``, which must neither raise nor wait, after ``seconds``.

        Raises:
            RuntimeError: this process can't start more threads.
        """
        alarm = Alarm(ring)
        due = time.monotonic() + seconds, next(self._numbers), alarm
        with self._changed:
            if self._thread is None:
                # See ``SerialExecutor``.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    self._thread.start()
                except BaseException:
                    self._thread = None
                    raise
            heapq.heappush(self._alarms, due)
            if self._alarms[0] is due:
                self._changed.notify_all()
        return alarm

    def cancel(self, alarm: Alarm) -> None:
        """Cancel an alarm and drop its function; further calls have no effect."""
        with self._changed:
            self._unwanted += alarm.ring is not None
            alarm.ring = None
            if 2 * self._unwanted > len(self._alarms):
                # Alarms that a handler sets meanwhile go to the new list.
                before, self._alarms, self._unwanted = self._alarms, [], 0
                for each in before:
                    if each[-1].ring is not None:
                        heapq.heappush(self._alarms, each)
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                is_idle = not self._changed.wait_for(lambda: bool(self._alarms), _LINGER_SECONDS)
                if is_idle and not self._alarms:  # as in ``SerialExecutor``
                    self._thread = None
                    return
                seconds = self._alarms[0][0] - time.monotonic()
                if seconds > 0:
                    self._changed.wait(seconds)
                    continue
                _, _, alarm = heapq.heappop(self._alarms)
                ring, alarm.ring = alarm.ring, None
                self._unwanted -= ring is None
            if ring is not None:
                ring()
            del alarm, ring  # they refer to the caller's objects
