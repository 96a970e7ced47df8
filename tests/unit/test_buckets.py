"""Tensors on several devices of one process, packed into one and unpacked.

There is no second device to test with, so CPU memory stands for two. As torch does for real
devices, the fake requires all tensors of an operation to be on one device, unless it copies
between them.
"""

from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from objcomm._training.buckets import Rule, _Bucket

# Of all types that torch numbers, only this one needs neither a driver nor a special build. Its
# tensors have elements here, because each wraps a CPU tensor that holds them.
FIRST, SECOND = torch.device("meta:0"), torch.device("meta:1")

pytestmark = pytest.mark.usefixtures("_devices")


class Placed(torch.Tensor):
    """CPU memory that claims to be on another device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls: type[Self], held: torch.Tensor, device: torch.device) -> Self:
        made = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001  # torch's documented way
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=device
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> Any:
        raise AssertionError("outside of the mode")


class Devices(TorchDispatchMode):
    """Run operations in CPU memory if their tensors are on one device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        wanted = dict(kwargs or {})
        placed = [each for each in tree_leaves((args, wanted)) if isinstance(each, Placed)]
        found = {each.device for each in placed}
        if len(found) > 1 and func != torch.ops.aten.copy_.default:
            raise RuntimeError(f"{func}: tensors on {sorted(map(str, found))}")
        device = wanted.pop("device", None) or (placed[0].device if placed else None)
        arguments, options = tree_map_only(Placed, lambda each: each.held, (args, wanted))
        results = func(*arguments, **options)
        if results is None or func._schema.name.endswith("_"):  # noqa: SLF001  # no public name
            return args[0] if results is not None else None
        if device is None or device.type == "cpu":
            return results
        return tree_map_only(torch.Tensor, lambda each: Placed(each, device), results)


@pytest.fixture
def _devices() -> Iterator[None]:
    with torch.inference_mode(), Devices():  # type: ignore[no-untyped-call]  # torch's
        yield


def bucket_of(*tensors: torch.Tensor) -> _Bucket:
    bucket = _Bucket(Rule.AVERAGE, "cuda")
    bucket.tensors += tensors
    return bucket


def held(tensor: torch.Tensor) -> list[float]:
    assert isinstance(tensor, Placed)
    elements: list[float] = tensor.held.reshape(-1).tolist()
    return elements


def test_the_fake_devices_refuse_what_torch_refuses() -> None:
    ours, theirs = Placed(torch.ones(2), FIRST), Placed(torch.ones(2), SECOND)
    with pytest.raises(RuntimeError, match=r"cat.*meta:[01]"):
        torch.cat([ours, theirs])
    assert ours.copy_(theirs).device == FIRST
    assert ours.cpu().device.type == "cpu"


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "where they were packed": lambda flat: flat.mul_(10),
    "on the host": lambda flat: flat.cpu().mul_(10),
    "on the other device": lambda flat: flat.to(SECOND).mul_(10),
}


@pytest.mark.parametrize("change", CHANGES)
def test_tensors_of_two_devices_travel_as_one(change: str) -> None:
    ours = Placed(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), FIRST)
    theirs = Placed(torch.tensor([5.0, 6.0]), SECOND)
    more = Placed(torch.tensor([7.0]), FIRST)
    bucket = bucket_of(ours, theirs, more)
    flat = bucket.open()
    assert flat.device == FIRST
    assert held(flat) == [1, 2, 3, 4, 5, 6, 7]
    bucket.close(CHANGES[change](flat))
    assert [held(each) for each in (ours, theirs, more)] == [[10, 20, 30, 40], [50, 60], [70]]


@pytest.mark.parametrize("change", CHANGES)
def test_a_single_tensor_returns_from_where_it_was_changed(change: str) -> None:
    alone = Placed(torch.tensor([1.0, 2.0]), FIRST)
    bucket = bucket_of(alone)
    bucket.close(CHANGES[change](bucket.open()))
    assert held(alone) == [10, 20]
