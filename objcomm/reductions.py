"""Reduce objects of all ranks into one: ``reduce`` and ``all_reduce``.

Operands stay in rank order, so an operator need not commute. Small operands meet at one rank,
which folds them; large ones, and those of more than eight ranks, go along a binomial tree, so that
neither all bytes nor all work land on one rank. Which of the two follows from the first messages,
that one rank has read and answers, so all ranks take the same way (mpi4py's trees have the same
order of operands: ``src/mpi4py/MPI.src/msgpickle.pxi``, PyMPI_reduce_intra).
"""

from collections.abc import Callable, Generator, Iterable
from typing import Any, Literal, TypeVar, Unpack, overload

import torch

from objcomm.call import Call, Options
from objcomm.config import Allowed
from objcomm.frames import Operation, Status
from objcomm.group import Timeout
from objcomm.message import Message
from objcomm.ops import Operator, operator_for
from objcomm.transport import routes, topology
from objcomm.transport.exchange import Exchange
from objcomm.work import Work
from objcomm.world import GroupLike

T = TypeVar("T")


@overload
def reduce(
    obj: T,
    op: Callable[[T, T], T] | str = "sum",
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    async_op: Literal[False] = False,
    **options: Unpack[Options],
) -> T | None: ...
@overload
def reduce(
    obj: T,
    op: Callable[[T, T], T] | str = "sum",
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    async_op: Literal[True],
    **options: Unpack[Options],
) -> Work[T | None]: ...
def reduce(
    obj: T,
    op: Callable[[T, T], T] | str = "sum",
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: torch.device | str | int | None = None,
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
            left one; or ``sum``, ``prod``, ``min``, ``max``, ``mean``, ``any``, ``all`` for
            numbers, tensors and arrays. Integers stay integers of any size; the mean of integers
            is a float; tensors and arrays keep dtype and shape, but the mean of integer ones is
            float64; a NaN is the least and the greatest.
        dst: global rank that gets the result.
        group_dst: the same as a rank within the group; give one. Neither: the group's first rank.
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
            destination and the rank where it happened.
        DesyncError: another rank is in another operation, or gave another named operator.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Example:
        >>> import objcomm
        >>> objcomm.reduce({"seen": {3}}, lambda a, b: {"seen": a["seen"] | b["seen"]})
        {'seen': {3}}
    """
    operator = operator_for(op)
    call = Call(
        Operation.REDUCE,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        global_root=dst,
        group_root=group_dst,
        has_root=True,
        must_agree=operator.name,
        confirm=confirm,
        accept=accept,
        allow=allow,
    )
    return call.run(_reduce(call, operator, obj), async_op=async_op)


def _reduce(call: Call, operator: Operator, obj: T) -> Generator[None, None, T | None]:
    if call.is_alone:
        return call.alone(lambda: _alone(operator, obj))
    reduction = _Reduction(call, operator, obj)
    yield
    with call.traffic() as exchange:
        message = reduction.onto(exchange, call.root)
    result: T | None = call.settle(lambda: reduction.value(message))
    return result


@overload
def all_reduce(
    obj: T,
    op: Callable[[T, T], T] | str = "sum",
    *,
    async_op: Literal[False] = False,
    **options: Unpack[Options],
) -> T: ...
@overload
def all_reduce(
    obj: T,
    op: Callable[[T, T], T] | str = "sum",
    *,
    async_op: Literal[True],
    **options: Unpack[Options],
) -> Work[T]: ...
def all_reduce(
    obj: T,
    op: Callable[[T, T], T] | str = "sum",
    *,
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: torch.device | str | int | None = None,
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
        CollectiveError: an operand could not be encoded or decoded, or ``op`` raised. Every rank.
        DecodeError: the result could not be rebuilt. That rank only; later calls work.
        DesyncError: another rank is in another operation, or gave another named operator.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Example:
        >>> import objcomm
        >>> objcomm.all_reduce(2**70, "max") == 2**70
        True
    """
    operator = operator_for(op)
    call = Call(
        Operation.ALL_REDUCE,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        must_agree=operator.name,
        confirm=confirm,
        accept=accept,
        allow=allow,
    )
    return call.run(_all_reduce(call, operator, obj), async_op=async_op)


def _all_reduce(call: Call, operator: Operator, obj: T) -> Generator[None, None, T]:
    if call.is_alone:
        return call.alone(lambda: _alone(operator, obj))
    reduction = _Reduction(call, operator, obj)
    yield
    with call.traffic() as exchange:
        message = reduction.onto_all(exchange)
    result: T = call.settle(lambda: reduction.value(message))
    return result


def _alone(operator: Operator, obj: T) -> T:
    finished: T = operator.finish(operator.prepare(obj), 1)
    return finished


class _Accumulator:
    """Operands of consecutive ranks, combined as they come, or the failures among them."""

    def __init__(self, call: Call, operator: Operator, mine: Message, operand: Any) -> None:
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
            # The operator may change what it gets, but not what the caller passed in.
            is_mine = message is self._mine
            obj = self._call.copy(self._operand) if is_mine else self._call.decode(message)
            self._combined = obj if self._is_empty else self._operator.combine(self._combined, obj)
            self._is_empty = False
        except BaseException as error:  # noqa: BLE001  # it travels, and is raised afterwards
            self._failed.append(self._call.failure(error))

    def partial(self) -> Message:
        """What has been combined so far."""
        return self._call.failures(self._failed) or self._call.message(lambda: self._combined)

    def result(self) -> tuple[Message, Any]:
        """The end of the reduction: as a message for other ranks, and as the object itself."""
        if not self._failed:
            try:
                self._combined = self._operator.finish(self._combined, self._call.size)
            except BaseException as error:  # noqa: BLE001  # likewise
                self._failed.append(self._call.failure(error))
        return self.partial(), self._combined


class _Reduction:
    """One reduction on this rank, and the result where it is computed."""

    def __init__(self, call: Call, operator: Operator, obj: Any) -> None:
        self._call = call
        self._operator = operator
        self._operand: Any = None
        self._mine = call.message(lambda: self._prepare(obj))
        self._computed: tuple[Message, Any] | None = None

    def onto(self, exchange: Exchange, root: int) -> Message | None:
        """All operands into one message on ``root``; ``None`` elsewhere."""
        if exchange.size <= topology.STAR_MAX_SIZE:
            heads = routes.gather_heads(exchange, self._mine, root)
            folded = self._fold_if_small(heads)
            status = Status.TREE if folded is None else Status.VALUE
            answer = None if heads is None else self._call.announcement(status)
            if routes.broadcast(exchange, answer, root).header.status != Status.TREE:
                return folded
        combined = self._along_tree(exchange)
        if root == routes.HUB:
            return combined
        if combined is not None:
            routes.send(exchange, combined, root)
        return routes.recv(exchange, routes.HUB) if exchange.rank == root else None

    def onto_all(self, exchange: Exchange) -> Message:
        """All operands into one message, on every rank."""
        if exchange.size <= topology.STAR_MAX_SIZE:
            heads = routes.gather_heads(exchange, self._mine, routes.HUB)
            folded = self._fold_if_small(heads)
            answer = folded or self._call.announcement(Status.TREE)
            message = routes.broadcast(exchange, answer, routes.HUB)
            if message.header.status != Status.TREE:
                return message
        return routes.broadcast(exchange, self._along_tree(exchange), routes.HUB)

    def value(self, message: Message | None) -> Any:
        """The result; where it was computed, the very object that was sent."""
        self._call.raise_failures(() if message is None else [message])
        if message is None:
            return None
        if self._computed is not None and message is self._computed[0]:
            return self._computed[1]
        return self._call.decode(message)

    def _prepare(self, obj: Any) -> Any:
        self._operand = self._operator.prepare(obj)
        return self._operand

    def _fold_if_small(self, heads: list[Message] | None) -> Message | None:
        """Fold on this rank, if it has all operands and all came with their first messages."""
        if heads is None or not all(head.is_all_head for head in heads):
            return None
        accumulator = _Accumulator(self._call, self._operator, self._mine, self._operand)
        for head in heads:
            accumulator.add(head)
        self._computed = accumulator.result()
        return self._computed[0]

    def _along_tree(self, exchange: Exchange) -> Message | None:
        """The binomial tree to rank 0: at each step a rank takes its right neighbour's partial."""
        accumulator = _Accumulator(self._call, self._operator, self._mine, self._operand)
        is_leaf = True
        step = 1
        while step < exchange.size:
            if exchange.rank & step:
                partial = self._mine if is_leaf else accumulator.partial()
                routes.send(exchange, partial, exchange.rank - step)
                return None
            if exchange.rank + step < exchange.size:
                right = routes.recv(exchange, exchange.rank + step)
                if is_leaf:
                    accumulator.add(self._mine)
                    is_leaf = False
                accumulator.add(right)
            step *= 2
        self._computed = accumulator.result()
        return self._computed[0]
