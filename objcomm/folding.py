"""Whole objects of all ranks, folded into one by an operator that only knows two at a time.

Operands stay in rank order, so an operator need not commute. Small operands meet at one rank,
which folds them; large ones, those of more than eight ranks, and those of a slow operator go along
a binomial tree, so that neither all bytes nor all work land on one rank. Which of the two follows
from the first messages, that one rank has read and answers, so all ranks take the same way
(mpi4py's trees have the same order of operands: ``src/mpi4py/MPI.src/msgpickle.pxi``,
PyMPI_reduce_intra).
"""

from typing import Any

from objcomm.call import Call
from objcomm.frames import Status
from objcomm.message import Message
from objcomm.ops import Operator
from objcomm.transport import routes, topology
from objcomm.transport.exchange import Exchange


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
        return self._call.failures(self._failed) or self._call.message(lambda: self._combined)

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
        self._mine = call.message(lambda: self._prepare(obj))
        if self._combines() and self._mine.header.status != Status.FAILURE:
            self._take_copy()
        self._computed: tuple[Message, Any] | None = None

    def onto(self, exchange: Exchange, root: int) -> Message | None:
        """All operands into one message on ``root``; ``None`` elsewhere."""
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

    def onto_all(self, exchange: Exchange) -> Message:
        """All operands into one message, on every rank."""
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
        size = self._call.size
        place = (self._call.rank - self._top(self._call.root)) % size
        return self._call.is_root or (place % 2 == 0 and place + 1 < size)

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
        """The binomial tree to ``top``: at each step a rank takes its right neighbour's partial.

        Ranks count from ``top`` on, so another one than the first changes the operands' order.
        """
        size = exchange.size
        place = (exchange.rank - top) % size
        accumulator = _Accumulator(self._call, self._operator, self._mine, self._operand)
        is_leaf = True
        step = 1
        while step < size:
            if place & step:
                partial = self._mine if is_leaf else accumulator.partial()
                routes.send(exchange, partial, (exchange.rank - step) % size)
                return None
            if place + step < size:
                right = routes.recv(exchange, (exchange.rank + step) % size)
                if is_leaf:
                    accumulator.add(self._mine)
                    is_leaf = False
                accumulator.add(right)
            step *= 2
        self._computed = accumulator.result()
        return self._computed[0]
