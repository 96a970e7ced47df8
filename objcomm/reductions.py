"""Reduce objects of all ranks into one: ``reduce`` and ``all_reduce``.

``folding`` combines whole objects two at a time; ``trees`` goes leaf by leaf through containers,
for the named operators that do so.
"""

import collections
from collections.abc import Callable, Generator, Iterable
from typing import Any, Literal, TypeVar, Unpack, overload

import torch

from objcomm.call import Call
from objcomm.config import Allowed
from objcomm.folding import Folding
from objcomm.frames import Operation
from objcomm.group import Timeout
from objcomm.memory import DeviceLike
from objcomm.ops import Extreme, Op, Operator, operator_for
from objcomm.options import Options
from objcomm.trees import Leafwise, TreeReduction, alone, options_for
from objcomm.work import Work
from objcomm.world import GroupLike

T = TypeVar("T")

Missing = Literal["error", "skip"]


class ReductionOptions(Options, total=False):
    """The keywords of both reductions; see ``reduce``."""

    dtype: torch.dtype | None
    missing: Missing


@overload
def reduce(
    obj: Any,
    op: Literal["argmin", "argmax"],
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    async_op: Literal[False] = False,
    **options: Unpack[ReductionOptions],
) -> Extreme | None: ...
@overload
def reduce(
    obj: Any,
    op: Literal["argmin", "argmax"],
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    async_op: Literal[True],
    **options: Unpack[ReductionOptions],
) -> Work[Extreme | None]: ...
@overload
def reduce(
    obj: Any,
    op: Literal["counter"],
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    async_op: Literal[False] = False,
    **options: Unpack[ReductionOptions],
) -> collections.Counter[Any] | None: ...
@overload
def reduce(
    obj: Any,
    op: Literal["counter"],
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    async_op: Literal[True],
    **options: Unpack[ReductionOptions],
) -> Work[collections.Counter[Any] | None]: ...
@overload
def reduce(
    obj: T,
    op: Callable[[T, T], T] | Op[T] | str = "sum",
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    async_op: Literal[False] = False,
    **options: Unpack[ReductionOptions],
) -> T | None: ...
@overload
def reduce(
    obj: T,
    op: Callable[[T, T], T] | Op[T] | str = "sum",
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    async_op: Literal[True],
    **options: Unpack[ReductionOptions],
) -> Work[T | None]: ...
@overload
def reduce(
    obj: T,
    op: Callable[[T, T], T] | Op[T] | str = "sum",
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    async_op: bool,
    **options: Unpack[ReductionOptions],
) -> T | Work[T | None] | None: ...
def reduce(
    obj: T,
    op: Callable[[T, T], T] | Op[T] | str = "sum",
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    dtype: torch.dtype | None = None,
    missing: Missing = "error",
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    confirm: bool = False,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
    async_op: bool = False,
) -> T | Work[T | None] | None:
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
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes operands.
        device: where tensors inside received operands, and so of the result, shall lie.
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
        NotInGroupError: this rank is no member of ``group``.
        CollectiveError: an operand could not be encoded or decoded, or ``op`` raised. The
            destination and the rank where it happened. With an op that goes leaf by leaf also:
            two ranks' structures differ; every rank, before a large tensor moves, and the error
            names the path and the two.
        DesyncError: another rank is in another operation, or gave another named operator.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Examples:
        >>> import objcomm
        >>> objcomm.reduce({"seen": {3}}, lambda a, b: {"seen": a["seen"] | b["seen"]})
        {'seen': {3}}
    """
    operator = operator_for(op)
    leafwise = options_for(operator, dtype, missing)
    call = Call(
        Operation.REDUCE,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        global_root=dst,
        group_root=group_dst,
        has_root=True,
        must_agree=operator.name + leafwise.text,
        confirm=confirm,
        accept=accept,
        allow=allow,
    )
    return call.run(_reduce(call, operator, obj, leafwise), async_op=async_op)


def _reduce(
    call: Call, operator: Operator, obj: T, leafwise: Leafwise
) -> Generator[None, None, T | None]:
    if call.is_alone:
        return call.alone(lambda: _alone(operator, obj, leafwise))
    result: T | None
    if operator.is_leafwise:
        tree = TreeReduction(call, operator, obj, leafwise)
        yield
        with call.traffic() as exchange:
            answer = tree.run(exchange, call.root)
        result = call.settle(lambda: tree.value(answer))
    else:
        folding = Folding(call, operator, obj)
        yield
        with call.traffic() as exchange:
            message = folding.onto(exchange, call.root)
        result = call.settle(lambda: folding.value(message))
    return result


@overload
def all_reduce(
    obj: Any,
    op: Literal["argmin", "argmax"],
    *,
    async_op: Literal[False] = False,
    **options: Unpack[ReductionOptions],
) -> Extreme: ...
@overload
def all_reduce(
    obj: Any,
    op: Literal["argmin", "argmax"],
    *,
    async_op: Literal[True],
    **options: Unpack[ReductionOptions],
) -> Work[Extreme]: ...
@overload
def all_reduce(
    obj: Any,
    op: Literal["counter"],
    *,
    async_op: Literal[False] = False,
    **options: Unpack[ReductionOptions],
) -> collections.Counter[Any]: ...
@overload
def all_reduce(
    obj: Any,
    op: Literal["counter"],
    *,
    async_op: Literal[True],
    **options: Unpack[ReductionOptions],
) -> Work[collections.Counter[Any]]: ...
@overload
def all_reduce(
    obj: T,
    op: Callable[[T, T], T] | Op[T] | str = "sum",
    *,
    async_op: Literal[False] = False,
    **options: Unpack[ReductionOptions],
) -> T: ...
@overload
def all_reduce(
    obj: T,
    op: Callable[[T, T], T] | Op[T] | str = "sum",
    *,
    async_op: Literal[True],
    **options: Unpack[ReductionOptions],
) -> Work[T]: ...
@overload
def all_reduce(
    obj: T,
    op: Callable[[T, T], T] | Op[T] | str = "sum",
    *,
    async_op: bool,
    **options: Unpack[ReductionOptions],
) -> T | Work[T]: ...
def all_reduce(
    obj: T,
    op: Callable[[T, T], T] | Op[T] | str = "sum",
    *,
    dtype: torch.dtype | None = None,
    missing: Missing = "error",
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    confirm: bool = False,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
    async_op: bool = False,
) -> T | Work[T]:
    """Combine the objects of all ranks, in rank order, onto every rank.

    Every rank of ``group`` must call this, with the same operator. The result is computed once and
    sent, so it is bit-identical on all ranks.

    Args:
        obj: this rank's operand; it is not changed, even where ``op`` changes its arguments.
        op: as in ``reduce``.
        dtype: as in ``reduce``.
        missing: as in ``reduce``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes operands and the result.
        device: where tensors inside what is received shall lie.
        confirm: wait until every rank has decoded, and raise everywhere if one could not.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        async_op: return at once; the result is the work's. Buffers of tensors and arrays in ``obj``
            must not change before its ``wait`` returns, and ``op`` is called on another thread.

    Returns:
        The result. In a world of one a callable is not called and ``obj`` comes back.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is no member of ``group``.
        CollectiveError: an operand could not be encoded or decoded, ``op`` raised, or two ranks'
            structures differ; the error names the path and the two. Every rank.
        DecodeError: the result could not be rebuilt. That rank only; later calls work.
        DesyncError: another rank is in another operation, or gave another named operator.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Examples:
        >>> import objcomm
        >>> objcomm.all_reduce(2**70, "max") == 2**70
        True
    """
    operator = operator_for(op)
    leafwise = options_for(operator, dtype, missing)
    call = Call(
        Operation.ALL_REDUCE,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        must_agree=operator.name + leafwise.text,
        confirm=confirm,
        accept=accept,
        allow=allow,
    )
    return call.run(_all_reduce(call, operator, obj, leafwise), async_op=async_op)


def _all_reduce(
    call: Call, operator: Operator, obj: T, leafwise: Leafwise
) -> Generator[None, None, T]:
    if call.is_alone:
        return call.alone(lambda: _alone(operator, obj, leafwise))
    result: T
    if operator.is_leafwise:
        tree = TreeReduction(call, operator, obj, leafwise)
        yield
        with call.traffic() as exchange:
            answer = tree.run(exchange, None)
        result = call.settle(lambda: tree.value(answer))
    else:
        folding = Folding(call, operator, obj)
        yield
        with call.traffic() as exchange:
            message = folding.onto_all(exchange)
        result = call.settle(lambda: folding.value(message))
    return result


def _alone(operator: Operator, obj: T, leafwise: Leafwise) -> T:
    result: T
    result = alone(operator, obj, leafwise) if operator.is_leafwise else operator.alone(obj)
    return result
