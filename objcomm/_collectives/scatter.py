"""``scatter``, ``all_to_all`` and ``reduce_scatter``: each rank receives different objects."""

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
    """Give each rank one of the source's objects.

    Every rank of ``group`` must call this. Each object is sent only to its own rank. Objects may
    differ in size; none is padded.

    Args:
        objs: on the source, one object per rank in the order of group ranks: a list, a generator
            or any other iterable except a string, a set or a mapping. Ignored on other ranks.
        src: global rank of the source.
        group_src: the source as a rank within the group, instead of ``src``. With neither, the
            group's first rank is the source.
        name: name of this call; see ``objcomm.broadcast``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.
        codec: name of the codec that encodes the objects on the source.
        device: device on which to place received tensors.
        confirm: wait until every rank has decoded, and raise on every rank if any rank failed to.
        accept: codecs this rank accepts in this call; see ``objcomm.configure``.
        allow: what a received pickle may name in this call; see ``objcomm.configure``.
        progress: on the group's first rank, show a progress bar of the bytes that it sends or, if
            another rank is the source, receives; see ``objcomm.broadcast``.
        async_op: return a ``Work`` immediately; its ``wait`` returns the result. Do not modify
            tensors or arrays in ``objs`` before ``wait`` returns.

    Returns:
        This rank's object. It is the same object on the source, an independent copy elsewhere.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        MissingDependencyError: ``progress`` is set and tqdm is not installed. Raised on each rank
            without tqdm, before any traffic.
        CollectiveError: the source passed the wrong number of objects, or could not encode one.
            Raised on every rank. In a group of one, a wrong number raises UsageError instead.
        DecodeError: the object could not be rebuilt. Raised on that rank only; later calls work.
        DesyncError: ranks are in different operations, or in calls with different names. Raised
            once on every rank: where it waits, or in its next call.
        TransportTimeout: the timeout expired. Raised on every rank that was still waiting.
        TransportError: a rank died. Raised on every rank that was waiting for it.

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
    """Run ``scatter`` within a call that has begun; see ``broadcast_in``.

    Args:
        call: the call.
        produce: returns one object per rank, on the source; an error is sent as the source's
            failure.
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
    """Send one object from every rank to every rank.

    Every rank of ``group`` must call this. Each object is sent only to its own rank. Objects may
    differ in size; none is padded. Large ones are sent only after every rank has encoded all of
    its objects.

    Args:
        objs: one object per rank, in the order of group ranks: any iterable, as in ``scatter``.
        name: name of this call; see ``objcomm.broadcast``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.
        codec: name of the codec that encodes this rank's objects.
        device: device on which to place received tensors.
        confirm: wait until every rank has decoded, and raise on every rank if any rank failed to.
        accept: codecs this rank accepts in this call; see ``objcomm.configure``.
        allow: what a received pickle may name in this call; see ``objcomm.configure``.
        async_op: return a ``Work`` immediately; its ``wait`` returns the result. Do not modify
            tensors or arrays in ``objs`` before ``wait`` returns.

    Returns:
        The object from each rank for this rank, in the order of group ranks. This rank's own is
        the same object it passed; the others are independent copies.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: a rank passed the wrong number of objects, or could not encode one. Raised
            on every rank.
        DecodeError: an object could not be rebuilt. Raised on that rank only; later calls work.
        DesyncError: ranks are in different operations, or in calls with different names. Raised
            once on every rank: where it waits, or in its next call.
        TransportTimeout: the timeout expired. Raised on every rank that was still waiting.
        TransportError: a rank died. Raised on every rank that was waiting for it.

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
    """Combine, for each rank, the operands that all ranks pass for it, in rank order.

    Every rank of ``group`` must call this, with the same operator. Each rank combines the operands
    passed for it, so the work is spread over all ranks. The ranks then report to each other
    whether they succeeded, which costs a second round of small messages.

    Args:
        objs: one operand per rank, in the order of group ranks, as in ``scatter``. None of them is
            modified, even if ``op`` modifies its arguments.
        op: as in ``reduce``, except that the named operators that ``reduce`` applies leaf by leaf
            accept only numbers, tensors or arrays here, not containers of them.
        name: name of this call; see ``objcomm.broadcast``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.
        codec: name of the codec that encodes operands.
        device: device on which to place received operands, and so the result.
        confirm: has no effect, because errors reach all ranks in any case.
        accept: codecs this rank accepts in this call; see ``objcomm.configure``.
        allow: what a received pickle may name in this call; see ``objcomm.configure``.
        async_op: return a ``Work`` immediately; its ``wait`` returns the result. Do not modify
            tensors or arrays in ``objs`` before ``wait`` returns. ``op`` runs on another thread.

    Returns:
        On rank i of the group, the combination of every rank's ``objs[i]``. In a world of one, a
        callable ``op`` is not called and the object itself is returned.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: a rank passed the wrong number of objects, an operand could not be encoded
            or decoded, or ``op`` raised on some rank. Raised on every rank.
        DesyncError: another rank is in a different operation, or passed a different name or named
            operator.
        TransportTimeout: the timeout expired. Raised on every rank that was still waiting.
        TransportError: a rank died. Raised on every rank that was waiting for it.

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
    """Combine this rank's operands; an error becomes this rank's failure."""
    operands = (
        own if peer == call.rank else call.decode(message) for peer, message in enumerate(arrived)
    )
    try:
        return operator.present(operator.fold(operands, call.size))
    except BaseException as error:  # noqa: BLE001  # sent to the others, and raised afterwards
        call.failure(error)
        return None


def _alone(call: Call, produce: Callable[[], Iterable[T] | None]) -> T:
    """Return the only object in a world of one, where a wrong number of objects is a UsageError."""
    objs = call.alone(produce)
    return _checked(call, objs, call.alone(lambda: _members(call, objs)))[0]


def one_each(call: Call, objs: Iterable[T] | None) -> list[T]:
    """Return the objects that a caller passed for all ranks.

    Raises:
        UsageError: there is not exactly one object for each rank.
    """
    return _checked(call, objs, _members(call, objs))


def _members(call: Call, objs: Iterable[T] | None) -> list[T] | None:
    """List the members of an iterable, which may be endless, up to one more than there are ranks.

    Returns None for an object that is not iterable or has no order, and for strings and mappings,
    whose characters or keys nobody means to send.
    """
    if isinstance(objs, str | set | frozenset | Mapping):
        return None
    try:
        each = iter(objs)  # type: ignore[arg-type]  # tested here
    except TypeError:
        return None
    return list(itertools.islice(each, call.size + 1))


def _checked(call: Call, objs: object, members: list[T] | None) -> list[T]:
    """Return ``members`` if there is one for each rank.

    Raises:
        UsageError: the number differs.
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
    """Build a message for each rank; if one fails, send the failure to all ranks.

    Args:
        call: the call.
        produce: returns one object for each rank.
        own: receives this rank's object, which is not sent: the object itself, or a copy to
            combine.
        operator: prepares each object, if they are to be combined.
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
                # The operator may modify this object, and the caller may modify what it passed in.
                own.append(obj if operator is None else call.copy(prepared))
    except BaseException as error:  # noqa: BLE001  # sent to the others, and raised afterwards
        return [call.failure(error)] * call.size
    return messages
