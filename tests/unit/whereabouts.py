"""Made-up positions of ranks, and what one rank finds out about its wait."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from objcomm._failures import losses
from objcomm._failures.deadlock import (
    MEETING,
    Deadlock,
    LaneWait,
    Step,
    WaitSnapshot,
    find_deadlock,
)
from objcomm._failures.liveness import Processes
from objcomm._failures.mesh import Mesh
from objcomm._observe.history import History
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
    """A lane whose latest call is in progress if it awaits a rank."""
    now = past[-1] if past and awaits >= 0 else None
    next_sequence = past[-1].sequence + 1 if past else 0
    name = group if nonce is None else nonce
    return LaneWait(
        group, name, number, thread, thread, next_sequence, -1, now, awaits, since, 1.0, past
    )


def meeting(group: str, *, awaits: int, thread: int = MAIN) -> LaneWait:
    now = Step(MEETING, Operation.NONE, -1, 0, "train.py:1", "barrier")
    return LaneWait(group, "", 0, thread, thread, 0, -1, now, awaits, 0.0, 1.0, ())


def conflict_of(
    ranks: dict[int, list[LaneWait]],
    start: int = 0,
    *,
    threaded: Collection[int] | None = None,
    reported: dict[int, Deadlock] | None = None,
) -> Deadlock | None:
    """Return what a rank finds out about its first lane; ranks not listed are silent.

    Args:
        ranks: the lanes of each rank.
        start: the rank that searches.
        threaded: ranks whose processes have several threads; all of them if None.
        reported: by rank, a deadlock that it was part of and has published.
    """
    deadlocks = {rank: (deadlock,) for rank, deadlock in (reported or {}).items()}
    singles = ranks.keys() - (ranks if threaded is None else threaded)
    known = {
        rank: WaitSnapshot(1, MAIN, tuple(lanes), deadlocks.get(rank, ()), rank in singles)
        for rank, lanes in ranks.items()
    }
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
    """The lane of two ranks; ``waits`` is the operation in progress, if any."""
    name = f"world, ranks {min(ranks)}-{max(ranks)}"
    now = None if waits == Operation.NONE else step(0, waits)
    who = waiter if now is not None else 0
    return LaneWait(name, name, 0, OTHER, who, sent, taken, now, awaits, since, 1.0, ())


def recv(mine: int, src: int, **fields: Any) -> LaneWait:
    return pair(mine, src, waits=Operation.RECV, awaits=src, **fields)


def send(mine: int, dst: int, **fields: Any) -> LaneWait:
    return pair(mine, dst, waits=Operation.SEND, awaits=dst, **fields)


def mesh_like(*ranks: int, others: tuple[int, ...] = (0,), **facts: Any) -> Any:
    """Return the parts of a mesh of these ranks that are read."""
    thread = {"processes": Processes(), "is_cut_off": lambda _: False, "submit": lambda _: None}
    made: dict[str, Any] = dict.fromkeys(("verdict", "whole", "link"))
    made |= {"name": "", "nonce": "", "number": 0, "lanes": {}, "is_world": False}
    made["blamed_by"] = lambda _: ()
    made |= {"ranks": ranks, "others": others, "members": tuple(range(len(ranks)))}
    return SimpleNamespace(**made | {"board_thread": SimpleNamespace(**thread)} | facts)


def board_like(**answers: Any) -> Any:
    """Return the parts of rank 1's board that are read."""
    made: dict[str, Any] = {"rank": 1, "ask": lambda: 1, "publish": lambda snapshot: snapshot}
    made |= dict.fromkeys(("look", "learn", "publish_deadlock"), lambda _: None)
    return SimpleNamespace(**made | answers)


def lane_like(**facts: Any) -> Any:
    """Return the parts of a lane that are read."""
    made: dict[str, Any] = {"number": 0, "waits": list, "has_waiting": lambda _: True}
    return SimpleNamespace(**made | {"order": None} | facts)


def mesh_that_has_met(rank: int, members: tuple[int, ...], board_thread: Any) -> Mesh:
    """Return a real mesh of a world."""
    mesh = Mesh(
        name="world",
        is_world=True,
        ranks=members,
        rank=rank,
        history=History(),
        board_thread=board_thread,
        members=members,
        whole=None,
        is_destroyed=lambda: False,
        end_unconnected=losses.end_unconnected,
    )
    mesh._meeting.nonce = "n"  # noqa: SLF001  # as after the ranks have met
    return mesh
