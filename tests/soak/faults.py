"""The faults that a turn can have, and the result that each rank must get."""

import random
from collections.abc import Callable
from operator import attrgetter

import objcomm
from objcomm import CollectiveError, DecodeError, UsageError
from objcomm._wire.header import WINDOW_NBYTES
from tests.soak.operations import OPERATIONS, Operation, Pattern
from tests.soak.turn import MARK, Expected, Turn

_FROM_ONE = (Pattern.ONE_TO_ALL, Pattern.ONE_TO_EACH)


def with_fault(turn: Turn, fault: str, chance: random.Random) -> Turn:
    """Return the same turn with a fault, on ranks where it will show."""
    pattern = OPERATIONS[turn.operation].pattern
    culprit = turn.root if pattern in _FROM_ONE else chance.randrange(turn.size)
    victim = -1
    if fault in {"raising operator", "undecodable"} and pattern not in _FROM_ONE:
        # The first rank's operand is never on the right, and its own is not sent.
        culprit = chance.randrange(1, turn.size)
        victim = 0 if pattern is Pattern.THROUGH_FIRST else chance.randrange(culprit)
        if pattern is Pattern.ALL_TO_ONE and fault == "undecodable":
            victim = turn.root
            culprit = (turn.root + culprit) % turn.size
    elif fault in {"undecodable", "unencodable"}:
        victim = (turn.root + chance.randrange(1, turn.size)) % turn.size
    codecs = ("pickle",) * turn.size if fault == "undecodable" else turn.codecs
    return turn._replace(fault=fault, culprit=culprit, victim=victim, codecs=codecs)


def expected(turn: Turn, rank: int) -> Expected:
    """Return the expected result of a rank."""
    operation = OPERATIONS[turn.operation]
    if turn.fault == "no such rank":
        return Expected(error=UsageError, text=f"={turn.size} is not in this group")
    if turn.fault == "undecodable":
        return _where_one_cannot_decode(turn, operation, rank)
    if not turn.fault:
        return Expected(operation.result(turn, rank))
    blame, text = FAULTS[turn.fault]
    failed = blame(turn)
    is_one_way = operation.pattern is Pattern.ALL_TO_ONE and not turn.confirm
    if is_one_way and rank not in {turn.root, failed}:
        return Expected()
    return Expected(error=CollectiveError, failed=failed, text=text)


def _where_one_cannot_decode(turn: Turn, operation: Operation, rank: int) -> Expected:
    text = "cannot be rebuilt on rank"
    if turn.confirm or operation.pattern is Pattern.THROUGH_FIRST:
        return Expected(error=CollectiveError, failed=turn.victim, text=text)
    if rank == turn.victim:
        return Expected(error=DecodeError, text=text)
    return Expected(operation.result(turn, rank))


def _combining_rank(turn: Turn) -> int:
    """Return the rank that combines the culprit's operand with those of lower ranks."""
    operands = [[(rank, turn.object_of(rank))] for rank in range(turn.size)]
    sizes = [
        objcomm.to_tensor(operand, codec=codec).numel()
        for operand, codec in zip(operands, turn.codecs, strict=True)
    ]
    if max(sizes) <= WINDOW_NBYTES:  # all fit into first messages: one rank folds them
        return turn.root if turn.operation == "reduce" else 0
    return turn.culprit - (turn.culprit & -turn.culprit)  # the parent in a binomial tree


#: The rank that the error blames, and its text. Two more faults raise no CollectiveError.
FAULTS: dict[str, tuple[Callable[[Turn], int], str]] = {
    "unencodable": (attrgetter("culprit"), "lock"),
    "wrong length": (attrgetter("root"), "one object for each"),
    "raising operator": (_combining_rank, MARK),
    "raising fn1": (attrgetter("culprit"), MARK),
    "raising fn2": (lambda _turn: 0, MARK),
    "no scalar": (attrgetter("culprit"), "is not a scalar"),
}
