"""Threads that wait to be useful: for one job, for one job after another, for many at a time.

Also who comes first, where several threads want one thing.

A signal's handler, a destructor or a weak reference's callback runs on a thread that may be between
any two steps of this package, locks held, and may call anything of it. So every lock is one that
its thread may take twice, and what it guards is consistent wherever a handler can run, or an
``Alone`` inside it refuses re-entry. An Event is not safe: a handler can find its own lock held.
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

_ABANDONED = "the connections were closed, before everything sent over them was taken"


class AbandonedError(RuntimeError):
    """A wait was given up by who had let another thread do it."""


class Signal:
    """Lets threads wait for what another one does, or a handler on the same thread.

    Attributes:
        is_set: whether it was done.
    """

    __slots__ = ("_lock", "is_set")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.is_set = False

    def set(self, _: object = None) -> None:
        """It was done; once is enough. A future may call this back."""
        if not self.is_set:
            self.is_set = True  # nobody gets a turn between these two
            self._lock.release()

    def wait(self, seconds: float = -1) -> bool:
        """Wait so long, or without end; returns whether it was done."""
        if not self.is_set and self._lock.acquire(timeout=seconds):
            self._lock.release()  # to the next one that waits
        return self.is_set


class Alone:
    """A block that its thread can't enter twice; a context, within a lock that keeps others out.

    It is for steps between which the state is inconsistent. A thread that tries is told, instead of
    finding what a handler can't use.
    """

    __slots__ = ("_is_entered", "_what")

    def __init__(self, what: str) -> None:
        """Begin.

        Args:
            what: is done in there, for the error's text.
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
    """What to say to who would wait for something that it has interrupted on its own thread."""
    return (
        f"a signal's handler or a destructor has interrupted {what} on this thread, which "
        "resumes only when that returns; set a flag there and communicate after the call"
    )


# Locks that other threads need in order to make progress.
_guards: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

#: How long a wait may take before it is worth asking whether it can end at all.
SUSPICIOUS_SECONDS = 0.25


def guard() -> Any:
    """A lock that a thread may take twice, and that ``check_uninterrupted`` knows."""
    lock = threading.RLock()
    _guards[lock] = None
    return lock


def check_uninterrupted(what: str) -> None:
    """See that a wait of this thread can end: nobody waits while holding a guard.

    Args:
        what: waits, for the error's text.

    Raises:
        UsageError: a handler or a destructor waits, and has interrupted steps that other threads
            wait for.
    """
    for reference in _guards.keyrefs():
        lock = reference()
        if lock is not None and lock._is_owned():  # noqa: SLF001  # as Condition asks
            raise UsageError(f"{what}: {interrupted('a step of objcomm')}")


# A pool's idle thread waits so long for its next job.
_IDLE_SECONDS = 5.0


def carried_out(job: Callable[[], T], outcome: Future[T]) -> None:
    """Do ``job``, and let whoever waits for ``outcome`` have what it returns or raises.

    An error's traceback holds this frame, and through it those of its callers. Nothing here leads
    back to the error when this returns, and each caller has to see to that for itself.
    """
    try:
        result = job()
    except BaseException as error:  # noqa: BLE001  # raised by the thread that waits
        outcome.set_exception(error)
    else:
        outcome.set_result(result)
    finally:
        del job, outcome


class TicketQueue:
    """Lets threads do something one after another, in the order in which they took their places.

    Attributes:
        places: that were taken and not left.
    """

    def __init__(self) -> None:
        # Each step is one of the dictionary's, and needs no lock.
        self.places: OrderedDict[Ticket, None] = OrderedDict()
        self._admission = threading.RLock()  # it knows its owner
        self._is_admitting: Callable[[], bool] = self._admission._is_owned  # type: ignore[attr-defined]  # noqa: SLF001  # as Condition asks

    @property
    def waiting(self) -> int:
        """How many have a place and are not through."""
        return len(self.places)

    def is_held_up(self, place: "Ticket") -> bool:
        """Whether the calling thread keeps a place from its turn, and waits for it all the same."""
        me = threading.get_ident()
        return self._is_admitting() or any(
            each.owner == me
            for each in itertools.takewhile(lambda each: each is not place, self._copy())
        )

    def admit(self) -> None:
        """Tell the first one that its turn has come, unless it has heard.

        In a loop, and by one thread at a time: of a thousand places each may be left as its turn
        comes, and whoever leaves one comes here.
        """
        while True:
            try:
                first = next(iter(self.places), None)
            except RuntimeError:  # changed in between
                continue
            if first is None or first.turn.is_set:
                return
            if self._is_admitting() or not self._admission.acquire(blocking=False):
                return  # who is at it looks once more
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
    """A place in an order: whoever takes it must leave it, whether its turn has come or not.

    A context at whose end it is left.

    Attributes:
        turn: set when all that were taken before have been left.
        on_turn: see the parameter.
        owner: the thread that leaves it; 0 while that is not settled.
    """

    def __init__(self, order: TicketQueue, on_turn: Callable[[], object] | None = None) -> None:
        """Begin; nothing is taken yet, so that nobody can be interrupted between the two.

        Args:
            order: in which it is a place.
            on_turn: called when its turn comes, where no thread waits for that: on whichever
                thread, perhaps more than once.
        """
        self._order = order
        self.on_turn = on_turn
        self.turn = Signal()
        self.owner = 0

    def take(self) -> None:
        """Queue behind all places that were taken before."""
        self._order.places[self] = None
        self._order.admit()

    def enter(self, seconds: float) -> bool:
        """Wait so long for its turn; returns whether it has come.

        Raises:
            UsageError: a handler waits for a place that its own thread has.
        """
        if self.turn.is_set:
            return True
        if self._order.is_held_up(self):
            raise UsageError(interrupted("a call that comes first"))
        return self.turn.wait(seconds)

    def leave(self) -> None:
        """Let the next one in, at once or when it would be this one's turn; once is enough."""
        if self._order.places.pop(self, self) is None:  # it was there
            self._order.admit()

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
    """At most one thread, whatever interrupts those who start it.

    A start that Ctrl-C has interrupted may have succeeded. So it is made again when the next one
    asks, and of two threads the second does nothing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._claim = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the thread has come."""
        return self._thread is not None

    @property
    def is_alive(self) -> bool:
        """Whether it has come and not ended."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Let the thread do ``job``, unless it has begun to; returns at once.

        Raises:
            RuntimeError: this process can start no more threads; the next call tries again.
        """
        if self._thread is None:
            threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True).start()

    def do_here(self, job: Callable[[], None]) -> None:
        """Do ``job`` on the calling thread, unless another one has begun to."""
        self._run(job)

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has done its job, if it has come; so long at most.

        Who has done it itself need not.
        """
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(seconds)

    def _run(self, job: Callable[[], None]) -> None:
        if self._claim.acquire(blocking=False):
            self._thread = threading.current_thread()
            job()


class ThreadPool:
    """Does each job on a thread of its own, because each may wait; idle threads are used again.

    Attributes:
        under_way: jobs that are not done.
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
        """Whether every job is done that it counts on."""
        return not self.under_way

    def submit(self, job: Callable[[], None]) -> None:
        """Do ``job``, which must not raise, soon.

        Raises:
            RuntimeError: this process can start no more threads.
        """
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                # First: what can't be done must not be begun.
                _Worker(self, self.run, "objcomm-pool").start()
            self.under_way += not self._is_given_up
        self._jobs.put(job)

    def close(self) -> None:
        """Let each thread end after its job; what comes later is still done."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, 0
            self.under_way += idle
        for _ in range(idle):
            self._jobs.put(_nothing)

    def give_up(self) -> None:
        """Count on no job any more: some may never be done."""
        with self._lock:
            self._is_given_up, self.under_way = True, 0

    def run(self) -> None:
        """Do jobs, on a thread of the pool's."""
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
                self.under_way -= not self._is_given_up
                if self._is_closed:
                    return
                self._idle += 1


# A thread that only computes keeps the interpreter from others for 5 ms, such as those that move
# bytes, so there is this pause between two jobs.
_PAUSE_SECONDS = 50e-6


class SerialQueue:
    """Does jobs one after another, on a thread that a pool lends as long as there are any.

    Where Ctrl-C strikes as a thread is lent there may be two for a while.
    """

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._lock = guard()
        self._jobs: deque[Callable[[], None]] = deque()
        self._has_thread = False

    def submit(self, job: Callable[[], None]) -> None:
        """Do ``job``, which must not raise, after all jobs before it.

        Raises:
            RuntimeError: this process can start no more threads.
        """
        with self._lock:
            self._jobs.append(job)
            if self._has_thread:
                return
            self._has_thread = True  # before: what a handler submits meanwhile needs no second one
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
            del job  # it holds the caller's objects
            if self._jobs:
                time.sleep(_PAUSE_SECONDS)


# What can still end does so as soon as its thread gets a turn, also on a busy machine.
_LAST_TURN_SECONDS = 1.0


class Apart:
    """Waits that threads of their own do, so that whoever needs them can stop to wait.

    A thread that is stuck in C++ can't be woken. It stays there with what it holds.
    """

    def __init__(self) -> None:
        self._pool = ThreadPool()
        self._lock = threading.RLock()  # what the collector finds at any step may abandon it
        self._callers: set[Signal] = set()
        self._is_abandoned = False

    def do(self, job: Callable[[], None]) -> None:
        """Let a thread do ``job``, which waits, and raise what it raises.

        Raises:
            AbandonedError: it was given up, before or meanwhile, and has not ended since.
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
            except RuntimeError:  # there can be no more threads: this one waits
                if self._is_abandoned:
                    raise AbandonedError(_ABANDONED) from None
                run()
            is_woken.wait()
            # What is given up may have ended, and its thread had no turn to say so.
            if not ended.done() and not wait([ended], _LAST_TURN_SECONDS).done:
                raise AbandonedError(_ABANDONED)
            ended.result()
        finally:
            del ended, run  # an error's traceback holds this frame, and its future the error
            with self._lock:
                self._callers.discard(is_woken)

    def abandon(self) -> None:
        """Let all raise whose waits don't end any more, now and from now on."""
        with self._lock:
            self._is_abandoned = True
            callers = tuple(self._callers)
        self._pool.close()  # nothing will come: no idle thread need wait for it
        self._pool.give_up()
        for each in callers:
            each.set()


def done_within(seconds: float, job: Callable[[], T], undo: Callable[[T], object]) -> T:
    """What ``job`` returns or raises; a thread does it, and is left behind if it takes too long.

    Args:
        seconds: how long to wait for it.
        job: is done in the caller's context.
        undo: given what the job returns, where nobody waits for that any more.

    Raises:
        TimeoutError: it has taken too long.
    """
    ended: Future[T] = Future()
    pool = ThreadPool()
    try:
        try:
            pool.submit(partial(copy_context().run, _do_errand, job, undo, ended))
        except RuntimeError:  # there can be no more threads: this one does it
            return job()
        pool.close()  # its thread ends after the job
        try:
            wait([ended], seconds)
        except BaseException:  # Ctrl-C
            if not ended.cancel() and ended.exception() is None:
                undo(ended.result())
            raise
        if ended.cancel():
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
    """Wakes an idle thread."""


# A thread takes 60 us to start, and a burst of calls should need one only.
_LINGER_SECONDS = 1.0


class SerialExecutor:
    """A queue of jobs with one thread, which comes with the first job and goes when idle."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition(guard())
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
                # Before it starts: what a handler submits meanwhile needs no second one.
                self._thread = _Worker(self, self._run, self._name)
                try:
                    self._thread.start()
                except BaseException:
                    self._thread = None
                    raise
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
                is_idle = not self._changed.wait_for(lambda: bool(self._jobs), _LINGER_SECONDS)
                if is_idle and not self._jobs:  # nor has a destructor brought one since
                    self._thread = None
                    return
                self._is_busy = True  # before the queue is empty: nobody may take it for idle
                job = self._jobs.popleft()
            job()
            del job  # it holds the caller's objects


class _Worker(threading.Thread):
    """The thread of a line, or one of a pool's."""

    def __init__(
        self, owner: ThreadPool | SerialExecutor, target: Callable[[], None], name: str
    ) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.owner = owner


def are_workers_busy() -> bool:
    """Whether any pool or line of this process has a job, or lets go of what one has held."""
    return any(
        isinstance(each, _Worker) and not each.owner.is_idle for each in threading.enumerate()
    )


class Alarm:
    """Something to be done at a certain time.

    Attributes:
        ring: does it; None where it is not wanted any more.
    """

    __slots__ = ("ring",)

    def __init__(self, ring: Callable[[], object]) -> None:
        self.ring: Callable[[], object] | None = ring


class AlarmClock:
    """Does things at their times, on one thread, which comes with the first and goes when idle."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition(guard())
        # Numbers tell two of one time apart, so that no Python code runs while the heap is sifted.
        self._alarms: list[tuple[float, int, Alarm]] = []
        self._numbers = itertools.count()
        self._unwanted = 0
        self._thread: threading.Thread | None = None

    def set(self, seconds: float, ring: Callable[[], object]) -> Alarm:
        """Have ``ring`` called after so long; it must neither raise nor wait.

        Raises:
            RuntimeError: this process can start no more threads.
        """
        alarm = Alarm(ring)
        due = time.monotonic() + seconds, next(self._numbers), alarm
        with self._changed:
            if self._thread is None:
                # As of ``SerialExecutor``.
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
        """Forget an alarm, and let go of what it would do; once is enough."""
        with self._changed:
            self._unwanted += alarm.ring is not None
            alarm.ring = None
            if 2 * self._unwanted > len(self._alarms):
                # What a handler sets meanwhile is in the new list.
                before, self._alarms, self._unwanted = self._alarms, [], 0
                for each in before:
                    if each[-1].ring is not None:
                        heapq.heappush(self._alarms, each)
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                is_idle = not self._changed.wait_for(lambda: bool(self._alarms), _LINGER_SECONDS)
                if is_idle and not self._alarms:  # as of ``SerialExecutor``
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
            del alarm, ring  # it holds the caller's objects
