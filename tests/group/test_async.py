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
from objcomm import CollectiveError, DecodeError, Work
from tests.group.helpers import RefusesToPickle, assert_group_works, hear, say, subgroup, tell_all
from tests.group.in_flight import LIMIT_S, meanwhile, own
from tests.group.operations import OPERATIONS, ROOTED
from tests.ranks import ranks
from tests.workers import here

# Results


@ranks(1, 4)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_asynchronous_call_gives_what_the_synchronous_one_gives(name: str) -> None:
    call = OPERATIONS[name]
    for root in range(here().world_size) if name in ROOTED else [None]:
        options = {} if root is None else {ROOTED[name]: root}
        wanted = call(own(name), **options)
        work = call(own(name), async_op=True, **options)
        assert isinstance(work, Work)
        assert work.operation == name
        assert work.wait(LIMIT_S) == wanted
        assert (work.done(), work.exception(), work.result()) == (True, None, wanted)


@ranks(4)
@pytest.mark.parametrize("name", OPERATIONS)
def test_on_a_subgroup_it_gives_the_same(name: str) -> None:
    call = OPERATIONS[name]
    with subgroup(1, 3) as group:
        if here().rank in (1, 3):
            for root in range(2) if name in ROOTED else [None]:
                options = {} if root is None else {f"group_{ROOTED[name]}": root}
                wanted = call(own(name, group), group=group, **options)
                work = call(own(name, group), group=group, async_op=True, **options)
                assert work.wait(LIMIT_S) == wanted
        else:
            with pytest.raises(objcomm.NotInGroupError):
                call(own(name), group=group, async_op=True)
        objcomm.barrier()


@ranks(1, 2)
def test_the_work_knows_the_line_that_began_it() -> None:
    work = objcomm.all_gather(1, async_op=True)
    file, _, number = work.call_site.rpartition(":")
    assert file == __file__
    assert "work = objcomm.all_gather(1, async_op=True)" in linecache.getline(file, int(number))
    work.wait()


@ranks(1, 2, 3)
def test_own_objects_come_back_as_they_are() -> None:
    mine = {"rank": here().rank}
    assert objcomm.all_gather(mine, async_op=True).wait()[here().rank] is mine


@ranks(1, 2, 3)
@pytest.mark.parametrize("nbytes", [100, 100_000, 3_000_000])
def test_large_objects_arrive_whole(nbytes: int) -> None:
    mine = torch.full((nbytes,), here().rank, dtype=torch.uint8)
    works = [objcomm.all_gather(mine, async_op=True), objcomm.all_gather(mine, async_op=True)]
    for work in reversed(works):
        for rank, got in enumerate(work.wait(LIMIT_S)):
            assert torch.equal(got, torch.full((nbytes,), rank, dtype=torch.uint8))


# Order


@ranks(2, 3, 4)
def test_ranks_may_wait_in_any_order() -> None:
    size, mine = here().world_size, here().rank
    works = [objcomm.all_gather((mine, turn), async_op=True) for turn in range(60)]
    order = list(range(60))
    if mine % 2:
        order.reverse()
    if mine == 2:
        order = order[30:] + order[:30]
    for turn in order:
        assert works[turn].wait(LIMIT_S) == [(rank, turn) for rank in range(size)]
    assert_group_works()


@ranks(2, 3)
def test_synchronous_calls_keep_their_place_in_the_order() -> None:
    size, mine = here().world_size, here().rank
    for turn in range(10):
        works: list[Work[Any]] = [
            objcomm.all_gather((turn, "before", mine), async_op=True),
            objcomm.broadcast((turn, mine), src=size - 1, async_op=True),
        ]
        assert objcomm.all_gather((turn, "between", mine)) == [
            (turn, "between", rank) for rank in range(size)
        ]
        assert all(work.done() for work in works)  # a synchronous call runs after the earlier ones
        works.append(objcomm.all_reduce(turn, async_op=True))
        assert works[2].wait() == turn * size
        assert works[1].wait() == (turn, size - 1)
        assert works[0].wait() == [(turn, "before", rank) for rank in range(size)]


@ranks(2, 3)
def test_some_ranks_may_call_synchronously_what_others_do_not() -> None:
    size, mine = here().world_size, here().rank
    for turn in range(20):
        if turn % size == mine:
            got = objcomm.all_gather(turn, async_op=True).wait()
        else:
            got = objcomm.all_gather(turn)
        assert got == [turn] * size


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


@ranks(2, 4)
def test_each_lane_and_thread_has_its_own_order() -> None:
    size, mine = here().world_size, here().rank

    def talk(name: str) -> None:
        with objcomm.lane(name):
            works = []
            for turn in range(25):
                works.append(objcomm.all_gather((name, turn, mine), async_op=True))
                if turn % 7 == 3:
                    assert objcomm.all_reduce(turn) == turn * size
        for turn, work in enumerate(works):
            assert work.wait() == [(name, turn, rank) for rank in range(size)]

    with meanwhile(lambda: talk("a")), meanwhile(lambda: talk("b")):
        works = [objcomm.all_gather(turn, async_op=True) for turn in range(50)]
        assert objcomm.wait_all(works) == [[turn] * size for turn in range(50)]
    assert_group_works()


@ranks(2)
def test_the_lane_is_that_of_the_call() -> None:
    with objcomm.lane("short"):
        work = objcomm.all_gather("in the lane", async_op=True)
    outside = objcomm.all_gather("outside", async_op=True)
    assert outside.wait() == ["outside"] * 2
    assert work.wait() == ["in the lane"] * 2


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


@ranks(2, 3)
def test_torchs_own_collectives_on_the_same_group_do_not_mix_in() -> None:
    size, mine = here().world_size, here().rank
    for turn in range(20):
        numbers = torch.full((1000,), float(mine + turn))
        ours = objcomm.all_gather((mine, turn), async_op=True)
        theirs = dist.all_reduce(numbers, async_op=True)
        later = objcomm.broadcast(bytes([turn]) * 50_000, async_op=True)
        if mine:
            theirs.wait()
            assert later.wait() == bytes([turn]) * 50_000
        assert ours.wait() == [(rank, turn) for rank in range(size)]
        theirs.wait()
        assert later.wait() == bytes([turn]) * 50_000
        assert numbers[0].item() == sum(range(size)) + size * turn


@pytest.mark.parametrize("turns", [40, pytest.param(200, marks=pytest.mark.long)])
@ranks(2, 4)
def test_background_gathers_beside_barriers_and_torchs_reductions(turns: int) -> None:
    """Issue 4: 200 of each at the same time, without a deadlock or a mismatched pair."""
    size, mine = here().world_size, here().rank

    def gather() -> None:
        with objcomm.lane("background"):
            works = [objcomm.all_gather(("background", t, mine), async_op=True) for t in range(10)]
            for turn in range(turns - 10):
                assert works.pop(0).wait() == [("background", turn, r) for r in range(size)]
                works.append(objcomm.all_gather(("background", turn + 10, mine), async_op=True))
            for turn, work in enumerate(works, turns - 10):
                assert work.wait() == [("background", turn, r) for r in range(size)]

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
def test_what_is_pickled_may_change_after_the_call() -> None:
    mine = {"list": [1, 2], "text": "before"}
    work = objcomm.broadcast(mine, async_op=True)
    mine["list"].append(3)  # type: ignore[attr-defined]  # a list
    mine["text"] = "after"
    got = work.wait()
    if here().rank == 1:
        assert got == {"list": [1, 2], "text": "before"}
    else:
        assert got is mine


@ranks(2, 3, 4)
@pytest.mark.parametrize("is_large", [False, True])
def test_an_operand_may_change_after_the_call(*, is_large: bool) -> None:
    """Also on the ranks that combine their own operand with others'."""
    rank, size = here().rank, here().world_size
    filler = "x" * (50_000 if is_large else 1)
    expected = [(each, filler) for each in range(size)]
    for call in (objcomm.all_reduce, objcomm.reduce):
        mine = [(rank, filler)]
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


# Waiting for several works, and asyncio


@ranks(1, 2, 3)
def test_asyncio_waits_for_works_beside_other_tasks() -> None:
    size, mine = here().world_size, here().rank

    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        works = [objcomm.all_gather((mine, turn), async_op=True) for turn in range(5)]
        got = await asyncio.gather(*reversed(works))
        assert got[::-1] == [[(rank, turn) for rank in range(size)] for turn in range(5)]
        assert await objcomm.all_reduce(mine, async_op=True) == sum(range(size))
        ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking
        assert ticks > 0

    asyncio.run(main())
    assert_group_works()


@ranks(2)
def test_asyncios_limit_leaves_the_call_in_flight() -> None:
    objcomm.barrier()

    async def main() -> None:
        work = objcomm.all_gather(0, async_op=True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_awaited(work), 0.1)
        assert not work.done()
        tell_all("limit", "")
        assert await work == [0, 1]

    if here().rank == 0:
        asyncio.run(main())
    else:
        tell_all("limit", "")
        assert objcomm.all_gather(1) == [0, 1]


async def _awaited(work: Work[Any]) -> Any:
    return await work


@ranks(2, 3)
def test_as_completed_and_wait_all_on_real_calls() -> None:
    size = here().world_size
    works = [objcomm.all_gather(turn, async_op=True) for turn in range(5)]
    got = [work.result()[0] for work in objcomm.as_completed(works)]
    assert sorted(got) == list(range(5))
    failing = [
        objcomm.all_gather(1, async_op=True),
        objcomm.all_gather(RefusesToPickle(LookupError("none")), async_op=True),
        objcomm.all_gather(3, async_op=True),
    ]
    with pytest.raises(CollectiveError, match="none"):
        objcomm.wait_all(failing)
    assert failing[2].result() == [3] * size


def _read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


class _OutOfBand:
    """Pickle the array out of band by the class's own method, without objcomm."""

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
