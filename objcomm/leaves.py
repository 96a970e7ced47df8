"""Tensors and arrays as leaves of an operand: their descriptions, elements and fresh results.

Knows torch and numpy's dtypes; knows no containers, and no ranks.
"""

import math
from typing import Any, NamedTuple

import torch

from objcomm import elementwise
from objcomm.codecs.tensors import (
    check_shape,
    describe_array,
    dtype_name,
    dtype_named,
    is_plain_array,
    is_plain_tensor,
)
from objcomm.errors import DecodeError

_TENSOR, _ARRAY = "tensor", "array"


class Tensors(NamedTuple):
    """What a description says of a tensor or an array."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str
    is_array: bool

    @property
    def numel(self) -> int:
        """Elements: a number of Python's, because a peer may name any shape."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize


def described(leaf: Any) -> tuple[Any, Any] | None:
    """A leaf's description as plain data, and the leaf; ``None`` if ``elementwise`` has no use."""
    if is_plain_tensor(leaf) and leaf.dtype in elementwise.DTYPES and not leaf.is_meta:
        value = leaf.detach().resolve_conj().resolve_neg()
        name = dtype_name(value.dtype)
        return (_TENSOR, name, tuple(value.shape), value.device.type), value
    if is_plain_array(leaf) and _torch_dtype_of(leaf) is not None:
        return (_ARRAY, leaf.dtype.name, tuple(leaf.shape), "cpu"), leaf
    return None


def _torch_dtype_of(array: Any) -> torch.dtype | None:
    if not array.dtype.isnative or array.dtype.names is not None:
        return None
    dtype = getattr(torch, array.dtype.name, None)
    return dtype if dtype in elementwise.DTYPES else None


def tensors_of(description: Any) -> Tensors | None:
    """What a tensor's or an array's description says; ``None`` for any other leaf.

    Raises:
        DecodeError: another rank's says what no rank would.
    """
    if type(description) is not tuple or not description:
        return None
    if type(description[0]) is not str or description[0] not in {_TENSOR, _ARRAY}:
        return None
    is_whole = len(description) == len(Tensors._fields)
    if not is_whole or not type(description[1]) is type(description[3]) is str:
        raise DecodeError("tensor", "a leaf is described by what is no description")
    kind, dtype, shape, device_type = description
    check_shape(kind, shape)
    return Tensors(dtype_named(dtype), shape, device_type, kind == _ARRAY)


def flat_of(leaf: Any, op: str) -> torch.Tensor:
    """A tensor's or an array's elements in C order, in the dtype that travels; often a view."""
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    else:
        import numpy as np  # noqa: PLC0415  # numpy is optional

        dtype = getattr(torch, leaf.dtype.name)
        flat = describe_array(np.ascontiguousarray(leaf))[1].view(dtype)
    return flat.to(elementwise.operand_dtype(op, flat.dtype))


def room_for(about: Tensors, op: str, device: torch.device | str) -> tuple[Any, torch.Tensor]:
    """A fresh result and a flat view of its elements."""
    dtype = elementwise.result_dtype(op, about.dtype)
    with torch.inference_mode(mode=False):
        tensor = torch.empty(about.shape, dtype=dtype, device=device)
        return (tensor.numpy() if about.is_array else tensor), tensor.view(-1)
