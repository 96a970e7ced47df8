"""Which rank is main, and regions in which calls act locally."""

import asyncio
import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import UsageError
from objcomm._training import once
from tests.group.control import ORDERED, SHARES, fail, raised_together
from tests.group.helpers import assert_group_works, in_thread
from tests.ranks import ranks, solo
from tests.workers import here


def run_in(block: Callable[..., Any], error: BaseException | None = None) -> None:
    with block():
        if error is not None:
            fail(error)


def in_region(block: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    with block:
        yield


@ranks(2)
@pytest.mark.parametrize(
    "make", [once.MainProcessContext, objcomm.main_first, once.zero_only, objcomm.fail_together]
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
    world, after = here().world_size, (here().rank + 1) % here().world_size
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
                lambda: objcomm.send(1, after), lambda: objcomm.recv(after), objcomm.node_group,
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
def test_a_region_concerns_only_its_own_ranks() -> None:
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
    def background() -> None:
        with objcomm.lane("of another thread"):
            assert objcomm.all_gather(here().rank) == [0, 1]

    with once.MainProcessContext():
        in_thread(background).join()
    assert_group_works()


@ranks(1, 2, 4)
def test_zero_only_runs_its_branch_once_and_shares_its_outcome() -> None:
    rank, last = here().rank, here().world_size - 1
    ran = []
    with once.zero_only() as is_zero:
        if is_zero:
            ran.append(objcomm.broadcast("local"))
    assert ran == ["local"] * (rank == 0)
    for failing in {0, last}:
        mine = OSError("disk full") if rank == failing else None
        call = partial(run_in, once.zero_only, mine)
        error = raised_together(call, failing, operation="zero_only")
        assert error.failures[failing].message == "disk full"
        assert_group_works()


@solo()
def test_a_world_of_one_without_torch_distributed_behaves_like_others() -> None:
    for name, share in SHARES.items():
        assert share(lambda: 2.0) == 2.0
        raised_together(partial(share, partial(fail, ValueError())), 0, operation=name)
    for name, block in ORDERED.items():
        raised_together(partial(run_in, block, ValueError()), 0, operation=name)
    assert objcomm.rank_prefixed_message("text") == "text"
    assert objcomm.is_main(scope="node")
    with pytest.raises(UsageError, match="pass scope='node'"):
        objcomm.is_main("node")  # type: ignore[arg-type]  # tested on purpose
    with pytest.raises(UsageError, match="neither 'world' nor 'node'"):
        objcomm.is_main(scope="host")  # type: ignore[arg-type]  # tested on purpose


@solo(environment={"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"})
def test_a_job_that_has_not_begun_is_not_a_world_of_one() -> None:
    blocks: list[Any] = [objcomm.main_first, objcomm.node_first, once.zero_only]
    calls: list[Callable[[], object]] = [
        *(partial(share, lambda: 1) for share in SHARES.values()),
        *(partial(run_in, block) for block in [*blocks, once.MainProcessContext]),
        partial(objcomm.metrics.average_metrics, {"x": 1}),
        partial(objcomm.metrics.gather_from_all_ranks, lambda: 1),
    ]
    for call in calls:
        with pytest.raises(
            UsageError, match=r"says that there are other ranks.*init_process_group"
        ):
            call()
    assert not objcomm.is_main(scope="node")


@ranks(2, environment={"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
def test_variables_that_are_the_same_on_all_ranks_do_not_make_two_of_them_main() -> None:
    """A launcher started the shell from which the ranks were started by hand."""
    rank = here().rank
    ran: list[int] = []

    def runs() -> int:
        ran.append(rank)
        return rank

    for share in SHARES.values():
        assert share(runs) == 0
    assert ran == [0] * (len(SHARES) if rank == 0 else 0)
    assert objcomm.is_main() == objcomm.is_main(scope="node") == (rank == 0)


@ranks(2, disposable=True)
def test_the_first_rank_of_a_host_is_known_from_the_launcher_or_from_node_group() -> None:
    with pytest.raises(UsageError, match="node_group"):
        objcomm.is_main(scope="node")
    for variable in ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        os.environ[variable] = str(here().rank)
        assert objcomm.is_main(scope="node") == (here().rank == 0)
        del os.environ[variable]
    os.environ["LOCAL_RANK"] = "first"
    with pytest.raises(UsageError, match="LOCAL_RANK='first'"):
        objcomm.is_main(scope="node")
    os.environ["LOCAL_RANK"] = ""
    objcomm.node_group()
    assert objcomm.is_main(scope="node") == (here().rank == 0)
    assert objcomm.rank_prefixed_message("text") == f"[rank: {here().rank}] text"
