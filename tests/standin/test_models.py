"""Models and trees on the devices: results are bitwise the same as on the CPU."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError
from tests.cases import case
from tests.same import assert_same
from tests.standin import device
from tests.standin.worlds import (
    copies,
    devices_in,
    fetched,
    made,
    on_devices,
    over_the_devices_only,
    own_device,
)

LARGE = 100_000  # elements, so that the member does not fit into the window


def network() -> torch.nn.Module:
    """Return a model with large and small parameters, and buffers of both kinds."""
    return torch.nn.Sequential(
        torch.nn.Linear(40, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 2)
    )


@on_devices(1, 2, 3, 4)
def test_a_model_learns_as_it_does_on_the_cpu() -> None:
    device.set_device(0)  # torch's autograd knows no other device written in Python
    rank, size = objcomm.rank(), objcomm.world_size()
    torch.manual_seed(rank)
    there = network()
    here = copy.deepcopy(there)
    there.to("standin")
    given = torch.rand(5, 40)
    for model, at in ((here, "cpu"), (there, "standin")):
        device.queued()
        objcomm.models.broadcast_model(model, size - 1)
        assert copies() == []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with objcomm.models.eager_sync_model(model):
                model(given.to(at)).square().sum().backward()
                device.queued()
            assert copies() == []
            optimizer.step()
        objcomm.models.sync_buffers(model.named_buffers(), average=False)
    for (name, wanted), got in zip(
        here.state_dict().items(), there.state_dict().values(), strict=True
    ):
        assert got.device == own_device()
        assert torch.equal(got.cpu(), wanted), name
    gradients = [each.grad for each in there.parameters()]
    assert set(devices_in(gradients)) == {own_device()}
    assert {type(each) for each in there.parameters()} == {torch.nn.Parameter}
    assert bool(made()) == (size > 1)


@on_devices(2, 3)
def test_gradients_are_averaged_on_the_devices() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    parameters = [torch.nn.Parameter(torch.ones(each).to("standin")) for each in (3, LARGE, 0, 40)]
    for at, parameter in enumerate(parameters[:-1]):
        parameter.grad = torch.full_like(parameter, rank + at)
    if rank == 0:  # a gradient on one rank only
        parameters[-1].grad = torch.full_like(parameters[-1], 6.0)
    frozen = torch.nn.Parameter(torch.ones(3).to("standin"))  # a gradient on no rank
    with over_the_devices_only():
        objcomm.models.sync_gradients([*parameters, frozen])
    for at, parameter in enumerate(parameters[:-1]):
        assert parameter.grad is not None
        assert parameter.grad.device == own_device()
        assert bool((parameter.grad.cpu() == (size - 1) / 2 + at).all())
    assert parameters[-1].grad is not None
    assert bool((parameters[-1].grad.cpu() == 6 / size).all())
    assert frozen.grad is None


@on_devices(2, 3)
def test_tensors_are_changed_in_place() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    elsewhere = torch.device("standin", (device.current_device() + 1) % device.COUNT)
    tensors = {
        "large": torch.full((LARGE,), rank).to("standin"),
        "number": torch.tensor(rank).to("standin"),
        "transposed": torch.full((2, LARGE), rank).to("standin").t(),
        "strided": torch.full((LARGE, 2), rank).to("standin")[:, 1],
        "on the host": torch.full((LARGE,), rank),
        "elsewhere": torch.full((LARGE,), rank).to(elsewhere),
    }
    places = devices_in(tensors)
    for root in range(size):
        mine = {name: each.clone() for name, each in tensors.items()}
        objcomm.models.broadcast_tensors(mine.items(), root)
        for name, tensor in mine.items():
            assert bool((tensor.cpu() == root).all()), name
        assert devices_in(mine) == places
    means = {name: each.float() for name, each in tensors.items()}
    means["halves"] = torch.full((LARGE,), 60000.0, dtype=torch.float16).to("standin")
    objcomm.models.average_tensors(means.items())
    for name, tensor in means.items():
        wanted = 60000.0 if name == "halves" else (size - 1) / 2
        assert bool((tensor.cpu() == wanted).all()), name
    other = torch.ones(LARGE).to("standin") if rank else torch.ones(LARGE)
    with pytest.raises(CollectiveError, match="on standin"):
        objcomm.models.average_tensors([other])


@on_devices(1, 2, 3, 4)
def test_trees_are_combined_on_the_devices_and_as_on_the_cpu() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    generator = torch.Generator().manual_seed(rank)
    tree: dict[str, Any] = {
        "weights": torch.rand(LARGE, generator=generator),
        "halves": torch.full((LARGE,), 60000.0, dtype=torch.float16),
        "counts": torch.randint(0, 9, (LARGE + 1,), generator=generator),
        "flags": torch.rand(5, generator=generator) < 0.5,
        "column": torch.rand(50, 40, generator=generator)[:, 0],
        "empty": torch.empty(0, 3),
        "loss": 0.5,
    }
    there = {
        name: each.to("standin") if isinstance(each, torch.Tensor) else each
        for name, each in tree.items()
    }
    for op in ("sum", "mean", "any", "max", "min"):
        with case(op):
            want = objcomm.all_reduce(tree, op)
            with over_the_devices_only():
                got = objcomm.all_reduce(there, op)
            assert_same(fetched(got), want, sharing=False)
            assert set(devices_in(got)) == {own_device()}
    last = size - 1
    onto = objcomm.reduce(there, "mean", last)
    assert (onto is None) == (rank != last)
    assert onto is None or set(devices_in(onto)) == {own_device()}
    some = {"rare": torch.ones(LARGE).to("standin")} if rank == last else {}
    got = objcomm.all_reduce(some, "mean", missing="skip")
    assert bool((got["rare"].cpu() == 1).all())


@on_devices(2, 3)
def test_both_kinds_of_device_in_one_tree_and_a_group_without_a_backend() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    tree = {
        "there": torch.full((LARGE,), float(rank)).to("standin"),
        "here": torch.full((LARGE,), float(rank)),
    }
    group = dist.new_group(backend="gloo")
    for where in (None, group):
        got = objcomm.all_reduce(tree, "sum", group=where)
        assert got["there"].device == own_device()
        assert got["here"].device.type == "cpu"
        assert bool((got["there"].cpu() == sum(range(size))).all())
        assert bool((got["here"] == sum(range(size))).all())
        for name, tensor in tree.items():
            parameter = torch.nn.Parameter(tensor.clone())
            parameter.grad = tensor.clone()
            with case(name):
                objcomm.models.sync_gradients([parameter], group=where)
                assert parameter.grad.device == tensor.device
                assert bool((parameter.grad.cpu() == (size - 1) / 2).all())


@on_devices(2)
def test_asynchronous_calls_combine_on_the_callers_stream() -> None:
    rank = objcomm.rank()
    mine = torch.full((LARGE,), float(rank)).to("standin")
    side = device.Stream()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        mine.add_(1)
        device.queued()
        work = objcomm.all_reduce({"w": mine}, "sum", async_op=True)
        got = work.wait()
        noted = device.queued()
        assert bool((got["w"].cpu() == 3).all())
    assert {each.device for each in noted} == {device.current_device()}
    assert side.stream_id in {each.stream for each in noted}
    assert 0 not in {each.stream for each in noted}
