"""The table of operations: how to call each, its result, and its possible faults."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any

import objcomm
from tests.soak.turn import MARK, InjectedError, Party, Turn


class Pattern(Enum):
    """Which ranks wait for whose objects."""

    ONE_TO_ALL = 1
    ONE_TO_EACH = 2
    ALL_TO_ONE = 3
    ALL_TO_ALL = 4
    THROUGH_FIRST = 5  # all send to the group's first rank, and it returns the result to all


#: What a rank must get from a turn without a fault.
Result = Callable[[Turn, int], Any]


@dataclass(frozen=True)
class Operation:
    """One row of the table.

    Attributes:
        call: runs the turn's operation on this rank.
        result: the result of a rank without a fault.
        pattern: which ranks wait for which.
        faults: its possible faults.
        can_confirm: whether it takes ``confirm=``.
    """

    call: Callable[[Turn, Party], Any]
    result: Result
    pattern: Pattern
    faults: tuple[str, ...] = ()
    can_confirm: bool = True


def _options(turn: Turn, party: Party) -> dict[str, Any]:
    return {"group": party.group, "codec": turn.codecs[party.rank], "confirm": turn.confirm}


def _broadcast(turn: Turn, party: Party) -> Any:
    mine = turn.object_of(party.rank) if party.rank == turn.root else "ignored"
    return objcomm.broadcast(mine, group_src=turn.named_root, **_options(turn, party))


def _of_root(turn: Turn, _rank: int) -> Any:
    return turn.object_of(turn.root)


def _gather(turn: Turn, party: Party) -> Any:
    mine = turn.object_of(party.rank)
    return objcomm.gather(mine, group_dst=turn.named_root, **_options(turn, party))


def _all_gather(turn: Turn, party: Party) -> Any:
    return objcomm.all_gather(turn.object_of(party.rank), **_options(turn, party))


def _of_all(turn: Turn, _rank: int) -> Any:
    return [turn.object_of(rank) for rank in range(turn.size)]


def _at_root(result: Result) -> Result:
    return lambda turn, rank: result(turn, rank) if rank == turn.root else None


def chunk_of(turn: Turn, rank: int) -> Any:
    """Return what a scatter's source sends to one rank; the victim gets the faulty object."""
    return turn._replace(culprit=turn.victim).object_of(rank)


def _scatter(turn: Turn, party: Party) -> Any:
    chunks = None
    if party.rank == turn.root:
        chunks = [chunk_of(turn, rank) for rank in range(turn.size)]
        if turn.fault == "wrong length":
            chunks = [*chunks, MARK] if turn.seed % 2 else chunks[1:]
    return objcomm.scatter(chunks, group_src=turn.named_root, **_options(turn, party))


def _joiner(turn: Turn) -> Callable[[Any, Any], Any]:
    def join(left: list[Any], right: list[Any]) -> list[Any]:
        # The culprit's operand is first on the right exactly once, in a fold and in a tree.
        if turn.fault == "raising operator" and right[0][0] == turn.culprit:
            raise InjectedError(MARK)
        left.extend(right)  # an operator may change its left side, but no rank's argument
        return left

    return join


def _operand(turn: Turn, rank: int) -> Any:
    return [(rank, turn.object_of(rank))]


def _joining(name: str) -> Callable[[Turn, Party], Any]:
    """Return the call of an operation that joins one operand of each rank."""

    def call(turn: Turn, party: Party) -> Any:
        operand, options = _operand(turn, party.rank), _options(turn, party)
        if name == "reduce":
            options["group_dst"] = turn.named_root
        got = getattr(objcomm, name)(operand, _joiner(turn), **options)
        assert len(operand) == 1
        return got

    return call


def _joined(turn: Turn, _rank: int) -> Any:
    return [pair for rank in range(turn.size) for pair in _operand(turn, rank)]


def _all_to_all(turn: Turn, party: Party) -> Any:
    obj = turn.object_of(party.rank)
    return objcomm.all_to_all([[obj, to] for to in range(turn.size)], **_options(turn, party))


def _of_all_for(turn: Turn, rank: int) -> Any:
    return [[obj, rank] for obj in _of_all(turn, rank)]


def _reduce_scatter(turn: Turn, party: Party) -> Any:
    operands = [[*_operand(turn, party.rank), to] for to in range(turn.size)]
    got = objcomm.reduce_scatter(operands, _joiner(turn), **_options(turn, party))
    assert [len(operand) for operand in operands] == [2] * turn.size
    return got


def _joined_for(turn: Turn, rank: int) -> Any:
    return [member for pair in _joined(turn, rank) for member in (pair, rank)]


_NAMED: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add,
    "prod": operator.mul,
    "min": min,
    "max": max,
}


def _name_of(turn: Turn) -> Any:
    return list(_NAMED)[turn.seed % len(_NAMED)]


def _all_reduce_named(turn: Turn, party: Party) -> Any:
    mine = turn.number_of(party.rank)
    return objcomm.all_reduce(mine, _name_of(turn), **_options(turn, party))


def _reduced(turn: Turn, _rank: int) -> Any:
    return reduce(_NAMED[_name_of(turn)], map(turn.number_of, range(turn.size)))


def _gather_scalar(turn: Turn, party: Party) -> Any:
    mine = turn.scalar_of(party.rank)
    return objcomm.gather_scalar(mine, group_dst=turn.named_root, group=party.group)


def _all_gather_scalar(turn: Turn, party: Party) -> Any:
    return objcomm.metrics.all_gather_scalar(turn.scalar_of(party.rank), group=party.group)


def _scalars(turn: Turn, _rank: int) -> Any:
    return [turn.scalar_of(rank) for rank in range(turn.size)]


def _reduce_and_broadcast(turn: Turn, party: Party) -> Any:
    def contribute() -> Any:
        if turn.fault == "raising fn1" and party.rank == turn.culprit:
            raise InjectedError(MARK)
        return turn.object_of(party.rank)

    def combine(objs: list[Any]) -> Any:
        if turn.fault == "raising fn2":
            raise InjectedError(MARK)
        return {"all": objs, "count": len(objs)}

    codec = turn.codecs[party.rank]
    return objcomm.reduce_and_broadcast(contribute, combine, group=party.group, codec=codec)


def _counted(turn: Turn, rank: int) -> Any:
    return {"all": _of_all(turn, rank), "count": turn.size}


def _sendrecv(turn: Turn, party: Party) -> Any:
    rank, size = party.rank, turn.size
    return objcomm.sendrecv(
        turn.object_of(rank),
        group_dst=(rank + 1) % size,
        group_src=(rank - 1) % size,
        group=party.group,
        codec=turn.codecs[rank],
        tag=turn.seed % 2**32,
    )


def _of_neighbor(turn: Turn, rank: int) -> Any:
    return turn.object_of((rank - 1) % turn.size)


def _recv_all(count: int, tag: int, group: Any) -> list[Any]:
    return [objcomm.recv(group=group, tag=tag) for _ in range(count)]


def _recv_all_that_are_probed(count: int, tag: int, group: Any) -> list[Any]:
    received = []
    for _ in range(count):
        found = objcomm.probe(tag=tag, group=group)
        received.append(objcomm.recv(group_src=found.group_src, tag=tag, group=group))
    return received


def _recv_all_in_flight(count: int, tag: int, group: Any) -> list[Any]:
    works = [objcomm.irecv(tag=tag, group=group) for _ in range(count)]
    return [work.wait() for work in reversed(works)]


def _recv_all_that_are_held(count: int, tag: int, group: Any) -> list[Any]:
    held = [objcomm.mprobe(tag=tag, group=group) for _ in range(count)]
    return [message.recv() for message in reversed(held)]


_RECEIVING = [_recv_all, _recv_all_that_are_probed, _recv_all_in_flight, _recv_all_that_are_held]


def _send_to_root(turn: Turn, party: Party) -> Any:
    """Send from all ranks to the root, which receives in the order of arrival."""
    rank, root, group = party.rank, turn.root, party.group
    tag = turn.seed % 2**32  # a rank that has sent may be in the next turn
    if rank != root:
        mine = (rank, turn.object_of(rank))
        codec = turn.codecs[rank]
        work = objcomm.isend(mine, group_dst=root, group=group, codec=codec, tag=tag)
        work.wait()
        return None
    received = _RECEIVING[turn.seed % len(_RECEIVING)](turn.size - 1, tag, group)
    by_rank = {**dict(received), rank: turn.object_of(rank)}
    return [by_rank[each] for each in range(turn.size)]


def world_colors(rank: int) -> tuple[int, int]:
    """Return the rank's colors in the two ways in which groups are split."""
    return rank % 2, (rank >> 1) % 2


def _color(turn: Turn, rank: int) -> int:
    return world_colors(rank)[turn.seed % 2]


def _split(turn: Turn, party: Party) -> Any:
    """All-gather among the ranks of one color."""
    group = party.group
    if not turn.group.number:  # the parts of other groups would outlive them
        group = objcomm.split(_color(turn, party.rank), group=group)
    mine = (party.rank, turn.object_of(party.rank))
    gathered = dict(objcomm.all_gather(mine, group=group, codec=turn.codecs[party.rank]))
    wanted = _color(turn, party.rank)
    return [gathered[rank] for rank in sorted(gathered) if _color(turn, rank) == wanted]


def _of_color(turn: Turn, rank: int) -> Any:
    wanted = _color(turn, rank)
    return [turn.object_of(each) for each in range(turn.size) if _color(turn, each) == wanted]


def _all_gather_in_flight(turn: Turn, party: Party) -> Any:
    """Make two concurrent calls; half of the ranks wait for the second one first."""
    mine, options = turn.object_of(party.rank), _options(turn, party)
    plain = objcomm.all_gather(mine, async_op=True, **options)
    marked = objcomm.all_gather((turn.seed, mine), async_op=True, **options)
    for work in (plain, marked) if party.rank % 2 else (marked, plain):
        work.wait()
    assert [seed for seed, _ in marked.result()] == [turn.seed] * turn.size
    return plain.result()


_OBJECTS = ("unencodable", "undecodable")
_ROOTED = (*_OBJECTS, "no such rank")
_OPERATORS = ("unencodable", "raising operator")
_SCANNED = ("unencodable",)  # which ranks combine an operand depends on all sizes
_SCALAR = ("no scalar", "no such rank")
_CALLBACKS = (*_OBJECTS, "raising fn1", "raising fn2")

#: Every operation by name; the plan draws from it. To add an operation, add a line here.
OPERATIONS = {
    "broadcast": Operation(_broadcast, _of_root, Pattern.ONE_TO_ALL, _ROOTED),
    "gather": Operation(_gather, _at_root(_of_all), Pattern.ALL_TO_ONE, _ROOTED),
    "all_gather": Operation(_all_gather, _of_all, Pattern.ALL_TO_ALL, _OBJECTS),
    "scatter": Operation(_scatter, chunk_of, Pattern.ONE_TO_EACH, (*_ROOTED, "wrong length")),
    "reduce": Operation(_joining("reduce"), _at_root(_joined), Pattern.ALL_TO_ONE, _OPERATORS),
    "all_reduce": Operation(_joining("all_reduce"), _joined, Pattern.THROUGH_FIRST, _OPERATORS),
    "all_to_all": Operation(_all_to_all, _of_all_for, Pattern.ALL_TO_ALL, _OBJECTS),
    "reduce_scatter": Operation(_reduce_scatter, _joined_for, Pattern.ALL_TO_ALL, _SCANNED),
    "scan": Operation(
        _joining("scan"),
        lambda turn, rank: _joined(turn, rank)[: rank + 1],
        Pattern.ALL_TO_ALL,
        _SCANNED,
    ),
    "exscan": Operation(
        _joining("exscan"),
        lambda turn, rank: _joined(turn, rank)[:rank] or None,
        Pattern.ALL_TO_ALL,
        _SCANNED,
    ),
    "all_reduce of a named operator": Operation(_all_reduce_named, _reduced, Pattern.THROUGH_FIRST),
    "gather_scalar": Operation(
        _gather_scalar, _at_root(_scalars), Pattern.ALL_TO_ONE, _SCALAR, can_confirm=False
    ),
    "all_gather_scalar": Operation(
        _all_gather_scalar, _scalars, Pattern.ALL_TO_ALL, _SCALAR[:1], can_confirm=False
    ),
    "reduce_and_broadcast": Operation(
        _reduce_and_broadcast, _counted, Pattern.THROUGH_FIRST, _CALLBACKS, can_confirm=False
    ),
    "sendrecv": Operation(_sendrecv, _of_neighbor, Pattern.ALL_TO_ALL, can_confirm=False),
    "send to the root": Operation(
        _send_to_root, _at_root(_of_all), Pattern.ALL_TO_ONE, can_confirm=False
    ),
    "split": Operation(_split, _of_color, Pattern.ALL_TO_ALL, can_confirm=False),
    "all_gather in flight": Operation(_all_gather_in_flight, _of_all, Pattern.ALL_TO_ALL),
    "barrier": Operation(
        lambda turn, party: objcomm.barrier(f"barrier {turn.seed}", group=party.group),
        lambda _turn, _rank: None,
        Pattern.ALL_TO_ALL,
        can_confirm=False,
    ),
}
