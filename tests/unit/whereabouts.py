"""Where ranks are, made up, and what one of them finds out about its wait."""

from typing import Any

from objcomm._failures.deadlock import (
    MEETING,
    Deadlock,
    LaneWait,
    Step,
    WaitSnapshot,
    find_deadlock,
)
from objcomm._wire.header import Operation

MAIN, OTHER = 1, 2


def step(sequence: int, operation: int = Operation.BARRIER, *, root: int = -1) -> Step:
    return Step(sequence, operation, root, 0, f"train.py:{sequence}")


def lane(
    group: str = "world",
    *past: Step,
    awaits: int = -1,
    thread: int = MAIN,
    number: int = 0,
    nonce: str | None = None,
    since: float = 0.0,
) -> LaneWait:
    """A lane whose latest call is under way if it awaits somebody."""
    now = past[-1] if past and awaits >= 0 else None
    next_sequence = past[-1].sequence + 1 if past else 0
    name = group if nonce is None else nonce
    return LaneWait(
        group, name, number, thread, thread, next_sequence, -1, now, awaits, since, 1.0, past
    )


def meeting(group: str, *, awaits: int, thread: int = MAIN) -> LaneWait:
    now = Step(MEETING, Operation.NONE, -1, 0, "train.py:1", "barrier")
    return LaneWait(group, "", 0, thread, thread, 0, -1, now, awaits, 0.0, 1.0, ())


def conflict_of(ranks: dict[int, list[LaneWait]], start: int = 0) -> Deadlock | None:
    """What rank ``start`` finds out about its first lane; ranks that are not listed are silent."""
    known = {rank: WaitSnapshot(1, MAIN, tuple(lanes)) for rank, lanes in ranks.items()}
    return find_deadlock(start, known[start], ranks[start][0], known.get)


def pair(
    *ranks: int,
    waits: int = Operation.NONE,
    awaits: int = -1,
    sent: int = 0,
    taken: int = 0,
    waiter: int = MAIN,
    since: float = 0.0,
) -> LaneWait:
    """The lane of two ranks; ``waits`` is the operation that is under way, if any is."""
    name = f"world, ranks {min(ranks)}-{max(ranks)}"
    now = None if waits == Operation.NONE else step(0, waits)
    who = waiter if now is not None else 0
    return LaneWait(name, name, 0, OTHER, who, sent, taken, now, awaits, since, 1.0, ())


def recv(mine: int, src: int, **fields: Any) -> LaneWait:
    return pair(mine, src, waits=Operation.RECV, awaits=src, **fields)


def send(mine: int, dst: int, **fields: Any) -> LaneWait:
    return pair(mine, dst, waits=Operation.SEND, awaits=dst, **fields)


def conflict_among(
    ranks: dict[int, list[LaneWait]], start: int = 0, *, threaded: tuple[int, ...] = ()
) -> Deadlock | None:
    """As ``conflict_of``; processes have one thread but for those that are listed."""
    known = {
        rank: WaitSnapshot(1, MAIN, tuple(lanes), is_single=rank not in threaded)
        for rank, lanes in ranks.items()
    }
    return find_deadlock(start, known[start], ranks[start][0], known.get)
