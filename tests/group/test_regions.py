"""Main-process regions: calls act locally, for the region's own ranks, threads and tasks only."""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import UsageError
from objcomm._training import once
from tests.group.control import SHARES, fail, raised_together
from tests.group.helpers import assert_group_works
from tests.ranks import ranks
from tests.workers import here


def in_region(block: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    with block:
        yield


@ranks(2)
@pytest.mark.parametrize(
    "make",
    [
        once.MainProcessContext,
        objcomm.main_first,
        once.zero_only,
        objcomm.fail_together,
    ],
)
def test_generators_leave_regions_in_any_order_and_context(make: Callable[[], Any]) -> None:
    """Leaving the wrong region would disable barriers forever."""
    if make is not objcomm.fail_together:  # its exit makes a call, which the other block refuses
        first, second = in_region(make()), in_region(once.MainProcessContext())
        next(first)
        next(second)
        assert next(first, "ended") == "ended"
        assert objcomm.broadcast(here().rank) == here().rank
        assert next(second, "ended") == "ended"
        assert_group_works()
    elsewhere = in_region(make())
    contextvars.copy_context().run(next, elsewhere)
    assert next(elsewhere, "ended") == "ended"
    assert_group_works()


@ranks(2)
def test_regions_belong_to_tasks() -> None:
    async def region(begun: asyncio.Event, ended: asyncio.Event) -> None:
        with once.MainProcessContext():
            begun.set()
            await ended.wait()
            assert objcomm.broadcast(here().rank) == here().rank

    async def both() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(region(begun, ended))
        await begun.wait()
        assert await objcomm.broadcast(here().rank, src=1, async_op=True) == 1
        ended.set()
        await task

    asyncio.run(both())
    assert_group_works()


@ranks(1, 3)
def test_in_a_main_only_region_calls_act_locally() -> None:
    world = here().world_size
    with once.MainProcessContext(), once.MainProcessContext():
        mine = object()
        assert objcomm.broadcast(mine, src=world - 1) is mine
        assert objcomm.broadcast(mine, async_op=True).wait() is mine
        assert objcomm.barrier("anything") is None
        assert objcomm.ddp_broadcast(mine) is mine
        for name, share in SHARES.items():
            assert share(lambda: mine) is mine, name
            with pytest.raises(ValueError, match="as it is"):
                share(lambda: fail(ValueError("as it is")))
        for block in (objcomm.main_first, objcomm.node_first, once.zero_only):
            with pytest.raises(ValueError, match="as it is"), block():
                fail(ValueError("as it is"))
        with once.zero_only() as is_zero:
            assert is_zero
        if world > 1:
            refused: list[Callable[[], object]] = [
                lambda: objcomm.gather(1), lambda: objcomm.all_gather(1),
                lambda: objcomm.scatter([1] * world), lambda: objcomm.all_reduce(1),
                lambda: objcomm.reduce(1), lambda: objcomm.scan(1),
                lambda: objcomm.send(1, (here().rank + 1) % world),
                lambda: objcomm.recv((here().rank + 1) % world), objcomm.node_group,
                lambda: objcomm.gather_scalar(1), lambda: objcomm.all_gather(1, async_op=True),
                objcomm.fail_together().__enter__,
            ]  # fmt: skip
            for call in refused:
                with pytest.raises(UsageError, match=f"global rank {here().rank} is inside"):
                    call()
        with pytest.raises(UsageError):
            objcomm.broadcast(1, src=world)
    assert_group_works()
    with contextlib.suppress(ValueError), once.MainProcessContext():
        fail(ValueError())
    assert_group_works()  # an error leaves no region behind


@ranks(4)
def test_a_region_concerns_its_own_ranks_only() -> None:
    rank = here().rank
    half, part = objcomm.split(rank % 2), objcomm.split(f"pair {rank // 2}")
    with once.MainProcessContext(group=half):
        assert objcomm.broadcast(rank, group=half) == rank
        # The region covers only this rank of the pair, so the pair really communicates.
        assert objcomm.all_gather(rank, group=part) == [rank // 2 * 2, rank // 2 * 2 + 1]
        with pytest.raises(UsageError):
            objcomm.all_gather(1)
    assert_group_works()
    dist.destroy_process_group(half)
    dist.destroy_process_group(part)


@ranks(2)
def test_a_region_belongs_to_its_thread() -> None:
    results: list[Any] = []

    def background() -> None:
        with objcomm.lane("of another thread"):
            results.append(objcomm.all_gather(here().rank))

    with once.MainProcessContext():
        thread = threading.Thread(target=background)
        thread.start()
        thread.join()
    assert results == [[0, 1]]
    assert_group_works()


@ranks(1, 2, 4)
def test_zero_only_runs_its_branch_once_and_shares_how_it_went() -> None:
    rank, last = here().rank, here().world_size - 1
    ran = []
    with once.zero_only() as is_zero:
        if is_zero:
            ran.append(objcomm.broadcast("local"))
    assert ran == ["local"] * (rank == 0)
    for failing in {0, last}:

        def block(failing: int = failing) -> None:
            with once.zero_only():
                if rank == failing:
                    fail(OSError("disk full"))

        error = raised_together(block, failing, operation="zero_only")
        assert error.failures[failing].message == "disk full"
        assert_group_works()
