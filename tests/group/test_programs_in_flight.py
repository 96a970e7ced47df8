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
from objcomm import CollectiveError, Work
from tests.group.contributions import SIZES, content, same
from tests.group.helpers import assert_group_works, subgroup
from tests.ranks import ranks
from tests.workers import here

COLLECTIVES = [
    "broadcast", "gather", "all_gather", "scatter", "reduce", "all_reduce", "barrier",
    "gather_scalar", "all_gather_scalar", "reduce_and_broadcast",
    "all_to_all", "scan", "exscan", "reduce_scatter",
]  # fmt: skip
MESSAGES = ["message", "message of any rank", "message to itself", "sendrecv"]
LANES = ["", "", "side", "other side"]
_MOST_IN_FLIGHT = 12


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
        return [content(rank, nbytes, self.turn) for rank, nbytes in enumerate(self.nbytes)]


def draw(chance: random.Random, turn: int, groups: list[tuple[int, ...]]) -> Step:
    """Draw the next step."""
    members = chance.choice(groups)
    size = len(members)
    is_message = chance.random() < 0.35
    root = chance.randrange(size)
    all_alike = chance.choice([True, False, None])
    return Step(
        name=chance.choice(MESSAGES if is_message else COLLECTIVES),
        members=members,
        lane=chance.choice(LANES),
        are_async=[chance.random() < 0.5 if all_alike is None else all_alike for _ in range(size)],
        root=root,
        peer=(root + chance.randrange(1, size)) % size,
        nbytes=[chance.choice(SIZES[:-1]) for _ in range(size)],
        failing=chance.choice([None] * 5 + [chance.randrange(size)]),
        codec=chance.choice(["pickle", "msgpack"]),
        turn=turn,
    )


# The model


def model(step: Step, rank: int) -> Any:
    """Return what a member must get from a collective that fails on no rank."""
    wants, scalars = step.wants, [rank * 1000 + step.turn for rank in range(len(step.members))]
    everywhere = {
        "broadcast": wants[step.root],
        "all_gather": wants,
        "scatter": wants[rank],
        "all_reduce": wants,
        "all_gather_scalar": scalars,
        "reduce_and_broadcast": [len(wants), wants[0]],
        "barrier": None,
        "all_to_all": wants,
        "scan": wants[: rank + 1],
        "exscan": wants[:rank] or None,
        "reduce_scatter": wants,
    }
    at_root: dict[str, list[Any]] = {"gather": wants, "reduce": wants, "gather_scalar": scalars}
    if step.name in everywhere:
        return everywhere[step.name]
    return at_root[step.name] if rank == step.root else None


def fails(step: Step, rank: int) -> bool | None:
    """Return whether a failure must reach a member; None if it may or may not."""
    failing, root = step.failing, step.root
    if failing is None or step.name == "barrier":
        return False
    if step.name == "broadcast":
        return failing == root
    if step.name in {"gather", "reduce", "gather_scalar"}:
        return rank in (failing, root)
    if step.name == "scatter":  # the source does not encode its own object
        return None if failing != root else False
    if step.name in {"all_to_all", "scan", "exscan", "reduce_scatter"}:
        return None
    return True


def alike(got: Any, want: Any) -> bool:
    """Return whether a received object is what the model expects."""
    if isinstance(want, dict):
        return same(got, want)
    if isinstance(want, list):
        return isinstance(got, list) and len(got) == len(want) and all(map(alike, got, want))
    return bool(got == want)


# The program


@dataclass
class Running:
    """A program on this rank."""

    groups: dict[tuple[int, ...], Any]
    own: random.Random
    in_flight: list[tuple[Step, Work[Any], Callable[[Callable[[], Any]], None]]] = field(
        default_factory=list
    )

    def take_step(self, step: Step) -> None:
        """Start a step, and finish it if this rank calls synchronously."""
        if here().rank in step.members:
            rank = step.members.index(here().rank)
            for call, judge in self._calls(step, rank):
                if step.are_async[rank]:
                    self.in_flight.append((step, call(async_op=True), judge))
                else:
                    judge(call)
        while self.in_flight and (len(self.in_flight) > _MOST_IN_FLIGHT or self.own.random() < 0.3):
            self.wait_for(self.own.randrange(len(self.in_flight)))

    def wait_for(self, at: int) -> None:
        """Wait for an outstanding work, in one of several ways."""
        step, work, judge = self.in_flight.pop(at)
        if self.own.random() < 0.3:
            list(objcomm.as_completed([work]))
            assert work.done()
            judge(work.result)
        else:
            judge(work.wait)
        assert work.done(), step

    def _calls(self, step: Step, rank: int) -> Iterator[tuple[Callable[..., Any], Any]]:
        if step.name in COLLECTIVES:
            yield self._in_lane(step, self._collective(step, rank)), _judge_of(step, rank)
        else:
            for call, want in self._messages(step, rank):
                yield self._in_lane(step, call), _equals(step, want)

    def _in_lane(self, step: Step, call: Callable[..., Any]) -> Callable[..., Any]:
        def inside(**options: Any) -> Any:
            lane = objcomm.lane(step.lane) if step.lane else contextlib.nullcontext()
            with lane:
                return call(**options)

        return inside

    def _collective(self, step: Step, rank: int) -> Callable[..., Any]:
        wants, group = step.wants, self.groups[step.members]
        can_fail: Any = threading.Lock() if step.failing == rank else wants[rank]
        scalar: Any = [] if step.failing == rank else rank * 1000 + step.turn
        chunks: list[Any] = list(wants)
        if step.failing not in (None, step.root):
            chunks[step.failing] = threading.Lock()
        options: dict[str, Any] = {"group": group, "codec": step.codec}
        size = len(step.members)

        to_root, from_root = {"group_dst": step.root}, {"group_src": step.root}
        objs = chunks if rank == step.root else None
        calls: dict[str, Callable[..., Any]] = {
            "scatter": partial(objcomm.scatter, objs, **options, **from_root),
            "broadcast": partial(objcomm.broadcast, can_fail, **options, **from_root),
            "gather": partial(objcomm.gather, can_fail, **options, **to_root),
            "all_gather": partial(objcomm.all_gather, can_fail, **options),
            "reduce": partial(objcomm.reduce, [can_fail], _add, **options, **to_root),
            "all_reduce": partial(objcomm.all_reduce, [can_fail], _add, **options),
            "gather_scalar": partial(objcomm.gather_scalar, scalar, group=group, **to_root),
            "all_gather_scalar": partial(objcomm.metrics.all_gather_scalar, scalar, group=group),
            "reduce_and_broadcast": partial(
                objcomm.reduce_and_broadcast,
                lambda: can_fail,
                lambda everyones: [len(everyones), everyones[0]],
                **options,
            ),
            "all_to_all": partial(objcomm.all_to_all, [can_fail] * size, **options),
            "scan": partial(objcomm.scan, [can_fail], _add, **options),
            "exscan": partial(objcomm.exscan, [can_fail], _add, **options),
            "reduce_scatter": partial(objcomm.reduce_scatter, [[can_fail]] * size, _add, **options),
            "barrier": partial(objcomm.barrier, f"turn {step.turn}", group=group),
        }
        return calls[step.name]

    def _messages(self, step: Step, rank: int) -> Iterator[tuple[Callable[..., Any], Any]]:
        wants, size = step.wants, len(step.members)
        # Messages with one tag arrive in order; a receive from any rank needs its own tag.
        tag = step.turn % 3 if step.name == "message" else 1000 + step.turn
        options: dict[str, Any] = {"group": self.groups[step.members], "tag": tag}
        send = partial(objcomm.send, wants[rank], codec=step.codec, **options)
        recv = partial(objcomm.recv, **options)
        if step.name == "message to itself":
            yield partial(send, group_dst=rank), None
            yield partial(recv, group_src=rank), wants[rank]
        elif step.name == "sendrecv":
            peers: dict[str, Any] = {"group_dst": (rank + 1) % size, "group_src": (rank - 1) % size}
            both = partial(objcomm.sendrecv, wants[rank], **peers, **options)
            yield partial(self._around, step, both), wants[peers["group_src"]]
        elif rank == step.root:
            yield partial(send, group_dst=step.peer), None
        elif rank == step.peer:
            whose = {} if step.name == "message of any rank" else {"group_src": step.root}
            yield partial(recv, **whose), wants[step.root]

    def _around(self, step: Step, both: partial[Any], *, async_op: bool = False) -> Any:
        """Do one step of a ring; asynchronously, it is a send and a receive."""
        if not async_op:
            return both()
        options = dict(both.keywords)
        dst, src = options.pop("group_dst"), options.pop("group_src")
        sending = objcomm.isend(*both.args, group_dst=dst, **options)
        self.in_flight.append((step, sending, _equals(step, None)))
        return objcomm.irecv(group_src=src, **options)


def _add(left: list[Any], right: list[Any]) -> list[Any]:
    return left + right


def _equals(step: Step, want: Any) -> Callable[[Callable[[], Any]], None]:
    def judge(take: Callable[[], Any]) -> None:
        assert alike(take(), want), step

    return judge


def _judge_of(step: Step, rank: int) -> Callable[[Callable[[], Any]], None]:
    def judge(take: Callable[[], Any]) -> None:
        try:
            got = take()
        except CollectiveError as error:
            told = set(error.failures)
        else:
            assert fails(step, rank) is not True, step
            assert alike(got, model(step, rank)), step
            return
        assert fails(step, rank) is not False, step
        assert told <= {step.failing, step.root}, step

    return judge


@ranks(2, 3, 4)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))]
)
def test_any_program_gives_what_the_model_gives(seed: int) -> None:
    size = here().world_size
    world = tuple(range(size))
    upper = world[1:] if size > 2 else world
    with subgroup(*upper) as group:
        groups = {world: None, upper: group} if upper != world else {world: None}
        chance, own = random.Random(seed), random.Random(f"{seed} {here().rank}")
        running = Running(groups, own)
        for turn in range(80):
            running.take_step(draw(chance, turn, list(groups)))
            if chance.random() < 0.1:  # the user's own collectives on the same group
                numbers = torch.ones(100)
                dist.all_reduce(numbers)
                assert numbers.sum().item() == 100 * size
        while running.in_flight:
            running.wait_for(own.randrange(len(running.in_flight)))
        objcomm.barrier()
    assert_group_works()
