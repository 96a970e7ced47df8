"""A device mesh as ``group=``: every operation on each dimension of a mesh of two by two."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import objcomm
from objcomm import NotInGroupError, UsageError
from tests.group.helpers import assert_group_works
from tests.group.operations import OPERATIONS, ROOTED
from tests.ranks import ranks
from tests.workers import here

DIMENSIONS = ["dp", "tp"]


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def along(dimension: str) -> list[int]:
    """The global ranks of this rank's slice."""
    rank = here().rank
    return [rank % 2, rank % 2 + 2] if dimension == "dp" else [rank // 2 * 2, rank // 2 * 2 + 1]


@ranks(4)
@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_every_operation_works_along_a_dimension(dimension: str) -> None:
    part, want = two_by_two()[dimension], along(dimension)
    rank, mine = here().rank, want.index(here().rank)
    assert objcomm.rank(part) == mine
    assert objcomm.world_size(part) == 2
    assert objcomm.is_main(part) == (mine == 0)
    assert objcomm.broadcast(rank, group=part) == want[0]
    assert objcomm.gather(rank, group=part) == (want if mine == 0 else None)
    assert objcomm.all_gather(rank, group=part) == want
    assert objcomm.scatter(["a", "b"], group=part) == "ab"[mine]
    assert objcomm.reduce(rank, "sum", group=part) == (sum(want) if mine == 0 else None)
    assert objcomm.all_reduce(rank, "max", group=part) == want[1]
    assert objcomm.gather_scalar(rank, group=part) == (want if mine == 0 else None)
    assert objcomm.metrics.all_gather_scalar(rank, group=part) == want
    assert objcomm.reduce_and_broadcast(lambda: rank, tuple, group=part) == tuple(want)
    objcomm.barrier(dimension, group=part)
    with objcomm.fail_together(group=part):
        assert objcomm.stats(part)["barrier"].calls >= 1


@ranks(4)
@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_roots_along_a_dimension_are_global_or_group_ranks(dimension: str) -> None:
    part, want = two_by_two()[dimension], along(dimension)
    mine = want.index(here().rank)
    outside = next(rank for rank in range(4) if rank not in want)
    for name, argument in ROOTED.items():
        for root, member in enumerate(want):
            spellings: list[dict[str, Any]] = [{argument: member}, {f"group_{argument}": root}]
            for spelling in spellings:
                got = OPERATIONS[name](here().rank, group=part, **spelling)
                if argument == "src":
                    assert got == member, name
                else:
                    assert (got is None) == (mine != root), name
        wrong: list[dict[str, Any]] = [{argument: outside}, {f"group_{argument}": 2}]
        for each in wrong:
            with pytest.raises(UsageError):
                OPERATIONS[name](1, group=part, **each)
    assert_group_works(part.get_group())


@ranks(4)
def test_a_mesh_of_two_dimensions_is_refused_and_a_flat_one_is_not() -> None:
    mesh = two_by_two()
    flat = mesh._flatten("all")  # noqa: SLF001  # DeviceMesh has no other way
    for call in OPERATIONS.values():
        for wrong in (mesh, mesh["dp", "tp"]):
            with pytest.raises(UsageError, match="slice it"):
                call(1, group=wrong)
        call(1, group=flat)
    assert_group_works()


@ranks(4)
def test_a_rank_outside_a_mesh_is_told_so() -> None:
    mesh = DeviceMesh("cpu", [1, 3])
    for call in OPERATIONS.values():
        if here().rank in {1, 3}:
            call(1, group=mesh)
        else:
            with pytest.raises(NotInGroupError):
                call(1, group=mesh)
    assert here().rank in {1, 3} or (objcomm.rank(mesh), objcomm.world_size(mesh)) == (-1, -1)
    assert_group_works()


@ranks(4)
def test_a_dimension_can_be_divided_and_copied() -> None:
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
