"""The device link's logic, run with CPU tensors over Gloo: what it moves where, in which order.

The link does not depend on the type of device. Here "cpu" takes the accelerator's role:
``device="cpu"`` stages every large member through the link, as ``device="cuda"`` does.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError
from objcomm._algorithms import tensor_reduction
from objcomm._algorithms.device import BackendLink
from objcomm._calls.group import Group
from tests.cases import case
from tests.group.helpers import assert_group_works, error_in
from tests.group.operations import OBJECT_OPERATIONS, OPERATIONS
from tests.ranks import ranks
from tests.same import assert_same

LARGE = 100_000  # elements, too many for the window


class CountingLink(BackendLink):
    """Counts the bytes that this rank moved over the link."""

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__(lambda: group, device, range(group.size()))
        self.moved_nbytes = 0

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        self.moved_nbytes += flat.numel()
        super().broadcast(flat, root)

    def send(self, flat: torch.Tensor, peer: int) -> None:
        self.moved_nbytes += flat.numel()
        super().send(flat, peer)

    def recv(self, flat: torch.Tensor, peer: int) -> None:
        self.moved_nbytes += flat.numel()
        super().recv(flat, peer)

    def all_to_all(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        self.moved_nbytes += flat.numel()
        super().all_to_all(flat, into)

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        self.moved_nbytes += into.numel()
        super().all_gather(flat, into)

    def abort(self) -> None:
        """Do nothing: the backend is the group's own."""


@contextlib.contextmanager
def group_with_device_link() -> Iterator[tuple[Any, CountingLink]]:
    """Yield a new group of all ranks that treats the CPU as its accelerator, and its link."""
    process_group = dist.new_group()
    link = CountingLink(process_group, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "device_backends", {link.device: "gloo"})
        patch.setattr(Group, "_link", lambda *_: link)
        yield process_group, link


def on_device(group: Any) -> dict[str, Any]:
    """The options of a call that keeps large members in the device's memory."""
    return {"group": group, "device": "cpu"}


@ranks(2, 3)
def test_large_members_use_the_device_link_and_arrive_whole() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    with group_with_device_link() as (group, link):
        options = on_device(group)
        mine: Any = {"w": torch.full((LARGE,), rank), "n": np.full(LARGE, rank), "name": f"r{rank}"}
        objs = [torch.full((LARGE,), place) for place in range(size)]
        for root in range(size):
            before = link.moved_nbytes
            got: Any = objcomm.broadcast(mine if rank == root else None, root, **options)
            assert (got["w"] == root).all()
            assert (got["n"] == root).all()
            assert got["name"] == f"r{root}"
            assert link.moved_nbytes - before == 2 * 8 * LARGE
            gathered = objcomm.gather(mine, root, **options)
            assert (gathered is not None) == (rank == root)
            for sender, each in enumerate(gathered or []):
                assert (each["w"] == sender).all()
            part: Any = objcomm.scatter(objs if rank == root else None, root, **options)
            assert (part == rank).all()
        everyone = objcomm.all_gather(mine, **options)
        assert [int(each["n"][-1]) for each in everyone] == list(range(size))
        before = link.moved_nbytes
        parts = objcomm.all_to_all([obj + 10 * rank for obj in objs], **options)
        assert [int(each[-1]) for each in parts] == [10 * peer + rank for peer in range(size)]
        assert link.moved_nbytes > before


@ranks(2, 3)
def test_reductions_use_the_device_link_too() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    last, mine = size - 1, torch.full((LARGE,), rank)
    with group_with_device_link() as (group, link):
        options = on_device(group)
        assert (objcomm.all_reduce(mine, **options) == sum(range(size))).all()
        joined = objcomm.reduce([mine], lambda a, b: a + b, last, **options)
        assert (joined is None) == (rank != last)
        assert [int(each[0]) for each in joined or []] == (list(range(size)) if joined else [])
        assert link.moved_nbytes > 0
        assert (objcomm.scan(mine, **options) == sum(range(rank + 1))).all()
        before = objcomm.exscan(mine, **options)
        assert (before is None) == (rank == 0)
        assert before is None or (before == sum(range(rank))).all()
        operands = [torch.full((LARGE,), peer) for peer in range(size)]
        assert (objcomm.reduce_scatter(operands, **options) == rank * size).all()


@ranks(2, 3)
def test_every_operation_moves_large_members_over_the_device_link() -> None:
    with group_with_device_link() as (group, link):
        for name in OBJECT_OPERATIONS:
            before = link.moved_nbytes
            with case(name):
                got = OPERATIONS[name](torch.full((LARGE,), 7), **on_device(group))
                for each in got if isinstance(got, list) else [got]:
                    assert each is None or (each == 7).all()
                assert any(objcomm.all_gather(link.moved_nbytes > before))
                assert_group_works(group)


@ranks(2)
def test_without_device_nothing_in_cpu_memory_uses_the_device_link() -> None:
    with group_with_device_link() as (group, link):
        everyone = objcomm.all_gather(torch.full((LARGE,), objcomm.rank()), group=group)
        assert [int(each[0]) for each in everyone] == [0, 1]
        assert link.moved_nbytes == 0


@ranks(2)
def test_a_failure_leaves_the_device_link_in_step() -> None:
    with group_with_device_link() as (group, _):
        mine = torch.full((LARGE,), objcomm.rank())
        generator = (number for number in [1])  # can't be pickled
        given = (mine, generator) if objcomm.is_main() else mine
        error = error_in(CollectiveError, lambda: objcomm.all_gather(given, group=group))
        assert list(error.failures) == [0]
        everyone = objcomm.all_gather(mine, **on_device(group))
        assert [int(each[0]) for each in everyone] == [0, 1]


@ranks(2, 3)
def test_trees_on_the_device_are_combined_there_and_as_on_the_host() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    generator = torch.Generator().manual_seed(rank)
    tree: dict[str, Any] = {
        "weights": torch.rand(LARGE, generator=generator),
        "halves": torch.full((LARGE,), 60000.0, dtype=torch.float16),
        "counts": torch.randint(0, 9, (LARGE + 1,), generator=generator),
        "flags": torch.rand(5, generator=generator) < 0.5,
        "z": torch.complex(*[torch.rand(3, generator=generator) for _ in "ri"]),
        "column": torch.rand(50, 40, generator=generator)[:, 0],
        "empty": torch.empty(0, 3),
        "array": np.arange(LARGE) + rank,
        "loss": 0.5,
    }
    with group_with_device_link() as (group, link):
        # No products: how torch rounds those of complex numbers depends on its vector units.
        for op in ("sum", "mean", "any", "max"):
            before = link.moved_nbytes
            if op == "max":
                del tree["z"]  # complex numbers have no order
            got = objcomm.all_reduce(tree, op, group=group)
            assert link.moved_nbytes > before
            want = objcomm.all_reduce(tree, op)  # the world's own group has no device link
            assert_same(got, want, sharing=False)
        last = size - 1
        onto = objcomm.reduce(tree, "mean", group_dst=last, group=group)
        assert (onto is None) == (rank != last)
        if onto is not None:
            assert bool((onto["halves"] == 60000.0).all())
        # A member that only some ranks have goes through CPU memory.
        before = link.moved_nbytes
        some = {"rare": torch.ones(LARGE)} if rank else {}
        got = objcomm.all_reduce(some, "mean", missing="skip", group=group)
        assert bool((got["rare"] == 1).all())
        assert link.moved_nbytes == before


@ranks(2, 3)
def test_a_rank_out_of_device_memory_fails_the_call_before_others_wait() -> None:
    rank, last = objcomm.rank(), objcomm.world_size() - 1
    tensor = torch.ones(20 * LARGE)
    with group_with_device_link() as (group, link):
        with pytest.MonkeyPatch.context() as patch:
            if rank == last:
                full = mock.Mock(side_effect=torch.OutOfMemoryError("no room"))
                patch.setattr(tensor_reduction, "_packed", full)
            error = torch.OutOfMemoryError if rank == last else CollectiveError
            with pytest.raises(error, match="no room"):
                objcomm.all_reduce(tensor, group=group)
        assert link.moved_nbytes == 0
        assert bool((objcomm.all_reduce(tensor, group=group) == last + 1).all())
        assert link.moved_nbytes > 0


@ranks(2)
def test_a_link_that_only_some_ranks_have_is_used_by_none() -> None:
    process_group = dist.new_group()
    link = CountingLink(process_group, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        if objcomm.is_main():
            patch.setattr(Group, "device_backends", {link.device: "gloo"})
            patch.setattr(Group, "_link", lambda *_: link)
        got = objcomm.all_reduce(torch.full((LARGE,), objcomm.rank()), group=process_group)
    assert bool((got == 1).all())
    assert link.moved_nbytes == 0


@ranks(2, 3)
def test_models_on_the_device_travel_over_its_link() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    with group_with_device_link() as (group, link):
        parameters = [torch.nn.Parameter(torch.ones(numel)) for numel in (3, LARGE, 0, LARGE)]
        for at, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, float(rank + at))
        objcomm.models.sync_gradients(parameters, group=group)
        for at, parameter in enumerate(parameters):
            assert parameter.grad is not None
            assert bool((parameter.grad == (size - 1) / 2 + at).all())
        assert link.moved_nbytes > 2 * 4 * LARGE
        assert objcomm.stats(group)["sync_gradients"].sent_nbytes < 10_000
        before = link.moved_nbytes
        tensors = [torch.full((LARGE,), rank), torch.tensor(rank), torch.full((2, LARGE), rank).t()]
        objcomm.models.broadcast_tensors(tensors, size - 1, group=group)
        assert all(bool((tensor == size - 1).all()) for tensor in tensors)
        assert link.moved_nbytes - before == 8 * (3 * LARGE + 1)
        assert objcomm.stats(group)["broadcast_tensors"].sent_nbytes < 10_000
        halves = torch.full((LARGE,), 60000.0, dtype=torch.float16)
        objcomm.models.average_tensors([halves], group=group)
        assert bool((halves == 60000.0).all())
