"""Objects of all ranks, or of all up to this one, into one: ``reduce``, ``scan`` and their kin.

``leafwise`` goes leaf by leaf through containers, for the named operators of reductions that do so;
``folding`` combines whole objects, for all others and for scans.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch

from objcomm._calls.call import Call
from objcomm._calls.work import Work
from objcomm._collectives.reduction.folding import Folding, Scanning
from objcomm._collectives.reduction.leafwise import TreeReduction, alone
from objcomm._collectives.reduction.operators import Extreme, Operator, OpLike, operator_for
from objcomm._config import (
    Allowed,
    AsyncOptions,
    DeviceLike,
    GroupLike,
    MaybeAsyncOptions,
    SyncOptions,
    Timeout,
    WithDestination,
)
from objcomm._wire.header import Operation

T = TypeVar("T")

Missing = Literal["error", "skip"]


class _Keywords(TypedDict, total=False):
    dtype: torch.dtype | None
    missing: Missing


class _Sync(SyncOptions, _Keywords): ...


class _Async(AsyncOptions, _Keywords): ...


class _MaybeAsync(MaybeAsyncOptions, _Keywords): ...


class _SyncTo(_Sync, WithDestination): ...


class _AsyncTo(_Async, WithDestination): ...


class _MaybeAsyncTo(_MaybeAsync, WithDestination): ...


@overload
def reduce(
    obj: int, op: Literal["mean"], dst: int | None = None, **options: Unpack[_SyncTo]
) -> float | Any: ...
@overload
def reduce(
    obj: int, op: Literal["mean"], dst: int | None = None, **options: Unpack[_AsyncTo]
) -> Work[float | Any]: ...
@overload
def reduce(
    obj: Any, op: Literal["argmin", "argmax"], dst: int | None = None, **options: Unpack[_SyncTo]
) -> Extreme | Any: ...
@overload
def reduce(
    obj: Any, op: Literal["argmin", "argmax"], dst: int | None = None, **options: Unpack[_AsyncTo]
) -> Work[Extreme | Any]: ...
@overload
def reduce(
    obj: Any, op: Literal["counter"], dst: int | None = None, **options: Unpack[_SyncTo]
) -> Counter[Any] | Any: ...
@overload
def reduce(
    obj: Any, op: Literal["counter"], dst: int | None = None, **options: Unpack[_AsyncTo]
) -> Work[Counter[Any] | Any]: ...
@overload
def reduce(
    obj: T, op: OpLike[T] = "sum", dst: int | None = None, **options: Unpack[_SyncTo]
) -> T | Any: ...
@overload
def reduce(
    obj: T, op: OpLike[T] = "sum", dst: int | None = None, **options: Unpack[_AsyncTo]
) -> Work[T | Any]: ...
@overload
def reduce(
    obj: T, op: OpLike[T] = "sum", dst: int | None = None, **options: Unpack[_MaybeAsyncTo]
) -> T | Work[T | Any] | Any: ...
def reduce(
    obj: T,
    op: OpLike[T] = "sum",
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    dtype: torch.dtype | None = None,
    missing: Missing = "error",
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    confirm: bool = False,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
    async_op: bool = False,
) -> T | Work[T | Any] | Any:
    """Combine the objects of all ranks, in rank order, onto one rank.

    Every rank of ``group`` must call this, with the same operator.

    Args:
        obj: this rank's operand; it is not changed, even where ``op`` changes its arguments.
        op: a callable of two objects, which must be associative and may change and return its
            left one; an ``objcomm.Op``; or a name. ``sum``, ``prod``, ``min``, ``max``, ``mean``,
            ``any`` and ``all`` combine numbers, tensors and arrays, and go leaf by leaf through
            dicts, lists, tuples, named tuples and dataclasses, however nested. Integers stay
            integers of any size; the mean of integers is a float; tensors and arrays keep dtype,
            shape and device, but the mean of integer ones is float64; a NaN is the least and the
            greatest. Texts, bytes and None in containers must be equal and come back. The others
            take whole objects: ``argmin`` and ``argmax`` give a tuple ``(value, rank)``, the
            lowest group rank where operands tie; ``concat`` joins lists, tuples, texts, bytes,
            tensors and arrays; ``union`` unites sets and dicts, in which a key may not have two
            values; ``counter`` counts the members of iterables.
        dst: global rank that gets the result.
        group_dst: the same as a rank within the group; give one. Neither: the group's first rank.
        dtype: floating dtype in which ``sum``, ``prod`` and ``mean`` add up tensors of fractions;
            results come back in the leaf's own. If None: float32 for halves, float64 for means,
            the leaf's own for the rest.
        missing: ``"skip"`` lets keys of dicts be missing on some ranks; each leaf is combined, and
            averaged, over the ranks that have it, and comes back on all.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes operands.
        device: the device to place received operands on, and so the result.
        confirm: make every rank wait, and raise, if the result could not be made.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        async_op: return at once; the result is the work's. Buffers of tensors and arrays in ``obj``
            must not change before its ``wait`` returns, and ``op`` is called on another thread.

    Returns:
        The result on the destination, ``None`` elsewhere. In a world of one a callable is not
        called and ``obj`` comes back.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: an operand could not be encoded or decoded, or ``op`` raised. The
            destination and the rank where it happened. With an op that goes leaf by leaf also:
            two ranks' structures differ; every rank, before a large tensor moves, and the error
            names the path and the two.
        DesyncError: another rank is in another operation, or gave another name or another named
            operator.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Examples:
        >>> import objcomm
        >>> objcomm.reduce({"seen": {3}}, lambda a, b: {"seen": a["seen"] | b["seen"]})
        {'seen': {3}}
    """
    operator = operator_for(op, "reduce", dtype, missing)
    with Call(
        Operation.REDUCE,
        name=name,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        global_root=dst,
        group_root=group_dst,
        root_argument="dst",
        has_root=True,
        must_agree=operator.agreement,
        confirm=confirm,
        accept=accept,
        allow=allow,
        async_op=async_op,
    ) as call:
        rest = _reduced(call, operator, obj, call.root)
        return call.later(rest) if async_op else rest()


@overload
def all_reduce(obj: int, op: Literal["mean"], **options: Unpack[_Sync]) -> float: ...
@overload
def all_reduce(obj: int, op: Literal["mean"], **options: Unpack[_Async]) -> Work[float]: ...
@overload
def all_reduce(obj: Any, op: Literal["argmin", "argmax"], **options: Unpack[_Sync]) -> Extreme: ...
@overload
def all_reduce(
    obj: Any, op: Literal["argmin", "argmax"], **options: Unpack[_Async]
) -> Work[Extreme]: ...
@overload
def all_reduce(obj: Any, op: Literal["counter"], **options: Unpack[_Sync]) -> Counter[Any]: ...
@overload
def all_reduce(
    obj: Any, op: Literal["counter"], **options: Unpack[_Async]
) -> Work[Counter[Any]]: ...
@overload
def all_reduce(obj: T, op: OpLike[T] = "sum", **options: Unpack[_Sync]) -> T: ...
@overload
def all_reduce(obj: T, op: OpLike[T] = "sum", **options: Unpack[_Async]) -> Work[T]: ...
@overload
def all_reduce(obj: T, op: OpLike[T] = "sum", **options: Unpack[_MaybeAsync]) -> T | Work[T]: ...
def all_reduce(
    obj: T,
    op: OpLike[T] = "sum",
    *,
    dtype: torch.dtype | None = None,
    missing: Missing = "error",
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
    """Combine the objects of all ranks, in rank order, onto every rank.

    Every rank of ``group`` must call this, with the same operator. The result is computed once and
    sent, so it is bit-identical on all ranks.

    Args:
        obj: this rank's operand; it is not changed, even where ``op`` changes its arguments.
        op: as in ``reduce``.
        dtype: as in ``reduce``.
        missing: as in ``reduce``.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes operands and the result.
        device: the device to place received tensors on.
        confirm: wait until every rank has decoded, and raise everywhere if one could not.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        async_op: return at once; the result is the work's. Buffers of tensors and arrays in ``obj``
            must not change before its ``wait`` returns, and ``op`` is called on another thread.

    Returns:
        The result. In a world of one a callable is not called and ``obj`` comes back.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: an operand could not be encoded or decoded, ``op`` raised, or two ranks'
            structures differ; the error names the path and the two. Every rank.
        DecodeError: the result could not be rebuilt. That rank only; later calls work.
        DesyncError: another rank is in another operation, or gave another name or another named
            operator.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Examples:
        >>> import objcomm
        >>> objcomm.all_reduce(2**70, "max") == 2**70
        True
    """
    operator = operator_for(op, "all_reduce", dtype, missing)
    with Call(
        Operation.ALL_REDUCE,
        name=name,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        must_agree=operator.agreement,
        confirm=confirm,
        accept=accept,
        allow=allow,
        async_op=async_op,
    ) as call:
        rest = _reduced(call, operator, obj, None)
        return call.later(rest) if async_op else rest()


@overload
def scan(obj: int, op: Literal["mean"], **options: Unpack[SyncOptions]) -> float: ...
@overload
def scan(obj: int, op: Literal["mean"], **options: Unpack[AsyncOptions]) -> Work[float]: ...
@overload
def scan(obj: T, op: OpLike[T] = "sum", **options: Unpack[SyncOptions]) -> T: ...
@overload
def scan(obj: T, op: OpLike[T] = "sum", **options: Unpack[AsyncOptions]) -> Work[T]: ...
@overload
def scan(obj: T, op: OpLike[T] = "sum", **options: Unpack[MaybeAsyncOptions]) -> T | Work[T]: ...
def scan(
    obj: T,
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
    """Combine the objects of all ranks up to this one, in rank order.

    Every rank of ``group`` must call this, with the same operator.

    Args:
        obj: this rank's operand; it is not changed, even where ``op`` changes its arguments.
        op: as in ``reduce``; but the named ones that go leaf by leaf there take a number, a tensor
            or an array here, and no container of them. ``mean`` gives each rank
            the mean of those up to it.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes operands and results.
        device: the device to place received tensors on.
        confirm: wait until every rank has decoded, and raise everywhere if one could not.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        async_op: return at once; the result is the work's. Buffers of tensors and arrays in ``obj``
            must not change before its ``wait`` returns, and ``op`` is called on another thread.

    Returns:
        On rank i of the group the combination of the operands of ranks 0 to i. On the group's
        first rank no callable is called, and ``obj`` itself comes back.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: an operand could not be encoded or decoded, or ``op`` raised. Every rank,
            also those before the one where it happened.
        DecodeError: the result could not be rebuilt. That rank only; later calls work.
        DesyncError: another rank is in another operation, or gave another name or another named
            operator.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Examples:
        >>> import objcomm
        >>> objcomm.scan({"rank 0": 1}, lambda a, b: a | b)
        {'rank 0': 1}
    """
    operator = operator_for(op, "scan")
    with Call(
        Operation.SCAN,
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
        rest = _scanned(call, operator, obj, first=0)
        return call.later(rest) if async_op else rest()


@overload
def exscan(obj: int, op: Literal["mean"], **options: Unpack[SyncOptions]) -> float | None: ...
@overload
def exscan(
    obj: int, op: Literal["mean"], **options: Unpack[AsyncOptions]
) -> Work[float | None]: ...
@overload
def exscan(obj: T, op: OpLike[T] = "sum", **options: Unpack[SyncOptions]) -> T | None: ...
@overload
def exscan(obj: T, op: OpLike[T] = "sum", **options: Unpack[AsyncOptions]) -> Work[T | None]: ...
@overload
def exscan(
    obj: T, op: OpLike[T] = "sum", **options: Unpack[MaybeAsyncOptions]
) -> T | Work[T | None] | None: ...
def exscan(
    obj: T,
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
) -> T | float | Work[Any] | None:
    """Combine the objects of all ranks before this one, in rank order.

    Every rank of ``group`` must call this, with the same operator. Given each rank's number of
    lines, ``exscan(count)`` says where each begins.

    Args:
        obj: this rank's operand; it is not changed, even where ``op`` changes its arguments.
        op: as in ``reduce``; but the named ones that go leaf by leaf there take a number, a tensor
            or an array here, and no container of them. ``mean`` gives each rank
            the mean of those before it.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes operands and results.
        device: the device to place received tensors on.
        confirm: wait until every rank has decoded, and raise everywhere if one could not.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        async_op: return at once; the result is the work's. Buffers of tensors and arrays in ``obj``
            must not change before its ``wait`` returns, and ``op`` is called on another thread.

    Returns:
        On rank i of the group the combination of the operands of ranks 0 to i - 1; on the group's
        first rank, which has none before it, the ``identity`` of an ``Op``, else ``None``.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: an operand could not be encoded or decoded, or ``op`` raised. Every rank,
            also those before the one where it happened.
        DecodeError: the result could not be rebuilt. That rank only; later calls work.
        DesyncError: another rank is in another operation, or gave another name or another named
            operator.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Examples:
        >>> import objcomm
        >>> objcomm.exscan(1000) is None
        True
    """
    operator = operator_for(op, "exscan")
    with Call(
        Operation.EXSCAN,
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
        rest = _scanned(call, operator, obj, first=1)
        return call.later(rest) if async_op else rest()


def _reduced(call: Call, operator: Operator, obj: Any, root: int | None) -> Callable[[], Any]:
    """Both reductions: onto ``root``, or onto every rank if it is None."""
    is_leafwise = operator.elementwise is not None
    reduced = partial(alone, operator) if is_leafwise else operator.alone
    way = TreeReduction if is_leafwise else Folding
    return _combined(call, lambda: reduced(obj), lambda: way(call, operator, obj, root))


def _scanned(call: Call, operator: Operator, obj: Any, first: int) -> Callable[[], Any]:
    """Both scans; ``first`` is the lowest rank that gets a combination."""
    begin = partial(Scanning, call, operator, obj, first)
    return _combined(call, lambda: operator.identity if first else operator.alone(obj), begin)


def _combined(
    call: Call, alone: Callable[[], Any], begin: Callable[[], Folding | Scanning | TreeReduction]
) -> Callable[[], Any]:
    """The rest of a call that combines what all ranks have; ``alone`` is for a world of one."""
    if call.is_alone:
        return partial(call.alone, alone)
    combining: Any = begin()  # the three have the same methods

    def rest() -> Any:
        with call.exchange as exchange:
            answer = combining.run(exchange)
        return call.result((), lambda: combining.value(answer))

    return rest
