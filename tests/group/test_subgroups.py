"""Groups other than the world: some of its ranks, slices of meshes, and groups that overlap."""

import contextlib
import operator
from collections.abc import Iterator
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

MEMBERS = [1, 3]
PARTS = ["ranks 1 and 3", "dp", "tp"]


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def along(dimension: str) -> list[int]:
    """The global ranks of this rank's slice."""
    rank = here().rank
    return [rank % 2, rank % 2 + 2] if dimension == "dp" else [rank // 2 * 2, rank // 2 * 2 + 1]


@contextlib.contextmanager
def part_of_world(name: str) -> Iterator[tuple[Any, list[int]]]:
    """Ranks 1 and 3, or this rank's slice of a mesh of two by two; with the members' ranks."""
    if name in {"dp", "tp"}:
        yield two_by_two()[name], along(name)
    else:
        with subgroup(*MEMBERS) as group:
            yield group, MEMBERS


@ranks(4)
@pytest.mark.parametrize("name", PARTS)
def test_every_operation_works_on_a_part_of_the_world(name: str) -> None:
    with part_of_world(name) as (group, members):
        rank = here().rank
        if rank not in members:
            return
        mine = members.index(rank)
        assert objcomm.rank(group) == mine
        assert objcomm.world_size(group) == 2
        assert objcomm.is_main(group) == (mine == 0)
        text = "".join(map(str, members))
        assert objcomm.broadcast(rank, group=group) == members[0]
        assert objcomm.gather(rank, group=group) == (members if mine == 0 else None)
        assert objcomm.all_gather(rank, group=group) == members
        assert objcomm.scatter(["a", "b"], group=group) == "ab"[mine]
        assert objcomm.scatter(["a", "b"], group_src=1, group=group) == "ab"[mine]
        reduced = objcomm.reduce(str(rank), operator.add, group=group)
        assert reduced == (text if mine == 0 else None)
        assert objcomm.all_reduce(str(rank), operator.add, group=group) == text
        assert objcomm.all_reduce(rank, "max", group=group) == members[1]
        assert objcomm.gather_scalar(rank, group=group) == (members if mine == 0 else None)
        assert objcomm.metrics.all_gather_scalar(mine + 0.5, group=group) == [0.5, 1.5]
        assert objcomm.reduce_and_broadcast(lambda: rank, tuple, group=group) == tuple(members)
        objcomm.barrier(name, group=group)
        with objcomm.fail_together(group=group):
            assert objcomm.stats(group)["barrier"].calls >= 1


@ranks(4)
@pytest.mark.parametrize("part", PARTS)
def test_roots_are_global_ranks_or_ranks_of_the_group(part: str) -> None:
    with part_of_world(part) as (group, members):
        rank = here().rank
        if rank not in members:
            return
        for name, argument in ROOTED.items():
            for root, member in enumerate(members):
                for spelling in ({argument: member}, {f"group_{argument}": root}):
                    with case(name, spelling):
                        got = OPERATIONS[name](rank, group=group, **spelling)
                        if argument == "src":
                            assert got == member
                        elif rank != member:
                            assert got is None
                        else:
                            assert got == (members[0] if name == "reduce" else members)
            outside = [{argument: each} for each in range(4) if each not in members]
            for wrong in (*outside, {f"group_{argument}": 2}):
                with case(name, wrong), pytest.raises(UsageError):
                    OPERATIONS[name](1, group=group, **wrong)
        objcomm.barrier(group=group)


@ranks(4)
@pytest.mark.parametrize("is_mesh", [False, True])
def test_a_rank_outside_a_group_cannot_call_on_it(*, is_mesh: bool) -> None:
    rank = here().rank
    with subgroup(*MEMBERS) as members:
        group: Any = DeviceMesh("cpu", MEMBERS) if is_mesh else members
        for name, operation in (OPERATIONS if is_mesh else OPERATIONS | MESSAGES).items():
            with case(name):
                if rank in MEMBERS:
                    operation(1, group=group)
                else:
                    text = f"^{name.partition(' ')[0]}: global rank {rank} is not a member"
                    with pytest.raises(NotInGroupError, match=text):
                        operation(1, group=group)
        assert rank in MEMBERS or (objcomm.rank(group), objcomm.world_size(group)) == (-1, -1)
        assert objcomm.is_main(group) == (rank == MEMBERS[0])
        assert_group_works()


@ranks(4)
def test_a_mesh_of_two_dimensions_is_refused_and_one_of_one_dimension_is_not() -> None:
    rank, mesh = here().rank, two_by_two()
    flat = mesh._flatten("all")  # noqa: SLF001  # DeviceMesh has no other way
    for name, call in OPERATIONS.items():
        for wrong in (mesh, mesh["dp", "tp"]):
            text = rf"^{name}: group= must be a mesh of one dimension, not of 2; slice it"
            with case(name), pytest.raises(UsageError, match=text):
                call(1, group=wrong)
        call(1, group=flat)
    line = init_device_mesh("cpu", (4,))
    assert objcomm.all_gather(rank, group=line) == [0, 1, 2, 3]
    assert objcomm.broadcast(rank, src=2, group=line) == 2
    assert (objcomm.rank(line), objcomm.world_size(line)) == (rank, 4)
    assert_group_works()


@ranks(4)
def test_a_dimension_of_a_mesh_can_be_divided_and_copied() -> None:
    rank, mesh = here().rank, two_by_two()
    part = mesh["dp"]
    turned = objcomm.split(0, key=-rank, group=part)
    assert objcomm.all_gather(rank, group=turned) == along("dp")[::-1]
    assert objcomm.split(0, key=-rank, group=mesh["dp"]) is turned
    assert objcomm.split(0, key=-rank, group=part.get_group()) is turned
    copy = objcomm.dup(group=part)
    assert objcomm.all_gather(rank, group=copy) == along("dp")
    dist.destroy_process_group(copy)
    hosts = objcomm.leaders(group=part)
    assert (objcomm.rank(hosts) == 0) == (rank == along("dp")[0])
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor, group=turned)
    assert tensor.item() == sum(along("dp"))


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
def test_a_users_group_stays_free_for_the_users_own_traffic() -> None:
    rank = here().rank
    tensor = torch.tensor([rank])
    work = dist.all_reduce(tensor, async_op=True)
    assert objcomm.all_gather(rank) == [0, 1, 2]
    work.wait()
    assert tensor.item() == 3
    request: Any = dist.irecv(tensor, src=1) if rank == 0 else None
    assert objcomm.all_gather(rank) == [0, 1, 2]
    if rank == 1:
        dist.send(torch.tensor([7]), dst=0)
    elif rank == 0:
        request.wait()
        assert tensor.item() == 7


@ranks(3)
def test_a_group_may_be_destroyed_and_made_again() -> None:
    for turn in range(3):
        with subgroup(0, 2) as group:
            if here().rank != 1:
                assert objcomm.all_gather(turn, group=group) == [turn, turn]
                assert objcomm.broadcast(bytes(100_000), src=2, group=group) == bytes(100_000)
    assert_group_works()
