"""Something else for each rank: from one, from every rank, or from every rank and combined."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import partial
from typing import Any, Literal, TypeVar, Unpack, overload

from objcomm._algorithms import routes
from objcomm._calls.call import Call
from objcomm._calls.work import Work
from objcomm._collectives.broadcast import SourceAsync, SourceMaybeAsync, SourceSync
from objcomm._collectives.gather import decode_others
from objcomm._collectives.reduction.operators import Operator, OpLike, operator_for
from objcomm._config import (
    Allowed,
    AsyncOptions,
    DeviceLike,
    GroupLike,
    MaybeAsyncOptions,
    SyncOptions,
    Timeout,
)
from objcomm._wire.header import Operation, Status
from objcomm._wire.message import Message
from objcomm.errors import UsageError

T = TypeVar("T")


@overload
def scatter(
    objs: Iterable[T] | None, src: int | None = None, **options: Unpack[SourceSync]
) -> T: ...
@overload
def scatter(
    objs: Iterable[T] | None, src: int | None = None, **options: Unpack[SourceAsync]
) -> Work[T]: ...
@overload
def scatter(
    objs: Iterable[T] | None, src: int | None = None, **options: Unpack[SourceMaybeAsync]
) -> T | Work[T]: ...
def scatter(
    objs: Iterable[T] | None,
    src: int | None = None,
    *,
    group_src: int | None = None,
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
) -> T | Work[T]:
    """Give each rank one object of the source's.

    Every rank of ``group`` must call this. Each object travels to its own rank only, at its own
    size.

    Args:
        objs: on the source one object per rank, in the order of group ranks: a list, a generator,
            or any other iterable but a text, a set or a mapping; elsewhere ignored.
        src: global rank of the source.
        group_src: the same as a rank within the group; give one. Neither: the group's first rank.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes the objects on the source.
        device: the device to place received tensors on.
        confirm: wait until every rank has decoded, and raise everywhere if one could not.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        progress: let the group's first rank show a bar of the bytes that it sends, or receives
            where another rank is the source; as in ``objcomm.broadcast``.
        async_op: return at once; the result is the work's. Buffers of tensors and arrays in
            ``objs`` must not change before its ``wait`` returns.

    Returns:
        This rank's object. On the source the identical one, elsewhere an independent copy.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        MissingDependencyError: ``progress`` without tqdm. Every rank that lacks it, before any
            traffic.
        CollectiveError: the source gave another number of objects, or could not encode one.
            Every rank. In a group of one a wrong number is a UsageError.
        DecodeError: the object could not be rebuilt. That rank only; later calls work.
        DesyncError: ranks are in different operations, or in calls of different names. Every rank,
            once: where it waits, or in its next call.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Examples:
        >>> import objcomm
        >>> objcomm.scatter([{"files": ["a", "b"]}])
        {'files': ['a', 'b']}
    """
    with Call(
        Operation.SCATTER,
        name=name,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        global_root=src,
        group_root=group_src,
        has_root=True,
        confirm=confirm,
        accept=accept,
        allow=allow,
        progress=progress,
        async_op=async_op,
    ) as call:
        rest = scatter_in(call, lambda: objs)
        return call.later(rest) if async_op else rest()


def scatter_in(call: Call, produce: Callable[[], Iterable[T] | None]) -> Callable[[], T]:
    """``scatter`` for a call that was already begun, as ``broadcast_in`` is.

    Args:
        call: the call.
        produce: gives one object per rank on the source; an error travels as that rank's failure.
    """
    if call.is_alone:
        return lambda: _alone(call, produce)
    own: list[T] = []
    messages = _encode_each(call, produce, own) if call.is_root else None

    def rest() -> T:
        with call.exchange as exchange:
            message = routes.scatter(exchange, messages, call.root)
        return call.result([message], lambda: own[0] if call.is_root else call.decode(message))

    return rest


@overload
def all_to_all(objs: Iterable[T], **options: Unpack[SyncOptions]) -> list[T]: ...
@overload
def all_to_all(objs: Iterable[T], **options: Unpack[AsyncOptions]) -> Work[list[T]]: ...
@overload
def all_to_all(
    objs: Iterable[T], **options: Unpack[MaybeAsyncOptions]
) -> list[T] | Work[list[T]]: ...
def all_to_all(
    objs: Iterable[T],
    *,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    confirm: bool = False,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
    async_op: bool = False,
) -> list[T] | Work[list[T]]:
    """Give each rank one object of every rank's.

    Every rank of ``group`` must call this. Each object travels to its own rank only, at its own
    size, and large ones only after every rank has encoded all of its own.

    Args:
        objs: one object per rank, in the order of group ranks: any iterable, as in ``scatter``.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes this rank's objects.
        device: the device to place received tensors on.
        confirm: wait until every rank has decoded, and raise everywhere if one could not.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        async_op: return at once; the result is the work's. Buffers of tensors and arrays in
            ``objs`` must not change before its ``wait`` returns.

    Returns:
        What each rank gave for this one, in the order of group ranks. From this rank itself that is
        the identical object, from the others an independent copy.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: a rank gave another number of objects, or could not encode one. Every
            rank.
        DecodeError: an object could not be rebuilt. That rank only; later calls work.
        DesyncError: ranks are in different operations, or in calls of different names. Every rank,
            once: where it waits, or in its next call.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Examples:
        >>> import objcomm
        >>> objcomm.all_to_all([{"for rank": 0}])
        [{'for rank': 0}]
    """
    with Call(
        Operation.ALL_TO_ALL,
        name=name,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        confirm=confirm,
        accept=accept,
        allow=allow,
        async_op=async_op,
    ) as call:
        rest = _all_to_all(call, objs)
        return call.later(rest) if async_op else rest()


def _all_to_all(call: Call, objs: Iterable[T]) -> Callable[[], list[T]]:
    if call.is_alone:
        return lambda: [_alone(call, lambda: objs)]
    own: list[T] = []
    messages = _encode_each(call, lambda: objs, own)

    def rest() -> list[T]:
        with call.exchange as exchange:
            arrived = routes.all_to_all(exchange, messages)
        return call.result(arrived, lambda: decode_others(call, arrived, own[0]))

    return rest


@overload
def reduce_scatter(
    objs: Iterable[int], op: Literal["mean"], **options: Unpack[SyncOptions]
) -> float: ...
@overload
def reduce_scatter(
    objs: Iterable[int], op: Literal["mean"], **options: Unpack[AsyncOptions]
) -> Work[float]: ...
@overload
def reduce_scatter(
    objs: Iterable[T], op: OpLike[T] = "sum", **options: Unpack[SyncOptions]
) -> T: ...
@overload
def reduce_scatter(
    objs: Iterable[T], op: OpLike[T] = "sum", **options: Unpack[AsyncOptions]
) -> Work[T]: ...
@overload
def reduce_scatter(
    objs: Iterable[T], op: OpLike[T] = "sum", **options: Unpack[MaybeAsyncOptions]
) -> T | Work[T]: ...
def reduce_scatter(
    objs: Iterable[T],
    op: OpLike[T] = "sum",
    *,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    confirm: bool = False,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
    async_op: bool = False,
) -> T | float | Work[Any]:
    """Combine what all ranks give for one rank, in rank order, onto that rank; for each rank.

    Every rank of ``group`` must call this, with the same operator. Each rank combines what is its
    own, so the work is spread over all of them. At the end the ranks tell each other whether they
    could, which costs a second round of small messages.

    Args:
        objs: one operand per rank, in the order of group ranks, as in ``scatter``; none is changed,
            even where ``op`` changes its arguments.
        op: as in ``reduce``; but the named ones that go leaf by leaf there take numbers, tensors or
            arrays here, and no containers of them.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes operands.
        device: the device to place received operands on, and so the result.
        confirm: changes nothing here, for errors reach all ranks in any case.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        async_op: return at once; the result is the work's. Buffers of tensors and arrays in
            ``objs`` must not change before its ``wait`` returns, and ``op`` is called on another
            thread.

    Returns:
        On rank i of the group the combination of what every rank has at place i of its ``objs``.
        In a world of one a callable is not called and the object itself comes back.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: a rank gave another number of objects, an operand could not be encoded or
            decoded, or ``op`` raised on some rank. Every rank.
        DesyncError: another rank is in another operation, or gave another name or another named
            operator.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Examples:
        >>> import objcomm
        >>> objcomm.reduce_scatter([{"rank 0": 1}], lambda a, b: a | b)
        {'rank 0': 1}
    """
    operator = operator_for(op, "reduce_scatter")
    with Call(
        Operation.REDUCE_SCATTER,
        name=name,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        must_agree=operator.name,
        confirm=confirm,
        accept=accept,
        allow=allow,
        async_op=async_op,
    ) as call:
        rest = _reduce_scatter(call, operator, objs)
        return call.later(rest) if async_op else rest()


def _reduce_scatter(call: Call, operator: Operator, objs: Iterable[Any]) -> Callable[[], Any]:
    if call.is_alone:
        return lambda: call.alone(partial(operator.alone, _alone(call, lambda: objs)))
    own: list[Any] = []
    messages = _encode_each(call, lambda: objs, own, operator)

    def rest() -> Any:
        with call.exchange as exchange:
            arrived = routes.all_to_all(exchange, messages)
            folded: Any = None
            if not any(each.header.status == Status.FAILURE for each in arrived):
                folded = _folded(call, operator, arrived, own[0])
                call.confirm()
        return call.result(arrived, lambda: folded)

    return rest


def _folded(call: Call, operator: Operator, arrived: Sequence[Message], own: Any) -> Any:
    """This rank's operands combined; an error becomes this rank's failure."""
    operands = (
        own if peer == call.rank else call.decode(message) for peer, message in enumerate(arrived)
    )
    try:
        return operator.present(operator.fold(operands, call.size))
    except BaseException as error:  # noqa: BLE001  # it travels, and is raised afterwards
        call.failure(error)
        return None


def _alone(call: Call, produce: Callable[[], Iterable[T] | None]) -> T:
    """The one object of a world of one, where a wrong number of them can be nobody else's fault."""
    objs = call.alone(produce)
    return _checked(call, objs, call.alone(lambda: _members(call, objs)))[0]


def one_each(call: Call, objs: Iterable[T] | None) -> list[T]:
    """What a caller gave for all ranks.

    Raises:
        UsageError: it is not one object for each.
    """
    return _checked(call, objs, _members(call, objs))


def _members(call: Call, objs: Iterable[T] | None) -> list[T] | None:
    """What an iterable gives, which may have no end; None for what is none, or has no order.

    Of a text or a mapping nobody wants the letters or the keys.
    """
    if isinstance(objs, str | set | frozenset | Mapping):
        return None
    try:
        each = iter(objs)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return None
    return list(itertools.islice(each, call.size + 1))


def _checked(call: Call, objs: object, members: list[T] | None) -> list[T]:
    """Hold them against the number of ranks.

    Raises:
        UsageError: there are not as many.
    """
    if members is not None and len(members) == call.size:
        return members
    given = "None" if objs is None else type(objs).__name__
    if members is not None:
        is_known = isinstance(objs, Sized) or len(members) < call.size
        found = len(objs) if isinstance(objs, Sized) else len(members)
        given += f" of {found}" if is_known else f" of more than {call.size}"
    raise UsageError(
        f"{call.operation}: give one object for each of {call.size} ranks, not a {given}"
    )


def _encode_each(
    call: Call,
    produce: Callable[[], Iterable[T] | None],
    own: list[Any],
    operator: Operator | None = None,
) -> list[Message]:
    """A message for each rank; where one can't be made all say why.

    Args:
        call: whose.
        produce: gives one object for each rank.
        own: gets this rank's, which stays here: as the object itself, or as a copy to combine.
        operator: prepares each, if they are to be combined.
    """
    messages = []
    try:
        each = one_each(call, call.aside(produce))
        for peer in range(call.size):
            obj = each[peer]
            if peer == call.rank and operator is None:
                message = call.announcement(Status.VALUE)
            else:
                prepared = obj if operator is None else operator.prepare(obj, call.rank)
                message = call.message(prepared)
            if message.header.status == Status.FAILURE:
                return [message] * call.size
            messages.append(message)
            if peer == call.rank:
                # An operator may change it, and from now on the caller what was passed in.
                own.append(obj if operator is None else call.copy(prepared))
    except BaseException as error:  # noqa: BLE001  # it travels, and is raised afterwards
        return [call.failure(error)] * call.size
    return messages
