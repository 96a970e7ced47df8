"""Asynchronous operations: their results, their order, and the ways to wait for them."""

import asyncio
import contextlib
import linecache
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import DecodeError, NotInGroupError, Work
from tests.group.helpers import assert_group_works, error_in, hear, say, subgroup, tell_all
from tests.group.in_flight import LIMIT_S, meanwhile, own
from tests.group.operations import OPERATIONS, ROOTED
from tests.ranks import ranks
from tests.workers import here

# Results


def _assert_same_result(name: str, group: Any = None, prefix: str = "") -> None:
    """Compare both ways of a call, from each root."""
    call = OPERATIONS[name]
    for root in range(objcomm.world_size(group)) if name in ROOTED else [None]:
        options = {} if root is None else {prefix + ROOTED[name]: root}
        wanted = call(own(name, group), group=group, **options)
        work = call(own(name, group), group=group, async_op=True, **options)
        assert isinstance(work, Work)
        assert work.operation == name
        assert work.wait(LIMIT_S) == wanted
        assert (work.done(), work.exception(), work.result()) == (True, None, wanted)


@ranks(1, 4)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_asynchronous_call_returns_the_same_as_a_synchronous_one(name: str) -> None:
    _assert_same_result(name)


@ranks(4)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_asynchronous_call_on_a_subgroup_returns_the_same(name: str) -> None:
    with subgroup(1, 3) as group:
        if here().rank in (1, 3):
            _assert_same_result(name, group, "group_")
        else:
            call = OPERATIONS[name]
            error_in(NotInGroupError, lambda: call(own(name), group=group, async_op=True))
        objcomm.barrier()


@ranks(1, 2)
def test_a_work_knows_the_line_that_started_it() -> None:
    work = objcomm.all_gather(1, async_op=True)
    file, _, number = work.call_site.rpartition(":")
    assert file == __file__
    assert "work = objcomm.all_gather(1, async_op=True)" in linecache.getline(file, int(number))
    work.wait()


@ranks(1, 2, 3)
@pytest.mark.parametrize("nbytes", [100, 100_000, 3_000_000])
def test_large_objects_arrive_whole(nbytes: int) -> None:
    mine = torch.full((nbytes,), here().rank, dtype=torch.uint8)
    works = [objcomm.all_gather(mine, async_op=True), objcomm.all_gather(mine, async_op=True)]
    for work in reversed(works):
        for rank, got in enumerate(work.wait(LIMIT_S)):
            assert torch.equal(got, torch.full((nbytes,), rank, dtype=torch.uint8))


# Order


@ranks(2, 3)
def test_a_synchronous_call_runs_after_earlier_asynchronous_ones() -> None:
    size, mine = here().world_size, here().rank
    works: list[Work[Any]] = [
        objcomm.all_gather(("before", mine), async_op=True),
        objcomm.broadcast(mine, src=size - 1, async_op=True),
    ]
    assert objcomm.all_gather(("between", mine)) == [("between", rank) for rank in range(size)]
    assert all(work.done() for work in works)
    works.append(objcomm.all_reduce(1, async_op=True))
    assert works[2].wait() == size
    assert works[1].wait() == size - 1
    assert works[0].wait() == [("before", rank) for rank in range(size)]


@ranks(2, 3)
def test_a_call_returns_before_other_ranks_have_called() -> None:
    objcomm.barrier()  # the first use of a group waits for all ranks
    if here().rank == 0:
        works = [objcomm.all_gather(0, async_op=True), objcomm.barrier(async_op=True)]
        assert not any(work.done() for work in works)
        with pytest.raises(TimeoutError, match="still running"):
            works[0].wait(0.1)
    tell_all("rank 0 has called", "")
    if here().rank > 0:
        works = [objcomm.all_gather(here().rank, async_op=True), objcomm.barrier(async_op=True)]
    assert objcomm.wait_all(works) == [list(range(here().world_size)), None]


@ranks(2)
def test_any_thread_may_wait() -> None:
    works = [objcomm.all_gather(turn, async_op=True) for turn in range(5)]
    got: list[object] = []
    with meanwhile(lambda: got.extend(work.wait() for work in works)):
        assert works[4].wait() == [4, 4]
    assert got == [[turn] * 2 for turn in range(5)]


@ranks(2)
def test_another_thread_can_take_over_a_lane_with_outstanding_works() -> None:
    works: list[Work[Any]] = []

    def first() -> None:
        with objcomm.lane("passed on"):
            works.extend(objcomm.all_gather((turn, bytes(200_000)), async_op=True) for turn in "ab")

    def second() -> None:
        with objcomm.lane("passed on"):
            works.append(objcomm.all_gather(("c", b""), async_op=True))
            assert objcomm.all_gather("d") == ["d", "d"]

    for body in (first, second):
        with meanwhile(body):
            pass
    assert [work.wait()[0][0] for work in works] == ["a", "b", "c"]


@pytest.mark.parametrize("turns", [40, pytest.param(200, marks=pytest.mark.long)])
@ranks(2, 4)
def test_background_gathers_beside_barriers_and_torchs_reductions(turns: int) -> None:
    """Issue 4: 200 of each at the same time, without a deadlock or a mismatched pair."""
    size, mine = here().world_size, here().rank

    def gather() -> None:
        works: list[Work[Any]] = []
        with objcomm.lane("background"):
            for turn in range(turns + 10):  # ten are in flight
                if turn < turns:
                    works.append(objcomm.all_gather((turn, mine), async_op=True))
                if turn % 7 == 3:  # a synchronous call on the same lane
                    assert objcomm.all_reduce(turn) == turn * size
                if turn >= 10:
                    assert works.pop(0).wait() == [(turn - 10, rank) for rank in range(size)]

    with meanwhile(gather):
        for turn in range(turns):
            gradients = [torch.full((500,), float(mine + turn + each)) for each in range(2)]
            reducing = [dist.all_reduce(each, async_op=True) for each in gradients]
            objcomm.barrier(f"turn {turn}")
            for each, work in enumerate(reducing):
                work.wait()
                assert gradients[each][0].item() == sum(range(size)) + size * (turn + each)
    assert_group_works()


# What may change after the call


@ranks(2)
def test_a_pickled_object_may_change_after_the_call() -> None:
    mine = {"list": [1, 2]}
    work = objcomm.broadcast(mine, async_op=True)
    mine["list"].append(3)
    mine["text"] = []
    got = work.wait()
    assert got is mine if here().rank == 0 else got == {"list": [1, 2]}


@ranks(2, 3, 4)
@pytest.mark.parametrize("is_large", [False, True])
def test_an_operand_may_change_after_the_call(*, is_large: bool) -> None:
    """Also on the ranks that combine their own operand with others'."""
    filler = "x" * (50_000 if is_large else 1)
    expected = [(rank, filler) for rank in range(here().world_size)]
    for call in (objcomm.all_reduce, objcomm.reduce):
        mine = [(here().rank, filler)]
        work = call(mine, operator.add, async_op=True)
        mine.clear()
        assert work.wait() in (expected, None)


@ranks(2)
def test_options_are_those_of_the_call() -> None:
    with objcomm.configure(accept=["msgpack"], codec="pickle"):
        refused = objcomm.all_gather(1, async_op=True)
    taken = objcomm.all_gather(1, async_op=True)
    with pytest.raises(DecodeError, match="accept"):
        refused.wait()
    assert taken.wait() == [1, 1]
    assert_group_works()


MODES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@ranks(1, 2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [3, 100_000])
def test_torchs_modes_at_the_call_apply(mode: str, size: int) -> None:
    def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left + right

    def facts(tensor: torch.Tensor) -> tuple[bool, bool, float]:
        return tensor.requires_grad, tensor.is_inference(), tensor.sum().item()

    for op in (add, "sum", "mean"):
        with MODES[mode]():
            mine: torch.Tensor = torch.nn.Parameter(torch.ones(size))
            wanted = objcomm.all_reduce(mine, op)
            work = objcomm.all_reduce(mine, op, async_op=True)
        assert facts(work.wait()) == facts(wanted)


def _read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


class _OutOfBand:
    """Pickles the array out of band by the class's own method, without objcomm."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return bytes, (pickle.PickleBuffer(self.array),)


#: How the object that is sent contains the array.
PARTS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda array: array,
    "a view of it": lambda array: array[100:],
    "read-only": _read_only,
    "in Fortran's order": lambda array: {"t": array.reshape(100, 10_000).T},
    "out of band": _OutOfBand,
}


@ranks(2)
@pytest.mark.parametrize("part", [*PARTS, "reduced"])
def test_an_array_cannot_be_resized_while_it_travels(part: str) -> None:
    """NumPy would free the memory being sent; ``refcheck=False`` skips its own check."""
    objcomm.barrier()
    array = np.ones(1_000_000)
    if here().rank == 0:
        if part == "reduced":
            work = objcomm.all_reduce(array, "sum", async_op=True)
        else:
            work = objcomm.broadcast(PARTS[part](array), async_op=True)
        with pytest.raises(ValueError, match="cannot resize"):
            array.resize(50_000_000, refcheck=False)
        say("tried")
        work.wait()
        del work
        array.flags.writeable = True
        array.resize(10, refcheck=False)
    else:
        hear("tried")
        got = objcomm.all_reduce(array, "sum") if part == "reduced" else objcomm.broadcast(None)
        assert part == "out of band" or got is not None
    assert_group_works()


# asyncio


@ranks(1, 2, 3)
def test_asyncio_waits_for_works_beside_other_tasks() -> None:
    size, mine = here().world_size, here().rank
    ticks: list[None] = []

    async def tick() -> None:
        while True:
            ticks.append(None)
            await asyncio.sleep(0.001)

    async def main() -> None:
        ticking = asyncio.create_task(tick())
        works = [objcomm.all_gather((mine, turn), async_op=True) for turn in range(5)]
        got = await asyncio.gather(*reversed(works))
        assert got[::-1] == [[(rank, turn) for rank in range(size)] for turn in range(5)]
        assert await objcomm.all_reduce(mine, async_op=True) == sum(range(size))
        ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking

    asyncio.run(main())
    assert ticks
    assert_group_works()
