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
from objcomm._collectives.reduction.leafwise import Leafwise, TreeReduction, alone, options_for
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


class _Accumulator:
    """Operands of consecutive ranks, combined as they come, or the failures among them."""

    def __init__(self, call: Call, operator: Operator, mine: Message, operand: Any) -> None:
        """Begin.

        Args:
            call: whose.
            operator: combines.
            mine: the message that stands for this rank's operand.
            operand: a copy of it, which the operator may change.
        """
        self._call = call
        self._operator = operator
        self._mine = mine
        self._operand = operand
        self._failed: list[Message] = []
        self._combined: Any = None
        self._is_empty = True

    def add(self, message: Message) -> None:
        """Combine with the next higher rank's operand; an error becomes this rank's failure."""
        if message.header.status == Status.FAILURE:
            self._failed.append(message)
        if self._failed:
            return
        try:
            obj = self._operand if message is self._mine else self._call.decode(message)
            self._combined = obj if self._is_empty else self._operator.combine(self._combined, obj)
            self._is_empty = False
        except BaseException as error:  # noqa: BLE001  # it travels, and is raised afterwards
            self._failed.append(self._call.failure(error))

    def partial(self) -> Message:
        """What has been combined so far."""
        return self._call.failures(self._failed) or self._call.message(self._combined)

    def result(self) -> tuple[Message, Any]:
        """The end of the reduction: as a message for other ranks, and as the object itself."""
        if not self._failed:
            try:
                self._combined = self._operator.finish(self._combined, self._call.size)
            except BaseException as error:  # noqa: BLE001  # likewise
                self._failed.append(self._call.failure(error))
        return self.partial(), self._combined


class Folding:
    """One reduction on this rank, and the result where it is computed."""

    def __init__(self, call: Call, operator: Operator, obj: Any) -> None:
        self._call = call
        self._operator = operator
        self._operand: Any = None
        self._mine = call.message(obj, self._prepare)
        if self._combines() and self._mine.header.status != Status.FAILURE:
            self._take_copy()
        self._computed: tuple[Message, Any] | None = None

    def run(self, exchange: Exchange, root: int | None) -> Message | None:
        """The traffic: all operands into one message, on ``root`` or, if it is None, everywhere."""
        return self._onto_all(exchange) if root is None else self._onto(exchange, root)

    def _onto(self, exchange: Exchange, root: int) -> Message | None:
        if self._may_be_folded(exchange):
            heads = routes.gather_heads(exchange, self._mine, root)
            folded = self._fold_if_small(heads)
            status = Status.TREE if folded is None else Status.VALUE
            answer = None if heads is None else self._call.announcement(status)
            if routes.broadcast(exchange, answer, root).header.status != Status.TREE:
                return folded
        top = self._top(root)
        combined = self._along_tree(exchange, top)
        if root == top:
            return combined
        if combined is not None:
            routes.send(exchange, combined, root)
        return routes.recv(exchange, top) if exchange.rank == root else None

    def _onto_all(self, exchange: Exchange) -> Message:
        if self._may_be_folded(exchange):
            heads = routes.gather_heads(exchange, self._mine, routes.HUB)
            folded = self._fold_if_small(heads)
            answer = folded or self._call.announcement(Status.TREE)
            message = routes.broadcast(exchange, answer, routes.HUB)
            if message.header.status != Status.TREE:
                return message
        combined = self._along_tree(exchange, routes.HUB)
        return routes.broadcast(exchange, combined, routes.HUB)

    def value(self, message: Message | None) -> Any:
        """The result; where it was computed, the very object that was sent."""
        self._call.raise_failures(() if message is None else [message])
        if message is None:
            return None
        if self._computed is not None and message is self._computed[0]:
            return self._operator.present(self._computed[1])
        return self._operator.present(self._call.decode(message))

    def _prepare(self, obj: Any) -> Any:
        self._operand = self._operator.prepare(obj, self._call.rank)
        return self._operand

    def _combines(self) -> bool:
        """Whether this rank is one that combines its own operand with others."""
        call = self._call
        top = self._top(call.root)
        return call.is_root or bool(topology.in_order(call.rank, top, call.exchange.hosts)[1])

    def _take_copy(self) -> None:
        """Keep the operand as it is now.

        An operator may change what it gets, and the caller, while the call is in flight, what it
        passed in.
        """
        try:
            self._operand = self._call.copy(self._operand)
        except BaseException as error:  # noqa: BLE001  # it travels, and is raised afterwards
            self._mine = self._call.failure(error)

    def _top(self, root: int) -> int:
        """Where the tree ends: a commutative operator lets ranks count from ``root`` on."""
        return root if self._operator.is_commutative else routes.HUB

    def _may_be_folded(self, exchange: Exchange) -> bool:
        return exchange.size <= topology.STAR_MAX_SIZE and not self._operator.is_slow

    def _fold_if_small(self, heads: list[Message] | None) -> Message | None:
        """Fold on this rank, if it has all operands and all came with their first messages."""
        if heads is None or not all(head.is_all_head for head in heads):
            return None
        accumulator = _Accumulator(self._call, self._operator, self._mine, self._operand)
        for head in heads:
            accumulator.add(head)
        self._computed = accumulator.result()
        return self._computed[0]

    def _along_tree(self, exchange: Exchange, top: int) -> Message | None:
        """Up to ``top``: a rank combines its operand with those below it, and sends what that is.

        Ranks count from ``top`` on, so another one than the first changes the operands' order.
        """
        parent, children = topology.in_order(exchange.rank, top, exchange.hosts)
        if not children and parent is not None:
            routes.send(exchange, self._mine, parent)
            return None
        accumulator = _Accumulator(self._call, self._operator, self._mine, self._operand)
        accumulator.add(self._mine)
        for child in children:
            accumulator.add(routes.recv(exchange, child))
        if parent is not None:
            routes.send(exchange, accumulator.partial(), parent)
            return None
        self._computed = accumulator.result()
        return self._computed[0]


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
    operator = operator_for(op, "reduce")
    leafwise = options_for(operator, dtype, missing, "reduce")
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
        must_agree=operator.name + leafwise.text,
        confirm=confirm,
        accept=accept,
        allow=allow,
        async_op=async_op,
    ) as call:
        rest = _reduced(call, operator, obj, leafwise, call.root)
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
    operator = operator_for(op, "all_reduce")
    leafwise = options_for(operator, dtype, missing, "all_reduce")
    with Call(
        Operation.ALL_REDUCE,
        name=name,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        must_agree=operator.name + leafwise.text,
        confirm=confirm,
        accept=accept,
        allow=allow,
        async_op=async_op,
    ) as call:
        rest = _reduced(call, operator, obj, leafwise, None)
        return call.later(rest) if async_op else rest()


def _reduced(
    call: Call, operator: Operator, obj: Any, leafwise: Leafwise, root: int | None
) -> Callable[[], Any]:
    """Both reductions: onto ``root``, or onto every rank if it is None."""
    if call.is_alone:
        return functools.partial(call.alone, lambda: _alone(operator, obj, leafwise))
    reduction: Any  # the two have the same methods
    if operator.is_leafwise:
        reduction = TreeReduction(call, operator, obj, leafwise)
    else:
        reduction = Folding(call, operator, obj)

    def rest() -> Any:
        with call.exchange as exchange:
            answer = reduction.run(exchange, root)
        return call.result((), lambda: reduction.value(answer))

    return rest


def _alone(operator: Operator, obj: T, leafwise: Leafwise) -> T:
    result: T
    result = alone(operator, obj, leafwise) if operator.is_leafwise else operator.alone(obj)
    return result
