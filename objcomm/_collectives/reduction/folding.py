"""Reductions of whole objects, which an operator combines two at a time.

Operands are combined in rank order, so an operator need not be commutative. If operands are small,
one rank receives and folds them all. Large operands, those of more than eight ranks, and those of
a slow operator are combined by all ranks, which spreads the bytes and the work. One rank chooses
between the two by the first messages and announces its choice, so all ranks do the same.

A reduction by all ranks follows a binomial tree (mpi4py's trees have the same operand order:
``src/mpi4py/MPI.src/msgpickle.pxi``, PyMPI_reduce_intra). A scan takes log2(ranks) steps; in step
k, each rank combines its value with that of the rank 2**k before it (W. D. Hillis and G. L. Steele,
"Data parallel algorithms", 1986). The left argument always comes from lower ranks. In a scan, that
argument was just decoded, so an operator may modify it; this rank's own value, which may still be
on its way to another rank, is on the right.
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

# Operands of up to this size are sent to the rank that combines. A scan of 0.4 MB arrays on 8 ranks
# took 23 ms this way, and 43 ms by all ranks; of 4 MB arrays on 4 ranks, 39 and 34 ms (2 cores).
_SMALL_NBYTES = 1 << 20


def _may_meet(exchange: Exchange, operator: Operator) -> bool:
    """Whether one rank folds small operands."""
    return exchange.size <= topology.STAR_MAX_SIZE and not operator.is_slow


class _Combination:
    """This rank's operand and its combination with others', or the failures among them.

    Attributes:
        prepared: the operand as the operator prepared it.
        obj: if this rank combines, a copy of ``prepared``, later the combination so far. It is a
            copy because an operator may modify its argument, and the caller may modify what it
            passed in while the call is running.
        mine: the message with the operand, or with the reason why there is none.
        failed: the messages that report failures. Once there is one, nothing more is combined.
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
        """Combine with a received message; an error becomes this rank's failure."""
        if message.header.status == Status.FAILURE:
            self.failed.append(message)
        if not self.failed:
            try:
                self.obj = combine(self._call.decode(message))
            except BaseException as error:  # noqa: BLE001  # sent to the others, and raised afterwards
                self.failed.append(self._call.failure(error))
        self._message = None

    def message(self) -> Message:
        """Return the combination so far, as a message for another rank."""
        if self._message is None:
            self._message = self._call.failures(self.failed) or self._call.message(self.obj)
        return self._message


class Folding:
    """One reduction on this rank, with the result if it is computed here."""

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
        """Run the traffic; the combined message goes to ``root``, or to all ranks if it is None."""
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
        """Return the result; on the rank that computed it, the same object that was sent."""
        self._call.raise_failures(() if message is None else [message])
        if message is None:
            return None
        is_own = message is self._computed
        return self._operator.present(self._result if is_own else self._call.decode(message))

    def _top(self, root: int) -> int:
        """Return the root of the tree; a commutative operator lets it be ``root`` itself."""
        return root if self._operator.is_commutative else routes.HUB

    def _fold_if_small(self, heads: list[Message] | None) -> Message | None:
        """Fold here if this rank has all operands, and each fits into its first message."""
        if heads is None or not all(head.is_all_head for head in heads):
            return None
        own = self._own
        operands = (own.obj if head is own.mine else self._call.decode(head) for head in heads)
        return self._finished(heads, lambda: self._operator.fold(operands, self._call.size))

    def _along_tree(self, exchange: Exchange, top: int) -> Message | None:
        """Combine upward to ``top``: each rank adds its children's operands and sends the result.

        Ranks are counted from ``top``, so a ``top`` other than rank 0 changes the operand order.
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
        """Return the result as a message, or the failures among the operands."""

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
        """Run the traffic; return the hub's answer, or ``None`` if all ranks have combined."""
        if _may_meet(exchange, self._operator):
            heads = routes.gather(exchange, self._own.mine, routes.HUB, _SMALL_NBYTES)
            answers = None if heads is None else self._answers(heads)
            answer = routes.scatter(exchange, answers, routes.HUB)
            if answer.header.status != Status.TREE:
                return answer
        self._by_all(exchange)
        self._call.confirm()  # a rank that only sends upward would miss others' errors
        return None

    def value(self, answer: Message | None) -> Any:
        """Return this rank's result, from the hub's answer if there is one."""
        call, operator, own = self._call, self._operator, self._own
        call.raise_failures(own.failed if answer is None else [answer])
        count = call.rank + 1 - self._first
        if not count:
            return operator.identity
        if answer is None:
            # The first rank calls no callable, and gets its own object back.
            return operator.present(operator.finish(own.obj if call.rank else own.prepared, count))
        return operator.present(self._result if call.rank == routes.HUB else call.decode(answer))

    def _by_all(self, exchange: Exchange) -> None:
        """Combine on every rank; see the module docstring."""
        rank, size, first, own = exchange.rank, exchange.size, self._first, self._own
        if first:
            # Each rank continues with the operand of the previous one.
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
        """Return one answer per rank: its result, or the same message for all if there is none."""
        answer = self._call.failures(heads)
        if answer is None and any(head.header.nbytes > _SMALL_NBYTES for head in heads):
            answer = self._call.announcement(Status.TREE)
        try:
            return [answer] * len(heads) if answer else self._prefixes(heads)
        except BaseException as error:  # noqa: BLE001  # sent to the others, and raised afterwards
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
            if message.large:  # its memory is still being sent, and the operator may modify it
                combined = call.copy(combined)
        return messages
