"""Blocks in order: the first rank, or each host's first, goes before the others."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, UsageError
from objcomm._training import once
from tests.group.control import BLOCKS, OwnInterrupt, fail, raised_together
from tests.group.helpers import assert_group_works, hear, say, subgroup, when_main_thread_waits
from tests.ranks import ranks
from tests.workers import here


def assert_goes_first(
    first: int, members: Iterable[int], block: Any, *ways: dict[str, Any], group: Any = None
) -> None:
    """Check that one of these ranks runs a block's body while the others wait, and then they do.

    Args:
        first: the rank that goes first.
        members: all ranks that enter the block.
        block: what they enter.
        ways: the block's arguments, of one way to enter it after the other.
        group: the group of these ranks.
    """
    rank, is_prepared = here().rank, here().folder / "is prepared"
    if rank != first:
        when_main_thread_waits(lambda: say(f"rank {rank} waits"))
    for options in ways:
        with block(**options):
            if rank == first:
                for other in set(members) - {first}:
                    hear(f"rank {other} waits")
                assert not is_prepared.exists()
                is_prepared.touch()
            else:
                assert is_prepared.exists()
        if rank == first:
            is_prepared.unlink()
        objcomm.barrier(group=group)


@ranks(1, 2, 4)
@pytest.mark.parametrize("name", BLOCKS)
def test_the_first_rank_goes_first(name: str) -> None:
    block = BLOCKS[name]
    assert_goes_first(0, range(here().world_size), block, {}, {})
    # Nested inner blocks wait for no rank, also when both kinds are mixed on one host.
    objcomm.node_group()
    for inner in BLOCKS.values():
        with block(), inner(), block():
            pass
    assert_group_works()


@ranks(1, 3)
@pytest.mark.parametrize("block", [objcomm.main_first, once.zero_first])
def test_a_rank_other_than_the_first_may_go_first(block: Any) -> None:
    rank, last = here().rank, here().world_size - 1
    assert_goes_first(last, range(last + 1), block, {"rank": last}, {"group_rank": last})
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
def test_the_rank_that_goes_first_is_named_within_a_subgroup_too() -> None:
    with subgroup(1, 3) as pair:
        if here().rank in {1, 3}:
            block = partial(objcomm.main_first, group=pair)
            assert_goes_first(3, (1, 3), block, {"rank": 3}, {"group_rank": 1}, group=pair)
    assert_group_works()


@ranks(3)
def test_a_block_in_another_order_inside_a_block_is_refused_on_all() -> None:
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
def test_ranks_that_let_different_ranks_go_first_raise_a_desync() -> None:
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
def test_a_call_inside_a_block_is_refused(name: str) -> None:
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
def test_ranks_that_are_in_a_block_together_may_communicate() -> None:
    with subgroup(1, 2) as pair, objcomm.main_first():
        if here().rank > 0:
            assert objcomm.all_gather(here().rank, group=pair) == [1, 2]
    assert_group_works()


@ranks(2, 3)
def test_hosts_are_asked_for_once_on_each_lane() -> None:
    part = objcomm.dup()

    def asked() -> bool:
        objcomm.reset_stats(part)
        with objcomm.node_first(group=part):
            pass
        assert objcomm.run_once_per_node(lambda: "one", group=part) == "one"
        return "node_group" in objcomm.stats(part)

    assert asked()
    assert not asked()
    with objcomm.lane("another"):
        assert asked()
        assert not asked()
    dist.destroy_process_group(objcomm.node_group(group=part))
    assert asked()
    dist.destroy_process_group(part)


@ranks(4)
def test_blocks_of_hosts() -> None:
    """Two simulated hosts of two ranks each, because the test runs on one host."""
    rank = here().rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("objcomm._collectives.split.machine", lambda: f"host {rank // 2}")
        part = objcomm.dup()
        with objcomm.node_first(group=part):
            pass
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

        def fail_on(failing: int) -> None:
            if rank == failing:
                fail(OSError("disk full"))

        def block(failing: int) -> None:
            with objcomm.node_first(group=part):
                fail_on(failing)

        for failing in (2, 3):
            raised_together(partial(block, failing), failing, operation="node_first")
            assert_group_works(part)
        call = partial(objcomm.run_once_per_node, fail_on, [2], group=part)
        raised_together(call, 2, operation="run_once_per_node")
        assert_group_works(part)
        with objcomm.node_first(group=part):
            if rank == 0:
                with objcomm.main_first(group=part):
                    pass
        dist.destroy_process_group(part)
    assert_group_works()
