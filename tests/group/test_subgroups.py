"""Groups other than the world: ranks 1 and 3 of four, meshes, and groups that overlap."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import objcomm
from objcomm import NotInGroupError, UsageError
from tests.cases import case
from tests.group.helpers import assert_group_works, subgroup
from tests.group.operations import MESSAGES, OPERATIONS, ROOTED
from tests.ranks import ranks
from tests.workers import here

MEMBERS = (1, 3)


@ranks(4)
def test_every_operation_works_on_a_group_without_rank_zero() -> None:
    with subgroup(*MEMBERS) as group:
        if here().rank not in MEMBERS:
            return
        mine = objcomm.rank(group)
        assert mine == MEMBERS.index(here().rank)
        assert objcomm.world_size(group) == 2
        assert objcomm.is_main(group) == (mine == 0)
        assert objcomm.broadcast(mine, group=group) == 0
        assert objcomm.gather(mine, group=group) == ([0, 1] if mine == 0 else None)
        assert objcomm.all_gather(mine, group=group) == [0, 1]
        assert objcomm.scatter(["a", "b"], group=group) == "ab"[mine]
        assert objcomm.reduce(str(mine), _join, group=group) == ("01" if mine == 0 else None)
        assert objcomm.all_reduce(str(mine), _join, group=group) == "01"
        assert objcomm.gather_scalar(mine, group=group) == ([0, 1] if mine == 0 else None)
        assert objcomm.metrics.all_gather_scalar(mine + 0.5, group=group) == [0.5, 1.5]
        assert objcomm.reduce_and_broadcast(lambda: mine, tuple, group=group) == (0, 1)
        objcomm.barrier("members", group=group)


def _join(left: str, right: str) -> str:
    return left + right


@ranks(4)
def test_roots_are_global_ranks_unless_said_otherwise() -> None:
    with subgroup(*MEMBERS) as group:
        if here().rank not in MEMBERS:
            return
        mine: Any = objcomm.rank(group)
        for root, member in enumerate(MEMBERS):
            sources: list[dict[str, Any]] = [{"src": member}, {"group_src": root}]
            for src in sources:
                assert objcomm.broadcast(mine, group=group, **src) == root
                chunks = [5, 6] if mine == root else None
                assert objcomm.scatter(chunks, group=group, **src) == 5 + mine
            destinations: list[dict[str, Any]] = [{"dst": member}, {"group_dst": root}]
            for dst in destinations:
                want = [0, 1] if mine == root else None
                assert objcomm.gather(mine, group=group, **dst) == want
                assert objcomm.gather_scalar(mine, group=group, **dst) == want
                reduced = objcomm.reduce(str(mine), _join, group=group, **dst)
                assert reduced == ("01" if mine == root else None)


@ranks(4)
def test_a_global_rank_outside_the_group_is_refused_as_root() -> None:
    with subgroup(*MEMBERS) as group:
        if here().rank not in MEMBERS:
            return
        for name, argument in ROOTED.items():
            for wrong in ({argument: 0}, {argument: 2}, {f"group_{argument}": 2}):
                with case(name, wrong), pytest.raises(UsageError):
                    OPERATIONS[name]("x", group=group, **wrong)
            assert_group_works(group)


@ranks(4)
def test_a_rank_outside_the_group_is_told_so() -> None:
    with subgroup(*MEMBERS) as group:
        for name, operation in {**OPERATIONS, **MESSAGES}.items():
            with case(name):
                if here().rank in MEMBERS:
                    operation(1, group=group)
                else:
                    with pytest.raises(NotInGroupError):
                        operation(1, group=group)
        assert objcomm.is_main(group) == (here().rank == MEMBERS[0])
        assert_group_works()


@ranks(4)
def test_a_mesh_of_one_dimension_is_a_group() -> None:
    mesh = init_device_mesh("cpu", (4,))
    assert objcomm.all_gather(here().rank, group=mesh) == [0, 1, 2, 3]
    assert objcomm.broadcast(here().rank, src=2, group=mesh) == 2
    assert (objcomm.rank(mesh), objcomm.world_size(mesh)) == (here().rank, 4)


@ranks(4)
def test_a_slice_of_a_mesh_is_a_group() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    rank = here().rank
    columns = objcomm.all_gather(rank, group=mesh["outer"])
    assert columns == [rank % 2, rank % 2 + 2]
    rows = objcomm.all_gather(rank, group=mesh["inner"])
    assert rows == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert objcomm.broadcast(rank, group_src=1, group=mesh["inner"]) == rows[1]


@ranks(4)
def test_a_mesh_of_two_dimensions_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for name, operation in OPERATIONS.items():
        with case(name), pytest.raises(UsageError):
            operation(1, group=mesh)
    assert_group_works()


@ranks(4)
def test_a_rank_outside_a_mesh_is_told_so() -> None:
    mesh = DeviceMesh("cpu", [1, 3])
    if here().rank in MEMBERS:
        assert objcomm.all_gather(here().rank, group=mesh) == [1, 3]
    else:
        with pytest.raises(NotInGroupError):
            objcomm.all_gather(here().rank, group=mesh)
    assert_group_works()


@ranks(1, 2)
def test_something_that_is_no_group_is_refused() -> None:
    groups: list[Any] = ["world", 0, [0, 1]]
    for wrong in groups:
        with case(wrong), pytest.raises(UsageError):
            objcomm.all_gather(1, group=wrong)
    assert_group_works()


@ranks(4)
def test_groups_that_overlap_do_not_mix() -> None:
    rank = here().rank
    with subgroup(0, 1, 2) as lower, subgroup(1, 2, 3) as upper, subgroup(3, 0) as outer:
        for turn in range(20):
            # Every rank keeps this order, so no groups wait for each other in a cycle.
            if rank in {0, 1, 2}:
                gathered = objcomm.all_gather((turn, rank), group=lower)
                assert gathered == [(turn, i) for i in range(3)]
            if rank in {1, 2, 3}:
                assert objcomm.broadcast((turn, rank), src=3, group=upper) == (turn, 3)
            if rank in {0, 3}:
                # new_group sorts its ranks: 0 comes first.
                assert objcomm.all_gather(rank, group=outer) == [0, 3]
            assert objcomm.all_reduce(rank) == 6


@ranks(4)
def test_halves_of_the_world_do_not_wait_for_each_other() -> None:
    rank = here().rank
    with subgroup(0, 1) as lower, subgroup(2, 3) as upper:
        mine = lower if rank < 2 else upper
        for turn in range(1 + 10 * (rank // 2)):
            assert objcomm.all_gather((turn, rank), group=mine)[rank % 2] == (turn, rank)
        objcomm.barrier()


@ranks(3)
def test_a_group_of_one_member_is_a_world_of_one() -> None:
    with subgroup(1) as group:
        if here().rank == 1:
            mine = ["only"]
            assert objcomm.all_gather(mine, group=group)[0] is mine
            assert objcomm.broadcast(mine, src=1, group=group) is mine
            assert objcomm.gather(mine, dst=1, group=group) == [mine]
            assert objcomm.all_reduce(2, group=group) == 2


@ranks(3)
def test_the_users_group_stays_free_for_the_users_own_traffic() -> None:
    rank = here().rank
    tensor = torch.tensor([rank])
    work = dist.all_reduce(tensor, async_op=True)
    assert objcomm.all_gather(rank) == [0, 1, 2]
    work.wait()
    assert tensor.item() == 3
    if rank == 0:
        request = dist.irecv(tensor, src=1)
        assert objcomm.all_gather(rank) == [0, 1, 2]
        assert request is not None
        request.wait()
        assert tensor.item() == 7
    else:
        assert objcomm.all_gather(rank) == [0, 1, 2]
        if rank == 1:
            dist.send(torch.tensor([7]), dst=0)


@ranks(3)
def test_a_group_may_be_destroyed_and_made_again() -> None:
    for turn in range(3):
        with subgroup(0, 2) as group:
            if here().rank != 1:
                assert objcomm.all_gather(turn, group=group) == [turn, turn]
                assert objcomm.broadcast(bytes(100_000), src=2, group=group) == bytes(100_000)
    assert_group_works()
