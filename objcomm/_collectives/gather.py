"""``gather`` and ``all_gather``, and decisions that one rank makes from all ranks' objects.

A function whose name ends in ``_in`` runs the first step of a call that has already been entered:
it encodes, and returns the second step as a function, to be called immediately or passed to
``call.later``. Other operations are built on these functions.
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
    """Keywords of a call that has a destination and returns its result."""


class DestinationAsync(ShownAsyncOptions, WithDestination):
    """Keywords of a call that has a destination and returns a ``Work``."""


class DestinationMaybeAsync(ShownMaybeAsyncOptions, WithDestination):
    """Keywords of a call that has a destination and returns a ``Work`` or its result."""


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
    """Collect one object from every rank onto one rank.

    Every rank of ``group`` must call this. Contributions may differ in size; none is padded. A
    rank that only sends returns once its contribution has been taken, which may be before ``dst``
    makes the call.

    Args:
        obj: this rank's contribution.
        dst: global rank of the destination.
        group_dst: the destination as a rank within the group, instead of ``dst``. With neither,
            the group's first rank is the destination.
        name: name of this call; see ``objcomm.broadcast``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.
        codec: name of the codec that encodes this rank's contribution.
        device: device on which to place received tensors.
        confirm: make every rank wait, and raise on all if any contribution could not be encoded
            or decoded.
        accept: codecs this rank accepts in this call; see ``objcomm.configure``.
        allow: what a received pickle may name in this call; see ``objcomm.configure``.
        progress: on the group's first rank, show a progress bar of the bytes that it receives or,
            if another rank is the destination, sends; see ``objcomm.broadcast``.
        async_op: return a ``Work`` immediately; its ``wait`` returns the result. Do not modify
            tensors or arrays in ``obj`` before ``wait`` returns.

    Returns:
        On the destination, a list of one object per rank, in the order of group ranks; its own is
        the same object it passed. ``None`` on other ranks.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        MissingDependencyError: ``progress`` is set and tqdm is not installed. Raised on each rank
            without tqdm, before any traffic.
        CollectiveError: some rank could not encode its object. Raised on that rank and on the
            destination.
        DecodeError: an object could not be rebuilt. Raised on the destination, after the traffic.
        DesyncError: ranks are in different operations, or in calls with different names. Raised
            once on every rank: where it waits, or in its next call.
        TransportTimeout: the timeout expired. Raised on every rank that was still waiting.
        TransportError: a rank died. Raised on every rank that was waiting for it.

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

    Every rank of ``group`` must call this. Contributions may differ in size; none is padded.

    Args:
        obj: this rank's contribution.
        name: name of this call; see ``objcomm.broadcast``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.
        codec: name of the codec that encodes this rank's contribution.
        device: device on which to place received tensors.
        confirm: wait until every rank has decoded, and raise on every rank if any rank failed to.
        accept: codecs this rank accepts in this call; see ``objcomm.configure``.
        allow: what a received pickle may name in this call; see ``objcomm.configure``.
        progress: on the group's first rank, show a progress bar of the bytes that it receives and
            of its own bytes that reach all others; see ``objcomm.broadcast``.
        async_op: return a ``Work`` immediately; its ``wait`` returns the result. Do not modify
            tensors or arrays in ``obj`` before ``wait`` returns.

    Returns:
        One object per rank, in the order of group ranks. This rank's own is the same object it
        passed.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        MissingDependencyError: ``progress`` is set and tqdm is not installed. Raised on each rank
            without tqdm, before any traffic.
        CollectiveError: some rank could not encode its object. Raised on every rank.
        DecodeError: an object could not be rebuilt. Raised on that rank only; later calls work.
        DesyncError: ranks are in different operations, or in calls with different names. Raised
            once on every rank: where it waits, or in its next call.
        TransportTimeout: the timeout expired. Raised on every rank that was still waiting.
        TransportError: a rank died. Raised on every rank that was waiting for it.

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
    """Run ``gather`` within a call that has begun.

    Args:
        call: the call.
        given: this rank's contribution, or the argument of ``make``.
        make: called once; returns the contribution. It must run user functions through
            ``call.aside``. An error is sent as this rank's failure.
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
    """Append a callback's result to ``place``, so that this rank uses it without a copy."""
    place.append(value)
    return value


def decide_in(
    call: Call,
    produce: Callable[[], A],
    decide: Callable[[list[A]], B],
    *,
    in_turn: bool = False,
    is_part: Callable[[Any], bool] | None = None,
    is_answer: Callable[[Any], bool] | None = None,
) -> Callable[[], B]:
    """Compute a value on one rank from all ranks' contributions, and share it with all.

    Args:
        call: the call.
        produce: returns this rank's contribution; an error is sent as this rank's failure.
        decide: called once, on the group's first rank, with all contributions in rank order, and
            only if every rank has one. Any error it raises is raised on all ranks; a
            ``DisagreementError`` is attributed to the ranks that it blames.
        in_turn: whether to call ``produce`` only when the lane's earlier calls have ended; it must
            then not communicate.
        is_part: returns whether an object may come from another rank's ``produce``.
        is_answer: returns whether an object may come from ``decide`` on the first rank.
    """
    if call.is_alone:
        return partial(call.alone, lambda: decide([produce()]))
    own: list[A] = []
    shared: list[B] = []
    mine = None
    if not in_turn:
        mine = call.message(produce, lambda produce: kept(own, call.aside(produce)))

    def answer(messages: list[Message]) -> B:
        return kept(shared, decide(decode_others(call, messages, *own, is_part=is_part)))

    def rest() -> B:
        told = mine
        if told is None:
            told = call.message(produce, lambda produce: kept(own, produce()))
        with call.exchange as exchange:
            message = answered(call, exchange, told, answer)
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
    """Return one rank's answer to all ranks' messages; every rank calls this in its traffic.

    Args:
        call: the call.
        exchange: the call's traffic.
        mine: this rank's message.
        decide: returns the answer; called on ``hub`` with all messages in rank order, and only if
            none of them reports a failure. An error is sent instead of the answer, as the failure
            of ``hub`` or, for a ``DisagreementError`` or ``DifferenceError``, of the ranks that it
            blames.
        hub: the rank that decides, the same on all ranks.
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
    """Return all ranks' objects in rank order; this rank's own is ``own`` itself."""
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
    """Run ``all_gather`` within a call that has begun.

    Args:
        call: the call.
        obj: this rank's contribution.
        check: returns the contribution to send, or raises; an error is sent as this rank's
            failure.
    """
    if call.is_alone:
        return lambda: [call.alone(lambda: obj if check is None else check(obj))]
    mine = call.message(obj, check)

    def rest() -> list[T]:
        with call.exchange as exchange:
            messages = routes.all_gather(exchange, mine)
        return call.result(messages, decode_others, call, messages, obj)

    return rest
