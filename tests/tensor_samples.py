"""Tensors, modules and arrays that must arrive unchanged. Adds to `samples.SAMPLES`."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.samples import Plain, pickled, plain

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Labelled(torch.Tensor):
    """A user's subclass."""

    label: object


class Weight(torch.nn.Parameter):
    """A user's parameter class."""


def _every_byte(dtype: torch.dtype) -> torch.Tensor:
    """Return all bit patterns of fp8, including nan, and many of the wider types."""
    return torch.arange(256, dtype=torch.uint8).view(dtype)


for _dtype in (*_INTEGERS, *_UNSIGNED, *_FLOATS, *_FP8, *_COMPLEX):
    plain(f"tensor {_dtype}", functools.partial(_every_byte, _dtype))
plain("tensor torch.bool", lambda: torch.tensor([True, False, True]))
plain("tensor of 0 dimensions", lambda: torch.tensor(2.5))
plain("tensor of 0 elements", lambda: torch.empty(1, 0, 2))
plain("tensor of 1 MB", lambda: torch.arange(250_000, dtype=torch.float32).view(500, 500))
plain("tensor nan and -0.0", lambda: torch.tensor([float("nan"), -0.0, float("-inf")]))
plain("tensor column", lambda: torch.arange(12.0).view(3, 4)[:, 0])
plain("tensor transposed", lambda: torch.arange(12.0).view(3, 4).t())
plain("tensor with steps", lambda: torch.arange(100)[5:50:7])
plain("tensor expanded", lambda: torch.arange(3.0).view(3, 1).expand(3, 4))
plain("tensor expanded from one", lambda: torch.tensor(7).expand(1000, 1000))
plain("tensor with overlapping rows", lambda: torch.arange(10).unfold(0, 4, 1))
plain(
    "tensor channels last",
    lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
)
plain("tensor with conj bit", lambda: torch.tensor([1 + 2j, -0.0j]).conj())
plain("tensor with neg bit", lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag)
plain("tensor with an odd offset", lambda: torch.arange(9, dtype=torch.uint8)[1:])
plain("tensor requires_grad", lambda: torch.ones(3, requires_grad=True))
plain("parameter", lambda: torch.nn.Parameter(torch.arange(3.0)))
plain("frozen parameter", lambda: torch.nn.Parameter(torch.arange(3.0), requires_grad=False))
plain("list of 50 small tensors", lambda: [torch.full((3,), i) for i in range(50)])
plain(
    "tensors small and large",
    lambda: {"a": torch.zeros(3), "b": torch.ones(300, 300), "c": torch.arange(2)},
)
plain("dtype, device and size", lambda: [torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])])
plain("limits of dtypes", lambda: [torch.finfo(torch.bfloat16), torch.iinfo(torch.uint8)])
pickled("storage", lambda: torch.arange(3.0).untyped_storage())
pickled("storage of 1 MB", lambda: torch.arange(250_000).untyped_storage())
pickled("storage without bytes", lambda: torch.empty(0).untyped_storage())
plain("meta tensor", lambda: torch.empty(1 << 40, device="meta"))

plain("tensor with attributes", lambda: _with_attribute(torch.ones(2)))
plain("parameter with attributes", lambda: _with_attribute(torch.nn.Parameter(torch.ones(2))))
plain("buffer", lambda: torch.nn.Buffer(torch.ones(2), persistent=False))
plain("sparse tensor with attributes", lambda: _with_attribute(torch.eye(3).to_sparse()))
plain("meta tensor with attributes", lambda: _with_attribute(torch.empty(2, device="meta")))
plain("sparse tensor", lambda: torch.eye(3).to_sparse())
plain("uncoalesced sparse tensor", lambda: _sparse([[0, 0]], [1.0, 2.0], 2))
plain("sparse tensor with dense dimensions", lambda: _sparse([[1]], [[1.0, 2.0]], 4, 2))
plain("sparse tensor of 0 elements", lambda: _sparse([[], []], [], 3, 4))
pickled("compressed sparse tensor", lambda: _quietly(torch.eye(3).to_sparse_csr))
pickled("tensor of a subclass", lambda: torch.ones(3).as_subclass(Labelled))
pickled("parameter of a subclass", lambda: Weight(torch.ones(3), requires_grad=False))
pickled("parameter of a subclass with attributes", lambda: _with_attribute(Weight(torch.ones(3))))
pickled("linear layer", lambda: _seeded(torch.nn.Linear, 2, 3))
pickled("batch norm with integer buffer", lambda: torch.nn.BatchNorm1d(3))
pickled("state dict", lambda: _seeded(torch.nn.Linear, 2, 3).state_dict())


def _sparse(indices: list[Any], values: list[Any], *shape: int) -> torch.Tensor:
    at = torch.tensor(indices, dtype=torch.int64)
    return torch.sparse_coo_tensor(at, torch.tensor(values), shape, check_invariants=True)


def _quietly(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Create a tensor of a layout that torch warns about once, because it is new."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def _with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.label = {"kept": [1, (2,)]}  # type: ignore[attr-defined]  # an attribute of a user's program
    return tensor


def _seeded(cls: type[torch.nn.Module], *args: int) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cls(*args)


def _made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(3.0)


plain("tensor with a graph", lambda: torch.ones(3, requires_grad=True) * 2)
plain("tensor made in inference mode", _made_in_inference_mode)


def _tied() -> Any:
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    return Plain(encoder=weight, decoder=weight, head={"weight": weight})


pickled("the same tensor three times", _tied)


def _arrays() -> None:
    pickled("limits of numpy's dtypes", lambda: [np.finfo(np.float32), np.iinfo(np.int8)])
    pickled("memoryview of an array", lambda: np.arange(6.0).reshape(2, 3).data)
    record = np.dtype([("id", "<i4"), ("xy", "<f8", (2,)), ("name", "S3")])
    plain("array", lambda: np.arange(6.0).reshape(2, 3))
    plain("array of 1 MB", lambda: np.arange(250_000, dtype=np.float32))
    plain("array of 0 dimensions", lambda: np.array(2.5))
    plain("array of 0 elements", lambda: np.empty((0, 3), np.int16))
    plain("array in Fortran order", lambda: np.asfortranarray(np.arange(6).reshape(2, 3)))
    plain("array column", lambda: np.arange(12).reshape(3, 4)[:, 1])
    plain("array backwards", lambda: np.arange(5)[::-1])
    plain("array broadcast", lambda: np.broadcast_to(np.arange(3), (4, 3)))
    plain("array read-only", lambda: _read_only(np.arange(3)))
    plain("array big-endian", lambda: np.arange(3, dtype=">i4"))
    plain("array of structs", lambda: np.array([(1, (2.0, 3.0), b"abc"), (4, (5, 6), b"")], record))
    plain("array of datetimes", lambda: np.array(["2024-02-29T12", "NaT"], "datetime64[us]"))
    plain("array of timedeltas", lambda: np.array([1, -1], "timedelta64[ns]"))
    plain("array of str", lambda: np.array(["é", "", "日本語"]))
    plain("array of bytes", lambda: np.array([b"a\0b", b""]))
    plain("array of bool", lambda: np.array([True, False]))
    plain("array float16 with nan", lambda: np.array([np.nan, -0.0, np.inf], np.float16))
    plain("array complex", lambda: np.array([1 + 2j], np.complex64))
    plain("array longdouble", lambda: np.array([1, 3], np.longdouble) / 7)
    for scalar in (
        np.float64(0.1),
        np.float32(0.1),
        np.int8(-1),
        np.uint64(2**64 - 1),
        np.bool_(1),
    ):
        plain(f"numpy {type(scalar).__name__}", functools.partial(_same_object, scalar))
    plain("numpy datetime64", lambda: np.datetime64("2024-02-29", "D"))
    plain("numpy str_", lambda: np.str_("é"))
    plain("numpy void", lambda: np.array([(1, (2.0, 3.0), b"abc")], record)[0])
    plain("numpy dtype", lambda: [np.dtype("float32"), np.dtype(">i2"), record])
    pickled("array of objects", lambda: np.array([1, "a", None, [2], {"b": 3}], object))
    pickled("record array", lambda: np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]))
    pickled("masked array", lambda: np.ma.masked_array([1, 2, 3], [False, True, False]))
    pickled("state of a generator", lambda: np.random.default_rng(0).bit_generator.state)
    pickled("the same array twice", lambda: [array := np.arange(50_000), array])


def _same_object(obj: Any) -> Any:
    return obj


def _read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


_arrays()
