"""An operation in flight, and waiting for several."""

from __future__ import annotations  # torch may be built without distributed

import asyncio
import contextlib
import contextvars
import functools
import itertools
import os
import threading
import time
import warnings
from concurrent import futures
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, Protocol, Self, TypeVar

import torch

from objcomm._config import FOREVER_SECONDS, seconds_of
from objcomm._observe.published import fold, folded
from objcomm._transport.threads import SUSPICIOUS_SECONDS, Signal, check_uninterrupted
from objcomm.errors import UsageError, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from types import TracebackType

    from objcomm._config import Timeout
    from objcomm._transport.link import Awaitable
    from objcomm._transport.threads import SerialExecutor


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Waited(Protocol):
    """What the watchdog reads of a wait.

    Attributes:
        waiter: the thread that can do nothing else before it ends; 0 if there is none.
    """

    waiter: int


class _Nobody:
    """Stands for what is not watched, because it never waits for another rank."""

    waiter = 0


class Envelope(NamedTuple):
    """What is known of a message between two ranks besides its object.

    Attributes:
        src: global rank of the sender.
        group_src: the same as a rank within the group.
        tag: its tag.
        nbytes: its length on the wire; 0 if this rank sent it to itself.
    """

    src: int
    group_src: int
    tag: int
    nbytes: int


class Work(Generic[T_co]):
    """An operation that was begun with ``async_op=True`` and goes on by itself.

    Calls of one lane are carried out in their order, as if they were made one after another, so
    ranks may wait for them in any order. Errors, also those of other ranks, surface where the
    result is asked for. A work that nobody ever asks is reported by a RuntimeWarning that points to
    the line that began it.

    Also an awaitable: ``scores = await objcomm.all_gather(score, async_op=True)``.

    Attributes:
        operation: its name.
        call_site: the user's ``file:line`` that began it.

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
        "_future",
        "_is_asked",
        "_line",
        "_moving",
        "_on_error",
        "_pid",
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
        """Begin.

        Args:
            operation: its name.
            call_site: the user's ``file:line`` that begins it.
            waited: tells the watchdog which thread waits for it.
            envelopes: filled with that of each message that a receive gets.
            on_error: called when the program first takes its error, which it then knows of.
        """
        self._envelopes = envelopes
        self._cancel: Callable[[], bool] | None = None
        self._moving: Callable[[], Awaitable | None] | None = None
        self._signals: list[Awaitable] = []  # of threads that move what ends it
        self._on_error = on_error
        self.operation = operation
        self.call_site = call_site
        self._waited: Waited = _Nobody() if waited is None else waited
        self._line: SerialExecutor | None = None
        self._is_asked = False
        self._pid = os.getpid()
        # Not the future's own lock, which the thread that ends this work needs: a handler that
        # interrupts a wait may itself wait for that thread.
        self._ended = Signal()
        self._future: futures.Future[T_co] = futures.Future()
        self._future.set_running_or_notify_cancel()  # nobody can cancel what others take part in
        self._future.add_done_callback(self._ended.set)

    def __dir__(self) -> list[str]:
        return [name for name in object.__dir__(self) if name[0] != "_" or name[:2] == "__"]

    if not TYPE_CHECKING:  # a type checker finds the mistake by itself

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
            timeout: how long to block, in seconds or as a timedelta; not at all if 0, without end
                if None. When it passes the operation goes on; what ends it is the ``timeout=`` of
                the operation.

        Returns:
            What the operation returns when it is called without ``async_op``.

        Raises:
            TimeoutError: it is still in flight.
            UsageError: this process was forked after the operation was begun.
            ObjcommError: whatever the operation raises.
        """
        if self._pid != os.getpid() and not self.done():
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
            del self  # an error's traceback holds this frame, and the work holds the error

    def done(self) -> bool:
        """Whether the operation has ended, well or by an error; never blocks."""
        return self._ended.is_set

    @folded
    def result(self) -> T_co:
        """What the operation returns; never blocks.

        Raises:
            UsageError: it is still in flight.
            ObjcommError: whatever the operation raises.
        """
        self._must_be_done()
        try:
            return self._outcome()
        finally:
            del self  # as in ``wait``

    def exception(self) -> BaseException | None:
        """What the operation raises, or None if it ended well; never blocks.

        Raises:
            UsageError: it is still in flight.
        """
        self._must_be_done()
        self._hear()
        return self._error()

    @property
    def envelope(self) -> Envelope:
        """Who sent what a receive has received, with its tag and length; never blocks.

        Also where the object could not be rebuilt.

        Raises:
            UsageError: it is still in flight; or no message has come; or it is no receive.

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
        """Take a receive back that no message has met; never blocks.

        Local: other ranks hear nothing of it, and the next message that comes is the next
        receive's.

        Returns:
            Whether it was taken back. If so, it is done, and to wait for it raises
            ``concurrent.futures.CancelledError``. False if it goes on or has ended: a message has
            met it, its wait has ended by an error, or it is no receive.

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
            if error is self._error():  # who is cancelled may never see it
                self._hear()
            raise
        finally:
            del self  # as in ``wait``

    def carry_out(self, body: Callable[[], T_co]) -> None:
        """End by what ``body`` returns or raises; objcomm's own business."""
        try:
            result = body()
        except BaseException as error:  # noqa: BLE001  # raised where somebody waits
            fold(error)
            self._future.set_exception(error)
        else:
            self._on_error = None
            self._future.set_result(result)
        finally:
            self._cancel = self._moving = None
            for each in self._signals:
                each.set()
            del self, body  # an error's traceback holds this frame

    def carry_out_here(self, body: Callable[[], T_co]) -> Self:
        """The same; returns the work.

        Whoever calls this keeps the work in no variable of its own: an error's traceback holds the
        frames of all who called, and the work holds the error.
        """
        try:
            self.carry_out(body)
            return self
        finally:
            del self, body

    def moved_by(self, moving: Callable[[], Awaitable | None]) -> None:
        """Let a wait move what ends it: see ``Connections.signal``; objcomm's own business."""
        self._moving = moving
        if self.done():
            self._moving = None

    def cancelled_by(self, cancel: Callable[[], bool]) -> None:
        """Let ``cancel`` take it back as long as it goes on; objcomm's own business."""
        self._cancel = cancel
        if self.done():
            self._cancel = None

    def carry_out_on(self, line: SerialExecutor, body: Callable[[], T_co]) -> None:
        """The same on another thread, with this thread's context, modes, device and stream."""
        self._line = line
        try:
            line.submit(self.job(body))
        except BaseException:  # Ctrl-C, or there can be no more threads
            self.disown()
            raise

    def disown(self) -> None:
        """The caller gets no work: that nobody waits for it is no fault."""
        self._is_asked = True

    def job(self, body: Callable[[], T_co]) -> Callable[[], None]:
        """What another thread is to do later, with this thread's context, modes and stream."""
        context, device = contextvars.copy_context(), DevicePlace()
        is_inference, has_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def rest() -> T_co:
            # torch keeps these for each thread, and an operator of a reduction computes.
            with device, torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
                return body()

        # No function of its own: an error's traceback would hold its frame, and so the work.
        return functools.partial(context.run, self.carry_out, rest)

    def _has_ended_within(self, seconds: float | None) -> bool:
        if self._line is not None and self._line.is_here and not self.done():
            raise UsageError(
                f"{self.operation} at {self.call_site} comes after the call whose callback waits "
                "for it; wait for it after that call"
            )
        # A thread whose wait has a limit can do something else before the operation ends.
        self._waited.waiter = threading.get_ident() if seconds is None else 0
        try:
            if seconds is not None and seconds <= SUSPICIOUS_SECONDS:
                return self._ended.wait(seconds)
            ended = self._ended_on_this_thread()
            if ended.wait(SUSPICIOUS_SECONDS):
                return True
            check_uninterrupted(f"{self.operation} at {self.call_site}: wait")
            return ended.wait(-1 if seconds is None else seconds - SUSPICIOUS_SECONDS)
        finally:
            self._waited.waiter = 0

    def _ended_on_this_thread(self) -> Awaitable:
        """What a wait waits for, while it moves what ends it, if that can be."""
        moving = self._moving
        signal = None if moving is None else moving()
        if signal is None:
            return self._ended
        self._signals.append(signal)
        return self._ended if self.done() else signal

    def _must_be_done(self) -> None:
        if not self.done():
            raise UsageError(
                f"{self.operation} at {self.call_site} is still running; call wait() first"
            )
        self._is_asked = True

    def _outcome(self) -> T_co:
        self._hear()
        try:
            return self._future.result()
        finally:
            del self  # as in ``wait``

    def _hear(self) -> None:
        """The program takes the error, if there is one."""
        on_error = self._on_error
        if on_error is not None and self._pid == os.getpid():
            on_error()
        self._on_error = None  # last: whoever asks meanwhile, or after Ctrl-C, has heard as well

    def _error(self) -> BaseException | None:
        return self._future.exception() if self.done() else None

    def __del__(self) -> None:
        if getattr(self, "_is_asked", True) or not hasattr(self, "_future"):
            return
        error = self._error()
        ending = "" if error is None else f", and ended by {text_of(error)}"
        file, _, line = self.call_site.rpartition(":")
        warnings.warn_explicit(
            f"{self.operation} was started here but never waited for{ending}",
            RuntimeWarning,
            file,
            int(line),
        )


# Of thousands of works so many say which thread waits for them: that would be done at each end.
_NOTED_MAX = 64


def as_completed(works: Iterable[Work[T]], timeout: Timeout = None) -> Iterator[Work[T]]:
    """Give each work when it has ended, the first to end first.

    Local: other ranks may wait in another order, or not at all.

    Args:
        works: what to wait for.
        timeout: for all together, in seconds or as a timedelta; without end if None.

    Yields:
        Works that are done; ``result()`` gives or raises.

    Raises:
        TimeoutError: some are still in flight; they go on.

    Examples:
        >>> import objcomm
        >>> works = [objcomm.all_gather(each, async_op=True) for each in "ab"]
        >>> sorted(work.result() for work in objcomm.as_completed(works))
        [['a'], ['b']]
    """
    seconds = _limit_of("as_completed", timeout)
    each = _checked("as_completed", works)
    by_future = {work._future: work for work in each}  # noqa: SLF001  # its own class's business
    del each
    ended = futures.as_completed(by_future, seconds)
    while True:
        noted = itertools.islice(by_future.values(), _NOTED_MAX if seconds is None else 0)
        with _awaiting(noted):
            future = next(ended, None)
        if future is None:
            return
        work = by_future.pop(future)
        work._ended.wait()  # noqa: SLF001  # likewise; who has ended it is about to say so to all
        yield work


def _limit_of(name: str, timeout: Timeout) -> float | None:
    """A limit in seconds, if there is one; unlike an operation's it may be 0."""
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
    """Let whoever watches know that this thread can do nothing else."""
    waited = [work._waited for work in works if not work.done()]  # noqa: SLF001  # as above
    for each in waited:
        each.waiter = threading.get_ident()
    try:
        yield
    finally:
        for each in waited:
            each.waiter = 0


def wait_all(works: Iterable[Work[T]], timeout: Timeout = None) -> list[T]:
    """Wait until all have ended.

    Local: other ranks may wait in another order, or not at all.

    Args:
        works: what to wait for.
        timeout: for all together, in seconds or as a timedelta; without end if None.

    Returns:
        Their results, in the order of ``works``.

    Raises:
        TimeoutError: some are still in flight; they go on.
        ObjcommError: some have failed: the first one's error, after all have ended. The others'
            are still there to be asked for.

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
                if not waiting[at].done():  # the limit, or Ctrl-C
                    raise
                first = first or error
        if first is not None:
            raise first
        return results
    finally:
        first = None  # as in ``wait``
        waiting.clear()


class DevicePlace:
    """A device and a stream that another thread goes on with: as a rule those of the caller.

    They are of the one accelerator that torch's generic functions know.
    """

    def __init__(self, stream: torch.Stream | None = None) -> None:
        """Begin.

        Args:
            stream: and its device; the calling thread's current ones if None.
        """
        self._stream = stream
        self._before: torch.Stream | None = None
        self._device: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        accelerator = torch.accelerator.current_accelerator()
        if stream is None and accelerator is not None:
            # Not there: a module that was not imported, a driver, or what it was to be asked.
            with contextlib.suppress(AttributeError, RuntimeError):
                module: Any = torch.get_device_module(accelerator)
                # Before its first use nothing is on a device, the first one is current, and to ask
                # would be that use. A module that does not say so has nothing that begins then.
                if getattr(module, "is_initialized", _is_ready)():
                    self._stream = torch.accelerator.current_stream()

    def __enter__(self) -> None:
        if self._stream is None:
            return
        # Leaving it makes no context on the device that was current before, if there is none.
        self._device = torch.accelerator.device_index(self._stream.device_index)
        self._device.__enter__()
        self._before = torch.accelerator.current_stream(self._stream.device_index)
        torch.accelerator.set_stream(self._stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            torch.accelerator.set_stream(self._before)
            self._before = None
            self._device.__exit__(kind, error, traceback)


def stream_beside(*, after_current: bool) -> torch.Stream | None:
    """A new stream on the current device, for what the current one need not wait for.

    Args:
        after_current: whether what is queued there comes after all that the current stream has now.

    Returns:
        None where torch knows no accelerator, or one without streams.
    """
    accelerator = torch.accelerator.current_accelerator()
    try:
        module = None if accelerator is None else torch.get_device_module(accelerator)
    except RuntimeError:
        module = None
    make: Callable[[], torch.Stream] | None = getattr(module, "Stream", None)
    if make is None:
        return None
    stream = make()
    if after_current:
        stream.wait_stream(torch.accelerator.current_stream())
    return stream


def _is_ready() -> bool:
    return True
