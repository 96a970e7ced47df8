"""``reduce``, ``all_reduce``, ``scan`` and ``exscan``: combine the objects of all or lower ranks.

``leafwise`` combines containers leaf by leaf, for reductions with an operator such as ``sum``.
``folding`` combines whole objects, for all other operators and for scans.
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
        obj: this rank's operand. It is not modified, even if ``op`` modifies its arguments.
        op: a callable of two objects, which must be associative and may modify and return its left
            argument; an ``objcomm.Op``; or a name. ``sum``, ``prod``, ``min``, ``max``, ``mean``,
            ``any`` and ``all`` combine numbers, tensors and arrays, and go leaf by leaf through
            dicts, lists, tuples, named tuples and dataclasses, nested to any depth. Integers
            remain integers of any size, but the mean of integers is a float. Tensors and arrays
            keep their dtype, shape and device, but the mean of integer ones is float64. ``min``
            and ``max`` propagate NaN. ``any`` and ``all`` combine the truth values of all leaves,
            and return bools. With the other five, strings, bytes, None, enum members, dtypes and
            devices in containers must be equal on all ranks and are returned as they are. The
            remaining names take whole objects: ``argmin`` and ``argmax`` return a tuple
            ``(value, rank)``, with the lowest group rank if operands tie; ``concat`` joins lists,
            tuples, strings, bytes, tensors and arrays; ``union`` merges sets, or dicts in which no
            key has two values; ``counter`` counts the members of iterables.
        dst: global rank that gets the result.
        group_dst: the destination as a rank within the group, instead of ``dst``. With neither,
            the group's first rank is the destination.
        dtype: floating-point dtype in which ``sum``, ``prod`` and ``mean`` accumulate
            floating-point and complex tensors, unless theirs is wider; results have the leaf's
            dtype. None means float64 or complex128 for means, float32 for other operators on
            half-precision leaves, and otherwise the leaf's dtype.
        missing: ``"skip"`` allows dict keys to be missing on some ranks. Each leaf is then
            combined, or averaged, over the ranks that have it, and all ranks get the result.
        name: name of this call; see ``objcomm.broadcast``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.
        codec: name of the codec that encodes operands.
        device: device on which to place received operands, and so the result.
        confirm: make every rank wait, and raise on all if the result could not be computed.
        accept: codecs this rank accepts in this call; see ``objcomm.configure``.
        allow: what a received pickle may name in this call; see ``objcomm.configure``.
        async_op: return a ``Work`` immediately; its ``wait`` returns the result. Do not modify
            tensors or arrays in ``obj`` before ``wait`` returns. ``op`` runs on another thread.

    Returns:
        The result on the destination, ``None`` on other ranks. In a world of one, a callable
        ``op`` is not called and ``obj`` itself is returned.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: an operand could not be encoded or decoded, or ``op`` raised. Raised on
            the destination and on the rank that failed. Or, for an operator that goes leaf by
            leaf, two ranks' structures differ. Raised on every rank before any large tensor is
            sent; the error names the path and the two ranks.
        DesyncError: another rank is in a different operation, or passed a different name or named
            operator.
        TransportTimeout: the timeout expired. Raised on every rank that was still waiting.
        TransportError: a rank died. Raised on every rank that was waiting for it.

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

    Every rank of ``group`` must call this, with the same operator. Each part of the result is
    computed on one rank and sent to the others, so the result is bit-identical on all ranks.

    Args:
        obj: this rank's operand. It is not modified, even if ``op`` modifies its arguments.
        op: as in ``reduce``.
        dtype: as in ``reduce``.
        missing: as in ``reduce``.
        name: name of this call; see ``objcomm.broadcast``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.
        codec: name of the codec that encodes operands and the result.
        device: device on which to place received tensors.
        confirm: wait until every rank has decoded, and raise on every rank if any rank failed to.
        accept: codecs this rank accepts in this call; see ``objcomm.configure``.
        allow: what a received pickle may name in this call; see ``objcomm.configure``.
        async_op: return a ``Work`` immediately; its ``wait`` returns the result. Do not modify
            tensors or arrays in ``obj`` before ``wait`` returns. ``op`` runs on another thread.

    Returns:
        The result. In a world of one, a callable ``op`` is not called and ``obj`` itself is
        returned.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: an operand could not be encoded or decoded, ``op`` raised, or two ranks'
            structures differ, in which case the error names the path and the two ranks. Raised on
            every rank.
        DecodeError: the result could not be rebuilt. Raised on that rank only; later calls work.
        DesyncError: another rank is in a different operation, or passed a different name or named
            operator.
        TransportTimeout: the timeout expired. Raised on every rank that was still waiting.
        TransportError: a rank died. Raised on every rank that was waiting for it.

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
    """Combine the objects of the ranks up to and including this one, in rank order.

    Every rank of ``group`` must call this, with the same operator.

    Args:
        obj: this rank's operand. It is not modified, even if ``op`` modifies its arguments.
        op: as in ``reduce``, except that the named operators that ``reduce`` applies leaf by leaf
            accept only a number, a tensor or an array here, not a container of them. With
            ``mean``, each rank gets the mean of the operands up to its own.
        name: name of this call; see ``objcomm.broadcast``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.
        codec: name of the codec that encodes operands and results.
        device: device on which to place received tensors.
        confirm: wait until every rank has decoded, and raise on every rank if any rank failed to.
        accept: codecs this rank accepts in this call; see ``objcomm.configure``.
        allow: what a received pickle may name in this call; see ``objcomm.configure``.
        async_op: return a ``Work`` immediately; its ``wait`` returns the result. Do not modify
            tensors or arrays in ``obj`` before ``wait`` returns. ``op`` runs on another thread.

    Returns:
        On rank i of the group, the combination of the operands of ranks 0 to i. On the group's
        first rank, a callable ``op`` is not called and ``obj`` itself is returned.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: an operand could not be encoded or decoded, or ``op`` raised. Raised on
            every rank, including those before the rank that failed.
        DecodeError: the result could not be rebuilt. Raised on that rank only; later calls work.
        DesyncError: another rank is in a different operation, or passed a different name or named
            operator.
        TransportTimeout: the timeout expired. Raised on every rank that was still waiting.
        TransportError: a rank died. Raised on every rank that was waiting for it.

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
    """Combine the objects of the ranks before this one, in rank order.

    Every rank of ``group`` must call this, with the same operator. If ``count`` is the number of
    lines on each rank, ``exscan(count)`` is the position of the rank's first line.

    Args:
        obj: this rank's operand. It is not modified, even if ``op`` modifies its arguments.
        op: as in ``reduce``, except that the named operators that ``reduce`` applies leaf by leaf
            accept only a number, a tensor or an array here, not a container of them. With
            ``mean``, each rank gets the mean of the operands before its own.
        name: name of this call; see ``objcomm.broadcast``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.
        codec: name of the codec that encodes operands and results.
        device: device on which to place received tensors.
        confirm: wait until every rank has decoded, and raise on every rank if any rank failed to.
        accept: codecs this rank accepts in this call; see ``objcomm.configure``.
        allow: what a received pickle may name in this call; see ``objcomm.configure``.
        async_op: return a ``Work`` immediately; its ``wait`` returns the result. Do not modify
            tensors or arrays in ``obj`` before ``wait`` returns. ``op`` runs on another thread.

    Returns:
        On rank i of the group, the combination of the operands of ranks 0 to i - 1. On the group's
        first rank, the ``identity`` of an ``Op``, otherwise ``None``.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: an operand could not be encoded or decoded, or ``op`` raised. Raised on
            every rank, including those before the rank that failed.
        DecodeError: the result could not be rebuilt. Raised on that rank only; later calls work.
        DesyncError: another rank is in a different operation, or passed a different name or named
            operator.
        TransportTimeout: the timeout expired. Raised on every rank that was still waiting.
        TransportError: a rank died. Raised on every rank that was waiting for it.

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
    """Run a reduction onto ``root``, or onto every rank if it is None."""
    is_leafwise = operator.elementwise is not None
    reduced = partial(alone, operator) if is_leafwise else operator.alone
    way = TreeReduction if is_leafwise else Folding
    return _combined(call, lambda: reduced(obj), lambda: way(call, operator, obj, root))


def _scanned(call: Call, operator: Operator, obj: Any, first: int) -> Callable[[], Any]:
    """Run a scan; ``first`` is the lowest rank that gets a combination."""
    begin = partial(Scanning, call, operator, obj, first)
    return _combined(call, lambda: operator.identity if first else operator.alone(obj), begin)


def _combined(
    call: Call, alone: Callable[[], Any], begin: Callable[[], Folding | Scanning | TreeReduction]
) -> Callable[[], Any]:
    """Return the rest of a call that combines operands; ``alone`` is for a world of one."""
    if call.is_alone:
        return partial(call.alone, alone)
    combining: Any = begin()  # all three have the same methods

    def rest() -> Any:
        with call.exchange as exchange:
            answer = combining.run(exchange)
        return call.result((), lambda: combining.value(answer))

    return rest
