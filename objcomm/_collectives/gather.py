"""From all ranks to one, or to all, and what one rank makes of it: ``gather``, ``all_gather``.

A function whose name ends in ``_in`` is the first step of a call that was entered: it encodes. What
it returns is the second, to be called at once or given to ``call.later``. Others build on it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, Unpack, cast, overload

from objcomm._algorithms import routes
from objcomm._algorithms.exchange import Exchange
from objcomm._calls.call import Call
from objcomm._calls.work import Work
from objcomm._config import (
    Allowed,
    DeviceLike,
    GroupLike,
    ShownAsyncOptions,
    ShownMaybeAsyncOptions,
    ShownSyncOptions,
    Timeout,
    WithDestination,
)
from objcomm._wire.header import Operation
from objcomm._wire.message import Message

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")


class DestinationSync(ShownSyncOptions, WithDestination):
    """The keywords of a call that has a destination and returns its result."""


class DestinationAsync(ShownAsyncOptions, WithDestination):
    """The keywords of a call that has a destination and returns a work."""


class DestinationMaybeAsync(ShownMaybeAsyncOptions, WithDestination):
    """The keywords of a call that has a destination and returns a work or its result."""


@overload
def gather(obj: T, dst: int | None = None, **options: Unpack[DestinationSync]) -> list[T] | Any: ...
@overload
def gather(
    obj: T, dst: int | None = None, **options: Unpack[DestinationAsync]
) -> Work[list[T] | Any]: ...
@overload
def gather(
    obj: T, dst: int | None = None, **options: Unpack[DestinationMaybeAsync]
) -> list[T] | Work[list[T] | Any] | Any: ...
def gather(
    obj: T,
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    confirm: bool = False,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
    progress: bool = False,
    async_op: bool = False,
) -> list[T] | Work[list[T] | Any] | Any:
    """Collect one object from every rank onto one.

    Every rank of ``group`` must call this. Each contribution travels at its own size. A rank that
    only sends returns when its contribution was taken, which may be before ``dst`` calls.

    Args:
        obj: this rank's contribution.
        dst: global rank that receives.
        group_dst: the same as a rank within the group; give one. Neither: the group's first rank.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes this rank's contribution.
        device: the device to place received tensors on.
        confirm: make every rank wait, and raise, if any contribution was missing or unreadable.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        progress: let the group's first rank show a bar of the bytes that it receives, or sends
            where another rank is the destination; as in ``objcomm.broadcast``.
        async_op: return at once; the result is the work's. Buffers of tensors and arrays in
            ``obj`` must not change before its ``wait`` returns.

    Returns:
        On the destination one object per rank, in the order of group ranks; its own is the
        identical one. ``None`` elsewhere.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        MissingDependencyError: ``progress`` without tqdm. Every rank that lacks it, before any
            traffic.
        CollectiveError: some rank could not encode its object. The destination and that rank.
        DecodeError: an object could not be rebuilt. The destination, after the traffic.
        DesyncError: ranks are in different operations, or in calls of different names. Every rank,
            once: where it waits, or in its next call.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Examples:
        >>> import objcomm
        >>> objcomm.gather({"rank": 0, "correct": 41})
        [{'rank': 0, 'correct': 41}]
    """
    with Call(
        Operation.GATHER,
        name=name,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        global_root=dst,
        group_root=group_dst,
        root_argument="dst",
        has_root=True,
        confirm=confirm,
        accept=accept,
        allow=allow,
        progress=progress,
        async_op=async_op,
    ) as call:
        rest: Callable[[], list[T] | None] = gather_in(call, obj)
        return call.later(rest) if async_op else rest()


@overload
def all_gather(obj: T, **options: Unpack[ShownSyncOptions]) -> list[T]: ...
@overload
def all_gather(obj: T, **options: Unpack[ShownAsyncOptions]) -> Work[list[T]]: ...
@overload
def all_gather(obj: T, **options: Unpack[ShownMaybeAsyncOptions]) -> list[T] | Work[list[T]]: ...
def all_gather(
    obj: T,
    *,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    confirm: bool = False,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
    progress: bool = False,
    async_op: bool = False,
) -> list[T] | Work[list[T]]:
    """Collect one object from every rank onto every rank.

    Every rank of ``group`` must call this. Each contribution travels at its own size.

    Args:
        obj: this rank's contribution.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes this rank's contribution.
        device: the device to place received tensors on.
        confirm: wait until every rank has decoded, and raise everywhere if one could not.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        progress: let the group's first rank show a bar of the bytes that it receives, and of its
            own as they reach all others; as in ``objcomm.broadcast``.
        async_op: return at once; the result is the work's. Buffers of tensors and arrays in
            ``obj`` must not change before its ``wait`` returns.

    Returns:
        One object per rank, in the order of group ranks; this rank's own is the identical one.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        MissingDependencyError: ``progress`` without tqdm. Every rank that lacks it, before any
            traffic.
        CollectiveError: some rank could not encode its object. Every rank.
        DecodeError: an object could not be rebuilt. That rank only; later calls work.
        DesyncError: ranks are in different operations, or in calls of different names. Every rank,
            once: where it waits, or in its next call.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Examples:
        >>> import objcomm
        >>> objcomm.all_gather("shard-0.parquet")
        ['shard-0.parquet']
    """
    with Call(
        Operation.ALL_GATHER,
        name=name,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        confirm=confirm,
        accept=accept,
        allow=allow,
        progress=progress,
        async_op=async_op,
    ) as call:
        rest = all_gather_in(call, obj)
        return call.later(rest) if async_op else rest()


def gather_in(
    call: Call, given: A, make: Callable[[A], T] | None = None
) -> Callable[[], list[T] | None]:
    """``gather`` for a call that was already begun.

    Args:
        call: the call.
        given: this rank's contribution, or what ``make`` makes it of.
        make: called once; an error travels as this rank's failure. A function of the user's goes
            through ``call.aside``.
    """
    own: Any = given

    def made(given: A) -> T:
        nonlocal own
        own = given if make is None else make(given)
        return cast("T", own)

    if call.is_alone:
        return lambda: [call.alone(partial(made, given))]
    mine = call.message(given, None if make is None else made)

    def rest() -> list[T] | None:
        with call.exchange as exchange:
            messages = routes.gather(exchange, mine, call.root)
        if messages is None:
            return call.result(())
        return call.result(messages, decode_others, call, messages, cast("T", own))

    return rest


def kept(place: list[T], value: T) -> T:
    """Keep what a callback returned: its own rank gets the object itself, no copy."""
    place.append(value)
    return value


def decide_in(
    call: Call,
    produce: Callable[[], A],
    decide: Callable[[list[A]], B],
    *,
    is_part: Callable[[Any], bool] | None = None,
    is_answer: Callable[[Any], bool] | None = None,
) -> Callable[[], B]:
    """Let one rank compute something of all ranks' contributions, for all.

    Args:
        call: the call.
        produce: gives this rank's contribution; an error travels as this rank's failure.
        decide: called on the group's first rank with all contributions in rank order, once and
            only if every rank has one. What it raises is raised on all ranks; a
            ``DisagreementError`` in the name of the ranks that it blames.
        is_part: whether an object can be what another rank's ``produce`` gave.
        is_answer: whether it can be what ``decide`` gave on the first rank.
    """
    if call.is_alone:
        return partial(call.alone, lambda: decide([produce()]))
    own: list[A] = []
    shared: list[B] = []
    mine = call.message(produce, lambda produce: kept(own, call.aside(produce)))

    def answer(messages: list[Message]) -> B:
        return kept(shared, decide(decode_others(call, messages, *own, is_part=is_part)))

    def rest() -> B:
        with call.exchange as exchange:
            message = answered(call, exchange, mine, answer)
        call.raise_failures([message])
        if shared:
            return shared[0]
        if is_answer is None:
            return cast("B", call.decode(message))
        return cast("B", call.decode_as(message, is_answer, "an answer to a gather"))

    return rest


def answered(
    call: Call,
    exchange: Exchange,
    mine: Message,
    decide: Callable[[list[Message]], object],
    hub: int = routes.HUB,
) -> Message:
    """One rank's answer to the messages of all; every rank calls this in its traffic.

    Args:
        call: the call.
        exchange: its traffic.
        mine: this rank's message.
        decide: gives the answer; called on ``hub`` with all messages in rank order, and only if
            none of them tells of a failure. An error of it travels instead: as that rank's, or, a
            ``DisagreementError`` or ``DifferenceError``, as that of the ranks that it blames.
        hub: which rank; the same on all.
    """
    messages = routes.gather(exchange, mine, hub)
    answer = None
    if messages is not None:
        answer = call.failures(messages) or call.message(messages, decide, messages)
    return routes.broadcast(exchange, answer, hub)


def decode_others(
    call: Call,
    messages: Sequence[Message],
    own: T,
    *,
    is_part: Callable[[Any], bool] | None = None,
) -> list[T]:
    """The objects of all ranks, this rank's own being the identical one."""
    objs = []
    for rank, message in enumerate(messages):
        if rank == call.rank:
            objs.append(own)
        elif is_part is None:
            objs.append(call.decode(message))
        else:
            objs.append(call.decode_as(message, is_part, "a part of a gather"))
    return objs


def all_gather_in(
    call: Call, obj: T, check: Callable[[T], T] | None = None
) -> Callable[[], list[T]]:
    """``all_gather`` for a call that was already begun.

    Args:
        call: the call.
        obj: this rank's contribution.
        check: returns it, or raises; an error travels as this rank's failure.
    """
    if call.is_alone:
        return lambda: [call.alone(lambda: obj if check is None else check(obj))]
    mine = call.message(obj, check)

    def rest() -> list[T]:
        with call.exchange as exchange:
            messages = routes.all_gather(exchange, mine)
        return call.result(messages, decode_others, call, messages, obj)

    return rest
