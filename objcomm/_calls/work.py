"""Handles of asynchronous operations, and functions that wait for several of them."""

from __future__ import annotations  # torch may be built without distributed

import asyncio
import contextlib
import contextvars
import functools
import itertools
import sys
import threading
import time
import warnings
from concurrent import futures
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, Protocol, Self, TypeVar

import torch

from objcomm._algorithms.device import DevicePlace
from objcomm._config import FOREVER_SECONDS, seconds_of
from objcomm._observe.published import fold, folded
from objcomm._transport.threads import SUSPICIOUS_SECONDS, Signal, check_uninterrupted
from objcomm._world import inheritance
from objcomm.errors import UsageError, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from objcomm._config import Timeout
    from objcomm._transport.link import Awaitable
    from objcomm._transport.threads import SerialExecutor


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Waited(Protocol):
    """What the watchdog reads about a wait.

    Attributes:
        waiter: ident of the thread that is blocked until the wait ends; 0 if there is none.
    """

    waiter: int


class _Nobody:
    """Placeholder for work that is not watched because it never waits for another rank."""

    waiter = 0


class Envelope(NamedTuple):
    """The metadata of a point-to-point message.

    Attributes:
        src: global rank of the sender.
        group_src: group rank of the sender.
        tag: tag of the message.
        nbytes: length on the wire in bytes; 0 if this rank sent it to itself.
    """

    src: int
    group_src: int
    tag: int
    nbytes: int


class Work(Generic[T_co]):
    """An asynchronous operation, started with ``async_op=True``, which runs in the background.

    Calls on one lane run in the order in which they were made, so ranks may wait for them in any
    order. Errors, including those of other ranks, are raised when the result is requested. If the
    result is never requested, a RuntimeWarning points to the line that started the operation.

    It is also awaitable: ``scores = await objcomm.all_gather(score, async_op=True)``.

    Attributes:
        operation: the name of the operation.
        call_site: the user's ``file:line`` that started it.

    Examples:
        >>> import objcomm
        >>> work = objcomm.all_gather(0.5, async_op=True)
        >>> work.wait()
        [0.5]
    """

    __slots__ = (
        "__weakref__",
        "_cancel",
        "_ended",
        "_envelopes",
        "_forks",
        "_future",
        "_is_asked",
        "_line",
        "_moving",
        "_on_error",
        "_signals",
        "_waited",
        "call_site",
        "operation",
    )

    def __init__(
        self,
        operation: str,
        call_site: str,
        waited: Waited | None = None,
        envelopes: Sequence[Envelope] = (),
        on_error: Callable[[], None] | None = None,
    ) -> None:
        """Create a work without a result.

        Args:
            operation: the name of the operation.
            call_site: the user's ``file:line`` that started it.
            waited: shows the watchdog which thread waits for it.
            envelopes: filled with the envelope of each message that a receive gets.
            on_error: called when the program first retrieves the error.
        """
        self._envelopes = envelopes
        self._cancel: Callable[[], bool] | None = None
        self._moving: Callable[[], Awaitable | None] | None = None
        self._signals: list[Awaitable] = []  # set at the end, to wake threads that move its data
        self._on_error = on_error
        self.operation = operation
        self.call_site = call_site
        self._waited: Waited = _Nobody() if waited is None else waited
        self._line: SerialExecutor | None = None
        self._is_asked = False
        self._forks = inheritance.forks
        # Waits do not use the future's lock, which the thread that ends this work needs: a signal
        # handler that interrupts a wait may itself wait for that thread.
        self._ended = Signal()
        self._future: futures.Future[T_co] = futures.Future()
        self._future.set_running_or_notify_cancel()  # not cancellable: other ranks take part
        self._future.add_done_callback(self._ended.set)

    def __dir__(self) -> list[str]:
        return [name for name in object.__dir__(self) if name[0] != "_" or name[:2] == "__"]

    if not TYPE_CHECKING:  # a type checker reports these mistakes itself

        def __iter__(self) -> NoReturn:
            raise TypeError("'Work' object is not iterable; its wait() gives the result")

        def __getitem__(self, key: object) -> NoReturn:
            raise TypeError("'Work' object is not subscriptable; its wait() gives the result")

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"'Work' object has no attribute {name!r}; its wait() gives the result"
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Work can't be sent or copied; its wait() gives the result")

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._error() else "done"
        return f"<objcomm.Work: {self.operation} at {self.call_site}, {state}>"

    @folded
    def wait(self, timeout: Timeout = None) -> T_co:
        """Block until the operation has ended.

        Args:
            timeout: how long to block, in seconds or as a timedelta; 0 does not block, None means
                no limit. The operation continues when this timeout expires; its own
                ``timeout=`` limits it.

        Returns:
            What the operation returns without ``async_op``.

        Raises:
            TimeoutError: the operation is still in progress.
            UsageError: this process was forked after the operation was started.
            ObjcommError: whatever the operation raises.
        """
        if self._forks != inheritance.forks and not self.done():
            raise UsageError(
                f"{self.operation}: a forked process cannot wait for its parent's work; wait for "
                "it in the process that started it"
            )
        seconds = _limit_of(f"{self.operation}: wait", timeout)
        self._is_asked = True
        try:
            if not self._has_ended_within(seconds):
                raise TimeoutError(
                    f"{self.operation} at {self.call_site} is still running after {seconds} s; "
                    "it continues, and wait() can be called again"
                )
            return self._outcome()
        finally:
            del self  # breaks a cycle: the work holds the error, whose traceback holds this frame

    def done(self) -> bool:
        """Return whether the operation has ended, with a result or an error; never blocks."""
        return self._ended.is_set

    @folded
    def result(self) -> T_co:
        """Return the result of the operation; never blocks.

        Raises:
            UsageError: the operation is still in progress.
            ObjcommError: whatever the operation raises.
        """
        self._must_be_done()
        try:
            return self._outcome()
        finally:
            del self  # as in ``wait``

    def exception(self) -> BaseException | None:
        """Return the operation's error, or None if it succeeded; never blocks.

        Raises:
            UsageError: the operation is still in progress.
        """
        self._must_be_done()
        self._mark_retrieved()
        return self._error()

    @property
    def envelope(self) -> Envelope:
        """Sender, tag and length of the message that was received; never blocks.

        Available even if the object could not be rebuilt.

        Raises:
            UsageError: the operation is still in progress, or did not receive a message.

        Examples:
            >>> import objcomm
            >>> work = objcomm.irecv(tag=None)
            >>> objcomm.send("which?", 0, tag=5)
            >>> work.wait(), work.envelope.src, work.envelope.tag
            ('which?', 0, 5)
        """
        if not self.done():
            raise UsageError(
                f"{self.operation} at {self.call_site} is still running; call wait() first"
            )
        if not self._envelopes:
            raise UsageError(f"{self.operation} at {self.call_site} has received no message")
        return self._envelopes[0]

    def cancel(self) -> bool:
        """Cancel a receive that has not matched a message yet; never blocks.

        This is local: other ranks do not notice, and the next message goes to the next receive.

        Returns:
            Whether the receive was cancelled. If so, it is done, and waiting for it raises
            ``concurrent.futures.CancelledError``. False if a message has matched it, if it has
            ended with an error, or if the operation is not a receive.

        Examples:
            >>> import objcomm
            >>> work = objcomm.irecv(0, tag=4)
            >>> work.cancel(), work.done()
            (True, True)
        """
        cancel = self._cancel
        is_cancelled = cancel is not None and not self.done() and cancel()
        self._is_asked |= is_cancelled
        return is_cancelled

    def __await__(self) -> Generator[Any, None, T_co]:
        self._is_asked = True
        try:
            return (yield from asyncio.wrap_future(self._future).__await__())
        except BaseException as error:
            fold(error)
            if error is self._error():  # a cancelled task may never get the work's own error
                self._mark_retrieved()
            raise
        finally:
            del self  # as in ``wait``

    def carry_out(self, body: Callable[[], T_co]) -> None:
        """Run ``body`` and end with its result or exception. Internal."""
        try:
            result = body()
        except BaseException as error:  # noqa: BLE001  # raised by the thread that waits
            fold(error)
            self._future.set_exception(error)
        else:
            self._on_error = None
            self._future.set_result(result)
        finally:
            self._cancel = self._moving = None
            for each in tuple(self._signals):  # a waiting thread may remove its own
                each.set()
            del self, body  # as in ``wait``

    def carry_out_here(self, body: Callable[[], T_co]) -> Self:
        """Do what ``carry_out`` does, and return the work. Internal.

        The caller must not keep the work in a local variable: an error's traceback holds the
        frames of all callers, and the work holds the error.
        """
        try:
            self.carry_out(body)
            return self
        finally:
            del self, body

    def moved_by(self, moving: Callable[[], Awaitable | None]) -> None:
        """Let a waiting thread move this work's data; see ``Connections.signal``. Internal."""
        self._moving = moving
        if self.done():
            self._moving = None

    def cancelled_by(self, cancel: Callable[[], bool]) -> None:
        """Let ``cancel`` cancel the operation until it has ended. Internal."""
        self._cancel = cancel
        if self.done():
            self._cancel = None

    def carry_out_on(self, line: SerialExecutor, body: Callable[[], T_co]) -> None:
        """Do what ``carry_out`` does on another thread; see ``job``. Internal."""
        self._line = line
        try:
            line.submit(self.job(body))
        except BaseException:  # Ctrl-C, or no more threads can be started
            self.disown()
            raise

    def disown(self) -> None:
        """Suppress the warning about a work never waited for: its caller does not get the work."""
        self._is_asked = True

    def job(self, body: Callable[[], T_co]) -> Callable[[], None]:
        """Return a job for another thread, with this thread's context, modes, device and stream."""
        context, device = contextvars.copy_context(), DevicePlace()
        is_inference, has_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def rest() -> T_co:
            # Torch keeps these per thread, and a reduction's operator may compute with tensors.
            with device, torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
                return body()

        # A partial: an error's traceback would hold a function's frame, and so the work.
        return functools.partial(context.run, self.carry_out, rest)

    def _has_ended_within(self, seconds: float | None) -> bool:
        if self._line is not None and self._line.is_here and not self.done():
            raise UsageError(
                f"{self.operation} at {self.call_site} comes after the call whose callback waits "
                "for it; wait for it after that call"
            )
        # A thread whose wait has a timeout may do something else before the operation ends.
        self._waited.waiter = threading.get_ident() if seconds is None else 0
        try:
            if seconds is not None and seconds <= SUSPICIOUS_SECONDS:
                return self._ended.wait(seconds)
            ended = self._ended_on_this_thread()
            try:
                if ended.wait(SUSPICIOUS_SECONDS):
                    return True
                check_uninterrupted(f"{self.operation} at {self.call_site}: wait")
                return ended.wait(-1 if seconds is None else seconds - SUSPICIOUS_SECONDS)
            finally:
                with contextlib.suppress(ValueError):  # it is not among them
                    self._signals.remove(ended)
        finally:
            self._waited.waiter = 0

    def _ended_on_this_thread(self) -> Awaitable:
        """Return what to wait on: if possible, a signal whose wait also moves this work's data."""
        moving = self._moving
        signal = None if moving is None else moving()
        if signal is None:
            return self._ended
        self._signals.append(signal)
        if self.done():
            signal.set()
        return signal

    def _must_be_done(self) -> None:
        if not self.done():
            raise UsageError(
                f"{self.operation} at {self.call_site} is still running; call wait() first"
            )
        self._is_asked = True

    def _outcome(self) -> T_co:
        self._mark_retrieved()
        try:
            return self._future.result()
        finally:
            del self  # as in ``wait``

    def _mark_retrieved(self) -> None:
        """Record that the program retrieves the error, if there is one."""
        on_error = self._on_error
        if on_error is not None and self._forks == inheritance.forks:
            on_error()
        self._on_error = None  # last, so that it is called again if Ctrl-C interrupts the call

    def _error(self) -> BaseException | None:
        return self._future.exception() if self.done() else None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_is_asked", True) or not hasattr(self, "_future"):
            return
        try:
            error = self._error()
            ending = "" if error is None else f", and ended by {text_of(error)}"
            file, _, line = self.call_site.rpartition(":")
            warnings.warn_explicit(
                f"{self.operation} was started here but never waited for{ending}",
                RuntimeWarning,
                file,
                int(line),
            )
        except (AttributeError, TypeError):  # the names of modules may already be None
            if not is_finalizing():
                raise


# At most this many works show which thread waits for them: it is set again at each completion.
_NOTED_MAX = 64


def as_completed(works: Iterable[Work[T]], timeout: Timeout = None) -> Iterator[Work[T]]:
    """Yield each work when it has ended, in order of completion.

    This is local: other ranks may wait in another order, or not at all.

    Args:
        works: the works to wait for.
        timeout: for all together, in seconds or as a timedelta; None means no limit.

    Yields:
        Works that are done, so ``result()`` returns or raises immediately.

    Raises:
        TimeoutError: some works are still in progress. They continue.

    Examples:
        >>> import objcomm
        >>> works = [objcomm.all_gather(each, async_op=True) for each in "ab"]
        >>> sorted(work.result() for work in objcomm.as_completed(works))
        [['a'], ['b']]
    """
    seconds = _limit_of("as_completed", timeout)
    each = _checked("as_completed", works)
    by_future = {work._future: work for work in each}  # noqa: SLF001  # same module
    del each
    ended = futures.as_completed(by_future, seconds)
    while True:
        noted = itertools.islice(by_future.values(), _NOTED_MAX if seconds is None else 0)
        with _awaiting(noted):
            future = next(ended, None)
        if future is None:
            return
        work = by_future.pop(future)
        work._ended.wait()  # noqa: SLF001  # likewise; set right after the future
        yield work


def _limit_of(name: str, timeout: Timeout) -> float | None:
    """Return a timeout in seconds, or None for no limit; unlike an operation's, it may be 0."""
    if timeout is None:
        return None
    if not isinstance(timeout, bool) and timeout in (0, timedelta(0)):
        return 0.0
    seconds = seconds_of(name, timeout)
    return None if seconds >= FOREVER_SECONDS else seconds


def _checked(name: str, works: Iterable[Work[T]]) -> list[Work[T]]:
    try:
        found = list(works)
    except TypeError as error:
        raise UsageError(f"{name}: works={works!r} must be a list of objcomm.Work") from error
    for each in found:
        if not isinstance(each, Work):
            raise UsageError(f"{name}: works= lists objcomm.Work, not {each!r}")
    return found


@contextlib.contextmanager
def _awaiting(works: Iterable[Work[Any]]) -> Iterator[None]:
    """Show the watchdog that this thread is blocked until one of ``works`` ends."""
    waited = [work._waited for work in works if not work.done()]  # noqa: SLF001  # as above
    for each in waited:
        each.waiter = threading.get_ident()
    try:
        yield
    finally:
        for each in waited:
            each.waiter = 0


def wait_all(works: Iterable[Work[T]], timeout: Timeout = None) -> list[T]:
    """Wait until all works have ended.

    This is local: other ranks may wait in another order, or not at all.

    Args:
        works: the works to wait for.
        timeout: for all together, in seconds or as a timedelta; None means no limit.

    Returns:
        The results, in the order of ``works``.

    Raises:
        TimeoutError: some works are still in progress. They continue.
        ObjcommError: the error of the first work in ``works`` that failed, raised after all have
            ended. Errors of other works remain available from them.

    Examples:
        >>> import objcomm
        >>> objcomm.wait_all([objcomm.broadcast(each, async_op=True) for each in "ab"])
        ['a', 'b']
    """
    waiting = _checked("wait_all", works)
    del works
    seconds = _limit_of("wait_all", timeout)
    until = None if seconds is None else time.monotonic() + seconds
    first: BaseException | None = None
    results = []
    try:
        for at in range(len(waiting)):
            left = None if until is None else max(until - time.monotonic(), 1e-6)
            try:
                results.append(waiting[at].wait(left))
            except BaseException as error:
                if not waiting[at].done():  # the timeout, or Ctrl-C
                    raise
                first = first or error
        if first is not None:
            raise first
        return results
    finally:
        first = None  # as in ``wait``
        waiting.clear()
