"""split, dup, node_group and leaders: the members of each group, and what all ranks agree on."""

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import NotInGroupError, UsageError
from objcomm._collectives.split import _by_color, _Contribution, _leaders
from objcomm._world import store_of
from tests.group.helpers import assert_group_works, keys_in, subgroup
from tests.group.membership import NOBODY, members
from tests.ranks import ranks, solo
from tests.waits import wait_until
from tests.workers import here


@ranks(1, 2, 3, 4)
def test_ranks_of_one_color_form_a_group_that_works() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    half = objcomm.split(rank % 2)
    assert isinstance(half, dist.ProcessGroup)
    assert members(half) == list(range(rank % 2, size, 2))
    assert_group_works(half)
    assert objcomm.all_gather(rank, group=half) == members(half)
    tensor = torch.tensor([1])
    dist.all_reduce(tensor, group=half)
    assert tensor.item() == len(members(half))
    dist.destroy_process_group(half)
    assert_group_works()


@ranks(4)
def test_ranks_are_ordered_by_key_and_then_by_rank() -> None:
    rank = here().rank
    for keys, want in [
        ((3, 2, 1, 0), [3, 2, 1, 0]),
        ((5, -1, 5, 0), [1, 3, 0, 2]),
        ((None, None, None, None), [0, 1, 2, 3]),
        ((None, -1, 1, None), [1, 0, 3, 2]),
    ]:
        group = objcomm.split("all", keys[rank])
        assert members(group) == want
        assert objcomm.rank(group) == dist.get_rank(group) == want.index(rank)
        assert objcomm.all_gather(rank, group=group) == want
        assert objcomm.broadcast(rank, src=2, group=group) == 2
        tensor = torch.tensor([rank])
        dist.broadcast(tensor, src=want[-1], group=group)
        assert tensor.item() == want[-1]
        dist.destroy_process_group(group)


@ranks(4)
@pytest.mark.parametrize("none", [None, -1, -5])
def test_a_rank_without_a_color_is_in_no_group(none: Any) -> None:
    rank = here().rank
    group = objcomm.split(none if rank == 2 else 0)
    if rank != 2:
        assert members(group) == [0, 1, 3]
        assert_group_works(group)
        return
    assert group is NOBODY
    calls: list[Any] = [partial(objcomm.split, 0), objcomm.dup, objcomm.node_group, objcomm.leaders]
    for again in calls:
        with pytest.raises(NotInGroupError):
            again(group=group)


@ranks(4)
def test_disjoint_groups_with_different_pasts_are_divided_at_the_same_time() -> None:
    rank = here().rank
    # torch names groups by a process's number of groups, which differs between these ranks.
    alone = objcomm.split(rank)
    spare = [objcomm.dup(group=alone) for _ in range(rank)]
    pair = objcomm.split(rank // 2)
    for turn in range(3):
        one = objcomm.split(turn, key=-rank, group=pair)
        assert members(one) == sorted(members(pair), reverse=True)
        assert_group_works(one)
        dist.destroy_process_group(one)
    assert members(objcomm.split(rank % 2, group=pair)) == [rank]
    for group in spare:
        dist.destroy_process_group(group)
    with subgroup(0, 3) as group:  # torch's own names still agree
        if rank in {0, 3}:
            assert_group_works(group)
            dist.barrier(group)
    assert_group_works()


@ranks(4)
def test_a_group_without_rank_zero_is_divided_by_its_members_alone() -> None:
    rank = here().rank
    with subgroup(1, 3) as pair:
        if rank in {1, 3}:
            upside = objcomm.split(0, key=-rank, group=pair)
            assert members(upside) == [3, 1]
            assert_group_works(upside)
            assert objcomm.broadcast(rank, group=upside) == 3
            assert objcomm.broadcast(rank, group_src=1, group=upside) == 1
            assert members(objcomm.dup(group=pair)) == [1, 3]
            assert members(objcomm.node_group(group=pair)) == [1, 3]
            first = objcomm.leaders(group=pair)
            assert (members(first) == [1]) if rank == 1 else (first == NOBODY)
        else:
            with pytest.raises(NotInGroupError):
                objcomm.split(0, group=pair)


@ranks(2, 3)
def test_the_same_division_gives_the_same_group_again() -> None:
    rank = here().rank
    first = objcomm.split(rank % 2)
    assert objcomm.split(rank % 2) is objcomm.split(rank % 2) is first
    assert objcomm.split(str(rank % 2)) is first  # only its members count
    assert objcomm.split(rank % 2, group=objcomm.split("all")) is not first
    for call in (objcomm.node_group, objcomm.leaders):
        found = call()
        assert call() is found or found is call() is NOBODY
    assert objcomm.node_group() is objcomm.split(0)
    assert objcomm.split(0, key=-rank) is not objcomm.split(0)


@ranks(2)
def test_the_same_division_costs_one_exchange() -> None:
    objcomm.split(0)
    objcomm.reset_stats()
    objcomm.split(0)
    stats = objcomm.stats()
    assert set(stats) == {"split"}
    assert (stats["split"].calls, stats["split"].exchanges) == (1, 1)


@ranks(3)
@pytest.mark.parametrize("destroyer", [None, 0, 2])
def test_a_destroyed_group_is_created_again(destroyer: int | None) -> None:
    rank = here().rank
    first = objcomm.split(0)
    assert_group_works(first)
    objcomm.barrier()
    if destroyer in {None, rank}:
        dist.destroy_process_group(first)
    second = objcomm.split(0)
    assert second is not first
    assert_group_works(second)
    assert objcomm.split(0) is second


@ranks(3)
def test_a_group_that_only_some_ranks_still_have_is_created_again() -> None:
    rank = here().rank
    lower = objcomm.split("lower" if rank < 2 else "upper")
    if rank == 1:
        dist.destroy_process_group(lower)
    again = objcomm.split("lower" if rank < 2 else "upper")
    assert (again is lower) == (rank == 2)
    assert_group_works(again)


@ranks(2)
def test_a_copy_is_new_each_time_and_has_its_own_connections() -> None:
    first, second = objcomm.dup(), objcomm.dup()
    assert first is not second
    assert members(first) == members(second) == [0, 1]
    assert objcomm.split(0) not in {first, second}
    if here().rank == 0:
        for text, group in (("first", first), ("second", second)):
            assert objcomm.broadcast("", src=1, group=group) == text
        tensor = torch.zeros(1, dtype=torch.int64)
        dist.recv(tensor, src=1, group=second)
        assert tensor.item() == 1
    else:  # in the other order: messages of one group do not reach the other
        sent: Any = dist.isend(torch.tensor([1]), dst=0, group=second)
        assert objcomm.broadcast("first", src=1, group=first) == "first"
        assert objcomm.broadcast("second", src=1, group=second) == "second"
        sent.wait()
    assert members(objcomm.dup(group=objcomm.split(0, key=-here().rank))) == [1, 0]
    with objcomm.check():
        third = objcomm.dup()
    for group in (first, second, third):
        dist.destroy_process_group(group)


@ranks(2)
@pytest.mark.parametrize("make", [objcomm.node_group, objcomm.dup])
def test_nothing_refers_to_a_destroyed_group(make: Callable[[], dist.ProcessGroup]) -> None:
    group = make()
    assert_group_works(group)
    reference = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    wait_until(lambda: reference() is None, "threads that used the group to let go of it")


BOTH = "cpu:gloo,cuda:gloo"


@ranks(2, joined=False)
@pytest.mark.parametrize(
    ("backend", "is_bound"),
    [(None, False), ("gloo", False), ("cpu:gloo", False), (BOTH, False), (BOTH, True)],
)
def test_a_new_group_has_its_parents_backend_timeout_and_device(
    backend: str | None, *, is_bound: bool
) -> None:
    place, limit = here(), timedelta(seconds=77)
    dist.init_process_group(
        backend, store=place.store("s"), rank=place.rank, world_size=2, timeout=limit
    )
    world: Any = dist.GroupMember.WORLD
    if is_bound:  # Gloo, used here in place of NCCL, must not be asked for this device
        world.bound_device_id = torch.device("cuda", 0)
    groups: list[Any] = [objcomm.split(0, timeout=60), objcomm.dup(timeout=60)]
    for group in (*groups, objcomm.node_group()):
        assert dist.get_backend(group) == dist.get_backend()
        assert dist.get_backend_config(group) == dist.get_backend_config()
        assert group._get_backend(torch.device("cpu")).options._timeout == limit  # noqa: SLF001
        assert group.bound_device_id == world.bound_device_id
        assert_group_works(group)
    dist.destroy_process_group()


@ranks(2, environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
def test_groups_are_created_under_torchs_own_checks() -> None:
    for group in (objcomm.split(0), objcomm.dup()):
        assert_group_works(group)
        dist.barrier(group)
        dist.destroy_process_group(group)


@ranks(2)
def test_groups_can_be_divided_while_calls_are_in_flight() -> None:
    work = objcomm.all_gather(here().rank, async_op=True)
    group = objcomm.dup()
    inner = objcomm.all_gather(here().rank, group=group, async_op=True)
    assert members(objcomm.split(here().rank)) == [here().rank]
    assert inner.wait() == work.wait() == [0, 1]
    dist.destroy_process_group(group)


@ranks(2)
def test_large_numbers_and_those_of_numpy_are_colors_and_all_ranks_may_lack_one() -> None:
    assert members(objcomm.split(np.int64(3) if here().rank else 3)) == [0, 1]
    assert members(objcomm.split(2**70, key=np.int32(-here().rank))) == [1, 0]
    assert objcomm.split(None) is NOBODY
    assert_group_works()


@ranks(4)
def test_ranks_of_one_host_and_one_rank_per_host() -> None:
    assert members(objcomm.node_group()) == [0, 1, 2, 3]
    first = objcomm.leaders()
    if here().rank == 0:
        assert members(first) == [0]
        assert objcomm.all_gather("alone", group=first) == ["alone"]
    else:
        assert first == NOBODY


def test_hosts_are_grouped_by_name_whichever_ranks_they_have() -> None:
    sent = [_Contribution(host, 0, "", []) for host in "babca"]
    assert _by_color(sent) == [(0, 2), (1, 4), (3,)]
    assert _leaders(sent) == [(0, 1, 3)]


@solo()
def test_without_torch_distributed_there_is_a_world_of_one() -> None:
    assert objcomm.split(3) is objcomm.dup() is objcomm.node_group() is objcomm.leaders() is None
    assert objcomm.new_group([0]) is objcomm.survivors() is None
    outside = objcomm.split(None)
    assert (objcomm.rank(outside), objcomm.world_size(outside)) == (-1, -1)
    with pytest.raises(NotInGroupError):
        objcomm.all_gather(1, group=outside)
    with pytest.raises(UsageError):
        objcomm.split(1.5)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(UsageError, match="not in this group"):
        objcomm.new_group([0, 1])


@ranks(3)
def test_no_address_of_a_new_group_stays_in_the_store() -> None:
    store: Any = store_of(dist.group.WORLD)
    group: Any = objcomm.split(0 if here().rank else None)
    if here().rank:
        address = f"{group.group_name}//cpu"
        wait_until(lambda: not any(address in key for key in keys_in(store)), "addresses to go")
        assert_group_works(group)
        dist.destroy_process_group(group)
    assert_group_works()
