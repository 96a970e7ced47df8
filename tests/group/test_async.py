"""Operations in flight: their results, their order, their errors, and what they leave behind."""

import asyncio
import contextlib
import gc
import operator
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, DecodeError, DesyncError, UsageError, Work
from objcomm.transport import line as line_module
from tests.group.helpers import (
    RefusesToArrive,
    RefusesToPickle,
    assert_group_works,
    subgroup,
    tell_all,
    when_main_thread_waits,
)
from tests.group.operations import OBJECT_OPERATIONS, OPERATIONS, ROOTED, is_told
from tests.ranks import ranks
from tests.workers import here

# Promised within 2 s; a loaded machine gets more.
SOON_S = 6.0
LIMIT_S = 15.0


def own(name: str, group: dist.ProcessGroup | None = None) -> Any:
    """What this rank gives to an operation."""
    mine = objcomm.rank(group)
    return mine * 10 + 1 if name.endswith("scalar") else {"from": mine, "raw": bytes([mine]) * 40}


def lines() -> list[threading.Thread]:
    """The threads that carry asynchronous calls out."""
    return [each for each in threading.enumerate() if each.name.startswith("objcomm-line")]


@contextlib.contextmanager
def in_thread(body: Callable[[], object]) -> Iterator[None]:
    """Run `body` meanwhile, and raise what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    for error in errors:
        raise error


# Results


@ranks(1, 2, 3, 4)
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
    assert "work = objcomm.all_gather(1, async_op=True)" in _line(int(number))
    work.wait()


def _line(number: int) -> str:
    with open(__file__) as source:  # noqa: PTH123  # short
        return source.read().splitlines()[number - 1]


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
def test_synchronous_calls_come_in_their_place() -> None:
    size, mine = here().world_size, here().rank
    for turn in range(10):
        works: list[Work[Any]] = [
            objcomm.all_gather((turn, "before", mine), async_op=True),
            objcomm.broadcast((turn, mine), src=size - 1, async_op=True),
        ]
        assert objcomm.all_gather((turn, "between", mine)) == [
            (turn, "between", rank) for rank in range(size)
        ]
        assert all(work.done() for work in works)  # a synchronous call follows those before it
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
def test_a_call_returns_before_the_others_have_come() -> None:
    objcomm.barrier()  # the first use of a group waits for all
    if here().rank == 0:
        works = [objcomm.all_gather(0, async_op=True), objcomm.barrier(async_op=True)]
        assert not any(work.done() for work in works)
        with pytest.raises(TimeoutError, match="still in flight"):
            works[0].wait(0.1)
    tell_all("rank 0 has called", "")
    if here().rank > 0:
        works = [objcomm.all_gather(here().rank, async_op=True), objcomm.barrier(async_op=True)]
    assert objcomm.wait_all(works) == [list(range(here().world_size)), None]


@ranks(2, 4)
def test_lanes_and_threads_each_have_an_order_of_their_own() -> None:
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

    with in_thread(lambda: talk("a")), in_thread(lambda: talk("b")):
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
    with in_thread(lambda: got.extend(work.wait() for work in works)):
        assert works[4].wait() == [4, 4]
    assert got == [[turn] * 2 for turn in range(5)]


@ranks(2)
def test_another_thread_takes_the_lane_over_with_what_is_in_flight() -> None:
    works: list[Work[Any]] = []

    def first() -> None:
        with objcomm.lane("passed on"):
            works.extend(objcomm.all_gather((turn, bytes(200_000)), async_op=True) for turn in "ab")

    def second() -> None:
        with objcomm.lane("passed on"):
            works.append(objcomm.all_gather(("c", b""), async_op=True))
            assert objcomm.all_gather("d") == ["d", "d"]

    for body in (first, second):
        with in_thread(body):
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


@pytest.mark.parametrize("turns", [200])
@ranks(2, 4, deadline=90)
def test_background_gathers_beside_barriers_and_torchs_reductions(turns: int) -> None:
    """What issue 4 asks for: 200 of each at once, without deadlock or wrong pairing."""
    size, mine = here().world_size, here().rank

    def gather() -> None:
        with objcomm.lane("background"):
            works = [objcomm.all_gather(("background", t, mine), async_op=True) for t in range(10)]
            for turn in range(turns - 10):
                assert works.pop(0).wait() == [("background", turn, r) for r in range(size)]
                works.append(objcomm.all_gather(("background", turn + 10, mine), async_op=True))
            for turn, work in enumerate(works, turns - 10):
                assert work.wait() == [("background", turn, r) for r in range(size)]

    with in_thread(gather):
        for turn in range(turns):
            gradients = [torch.full((500,), float(mine + turn + each)) for each in range(2)]
            reducing = [dist.all_reduce(each, async_op=True) for each in gradients]
            objcomm.barrier(f"turn {turn}")
            for each, work in enumerate(reducing):
                work.wait()
                assert gradients[each][0].item() == sum(range(size)) + size * (turn + each)
    assert_group_works()


# What may change, and when


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
    """Also on the ranks that combine their own one with others."""
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
def test_torchs_modes_are_those_of_the_call(mode: str, size: int) -> None:
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


# Waiting for several, asyncio


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


# Errors


@ranks(1, 2)
@pytest.mark.parametrize("name", OPERATIONS)
def test_wrong_arguments_raise_at_the_call(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UsageError):
            OPERATIONS[name](own(name), async_op=True, timeout=-1)
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("name", OBJECT_OPERATIONS)
def test_what_cannot_be_encoded_raises_at_the_wait(name: str) -> None:
    mine: Any = RefusesToPickle(LookupError("not me")) if here().rank == 0 else 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        work = OPERATIONS[name](mine, async_op=True)
        if is_told(name, 0, here().rank):
            with pytest.raises(CollectiveError, match="not me") as caught:
                work.wait()
            assert work.exception() is caught.value
            assert caught.value.failures[0].rank == 0
        else:
            assert work.wait() in (None, 1)
    assert_group_works()


@ranks(1, 2, 3)
def test_an_op_that_raises_is_told_at_every_wait() -> None:
    def divide(_left: int, _right: int) -> int:
        raise ZeroDivisionError("by design")

    works = [objcomm.all_reduce(1, divide, async_op=True), objcomm.all_reduce(1, async_op=True)]
    if here().world_size == 1:
        assert works[0].wait() == 1
    else:
        with pytest.raises(CollectiveError, match="by design"):
            works[0].wait()
    assert works[1].wait() == here().world_size
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("confirm", [False, True])
def test_what_cannot_be_decoded_raises_at_the_wait(*, confirm: bool) -> None:
    works = [
        objcomm.broadcast(RefusesToArrive(1), async_op=True, confirm=confirm),
        objcomm.all_gather(here().rank, async_op=True),
    ]
    if here().rank == 1 and not confirm:
        with pytest.raises(DecodeError):
            works[0].wait()
    elif confirm:
        with pytest.raises(CollectiveError, match="cannot be rebuilt"):
            works[0].wait()
    else:
        works[0].wait()
    assert works[1].wait() == list(range(here().world_size))
    assert_group_works()


@ranks(2, 3)
def test_an_operations_limit_counts_from_its_turn_and_ends_it() -> None:
    group: Any = dist.new_group()
    objcomm.barrier(group=group)
    if here().rank == 0:
        works = [
            objcomm.all_gather(1, timeout=0.4, group=group, async_op=True),
            objcomm.all_gather(2, group=group, async_op=True),
        ]
        with pytest.raises(objcomm.TransportTimeout, match="all_gather"):
            works[0].wait()
        with pytest.raises(objcomm.TransportError):
            works[1].wait()
    tell_all("over", "")
    with pytest.raises(objcomm.TransportError):
        objcomm.barrier(group=group)
    dist.destroy_process_group(group)
    assert_group_works()


def soon(work: Work[Any]) -> BaseException:
    """The error of a work that fails soon."""
    began = time.monotonic()
    with pytest.raises(objcomm.ObjcommError) as caught:
        work.wait()
    assert time.monotonic() - began < SOON_S
    return caught.value


@ranks(2, 3)
def test_ranks_that_differ_in_flight_hear_of_it_and_the_group_works_on() -> None:
    objcomm.barrier()
    works: list[Work[Any]] = [objcomm.all_gather(1, async_op=True)]
    if here().rank == 1:
        works.append(objcomm.all_gather("other", async_op=True))
    else:
        works.append(objcomm.all_reduce(1, async_op=True))
    works.append(objcomm.all_gather(3, async_op=True))
    works[0].wait()
    error = soon(works[1])
    assert isinstance(error, DesyncError)
    assert "all_reduce" in str(error)
    assert "all_gather" in str(error)
    assert isinstance(soon(works[2]), DesyncError)
    tell_all("all have heard", "")
    assert_group_works()


@ranks(2)
def test_a_circle_through_a_wait_is_found() -> None:
    """Each rank waits for the other one in another group, one of them in a work's wait."""
    one: Any = dist.new_group([0, 1])
    two: Any = dist.new_group([0, 1])
    for group in (one, two):
        objcomm.barrier(group=group)
    if here().rank == 0:
        assert isinstance(soon(objcomm.barrier(group=one, async_op=True)), DesyncError)
    else:
        with pytest.raises(DesyncError):
            objcomm.barrier(group=two)
    tell_all("all have heard", "")
    for group in (one, two):
        assert_group_works(group)
        dist.destroy_process_group(group)


@ranks(2)
def test_a_circle_through_a_synchronous_call_behind_a_work_is_found() -> None:
    one: Any = dist.new_group([0, 1])
    two: Any = dist.new_group([0, 1])
    for group in (one, two):
        objcomm.barrier(group=group)
    began = time.monotonic()
    if here().rank == 0:
        work = objcomm.barrier(group=one, async_op=True)
        with pytest.raises(DesyncError):
            objcomm.barrier(group=one)  # waits for the one before it
        assert isinstance(soon(work), DesyncError)
    else:
        with pytest.raises(DesyncError):
            objcomm.barrier(group=two)
    assert time.monotonic() - began < SOON_S
    tell_all("all have heard", "")
    for group in (one, two):
        assert_group_works(group)
        dist.destroy_process_group(group)


@ranks(2)
def test_a_wait_with_a_limit_closes_no_circle() -> None:
    """Rank 0 waits for rank 1, which waits for rank 0 elsewhere; but rank 0 can go there."""
    one: Any = dist.new_group([0, 1])
    two: Any = dist.new_group([0, 1])
    for group in (one, two):
        objcomm.barrier(group=group)
    if here().rank == 0:
        work = objcomm.barrier(group=one, async_op=True)
        with pytest.raises(TimeoutError, match="still in flight"):
            work.wait(2.5)
        objcomm.barrier(group=two)
        work.wait()
    else:
        objcomm.barrier(group=two)
        objcomm.barrier(group=one)
    for group in (one, two):
        dist.destroy_process_group(group)


@ranks(2)
def test_what_is_in_flight_on_several_groups_is_no_circle() -> None:
    one: Any = dist.new_group([0, 1])
    two: Any = dist.new_group([0, 1])
    for group in (one, two):
        objcomm.barrier(group=group)
    groups = [one, two] if here().rank == 0 else [two, one]
    works = []
    for group in groups:
        works.append(objcomm.barrier(group=group, async_op=True))
        time.sleep(1.2)  # long enough to be investigated
    objcomm.wait_all(works)
    for group in (one, two):
        dist.destroy_process_group(group)


@ranks(3, expect_dead=[2])
def test_a_death_ends_what_is_in_flight() -> None:
    objcomm.barrier()
    tell_all("alive", "")
    if here().rank == 2:
        os._exit(1)
    works = [objcomm.all_gather(1, async_op=True), objcomm.barrier(async_op=True)]
    for work in works:
        assert isinstance(soon(work), objcomm.TransportError)
    with pytest.raises(objcomm.BrokenGroupError):
        objcomm.barrier(async_op=True)


@ranks(2)
def test_messages_of_a_group_of_two_meet_apart_from_its_collectives() -> None:
    """Whichever of the two is begun first on each rank."""
    for _ in range(3):
        group: Any = dist.new_group([0, 1])
        if here().rank == 0:
            sending = objcomm.isend("message", 1, group=group)
            assert objcomm.all_gather(0, group=group) == [0, 1]
            sending.wait()
        else:
            assert objcomm.all_gather(1, group=group) == [0, 1]
            assert objcomm.recv(0, group=group) == "message"
        dist.destroy_process_group(group)


@ranks(2, disposable=True)
def test_an_interrupt_ends_the_wait_and_not_the_work() -> None:
    objcomm.barrier()
    if here().rank == 0:
        work = objcomm.all_gather(0, async_op=True)
        when_main_thread_waits(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        assert not work.done()
    tell_all("interrupted", "")
    if here().rank == 1:
        work = objcomm.all_gather(1, async_op=True)
    assert work.wait() == [0, 1]
    assert_group_works()


@ranks(2, disposable=True)
def test_an_interrupt_of_a_call_that_waits_for_those_before_it_leaves_nobody_waiting() -> None:
    objcomm.barrier()
    if here().rank == 0:
        work = objcomm.all_gather(0, async_op=True)
        when_main_thread_waits(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            objcomm.barrier()
        assert isinstance(soon(work), objcomm.TransportError)
    tell_all("interrupted", "")
    if here().rank == 1:
        with pytest.raises(objcomm.TransportError):
            objcomm.all_gather(1)


@ranks(2, 3)
def test_a_block_that_fails_ends_what_is_in_flight_inside_it() -> None:
    before = objcomm.all_gather("before", async_op=True)
    works: list[Work[Any]] = []

    def block() -> None:
        with objcomm.fail_together():
            if here().rank == 0:
                raise LookupError("no such shard")
            works.append(objcomm.all_gather("inside", async_op=True))
            works.append(objcomm.barrier(async_op=True))
            works[0].wait()

    with pytest.raises(CollectiveError, match="no such shard"):
        block()
    assert before.wait() == ["before"] * here().world_size
    for work in works:
        assert "no such shard" in str(soon(work))
    assert_group_works()


@ranks(2)
def test_a_block_ends_when_what_is_in_flight_has_ended() -> None:
    with objcomm.fail_together():
        work = objcomm.all_gather(bytes(300_000), async_op=True)
    assert work.done()
    assert len(work.wait()) == 2


@ranks(2, 3)
def test_a_callback_on_the_lines_thread_that_communicates_is_refused() -> None:
    def nested(left: Any, right: Any) -> Any:
        objcomm.barrier()
        return left + right

    def in_flight(left: Any, right: Any) -> Any:
        objcomm.barrier(async_op=True)
        return left + right

    for op in (nested, in_flight):
        work = objcomm.all_reduce(1, op, async_op=True)
        with pytest.raises(CollectiveError, match="communicate before or after") as caught:
            work.wait(LIMIT_S)
        assert list(caught.value.failures) == [0]
        assert_group_works()


class Talkative:
    """Communicates when it arrives."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        objcomm.barrier()

    def __getstate__(self) -> dict[str, Any]:
        return {"any": 1}


@ranks(2)
@pytest.mark.parametrize("is_thread_over", [False, True])
def test_an_object_that_communicates_when_it_arrives_is_refused(*, is_thread_over: bool) -> None:
    works: list[Work[Any]] = []

    def call() -> None:
        with objcomm.lane(f"talkative {is_thread_over}"):
            works.append(objcomm.all_gather(Talkative(), async_op=True))

    if is_thread_over:  # so nobody owns the lane when it arrives
        objcomm.barrier()
        if here().rank == 0:
            with in_thread(call):
                pass
        tell_all("over", "")
        if here().rank == 1:
            with in_thread(call):
                pass
    else:
        call()
    with pytest.raises(DecodeError):
        works[0].wait(LIMIT_S)
    assert_group_works()


@ranks(2)
def test_a_callback_that_waits_for_a_later_work_is_refused() -> None:
    is_begun = threading.Event()
    works: list[Work[Any]] = []

    def impatient(left: Any, right: Any) -> Any:
        assert is_begun.wait(LIMIT_S)
        works[1].wait()
        return left + right

    works.append(objcomm.all_reduce(1, impatient, async_op=True))
    works.append(objcomm.all_gather(1, async_op=True))
    is_begun.set()
    with pytest.raises(CollectiveError, match="comes after"):
        works[0].wait(LIMIT_S)
    assert works[1].wait(LIMIT_S) == [1, 1]


@ranks(2, disposable=True)
def test_without_a_thread_for_it_the_call_fails_on_every_rank() -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with objcomm.lane("no thread"):
        objcomm.barrier()
        if here().rank == 0:
            with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
                warnings.simplefilter("error")
                patch.setattr(threading.Thread, "start", refuse)
                with pytest.raises(RuntimeError, match="new thread"):
                    objcomm.all_gather(0, async_op=True)
        else:
            with pytest.raises(objcomm.ObjcommError):
                objcomm.all_gather(1)


# What is left behind


@ranks(1, 2)
def test_what_is_never_waited_for_is_reported_at_its_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        objcomm.all_gather(1, async_op=True)
        objcomm.barrier()
        objcomm.all_reduce(RefusesToPickle(LookupError("lost")), "max", async_op=True)
        objcomm.barrier()
        _end_lines()
    told = [(each.category, each.filename, str(each.message)) for each in caught]
    assert [each[:2] for each in told] == [(RuntimeWarning, __file__)] * 2
    assert "async_op=True" in _line(caught[0].lineno)
    assert told[0][2] == "all_gather was begun here but never waited for"
    assert "lost" in told[1][2] or here().world_size == 1


def _end_lines() -> None:
    """Wait until no line's thread is left: it lets go of a work last."""
    until = time.monotonic() + LIMIT_S
    while lines():
        assert time.monotonic() < until
        time.sleep(0.02)


@ranks(2)
def test_only_asynchronous_calls_get_a_thread_and_it_ends_when_idle() -> None:
    _end_lines()
    objcomm.all_gather(1)
    with objcomm.lane("quiet"):
        objcomm.all_gather(1)
    assert lines() == []
    works = [objcomm.all_gather(turn, async_op=True) for turn in range(20)]
    assert [thread.name for thread in lines()] == ["objcomm-line"]
    with objcomm.lane("loud"):
        works += [objcomm.all_gather(turn, async_op=True) for turn in range(20)]
    assert len(lines()) == 2
    assert {"objcomm-line", "objcomm-line loud"} == {thread.name for thread in lines()}
    objcomm.wait_all(works)
    assert line_module._LINGER_SECONDS < LIMIT_S  # noqa: SLF001  # or the next line can't end
    _end_lines()
    assert_group_works()


class Held:
    def __init__(self) -> None:
        self.tensor = torch.ones(100_000)


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", OBJECT_OPERATIONS)
def test_neither_what_was_sent_nor_what_arrived_is_kept(name: str) -> None:
    gc.disable()
    try:
        mine = Held()
        work: Any = OPERATIONS[name](mine, async_op=True)
        got = work.wait()
        several = got if isinstance(got, list) else [got]
        kept = [weakref.ref(obj) for obj in (mine, work, *several) if obj is not None]
        objcomm.barrier(async_op=True).wait()
        objcomm.barrier()
        del mine, got, several, work
        assert [ref() for ref in kept] == [None] * len(kept)
    finally:
        gc.enable()


@ranks(2)
def test_what_failed_in_flight_keeps_nothing() -> None:
    def fail(_left: Any, _right: Any) -> Any:
        raise LookupError("by design")

    gc.disable()
    try:
        mine = Held()
        work = objcomm.all_reduce(mine, fail, async_op=True)
        with pytest.raises(CollectiveError):
            work.wait()
        kept: list[weakref.ref[Any]] = [weakref.ref(mine), weakref.ref(work)]
        objcomm.barrier(async_op=True).wait()
        objcomm.barrier()
        del mine, work
        assert [ref() for ref in kept] == [None] * 2
    finally:
        gc.enable()


@ranks(2)
def test_a_receive_that_failed_in_flight_keeps_nothing() -> None:
    objcomm.barrier()
    gc.disable()
    try:
        if here().rank == 0:
            objcomm.send(RefusesToArrive(1), 1)
        else:
            work = objcomm.irecv(0)
            with pytest.raises(DecodeError):
                work.wait()
            kept = weakref.ref(work)
            del work
            until = time.monotonic() + LIMIT_S
            while kept() is not None:  # its thread lets go of it last
                assert time.monotonic() < until
                time.sleep(0.01)
        objcomm.barrier()
    finally:
        gc.enable()


@ranks(2)
def test_memory_does_not_grow_with_the_number_of_works() -> None:
    def call_often() -> int:
        for turn in range(100):
            works = [
                objcomm.all_gather((turn, bytes(100_000)), async_op=True),
                objcomm.all_reduce(torch.ones(20_000), async_op=True),
            ]
            objcomm.wait_all(works)
        del works
        gc.collect()
        return len(gc.get_objects())

    call_often()
    before = call_often()
    assert call_often() - before < 50


# What is seen of it


@ranks(2)
def test_the_recorder_shows_what_is_in_flight() -> None:
    objcomm.barrier()
    if here().rank == 0:
        work = objcomm.all_gather(1, async_op=True)
        with pytest.raises(TimeoutError):
            work.wait(0.3)
        entry = _recorded()[-1]
        assert (entry["operation"], entry["outcome"], entry["ms"]) == (
            "all_gather",
            "under way",
            None,
        )
        assert entry["awaits"] == 1
        assert entry["call_site"] == work.call_site
    tell_all("looked", "")
    if here().rank == 1:
        work = objcomm.all_gather(1, async_op=True)
    work.wait()
    assert _recorded()[-1]["outcome"] == "returned"


def _recorded() -> list[dict[str, Any]]:
    told = objcomm.recorder.dump()
    (group,) = [each for each in told["groups"] if each["size"] == here().world_size]
    entries: list[dict[str, Any]] = group["entries"]
    return entries


@ranks(2)
def test_works_are_counted_as_calls() -> None:
    objcomm.reset_stats()
    objcomm.wait_all([objcomm.all_gather(bytes(1000), async_op=True) for _ in range(3)])
    counted = objcomm.stats()["all_gather"]
    assert counted.calls == 3
    assert counted.received_nbytes > 3000


@ranks(2)
def test_the_profiler_shows_works_where_it_looks_at_all_threads() -> None:
    with _profile(torch._C._profiler._ExperimentalConfig(profile_all_threads=True)) as profiler:  # noqa: SLF001  # torch has no public name for it
        objcomm.all_gather(1, async_op=True).wait()
        objcomm.barrier()
    names = [event.name for event in profiler.events()]
    assert "objcomm::barrier" in names
    assert "objcomm::all_gather" in names


def _profile(config: Any = None) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=activities, experimental_config=config)


@ranks(2)
def test_works_may_outlive_a_profiler() -> None:
    for _ in range(10):
        with _profile():
            works = [objcomm.all_gather(bytes(100_000), async_op=True) for _ in range(3)]
        objcomm.wait_all(works)
    assert_group_works()
