"""Reductions of whole objects, which an operator combines two at a time.

Operands come in rank order, so an operator need not commute. Small ones meet at one rank, which
folds them; large ones, those of more than eight ranks, and those of a slow operator are combined by
all ranks, so that neither all bytes nor all work land on one. Which of the two follows from the
first messages, that one rank has read and answers, so all ranks take the same way.

A reduction then goes along a binomial tree (mpi4py's trees have the same order of operands:
``src/mpi4py/MPI.src/msgpickle.pxi``, PyMPI_reduce_intra). A scan takes log2(ranks) steps: in step k
each rank combines what it has with what the rank 2**k before it has (W. D. Hillis and G. L. Steele,
"Data parallel algorithms", 1986). What came from lower ranks always stands on the left, fresh from
the wire, so an operator may change it; what this rank has may meanwhile be on its way to another
rank, and stands on the right.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from objcomm._algorithms import routes, topology
from objcomm._algorithms.exchange import Exchange
from objcomm._calls.call import Call
from objcomm._collectives.reduction.operators import Operator
from objcomm._wire.header import Status
from objcomm._wire.message import Message

# Up to so much of each rank's goes to the rank that combines. Scanning arrays of 0.4 MB on 8 ranks
# took 23 ms so, and 43 with all ranks combining; of 4 MB on 4 ranks 39 and 34 (2 cores).
_SMALL_NBYTES = 1 << 20


def _may_meet(exchange: Exchange, operator: Operator) -> bool:
    """Whether one rank folds small operands."""
    return exchange.size <= topology.STAR_MAX_SIZE and not operator.is_slow


class _Combination:
    """This rank's operand, and what it is combined to with others', or the failures among them.

    Attributes:
        prepared: the operand as the operator prepared it.
        obj: a copy of it, if this rank combines, and then what has been combined so far: an
            operator may change what it gets, and the caller, while the call is in flight, what was
            passed in.
        mine: the message of the operand, or of why there is none.
        failed: the messages that tell of failures; once there is one, nothing more is combined.
    """

    def __init__(self, call: Call, operator: Operator, obj: Any, *, is_copied: bool) -> None:
        self.prepared: Any = None
        self.obj: Any = None

        def prepared(obj: Any) -> Any:
            self.prepared = operator.prepare(obj, call.rank)
            if is_copied:
                self.obj = call.copy(self.prepared)
            return self.prepared

        self._call = call
        self.mine = call.message(obj, prepared)
        self.failed = [self.mine] if self.mine.header.status == Status.FAILURE else []
        self._message: Message | None = self.mine

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

    def __init__(self, call: Call, operator: Operator, obj: Any, root: int | None) -> None:
        self._call = call
        self._operator = operator
        self._root = root
        _, children = topology.in_order(call.rank, self._top(call.root), call.exchange.hosts)
        is_copied = call.is_root or bool(children)
        self._own = _Combination(call, operator, obj, is_copied=is_copied)
        self._computed: Message | None = None
        self._result: Any = None

    def run(self, exchange: Exchange) -> Message | None:
        """The traffic: all operands into one message, on ``root`` or, if it is None, everywhere."""
        root = self._root
        hub = routes.HUB if root is None else root
        if _may_meet(exchange, self._operator):
            folded = self._fold_if_small(routes.gather_heads(exchange, self._own.mine, hub))
            answer = folded if root is None else None
            if answer is None:
                answer = self._call.announcement(Status.VALUE if folded else Status.TREE)
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
        own = self._own
        operands = (own.obj if head is own.mine else self._call.decode(head) for head in heads)
        return self._finished(heads, lambda: self._operator.fold(operands, self._call.size))

    def _along_tree(self, exchange: Exchange, top: int) -> Message | None:
        """Up to ``top``: a rank combines its operand with those below it, and sends what that is.

        Ranks count from ``top`` on, so another one than the first changes the operands' order.
        """
        own, operator = self._own, self._operator
        parent, children = topology.in_order(exchange.rank, top, exchange.hosts)
        for child in children:
            message = routes.recv(exchange, child)
            own.take(message, lambda higher: operator.combine(own.obj, higher))
        if parent is not None:
            routes.send(exchange, own.message(), parent)
            return None
        return self._finished(own.failed, lambda: operator.finish(own.obj, self._call.size))

    def _finished(self, operands: list[Message], finish: Callable[[], Any]) -> Message:
        """The result as a message, or the failures among the operands."""

        def made(_: None) -> Any:
            self._result = finish()
            return self._result

        self._computed = self._call.failures(operands) or self._call.message(None, made)
        return self._computed


class Scanning:
    """One scan on this rank; rank i gets the combination of ``i + 1 - first`` operands."""

    def __init__(self, call: Call, operator: Operator, obj: Any, first: int) -> None:
        self._call = call
        self._operator = operator
        self._first = first
        self._own = _Combination(call, operator, obj, is_copied=True)
        self._result: Any = None

    def run(self, exchange: Exchange) -> Message | None:
        """The traffic: the hub's answer for this rank; ``None`` if all ranks have combined."""
        if _may_meet(exchange, self._operator):
            heads = routes.gather(exchange, self._own.mine, routes.HUB, _SMALL_NBYTES)
            answers = None if heads is None else self._answers(heads)
            answer = routes.scatter(exchange, answers, routes.HUB)
            if answer.header.status != Status.TREE:
                return answer
        self._by_all(exchange)
        self._call.confirm()  # a rank that only sends upwards hears of no other's error
        return None

    def value(self, answer: Message | None) -> Any:
        """This rank's result, from the hub's answer if there is one."""
        call, operator, own = self._call, self._operator, self._own
        call.raise_failures(own.failed if answer is None else [answer])
        count = call.rank + 1 - self._first
        if not count:
            return operator.identity
        if answer is None:
            # No callable is called on the first rank, which gets its object back.
            return operator.present(operator.finish(own.obj if call.rank else own.prepared, count))
        return operator.present(self._result if call.rank == routes.HUB else call.decode(answer))

    def _by_all(self, exchange: Exchange) -> None:
        """Combine on every rank; see the module."""
        rank, size, first, own = exchange.rank, exchange.size, self._first, self._own
        if first:
            # Each goes on with the operand of the one before.
            if rank + 1 < size:
                routes.send(exchange, own.mine, rank + 1)
            if rank:
                own.take(routes.recv(exchange, rank - 1), lambda lower: lower)
        step = 1
        while step < size - first and rank >= first:
            if rank + step < size:
                routes.send(exchange, own.message(), rank + step)
            if rank - step >= first:
                message = routes.recv(exchange, rank - step)
                own.take(message, lambda lower: self._operator.combine(lower, own.obj))
            step *= 2

    def _answers(self, heads: list[Message]) -> list[Message]:
        """One for each rank: its result, or alike for all that there is none."""
        answer = self._call.failures(heads)
        if answer is None and any(head.header.nbytes > _SMALL_NBYTES for head in heads):
            answer = self._call.announcement(Status.TREE)
        try:
            return [answer] * len(heads) if answer else self._prefixes(heads)
        except BaseException as error:  # noqa: BLE001  # it travels, and is raised afterwards
            return [self._call.failure(error)] * len(heads)

    def _prefixes(self, heads: list[Message]) -> list[Message]:
        call, operator, combined = self._call, self._operator, self._own.obj
        if not self._first:
            self._result = operator.finish(self._own.prepared, 1)
        messages = [call.announcement(Status.VALUE)]
        for rank in range(1, len(heads)):
            count = rank + 1 - self._first
            if count > 1:
                combined = operator.combine(combined, call.decode(heads[count - 1]))
            message = call.message(count, partial(operator.finish, combined))
            if message.header.status == Status.FAILURE:
                return [message] * len(heads)
            messages.append(message)
            if message.large:  # their memory is on its way, and the operator may change it
                combined = call.copy(combined)
        return messages
