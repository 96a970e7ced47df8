"""Blocks in order: the first rank, or each host's first, goes before the others."""

from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, UsageError
from objcomm._training import once
from tests.group.control import BLOCKS, OwnInterrupt, fail, raised_together
from tests.group.helpers import assert_group_works, exit_at_once, subgroup, when_main_thread_waits
from tests.ranks import ranks
from tests.workers import here


@ranks(1, 2, 4)
@pytest.mark.parametrize("name", BLOCKS)
def test_the_first_rank_goes_first(name: str) -> None:
    block, rank = BLOCKS[name], here().rank
    is_prepared = here().folder / name
    waiting = [f"{name} {other}" for other in range(1, here().world_size)]
    if rank > 0:
        when_main_thread_waits(lambda: here().store("order").set(waiting[rank - 1], ""))
    for _ in range(2):
        with block():
            if rank == 0:
                for key in waiting:
                    here().store("order").get(key)
                assert not is_prepared.exists()
                is_prepared.touch()
            else:
                assert is_prepared.exists()
        if rank == 0:
            is_prepared.unlink()
        objcomm.barrier()
    # Nested inner blocks wait for no rank, also when both kinds are mixed on one host.
    objcomm.node_group()
    for inner in BLOCKS.values():
        with block(), inner(), block():
            pass
    assert_group_works()


@ranks(1, 3)
@pytest.mark.parametrize("block", [objcomm.main_first, once.zero_first])
def test_another_rank_than_the_first_may_go_first(block: Any) -> None:
    rank, last = here().rank, here().world_size - 1
    is_prepared = here().folder / block.__name__
    waiting = [f"{block.__name__} {other}" for other in range(last)]
    if rank < last:
        when_main_thread_waits(lambda: here().store("order").set(waiting[rank], ""))
    for named in ({"rank": last}, {"group_rank": last}):
        with block(**named):
            if rank == last:
                for key in waiting:
                    here().store("order").get(key)
                assert not is_prepared.exists()
                is_prepared.touch()
            else:
                assert is_prepared.exists()
        objcomm.barrier()
        if rank == last:
            is_prepared.unlink()
        objcomm.barrier()
    with block(rank=last), objcomm.main_first(group_rank=last), once.MainProcessContext():
        assert objcomm.broadcast(rank) == rank

    def fails() -> None:
        with block(rank=last):
            if rank < last:
                pytest.fail("it was entered")
            fail(ValueError("on the last"))

    raised_together(fails, last, operation=block.__name__)
    assert_group_works()


@ranks(4)
def test_who_goes_first_is_named_within_a_subgroup_too() -> None:
    rank = here().rank
    made = here().folder / "made"
    with subgroup(1, 3) as pair:
        for named in ({"rank": 3}, {"group_rank": 1}):
            if rank in {1, 3}:
                with objcomm.main_first(group=pair, **named):
                    assert made.exists() == (rank == 1)
                    made.touch()
                objcomm.barrier(group=pair)
                made.unlink(missing_ok=True)
                objcomm.barrier(group=pair)
    assert_group_works()


@ranks(3)
def test_a_block_in_another_order_inside_of_a_block_is_refused_on_all() -> None:
    rank = here().rank
    for outer, inner in ((0, 2), (2, 0)):
        with (
            objcomm.main_first(rank=outer),
            pytest.raises(UsageError, match=f"global rank {rank} is inside main_first"),
            objcomm.main_first(rank=inner),
        ):
            pytest.fail("it was entered")
    assert_group_works()


@ranks(2)
def test_ranks_that_let_others_go_first_are_told_so() -> None:
    with pytest.raises(objcomm.DesyncError), objcomm.main_first(rank=here().rank):
        pass
    assert_group_works()


@ranks(2, 4)
@pytest.mark.parametrize("name", BLOCKS)
def test_an_error_in_a_block_is_raised_on_all(name: str) -> None:
    block, rank, last = BLOCKS[name], here().rank, here().world_size - 1
    entered = []

    def fails_on(*failing: int) -> None:
        with block():
            entered.append(rank)
            if rank in failing:
                fail(ValueError(f"on {rank}"))

    error = raised_together(lambda: fails_on(0), 0, operation=name)
    assert error.failures[0].message == "on 0"
    assert entered == [0] * (rank == 0)
    assert_group_works()
    raised_together(lambda: fails_on(last), last, operation=name)
    assert entered[-1:] == [rank]
    assert_group_works()
    if last > 1:
        raised_together(lambda: fails_on(1, 2), 1, 2, operation=name)
        assert_group_works()
    # A rank raises its own interrupt unchanged; nested blocks report to the outer one.
    with pytest.raises((OwnInterrupt, CollectiveError)) as caught, block():
        entered.append(fail(OwnInterrupt()) if rank == 0 else rank)
    assert isinstance(caught.value, OwnInterrupt) == (rank == 0)
    with pytest.raises(CollectiveError), block(), block():
        entered.append(fail(ValueError()) if rank == last else rank)
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_call_inside_of_a_block_is_refused(name: str) -> None:
    block, rank = BLOCKS[name], here().rank
    with block():
        for call in (
            objcomm.barrier,
            lambda: objcomm.all_gather(1),
            lambda: objcomm.run_on_main(int),
            lambda: once.zero_only().__enter__(),
        ):
            with pytest.raises(UsageError, match=f"global rank {rank} is inside {name}"):
                call()
    assert_group_works()
    with pytest.raises(CollectiveError) as caught, block():
        objcomm.barrier()
    assert caught.value.failures[0].type_name == "objcomm.UsageError"
    assert_group_works()


@ranks(3)
def test_ranks_that_are_in_a_block_together_may_talk() -> None:
    with subgroup(1, 2) as pair, objcomm.main_first():
        if here().rank > 0:
            assert objcomm.all_gather(here().rank, group=pair) == [1, 2]
    assert_group_works()


@ranks(3, expect_dead={2})
def test_a_rank_that_dies_in_a_block_is_named() -> None:
    with pytest.raises(objcomm.TransportError) as caught, objcomm.main_first():
        exit_at_once() if here().rank == 2 else None
    assert caught.value.peers == (2,)


@ranks(2, 3)
def test_hosts_are_asked_for_once_on_each_lane() -> None:
    part = objcomm.dup()

    def asked() -> int:
        objcomm.reset_stats(part)
        with objcomm.node_first(group=part):
            pass
        assert objcomm.run_once_per_node(lambda: "one", group=part) == "one"
        return objcomm.stats(part)["node_group"].calls if "node_group" in objcomm.stats(part) else 0

    assert asked() > 0
    assert asked() == 0
    with objcomm.lane("another"):
        assert asked() > 0
        assert asked() == 0
    dist.destroy_process_group(objcomm.node_group(group=part))
    assert asked() > 0
    dist.destroy_process_group(part)


@ranks(4)
def test_blocks_of_hosts() -> None:
    """Two simulated hosts of two ranks each, because the test runs on one host."""
    rank = here().rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("objcomm._collectives.split.machine", lambda: f"host {rank // 2}")
        part = objcomm.dup()
        order: list[str] = []
        with objcomm.node_first(group=part):
            order.append("in")
        assert objcomm.is_main(part, scope="node") == (rank in {0, 2})
        made = objcomm.run_once_per_node(lambda: here().rank, group=part)
        assert made == rank // 2 * 2

        def among_first() -> Any:
            # The world's other ranks are not here: local. The heads of the hosts are: not local.
            assert objcomm.broadcast(rank, src=3, group=part) == rank
            inner = objcomm.main_process_only(group=part)(lambda: f"on {rank}")
            return inner(), objcomm.all_gather(rank, group=heads)

        heads = objcomm.leaders(group=part)
        assert objcomm.once_per_node(group=part)(among_first)() == (f"on {rank // 2 * 2}", [0, 2])
        ran: list[str] = []
        objcomm.run_once_per_node(ran.append, ["func"], None, ran.append, ["post"], group=part)
        assert ran == (["func"] if rank in {0, 2} else ["post"])
        for failing in (2, 3):

            def block(failing: int = failing) -> None:
                with objcomm.node_first(group=part):
                    if rank == failing:
                        fail(OSError("disk full"))

            raised_together(block, failing, operation="node_first")
            assert_group_works(part)

        def fails_on_second_host() -> None:
            if rank == 2:
                fail(OSError("disk full"))

        raised_together(
            lambda: objcomm.run_once_per_node(fails_on_second_host, group=part),
            2,
            operation="run_once_per_node",
        )
        assert_group_works(part)
        with objcomm.node_first(group=part):
            if rank == 0:
                with objcomm.main_first(group=part):
                    pass
        dist.destroy_process_group(part)
    assert_group_works()
