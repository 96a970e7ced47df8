"""``stream``: all ranks iterate over the objects that one rank produces, or share them out.

A *feed* carries the objects from the source to some ranks by calls on its own two lanes: one for
the objects, and one for the other ranks' reports that they have finished with some. So the source
may be ahead of the others, calls in the body of the loop are not affected, and each call keeps the
promises of a collective. A stream has one feed to all ranks or, if it shares the objects out, one
feed to each rank.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import sys
import threading
from collections import deque
from collections.abc import (
    AsyncIterable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from typing import Any, Generic, Self, TypeVar, Unpack, overload

from objcomm._algorithms import routes
from objcomm._calls.call import Call, Coding, plain_call
from objcomm._calls.group import Group, lane, resolve
from objcomm._calls.work import Work
from objcomm._collectives.gather import decide_in
from objcomm._config import (
    Allowed,
    CallOptions,
    DeviceLike,
    GroupLike,
    Timeout,
    WithSource,
    check_name,
    settings,
    whole_number,
)
from objcomm._failures.verdict import Cause, Verdict
from objcomm._observe.history import call_site
from objcomm._observe.published import fold, folded
from objcomm._wire.failure_message import (
    failure_message,
    failure_of,
    failures_in,
    raise_together,
)
from objcomm._wire.header import Operation, Status
from objcomm.errors import CollectiveError, DecodeError, ObjcommError, RankFailure, UsageError

T = TypeVar("T")

_NAME = "stream"
_EXHAUSTED: Any = object()
_ITERABLE = "__iter__", "__aiter__", "__getitem__"


class _Feed(Generic[T]):
    """The objects on their way from the source to the other ranks of a group.

    A rank that leaves keeps taking objects, without decoding them, until the source knows: another
    rank may receive them through this one.

    Attributes:
        members: the ranks that it connects, as ranks of the user's group.
        batches: how many batches this rank has sent, or has received if it is not the source.
        reports: how many reports the source has taken, or this rank has made.
        is_leaving: whether this rank is leaving the stream.
        is_left: on the source, whether another rank is known to be leaving the stream.
        failures: by rank of the user's group, what kept a leaving rank from rebuilding an object.
        is_over: whether the last message was sent or received.
    """

    def __init__(
        self,
        group: Any,
        root: int,
        *,
        members: Sequence[int],
        created_at: str,
        lane_name: str,
        is_batched: bool,
        window: int,
        every: int,
        options: dict[str, Any],
    ) -> None:
        """Create a feed without traffic.

        Args:
            group: objcomm's state of the ranks that it connects.
            root: the source, as a rank of ``group``.
            members: the ranks of ``group``, as ranks of the user's group.
            created_at: the user's line, for errors.
            lane_name: the lane of the objects; that of the reports has a longer name.
            is_batched: whether messages contain lists of objects, not single objects.
            window: how many batches may be sent that a rank has not finished with.
            every: ranks report after this many batches.
            options: the options of each call.
        """
        self.members = members
        self._group, self._root, self._source = group, root, members[root]
        self._created_at = created_at
        self._lane_name = lane_name
        self._is_batched, self._window, self._every = is_batched, window, every
        self._options = options
        mesh = group.mesh
        self._nonce = "" if mesh is None or mesh.verdict is not None else mesh.nonce
        self._has_not_met = False  # if true, the two ranks never will
        self._works: list[Work[None]] = []
        self._awaited = 0  # reports that the source has begun to take
        self.batches = self.reports = 0
        self.is_leaving = self.is_left = self.is_over = False
        self.failures: dict[int, RankFailure] = {}

    @property
    def has_room(self) -> bool:
        """Whether the source may send the next batch."""
        begun = self.batches // self._every * self._every
        return self.reports * self._every >= begun - (self._window - self._every)

    @property
    def unfinished(self) -> int:
        """The number of batches that a rank has not reported to have finished with."""
        return self.batches - self.reports * self._every

    @property
    def owes_report(self) -> bool:
        """Whether a report must be made, or can be taken, before the next message."""
        return self.reports < self.batches // self._every

    @property
    def is_settled(self) -> bool:
        """Whether neither messages nor reports are outstanding."""
        return self.is_over and not self.owes_report and not self._works

    @property
    def is_cut_off(self) -> bool:
        """Whether the connections on which it began have ended."""
        mesh = self._group.mesh
        if not self._nonce:
            return False
        return mesh is None or mesh.nonce != self._nonce or mesh.verdict is not None

    @property
    def verdict(self) -> Verdict | None:
        """What has ended the connections on which it began, in ranks of the user's group."""
        mesh = self._group.mesh
        if mesh is None or (mesh.nonce != self._nonce and not self._has_not_met):
            return None
        verdict = mesh.posted_verdict
        return None if verdict is None else verdict.within(self.members)

    def give(
        self, batch: Sequence[T], failures: Collection[RankFailure] = (), *, is_async: bool
    ) -> Work[None] | None:
        """Send a batch; an empty one is the end of the stream, or the failures that end it."""

        def first(call: Call) -> Callable[[], None]:
            if batch:
                mine = call.message(batch if self._is_batched else batch[0])
                if mine.header.status == Status.FAILURE:  # numbered as in the user's group
                    own = failures_in([mine]).values()
                    named = [dataclasses.replace(each, rank=self._source) for each in own]
                    mine = failure_message(call.exchange.header, named)
            elif failures:
                mine = failure_message(call.exchange.header, failures)
            else:
                mine = call.announcement(Status.ENDED)
            self.is_over = mine.header.status != Status.VALUE
            self.batches += not self.is_over

            def rest() -> None:
                with call.exchange as exchange:
                    routes.broadcast(exchange, mine, call.root)
                if not failures:
                    call.raise_failures([mine])

            return rest

        return self._call(self._lane_name, first, is_async=is_async)

    def take(self, ready: deque[T], *, is_async: bool) -> Work[None] | None:
        """Receive the next batch into ``ready``, or learn that the stream has ended.

        Everything is recorded on the receiving thread, because an awaiting task may be cancelled.
        """

        def first(call: Call) -> Callable[[], None]:
            def rest() -> None:
                with call.exchange as exchange:
                    message = routes.broadcast(exchange, None, call.root)
                self.is_over = message.header.status in {Status.ENDED, Status.FAILURE}
                self.batches += not self.is_over
                if self.is_leaving:
                    return
                own = self.members[call.rank]
                raise_together(_NAME, failures_in([message]), None, own)
                if self.is_over:
                    return
                self.failures.clear()  # an object that could not be rebuilt was skipped
                try:
                    if self._is_batched:
                        ready.extend(call.decode_as(message, _is_batch, "a batch of a stream"))
                    else:
                        ready.append(call.decode(message))
                except DecodeError as error:
                    if error.origin is not None:
                        error.origin = error.origin._replace(rank=self._source)
                    self.failures[own] = failure_of(error, own, self._created_at)
                    raise

            return rest

        return self._call(self._lane_name, first, is_async=is_async)

    def report(self, *, is_async: bool) -> Work[None] | None:
        """Report that this rank has finished with all batches; on the source, take a report."""

        def first(call: Call) -> Callable[[], None]:
            if self.is_leaving and self.failures:
                mine = failure_message(call.exchange.header, self.failures.values())
            else:
                mine = call.announcement(Status.ENDED if self.is_leaving else Status.VALUE)

            def rest() -> None:
                with call.exchange as exchange:
                    messages = routes.gather(exchange, mine, call.root)
                if messages is not None:
                    # In this order, and as a new dict: another thread may run the loop, which
                    # reads the failures of all feeds once ``is_left`` of any is true.
                    self.failures = {**self.failures, **failures_in(messages)}
                    self.is_left |= any(each.header.status != Status.VALUE for each in messages)
                self.reports += 1

            return rest

        self._awaited += 1
        return self._call(f"{self._lane_name} reports", first, is_async=is_async)

    def report_later(self) -> None:
        """Take the reports that are due, without waiting for them."""
        while self._awaited < self.batches // self._every:
            self.keep(self.report(is_async=True))

    def keep(self, work: Work[None] | None) -> None:
        """Leave a ``Work`` to ``poll`` and ``outstanding``."""
        if work is not None:
            work.disown()
            self._works.append(work)

    def poll(self) -> None:
        """Record what has ended and begin to take a report that can be taken, without waiting."""
        for work in [each for each in self._works if each.done()]:
            self._works.remove(work)
            work.result()
        if self._awaited == self.reports and self.owes_report:
            self.keep(self.report(is_async=True))

    def outstanding(self) -> list[Work[None]]:
        """Return what has not been waited for, and forget it."""
        works, self._works = self._works, []
        return works

    def _call(
        self, lane_name: str, first: Callable[[Call], Callable[[], None]], *, is_async: bool
    ) -> Work[None] | None:
        """Make a call; ``first`` encodes and returns the rest, in which ranks wait."""
        mesh, thread = self._group.mesh, threading.current_thread()
        if self.is_cut_off and not (
            mesh is not None and mesh.nonce == self._nonce and mesh.is_owed_by(thread)
        ):
            raise UsageError(
                f"stream: the stream created at {self._created_at} can't continue, because "
                "an error has closed the connections that it began on; open a new stream"
            )
        try:
            with lane(lane_name):
                call = Call(
                    Operation.STREAM,
                    group=self._group,
                    group_root=self._root,
                    has_root=True,
                    async_op=is_async,
                    **self._options,
                )
        except ObjcommError as failure:
            if not self._nonce and not isinstance(failure, UsageError):
                self.is_over = self._has_not_met = True
            raise
        with call:
            self._nonce = self._nonce or self._group.mesh.nonce
            rest = first(call)
            if is_async:
                return call.later(rest)
            rest()
        return None


class Stream(Generic[T]):
    """The objects of ``objcomm.stream``, on one rank: an iterator, also for ``async for``.

    Its first step connects it, which every rank must do in the same order as its collectives. A
    stream belongs to the thread that takes the first step.

    Examples:
        >>> import contextlib
        >>> import objcomm
        >>> with contextlib.closing(objcomm.stream(range(10))) as numbers:
        ...     print(next(numbers), next(numbers))
        0 1
    """

    def __init__(
        self,
        iterable: Any,
        group: Group,
        source: int,
        *,
        depth: int,
        batch: int,
        scatter: bool,
        options: dict[str, Any],
    ) -> None:
        """Create a stream without traffic; see ``objcomm.stream``."""
        self._iterable: Any = iterable
        self._iterator: Any = None
        self._group = group
        self._source = source
        self._is_source = group.rank == source
        self._depth, self._batch, self._is_scattered = depth, batch, scatter
        self._options = options
        self._created_at = call_site()
        self._ready: deque[T] = deque()
        self._feeds: list[_Feed[T]] = []
        # The lane on which it was opened, and its number there; None before the first step.
        self._place: tuple[str, int] | None = None
        self._is_async = False
        self._is_over = False
        self._error: BaseException | None = None  # raised by the iterable after a partial batch
        self._work: Work[Any] | None = None  # of the step that an awaiting task is in

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    @folded
    def __next__(self) -> T:
        if not self._ready:
            self._is_async = False
            _now(self._advance())
        if self._ready:
            return self._ready.popleft()
        raise StopIteration

    async def __anext__(self) -> T:
        if not self._ready:
            self._is_async = True
            try:
                await self._advance()
            except BaseException as error:
                fold(error)
                raise
        if self._ready:
            return self._ready.popleft()
        raise StopAsyncIteration

    @folded
    def close(self) -> None:
        """Leave the stream, as a loop's ``break`` does; waits until the source knows.

        Nothing happens if the stream has ended.

        Raises:
            ObjcommError: whatever ``objcomm.broadcast`` raises.
        """
        self._is_async = False
        _now(self._leave())

    async def aclose(self) -> None:
        """Do what ``close`` does, without blocking the event loop.

        Raises:
            ObjcommError: whatever ``objcomm.broadcast`` raises.
        """
        self._is_async = True
        await self._leave()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # The other ranks wait, unless this process is only a fork of the rank. While the
        # interpreter ends, the names of modules may already be None.
        is_open = getattr(self, "_feeds", None) and not self._is_over
        if is_open and not is_finalizing() and not self._group.is_of_the_parent:
            self.close()

    async def _advance(self) -> None:
        """Make the next objects ready, unless the stream has ended."""
        if self._is_over:
            return
        try:
            try:
                await self._catch_up()
                if self._place is None:
                    await self._open()
                await (self._produce() if self._is_source else self._step())
            except ObjcommError as error:
                self._raise_as_all_ranks(error)
                raise
        except asyncio.CancelledError:
            raise  # the step continues, and the stream must still be closed
        except BaseException as error:
            self._ready.clear()
            if self._is_source:
                await self._end(error)
            elif any(feed.is_over or feed.is_cut_off for feed in self._feeds):
                self._release()
            raise
        if not self._ready:
            self._release()

    def _raise_as_all_ranks(self, error: ObjcommError) -> None:
        """Raise the error that all ranks raise for ``error``, if that is a different one.

        If objects are shared out, a feed connects two ranks only. What ends its connections also
        ends the whole group's, as it would without ``scatter``, so all ranks raise the same error.
        """
        mesh, thread = self._group.mesh, threading.current_thread()
        if not self._is_scattered or mesh is None:
            return
        verdicts = (feed.verdict for feed in self._feeds)
        verdict = next((each for each in verdicts if each and each.cause is not Cause.FAILED), None)
        is_new = mesh.verdict is None or mesh.is_owed_by(thread)
        is_from_source = isinstance(error, CollectiveError) and not self._is_source
        if verdict is None and is_new and is_from_source:
            # The source may have lost another rank. If so, it posted why before reporting it here.
            verdict = mesh.verdict or mesh.failed(mesh.nonce)
        if verdict is None:
            return
        if is_new:
            verdict = mesh.settle(verdict)
            mesh.mark_raised(thread)
        raise verdict.error(_NAME) from None

    async def _open(self) -> None:
        """Agree on a number that no open stream of this lane has on any rank, and create the feeds.

        All of this is done on the receiving thread, because an awaiting task may be cancelled.
        """
        group = self._group
        must_agree = f"{self._depth} {self._batch} {self._is_scattered}"
        call = plain_call(
            Operation.STREAM,
            name=self._options["name"],
            group=group,  # type: ignore[arg-type]  # objcomm's own state of the user's group
            group_root=self._source,
            has_root=True,
            must_agree=must_agree,
            async_op=self._is_async,
            timeout=self._options["timeout"],
        )
        with call:
            lane_name = "" if call.is_alone else call.exchange.lane.name

            def taken() -> list[int]:
                return [number for name, number in group.streams if name == lane_name]

            # In turn, because other tasks may have begun to open streams before.
            rest = decide_in(
                call, taken, _free, in_turn=True, is_part=_is_numbers, is_answer=_is_number
            )

            def opened() -> None:
                place = lane_name, rest()
                group.streams.add(place)
                self._feeds = self._make_feeds(*place)
                self._place = place

            if not self._is_async:
                opened()
                return
            work = call.later(opened)
        await self._done(work)

    def _make_feeds(self, lane_name: str, number: int) -> list[_Feed[T]]:
        group, source = self._group, self._source
        readers = [rank for rank in range(group.size) if rank != source]
        if not self._is_scattered:
            everyone = tuple(range(group.size))
            parts: list[tuple[Any, int, tuple[int, ...]]] = [(group, source, everyone)]
            parts = parts if readers else []
        else:
            readers = readers if self._is_source else [group.rank]
            pairs = [(source, rank) for rank in readers]
            parts = [(group.part(pair), 0, pair) for pair in pairs]
        window = 1 if settings().is_checked else max(1, self._depth // self._batch)
        return [
            _Feed(
                part,
                root,
                members=members,
                created_at=self._created_at,
                lane_name=f"{lane_name} {_NAME} {number}".strip(),
                is_batched=self._batch > 1,
                window=window,
                # Several batches for each report: a report costs the source a call.
                every=1 if self._is_scattered else max(1, window // 2),
                options=self._options | {"name": f"{self._options['name']} step".strip()},
            )
            for part, root, members in parts
        ]

    async def _step(self) -> None:
        """Receive the next batch, on a rank that is not the source."""
        for feed in self._feeds:
            if feed.owes_report:
                await self._done(feed.report(is_async=self._is_async))
            await self._done(feed.take(self._ready, is_async=self._is_async))

    async def _produce(self) -> None:
        """Give batches to the other ranks until there is one for this rank."""
        feeds = self._feeds
        while not self._ready and not self._is_over:
            if await self._is_left():
                failures = {rank: each for feed in feeds for rank, each in feed.failures.items()}
                await self._end(failures=failures.values())
                raise_together(_NAME, failures, None, self._source)
                return
            batch = await self._pull()
            if not batch:
                await self._fail(self._error)
                return
            receivers = feeds
            if self._is_scattered:
                for feed in feeds:
                    feed.poll()
                free = [feed for feed in feeds if feed.has_room]
                receivers = sorted(free, key=lambda feed: feed.unfinished)[:1]
            if not self._is_scattered or not receivers:
                self._ready.extend(batch)  # now, because an awaiting task may be cancelled
            try:
                for feed in receivers:
                    await self._give(feed, batch)
            except CollectiveError as error:
                if error.__cause__ is None:  # another rank's, in a block that fails together
                    raise
                await self._fail(error.__cause__)

    async def _is_left(self) -> bool:
        """Wait until another batch may be sent; return whether a rank is leaving the stream."""
        for feed in self._feeds:
            if self._is_scattered:  # this rank takes what no other has room for
                feed.poll()
            else:
                while not feed.has_room:
                    await self._done(feed.report(is_async=self._is_async))
        return any(feed.is_left for feed in self._feeds)

    async def _give(
        self, feed: _Feed[T], batch: Sequence[T], failures: Collection[RankFailure] = ()
    ) -> None:
        # A rank that is busy must not keep a large object from being given to another rank.
        is_async = self._is_async or self._is_scattered
        work = feed.give(batch, failures, is_async=is_async)
        if self._is_scattered and not (batch and feed.is_over):  # unless it can't be encoded
            feed.keep(work)
        else:
            await self._done(work)

    async def _pull(self) -> list[T]:
        """Take the next batch from the iterable; an empty one if it has ended or raised."""
        batch: list[T] = []
        while len(batch) < self._batch and self._iterable is not None:
            try:
                if self._is_async and hasattr(self._iterable, "__aiter__"):
                    self._iterator = self._iterator or aiter(self._iterable)
                    obj = await anext(self._iterator, _EXHAUSTED)
                else:
                    self._iterator = self._iterator or iter(self._iterable)
                    obj = next(self._iterator, _EXHAUSTED)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001  # raised on all ranks, after the batch
                self._error = error
                obj = _EXHAUSTED
            if obj is _EXHAUSTED:
                self._iterable = self._iterator = None
            else:
                batch.append(obj)
        return batch

    async def _fail(self, error: BaseException | None) -> None:
        """End the stream with the source's own error, if there is one, and raise it."""
        self._error = None
        await self._end(error)
        if error is not None:
            failure = failure_of(error, self._source, self._created_at)
            raise_together(_NAME, {self._source: failure}, error, self._source)

    async def _end(
        self, error: BaseException | None = None, failures: Collection[RankFailure] = ()
    ) -> None:
        """Announce to all ranks that the stream has ended, or what has ended it.

        Args:
            error: the source's own error, which it raises afterwards.
            failures: those of other ranks.
        """
        if self._is_over:
            return
        self._is_over = True
        if error is not None:
            failures = [failure_of(error, self._source, self._created_at)]
        self._iterable = self._iterator = None
        raised: list[BaseException] = []
        for feed in self._feeds:
            try:
                is_known = bool(failures) and feed.is_cut_off
                if not feed.is_over and not is_known:
                    await self._give(feed, (), failures)
            except BaseException as each:  # noqa: BLE001  # the other feeds must end, too
                raised.append(each)
        for feed in self._feeds:
            try:
                if error is None or isinstance(error, Exception):
                    await self._finish(feed)
                else:
                    feed.report_later()  # after Ctrl-C nobody waits for the others
            except BaseException as each:  # noqa: BLE001  # likewise
                raised.append(each)
        self._release()
        if not failures and raised:
            raise raised[0]

    async def _finish(self, feed: _Feed[T]) -> None:
        """Wait for the messages and reports that are outstanding."""
        for work in feed.outstanding():
            await self._done(work)
        while feed.owes_report:
            await self._done(feed.report(is_async=self._is_async))

    async def _leave(self) -> None:
        self._ready.clear()
        if self._is_over or self._place is None:
            self._is_over = True
            self._iterable = None
            return
        await self._catch_up()
        try:
            if any(feed.is_cut_off for feed in self._feeds):
                return  # the error that cut it off ends the other ranks' loops
            if self._is_source:
                await self._end()
                return
            for feed in self._feeds:
                feed.is_leaving = True
                while not feed.is_over:
                    await self._step()
        except ObjcommError as error:
            self._raise_as_all_ranks(error)
            raise
        finally:
            self._release()

    def _release(self) -> None:
        """Record that the stream is over; its lanes can be reused if nothing is left on them."""
        self._is_over = True
        self._iterable = self._iterator = None
        is_left = all(feed.is_cut_off or feed.is_settled for feed in self._feeds)
        if is_left and self._place is not None:
            self._group.streams.discard(self._place)

    async def _done(self, made: Any) -> Any:
        """Wait for a ``Work``; anything else is already a result."""
        if not isinstance(made, Work):
            return made
        self._work = made
        try:
            return await made if self._is_async else made.wait()
        finally:
            if made.done():
                self._work = None
            del made  # it may hold an error, whose traceback holds this frame

    async def _catch_up(self) -> None:
        """Wait for the step of a task that was cancelled, because it continues."""
        work, self._work = self._work, None
        if work is not None and not work.done():
            with contextlib.suppress(ObjcommError):
                await self._done(work)


def _now(steps: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never suspends."""
    with contextlib.suppress(StopIteration):
        steps.send(None)


def _free(taken: Sequence[Sequence[int]]) -> int:
    """Return the smallest number that no rank has taken."""
    found = set(itertools.chain.from_iterable(taken))
    return next(number for number in itertools.count() if number not in found)


def _is_number(obj: object) -> bool:
    return type(obj) is int and obj >= 0


def _is_numbers(obj: object) -> bool:
    return type(obj) is list and all(map(_is_number, obj))


def _is_batch(obj: object) -> bool:
    return type(obj) is list


class StreamOptions(CallOptions, WithSource, total=False):
    """The keywords of ``stream``."""

    depth: int
    batch: int
    scatter: bool
    codec: str | None
    device: DeviceLike
    accept: Iterable[str] | None
    allow: Iterable[Allowed] | None


@overload
def stream(
    iterable: None = None, src: int | None = None, **options: Unpack[StreamOptions]
) -> Stream[Any]: ...
@overload
def stream(
    iterable: Iterable[T] | AsyncIterable[T] | None,
    src: int | None = None,
    **options: Unpack[StreamOptions],
) -> Stream[T]: ...
def stream(
    iterable: Iterable[Any] | AsyncIterable[Any] | None = None,
    src: int | None = None,
    *,
    group_src: int | None = None,
    depth: int = 4,
    batch: int = 1,
    scatter: bool = False,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
) -> Stream[Any]:
    """Iterate on every rank over the objects that one rank produces, or share them out.

    Every rank of ``group`` must iterate over the result, in a ``for`` or ``async for`` loop. The
    source's loop yields its own objects, and the other loops yield independent copies in the same
    order. For example, one rank can read the data for all ranks.

    The source takes an object from its iterable when its own loop asks for the next one, on the
    same thread, and sends it before the body of its loop runs. It waits while a rank is ``depth``
    objects behind. Objects of more than 1.5 MiB are handed over once all ranks ask for them. With
    ``async for``, a wait for other ranks does not block the event loop, and the iterable may be
    asynchronous.

    A rank may leave its loop early, by ``break`` or an exception. It then waits until the source
    asks for its next object. At that point the source's loop ends, and so do the other loops, at
    most ``depth`` objects later, as if the iterable were exhausted. If the body communicates, all
    ranks must leave at the same object instead. To raise the exception of one rank on all ranks,
    put the loop into ``objcomm.fail_together``. A stream that is stored in a variable must be
    closed if its loop may end early; see ``objcomm.Stream``.

    The body of the loop may communicate, and open other streams. Each step of the loop acts as a
    collective: if a rank makes another call instead, or dies, the waiting ranks raise.

    Args:
        iterable: what to iterate over, on the source; None on all other ranks. With ``batch`` or
            ``scatter`` it must not change an object that it has yielded, as a reused buffer would:
            the object may not have been sent yet.
        src: global rank of the source.
        group_src: the source as a rank within the group, instead of ``src``. With neither, the
            group's first rank is the source.
        depth: how many objects may have been sent to a rank that has not finished with them,
            including the one in the body of its loop. The same on every rank.
        batch: how many objects to send in one message, at most ``depth``. The source first takes
            that many from its iterable, so use this only if the iterable is fast. The same on every
            rank.
        scatter: give each object to one rank only: to the rank with the fewest unfinished objects
            or, while every other rank has ``depth`` of them, to the source itself. The source gives
            out objects only when its loop asks for the next one. The same on every rank.
        name: name of the stream; see ``objcomm.broadcast``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: seconds or timedelta, for each wait; None uses the group's timeout. Ranks wait
            while another rank takes an object from the iterable, or is in the body of its loop, so
            the timeout must be longer than both.
        codec: name of the codec that encodes the objects.
        device: device on which to place received tensors.
        accept: codecs this rank accepts in this stream; see ``objcomm.configure``.
        allow: what a received pickle may name in this stream; see ``objcomm.configure``.

    Returns:
        An iterator over the objects. Nothing is sent before its first step.

    Raises:
        UsageError: an argument is invalid, the source has no iterable, or another rank passed one.
            Raised on each such rank, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: the iterable raised, or an object could not be encoded. Raised in the loop
            of every rank after the objects before it; on the source, chained to its own exception.
            Or another rank has left its loop after a DecodeError, before the last object.
        DecodeError: an object could not be rebuilt. Raised in the loop of that rank only, which may
            go on to the next object.
        ObjcommError: whatever else ``objcomm.broadcast`` raises, in the loops of the same ranks.

    Examples:
        >>> import objcomm
        >>> prompts = ["hello", "good bye"] if objcomm.rank() == 0 else None
        >>> for prompt in objcomm.stream(prompts):
        ...     print(prompt)
        hello
        good bye
    """
    whole = resolve(group, _NAME)
    source = whole.root(_NAME, src, group_src)
    whole.deadline(_NAME, timeout)
    check_name(name, _NAME)
    kept = {"accept": _kept(accept), "allow": _kept(allow)}
    Coding(codec, device, **kept, operation=_NAME)
    for argument, given in (("depth", depth), ("batch", batch)):
        count = whole_number(given)
        if count is None or count < 1:
            raise UsageError(f"stream: {argument}={given!r} must be a positive integer")
    if batch > depth:
        raise UsageError(
            f"stream: batch={batch} is more than depth={depth}; the source can't be ahead by less "
            "than it sends at a time"
        )
    is_source, own = whole.rank == source, whole.ranks[whole.rank]
    if is_source and not any(hasattr(iterable, each) for each in _ITERABLE):
        raise UsageError(
            f"stream: global rank {own} is the source and must pass an iterable, not a "
            f"{type(iterable).__name__}"
        )
    if not is_source and iterable is not None:
        raise UsageError(
            f"stream: global rank {own} passed an iterable, but the source is global rank "
            f"{whole.ranks[source]}; pass None on all other ranks"
        )
    return Stream(
        iterable,
        whole,
        source,
        depth=int(depth),
        batch=int(batch),
        scatter=bool(scatter),
        options={
            "name": name,
            "timeout": timeout,
            "codec": codec,
            "device": device,
            **kept,
        },
    )


def _kept(given: Any) -> Any:
    """Return an option that every call of a stream can read: an iterator becomes a list."""
    return list(given) if isinstance(given, Iterator) else given
