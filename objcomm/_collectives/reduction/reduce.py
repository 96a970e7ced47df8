"""Reduce objects of all ranks into one: ``reduce`` and ``all_reduce``.

``leafwise`` goes leaf by leaf through containers, for the named operators that do so. All others
combine whole objects two at a time, in rank order, so an operator need not commute. Small operands
meet at one rank, which folds them; large ones, those of more than eight ranks, and those of a slow
operator go along a binomial tree, so that neither all bytes nor all work land on one rank. Which of
the two follows from the first messages, that one rank has read and answers, so all ranks take the
same way (mpi4py's trees have the same order of operands: ``src/mpi4py/MPI.src/msgpickle.pxi``,
PyMPI_reduce_intra).
"""

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, Unpack, overload

import torch

from objcomm._algorithms import routes, topology
from objcomm._algorithms.exchange import Exchange
from objcomm._calls.call import Call
from objcomm._calls.work import Work
from objcomm._collectives.reduction.leafwise import TreeReduction, alone
from objcomm._collectives.reduction.operators import (
    Extreme,
    NamedOperator,
    Op,
    Operator,
    OpLike,
    operator_for,
)
from objcomm._config import (
    Allowed,
    Async,
    DeviceLike,
    GroupLike,
    MaybeAsync,
    Options,
    Sync,
    Timeout,
)
from objcomm._wire.header import Operation, Status
from objcomm._wire.message import Message


class Operand:
    """This rank's operand, prepared and encoded.

    Attributes:
        obj: as the operator prepared it.
        copy: another one where this rank combines it, else None: an operator may change what it
            gets, and the caller, while the call is in flight, what was passed in.
        message: that carries it, or tells why there is none.
    """

    def __init__(
        self, call: Call, operator: Operator, obj: Any, *, is_combined: bool = True
    ) -> None:
        self.obj: Any = None
        self.copy: Any = None

        def prepared(obj: Any) -> Any:
            self.obj = operator.prepare(obj, call.rank)
            if is_combined:
                self.copy = call.copy(self.obj)
            return self.obj

        self.message = call.message(obj, prepared)


class Accumulator:
    """Operands of consecutive ranks, combined as they come, or the failures among them.

    Attributes:
        obj: what has been combined so far.
        failed: the messages that tell of failures; once there is one, nothing more is combined.
    """

    def __init__(self, call: Call, mine: Message, operand: Any) -> None:
        self.obj = operand
        self.failed = [mine] if mine.header.status == Status.FAILURE else []
        self._call = call
        self._message: Message | None = mine

    def take(self, message: Message, combine: Callable[[Any], Any]) -> None:
        """Combine with what arrived; an error becomes this rank's failure."""
        if message.header.status == Status.FAILURE:
            self.failed.append(message)
        if not self.failed:
            try:
                self.obj = combine(self._call.decode(message))
            except BaseException as error:  # noqa: BLE001  # it travels, and is raised afterwards
                self.failed.append(self._call.failure(error))
        self._message = None

    def message(self) -> Message:
        """What has been combined so far, for another rank."""
        if self._message is None:
            self._message = self._call.failures(self.failed) or self._call.message(self.obj)
        return self._message


class Folding:
    """One reduction on this rank, and the result where it is computed."""

    def __init__(self, call: Call, operator: Operator, obj: Any) -> None:
        self._call = call
        self._operator = operator
        _, children = topology.in_order(call.rank, self._top(call.root), call.exchange.hosts)
        is_combined = call.is_root or bool(children)
        self._mine = Operand(call, operator, obj, is_combined=is_combined)
        self._computed: Message | None = None
        self._result: Any = None

    def run(self, exchange: Exchange, root: int | None) -> Message | None:
        """The traffic: all operands into one message, on ``root`` or, if it is None, everywhere."""
        hub = routes.HUB if root is None else root
        if exchange.size <= topology.STAR_MAX_SIZE and not self._operator.is_slow:
            heads = routes.gather_heads(exchange, self._mine.message, hub)
            folded = self._fold_if_small(heads)
            answer = folded if root is None else None
            if answer is None:
                status = Status.TREE if folded is None else Status.VALUE
                answer = self._call.announcement(status)
            answer = routes.broadcast(exchange, answer, hub)
            if answer.header.status != Status.TREE:
                return answer if root is None else folded
        top = self._top(hub)
        combined = self._along_tree(exchange, top)
        if root is None:
            return routes.broadcast(exchange, combined, top)
        if root == top:
            return combined
        if combined is not None:
            routes.send(exchange, combined, root)
        return routes.recv(exchange, top) if exchange.rank == root else None

    def value(self, message: Message | None) -> Any:
        """The result; where it was computed, the very object that was sent."""
        self._call.raise_failures(() if message is None else [message])
        if message is None:
            return None
        is_own = message is self._computed
        return self._operator.present(self._result if is_own else self._call.decode(message))

    def _top(self, root: int) -> int:
        """Where the tree ends: a commutative operator lets ranks count from ``root`` on."""
        return root if self._operator.is_commutative else routes.HUB

    def _fold_if_small(self, heads: list[Message] | None) -> Message | None:
        """Fold on this rank, if it has all operands and all came with their first messages."""
        if heads is None or not all(head.is_all_head for head in heads):
            return None
        mine = self._mine
        operands = (
            mine.copy if head is mine.message else self._call.decode(head) for head in heads
        )
        return self._finished(heads, lambda: self._operator.fold(operands, self._call.size))

    def _along_tree(self, exchange: Exchange, top: int) -> Message | None:
        """Up to ``top``: a rank combines its operand with those below it, and sends what that is.

        Ranks count from ``top`` on, so another one than the first changes the operands' order.
        """
        parent, children = topology.in_order(exchange.rank, top, exchange.hosts)
        below = Accumulator(self._call, self._mine.message, self._mine.copy)
        for child in children:
            message = routes.recv(exchange, child)
            below.take(message, lambda theirs: self._operator.combine(below.obj, theirs))
        if parent is not None:
            routes.send(exchange, below.message(), parent)
            return None
        finish = self._operator.finish
        return self._finished(below.failed, lambda: finish(below.obj, self._call.size))

    def _finished(self, operands: list[Message], finish: Callable[[], Any]) -> Message:
        """The result as a message, or the failures among the operands."""

        def made(_: None) -> Any:
            self._result = finish()
            return self._result

        self._computed = self._call.failures(operands) or self._call.message(None, made)
        return self._computed


T = TypeVar("T")

Missing = Literal["error", "skip"]


class ReductionOptions(Options, total=False):
    """The keywords of both reductions; see ``reduce``."""

    dtype: torch.dtype | None
    missing: Missing


class ReductionSync(ReductionOptions, Sync):
    """The same of a call that returns its result."""


class ReductionAsync(ReductionOptions, Async):
    """The same of a call that returns a work."""


class ReductionMaybeAsync(ReductionOptions, MaybeAsync):
    """The same of a call that returns a work or its result."""


class ReduceSync(ReductionSync, total=False):
    """The same where one rank gets the result."""

    group_dst: int | None


class ReduceAsync(ReductionAsync, total=False):
    """The same where one rank gets a work's result."""

    group_dst: int | None


class ReduceMaybeAsync(ReductionMaybeAsync, total=False):
    """The same where one rank gets a work's result."""

    group_dst: int | None


@overload
def reduce(
    obj: int, op: Literal["mean"], dst: int | None = None, **options: Unpack[ReduceSync]
) -> float | Any: ...
@overload
def reduce(
    obj: int, op: Literal["mean"], dst: int | None = None, **options: Unpack[ReduceAsync]
) -> Work[float | Any]: ...
@overload
def reduce(
    obj: Any, op: Literal["argmin", "argmax"], dst: int | None = None, **options: Unpack[ReduceSync]
) -> Extreme | Any: ...
@overload
def reduce(
    obj: Any,
    op: Literal["argmin", "argmax"],
    dst: int | None = None,
    **options: Unpack[ReduceAsync],
) -> Work[Extreme | Any]: ...
@overload
def reduce(
    obj: Any, op: Literal["counter"], dst: int | None = None, **options: Unpack[ReduceSync]
) -> collections.Counter[Any] | Any: ...
@overload
def reduce(
    obj: Any, op: Literal["counter"], dst: int | None = None, **options: Unpack[ReduceAsync]
) -> Work[collections.Counter[Any] | Any]: ...
@overload
def reduce(
    obj: T, op: OpLike[T] = "sum", dst: int | None = None, **options: Unpack[ReduceSync]
) -> T | Any: ...
@overload
def reduce(
    obj: T, op: OpLike[T] = "sum", dst: int | None = None, **options: Unpack[ReduceAsync]
) -> Work[T | Any]: ...
@overload
def reduce(
    obj: T, op: OpLike[T] = "sum", dst: int | None = None, **options: Unpack[ReduceMaybeAsync]
) -> T | Work[T | Any] | Any: ...
def reduce(
    obj: T,
    op: Callable[[T, T], T] | Op[T] | NamedOperator = "sum",
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
        NotInGroupError: this rank is no member of ``group``.
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
def all_reduce(obj: int, op: Literal["mean"], **options: Unpack[ReductionSync]) -> float: ...
@overload
def all_reduce(obj: int, op: Literal["mean"], **options: Unpack[ReductionAsync]) -> Work[float]: ...
@overload
def all_reduce(
    obj: Any, op: Literal["argmin", "argmax"], **options: Unpack[ReductionSync]
) -> Extreme: ...
@overload
def all_reduce(
    obj: Any, op: Literal["argmin", "argmax"], **options: Unpack[ReductionAsync]
) -> Work[Extreme]: ...
@overload
def all_reduce(
    obj: Any, op: Literal["counter"], **options: Unpack[ReductionSync]
) -> collections.Counter[Any]: ...
@overload
def all_reduce(
    obj: Any, op: Literal["counter"], **options: Unpack[ReductionAsync]
) -> Work[collections.Counter[Any]]: ...
@overload
def all_reduce(obj: T, op: OpLike[T] = "sum", **options: Unpack[ReductionSync]) -> T: ...
@overload
def all_reduce(obj: T, op: OpLike[T] = "sum", **options: Unpack[ReductionAsync]) -> Work[T]: ...
@overload
def all_reduce(
    obj: T, op: OpLike[T] = "sum", **options: Unpack[ReductionMaybeAsync]
) -> T | Work[T]: ...
def all_reduce(
    obj: T,
    op: Callable[[T, T], T] | Op[T] | NamedOperator = "sum",
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
        NotInGroupError: this rank is no member of ``group``.
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


def _reduced(call: Call, operator: Operator, obj: Any, root: int | None) -> Callable[[], Any]:
    """Both reductions: onto ``root``, or onto every rank if it is None."""
    is_leafwise = operator.elementwise is not None
    if call.is_alone:
        reduced = functools.partial(alone, operator) if is_leafwise else operator.alone
        return functools.partial(call.alone, lambda: reduced(obj))
    # The two have the same methods.
    reduction: Any = (TreeReduction if is_leafwise else Folding)(call, operator, obj)

    def rest() -> Any:
        with call.exchange as exchange:
            answer = reduction.run(exchange, root)
        return call.result((), lambda: reduction.value(answer))

    return rest
