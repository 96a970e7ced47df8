"""Random programs, synchronous or asynchronous, give the results of a model in one process.

Every rank draws the same program and knows what each rank contributes to each step, so it can
compute what it must get. Each rank draws for itself the order in which it waits for its works.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, Work, metrics
from tests.cases import case
from tests.group.helpers import assert_group_works, subgroup
from tests.ranks import ranks
from tests.same import assert_same
from tests.workers import here

COLLECTIVES = [
    "broadcast", "gather", "all_gather", "scatter", "reduce", "all_reduce", "barrier",
    "gather_scalar", "all_gather_scalar", "reduce_and_broadcast",
    "all_to_all", "scan", "exscan", "reduce_scatter",
]  # fmt: skip
MESSAGES = ["message", "message of any rank", "message to itself", "sendrecv"]
LANES = ["", "", "side", "other side"]
# Small, around the edges of the first message, and large.
SIZES = (0, 1, 100, 32_400, 32_768, 33_000, 65_536, 200_000, 1_000_001)
_MOST_IN_FLIGHT = 12

Groups = dict[tuple[int, ...], Any]  # by their members


@dataclass
class Step:
    """One step of a program, the same on all ranks.

    Attributes:
        name: an operation.
        members: global ranks of its group.
        lane: the lane's name.
        are_async: for each member, whether it calls asynchronously.
        root: group rank of the source or destination; for a message, of the sender.
        peer: group rank of a message's receiver.
        nbytes: what each member contributes.
        failing: the member whose contribution can't be sent.
        codec: the codec's name.
        turn: how many steps came before it.
    """

    name: str
    members: tuple[int, ...]
    lane: str
    are_async: list[bool]
    root: int
    peer: int
    nbytes: list[int]
    failing: int | None
    codec: str
    turn: int

    @property
    def wants(self) -> list[dict[str, Any]]:
        """What each member contributes."""
        return [self._content(rank, nbytes) for rank, nbytes in enumerate(self.nbytes)]

    def _content(self, rank: int, nbytes: int) -> dict[str, Any]:
        fill = (rank * 31 + self.turn) % 251
        return {
            "raw": bytes([fill]) * nbytes,
            "tensor": torch.full((nbytes // 8,), fill, dtype=torch.int64),
            "from": (rank, self.turn),
        }


def draw(chance: random.Random, turn: int, groups: Groups, *, is_async: bool) -> Step:
    """Draw the next step; no member calls asynchronously if not ``is_async``."""
    members = chance.choice(list(groups))
    size = len(members)
    is_message = chance.random() < 0.35
    root = chance.randrange(size)
    all_alike = chance.choice([True, False, None]) if is_async else False
    return Step(
        name=chance.choice(MESSAGES if is_message else COLLECTIVES),
        members=members,
        lane=chance.choice(LANES),
        are_async=[chance.random() < 0.5 if all_alike is None else all_alike for _ in range(size)],
        root=root,
        peer=(root + chance.randrange(1, size)) % size,
        nbytes=[chance.choice(SIZES[:-1] if is_async else SIZES) for _ in range(size)],
        failing=chance.choice([None] * (5 if is_async else 1) + [chance.randrange(size)]),
        codec=chance.choice(["pickle", "msgpack"]),
        turn=turn,
    )


# Calls, and what they must return if they fail nowhere

Call = tuple[Callable[..., Any], Any]


def collective(step: Step, rank: int, group: Any) -> Call:
    wants: Any = step.wants
    size, root, failing = len(step.members), step.root, step.failing
    scalars: Any = [each * 1000 + step.turn for each in range(size)]
    mine: Any = threading.Lock() if rank == failing else wants[rank]
    scalar: Any = [] if rank == failing else scalars[rank]
    chunks: Any = list(wants)
    if failing not in {None, root}:  # the source does not encode its own object
        chunks[failing] = threading.Lock()
    options: dict[str, Any] = {"group": group, "codec": step.codec}
    dst, src = {"group_dst": root}, {"group_src": root}
    # What only the root gives or receives.
    chunks_there, wants_there, scalars_there = chunks, wants, scalars
    if rank != root:
        chunks_there = wants_there = scalars_there = None
    calls: dict[str, Call] = {
        "broadcast": (partial(objcomm.broadcast, mine, **src, **options), wants[root]),
        "gather": (partial(objcomm.gather, mine, **dst, **options), wants_there),
        "all_gather": (partial(objcomm.all_gather, mine, **options), wants),
        "scatter": (partial(objcomm.scatter, chunks_there, **src, **options), wants[rank]),
        "reduce": (partial(objcomm.reduce, [mine], add, **dst, **options), wants_there),
        "all_reduce": (partial(objcomm.all_reduce, [mine], add, **options), wants),
        "barrier": (partial(objcomm.barrier, f"turn {step.turn}", group=group), None),
        "gather_scalar": (
            partial(objcomm.gather_scalar, scalar, group=group, **dst),
            scalars_there,
        ),
        "all_gather_scalar": (partial(metrics.all_gather_scalar, scalar, group=group), scalars),
        "reduce_and_broadcast": (
            partial(objcomm.reduce_and_broadcast, lambda: mine, size_and_first, **options),
            [size, wants[0]],
        ),
        "all_to_all": (partial(objcomm.all_to_all, [mine] * size, **options), wants),
        "scan": (partial(objcomm.scan, [mine], add, **options), wants[: rank + 1]),
        "exscan": (partial(objcomm.exscan, [mine], add, **options), wants[:rank] or None),
        "reduce_scatter": (partial(objcomm.reduce_scatter, [[mine]] * size, add, **options), wants),
    }
    return calls[step.name]


def add(left: list[Any], right: list[Any]) -> list[Any]:
    return left + right


def size_and_first(objs: list[Any]) -> list[Any]:
    return [len(objs), objs[0]]


def messages(step: Step, rank: int, group: Any) -> Iterator[Call]:
    wants, size = step.wants, len(step.members)
    # Messages with one tag arrive in order; a receive from any rank needs its own tag.
    tag = step.turn % 3 if step.name == "message" else 1000 + step.turn
    options: dict[str, Any] = {"group": group, "tag": tag}
    send = partial(objcomm.send, wants[rank], codec=step.codec, **options)
    recv = partial(objcomm.recv, **options)
    dst, src = (rank + 1) % size, (rank - 1) % size
    if step.name == "message to itself":
        yield partial(send, group_dst=rank), None
        yield partial(recv, group_src=rank), wants[rank]
    elif step.name == "sendrecv" and step.are_async[rank]:
        yield partial(send, group_dst=dst), None
        yield partial(recv, group_src=src), wants[src]
    elif step.name == "sendrecv":
        both = partial(objcomm.sendrecv, wants[rank], group_dst=dst, group_src=src, **options)
        yield both, wants[src]
    elif rank == step.root:
        yield partial(send, group_dst=step.peer), None
    elif rank == step.peer:
        whose = {} if step.name == "message of any rank" else {"group_src": step.root}
        yield partial(recv, **whose), wants[step.root]


# Results


def fails(step: Step, rank: int) -> bool | None:
    """Return whether a failure must reach a member; None if it may or may not."""
    failing, root = step.failing, step.root
    if failing is None or step.name in {"barrier", *MESSAGES}:
        return False
    if step.name == "broadcast":
        return failing == root
    if step.name in {"gather", "reduce", "gather_scalar"}:
        return rank in (failing, root)
    if step.name == "scatter":
        return None if failing != root else False
    if step.name in {"all_to_all", "scan", "exscan", "reduce_scatter"}:
        return None
    return True


def judge(step: Step, rank: int, want: Any, take: Callable[[], Any]) -> None:
    """Check what a call returns, or whom its failure names."""
    must_fail = fails(step, rank)
    with case(step):
        error = None
        try:
            got = take()
        except CollectiveError as raised:
            error = raised
        if error is not None:
            assert must_fail is not False
            assert set(error.failures) <= {step.failing, step.root}
            assert "lock" in str(error) or step.name.endswith("scalar")
        else:
            assert must_fail is not True
            assert_same(got, want)


@dataclass
class Running:
    """A program on this rank."""

    groups: Groups
    own: random.Random
    in_flight: list[tuple[Work[Any], partial[None]]] = field(default_factory=list)

    def take_step(self, step: Step) -> None:
        """Start a step, and finish it if this rank calls synchronously."""
        if here().rank in step.members:
            rank, group = step.members.index(here().rank), self.groups[step.members]
            is_message = step.name in MESSAGES
            calls = messages(step, rank, group) if is_message else [collective(step, rank, group)]
            for call, want in calls:
                check = partial(judge, step, rank, want)
                with objcomm.lane(step.lane) if step.lane else contextlib.nullcontext():
                    if step.are_async[rank]:
                        self.in_flight.append((call(async_op=True), check))
                    else:
                        check(call)
        while self.in_flight and (len(self.in_flight) > _MOST_IN_FLIGHT or self.own.random() < 0.3):
            self.wait_for_one()

    def wait_for_one(self) -> None:
        """Wait for an outstanding work, in one of several ways."""
        work, check = self.in_flight.pop(self.own.randrange(len(self.in_flight)))
        if self.own.random() < 0.3:
            list(objcomm.as_completed([work]))
            assert work.done()
            check(work.result)
        else:
            check(work.wait)
        assert work.done()


@ranks(2, 3, 4)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))]
)
def test_any_program_returns_what_the_model_returns(seed: int, *, is_async: bool) -> None:
    size = here().world_size
    world = tuple(range(size))
    upper = world[1:] if size > 2 else world
    with subgroup(*upper) as group:
        groups: Groups = {upper: group, world: None}
        chance, own = random.Random(seed), random.Random(f"{seed} {here().rank}")
        running = Running(groups, own)
        for turn in range(80):
            running.take_step(draw(chance, turn, groups, is_async=is_async))
            if chance.random() < 0.1:  # the user's own collectives on the same group
                numbers = torch.ones(100)
                dist.all_reduce(numbers)
                assert numbers.sum().item() == 100 * size
        while running.in_flight:
            running.wait_for_one()
        objcomm.barrier()
    assert_group_works()
