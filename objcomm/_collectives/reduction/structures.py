"""What an operand looks like: its containers and leaves as plain data, and where two differ.

A structure is nested tuples: ``(number of the leaf, description)``, or ``(kind, type, keys,
members)``. It holds no class and no tensor, so that comparing needs nothing of what is compared,
and ranks exchange it before anything large moves. Knows objects; knows no messages.
"""

import collections
import copy
import dataclasses
import datetime
import enum
import math
import numbers
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from objcomm._codecs.nesting import length_of
from objcomm._codecs.tensors import (
    check_shape,
    describe_array,
    dtype_name,
    dtype_named,
    is_plain_array,
    is_plain_tensor,
)
from objcomm._collectives.reduction import elementwise
from objcomm._collectives.reduction.operators import Operator
from objcomm._wire.failure_message import DifferenceError
from objcomm.errors import DecodeError, UsageError, shown

#: In place of a leaf that this rank does not have.
ABSENT = object()

_ROOT = "obj"
_NUMBER = "number"
#: A container whose keys may differ in order, and be missing on some ranks.
MAPPING = "mapping"
_FIELDS, _SEQUENCE = "fields", "sequence"
_CONSTANT = "constant"
_CONSTANTS = (str, bytes, enum.Enum, type(None), torch.dtype, torch.device)

# Keys that an error shows whole; the text of others may be of any length.
_SHORT = (str, bytes, bool, float, complex, type(None), enum.Enum, datetime.date, pathlib.PurePath)
# A scalar of numpy's makes an array of a range to compare the two: a key may be a short one.
_KEY_NUMBERS_MAX = 1 << 10

# What a rank that lacks a part can make by itself, without a class of the user's.
_MADE: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "list": list,
    "tuple": tuple,
    "collections.OrderedDict": collections.OrderedDict,
}


class Leaf(NamedTuple):
    """One leaf of a structure that several ranks have.

    Attributes:
        description: plain data.
        places: where each rank that has it has it among its own leaves.
    """

    description: Any
    places: dict[int, int]


def describe(obj: Any, operator: Operator, rank: int) -> tuple[Any, list[Any]]:
    """An operand's structure and its leaves.

    Raises:
        UsageError: the operator cannot combine a leaf; names its path.
    """
    describing = _Describing(operator, rank)
    return describing.node(obj, _ROOT), describing.leaves


class _Describing:
    # No nested functions: one that calls itself would be left to the garbage collector.
    def __init__(self, operator: Operator, rank: int) -> None:
        self.leaves: list[Any] = []
        self._operator = operator
        self._rank = rank

    def node(self, member: Any, path: str) -> Any:
        kind = _kind_of(member)
        if kind is None:
            return self._leaf(member, path)
        keys = _keys_of(kind, member)
        children = [self.node(_member(kind, member, key), path + _step(kind, key)) for key in keys]
        return kind, _type_name(member), keys, tuple(children)

    def _leaf(self, member: Any, path: str) -> Any:
        description, value = _described(member, self._operator, is_nested=path != _ROOT)
        if description != _CONSTANT:
            _check(self._operator, member, path, self._rank, description)
        self.leaves.append(value)
        return len(self.leaves) - 1, description


def _described(member: Any, operator: Operator, *, is_nested: bool) -> tuple[Any, Any]:
    if (found := described(member)) is not None:
        return found
    is_arraylike = isinstance(member, torch.Tensor) or hasattr(member, "__array_interface__")
    if operator.name in {"any", "all"} and not is_arraylike:
        return _NUMBER, bool(member)
    if is_nested and isinstance(member, _CONSTANTS):
        return _CONSTANT, member
    if isinstance(member, numbers.Number):
        return _NUMBER, member
    return ("object", _type_name(member)), member


def _check(operator: Operator, member: Any, path: str, rank: int, description: Any) -> None:
    if tensors_of(description) is None:
        try:
            operator.prepare(member, rank)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error
    elif operator.name in {"min", "max"} and "complex" in description[1]:
        raise UsageError(f"{path}: complex numbers have no {operator.name}")


def _type_name(obj: Any) -> str:
    kind = type(obj)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _kind_of(obj: Any) -> str | None:
    if isinstance(obj, dict):
        return MAPPING
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return _FIELDS
    if isinstance(obj, list) or type(obj) is tuple:  # a torch.Size is no tuple of operands
        return _SEQUENCE
    return _FIELDS if dataclasses.is_dataclass(obj) and not isinstance(obj, type) else None


def _keys_of(kind: str, obj: Any) -> tuple[Any, ...]:
    if kind == MAPPING:
        return tuple(obj)
    if kind == _SEQUENCE:
        return tuple(range(len(obj)))
    if isinstance(obj, tuple):
        return tuple(obj._fields)  # type: ignore[attr-defined]  # a named tuple
    return tuple(field.name for field in dataclasses.fields(obj))


def _member(kind: str, obj: Any, key: Any) -> Any:
    return getattr(obj, key) if kind == _FIELDS else obj[key]


def _step(kind: str, key: Any) -> str:
    return f".{key}" if kind == _FIELDS else f"[{_key_text(key)}]"


def _key_text(key: Any) -> str:
    if type(key) is tuple:
        return f"({', '.join(map(_key_text, key))})"
    return repr(key) if isinstance(key, _SHORT) else shown(key)


def _is_leaf(node: Any) -> bool:
    return type(node[0]) is int


def is_constant(description: Any) -> bool:
    """Whether the leaf passes through, if it is equal on all ranks."""
    return bool(description == _CONSTANT)


def leaves_of(node: Any, path: str = _ROOT) -> Iterator[tuple[str, Any]]:
    """Every leaf's path and description, in order."""
    if _is_leaf(node):
        yield path, node[1]
        return
    kind, _, keys, children = node
    for key, child in zip(keys, children, strict=True):
        yield from leaves_of(child, path + _step(kind, key))


def merge(structures: Sequence[Any], *, may_lack: bool) -> tuple[Any, list[Leaf]]:
    """One structure of all ranks', in the order of the lowest rank that has each member.

    Args:
        structures: one per rank, in rank order.
        may_lack: whether keys of mappings may be missing on some ranks.

    Returns:
        The structure, and all its leaves.

    Raises:
        DifferenceError: they differ.
    """
    first = structures[0]
    if all(each == first for each in structures[1:]):
        ranks = range(len(structures))
        leaves = [description for _, description in leaves_of(first)]
        return first, [Leaf(each, dict.fromkeys(ranks, at)) for at, each in enumerate(leaves)]
    merging = _Merging(len(structures), may_lack=may_lack)
    return merging.node(dict(enumerate(structures)), _ROOT), merging.leaves


class _Merging:
    def __init__(self, size: int, *, may_lack: bool) -> None:
        self.leaves: list[Leaf] = []
        self._size = size
        self._may_lack = may_lack

    def node(self, nodes: Mapping[int, Any], path: str) -> Any:
        lowest, *others = nodes
        first = nodes[lowest]
        for rank in others:
            if (ours := _kind_text(first)) != (theirs := _kind_text(nodes[rank])):
                raise DifferenceError(path, (lowest, rank), f"{ours} and {theirs}")
        if _is_leaf(first):
            self.leaves.append(Leaf(first[1], {rank: node[0] for rank, node in nodes.items()}))
            return len(self.leaves) - 1, first[1]
        kind, type_name, _, _ = first
        if len(nodes) < self._size and type_name not in _MADE:
            lacking = next(rank for rank in range(self._size) if rank not in nodes)
            reason = f"only mappings, lists and tuples can be filled in, not {type_name}"
            raise DifferenceError(path, _in_order(lowest, lacking), reason)
        members = {rank: dict(zip(node[2], node[3], strict=True)) for rank, node in nodes.items()}
        keys = tuple(dict.fromkeys(key for each in members.values() for key in each))
        children = []
        for key in keys:
            having = {rank: each[key] for rank, each in members.items() if key in each}
            step = path + _step(kind, key)
            if len(having) < len(members) and not self._may_lack:
                holder = next(iter(having))
                lacking = next(rank for rank in members if rank not in having)
                reason = f"rank {lacking} has no such member; give it, or pass missing='skip'"
                raise DifferenceError(step, _in_order(holder, lacking), reason)
            children.append(self.node(having, step))
        return kind, type_name, keys, tuple(children)


def _in_order(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)


def _kind_text(node: Any) -> str:
    """All that must agree of one node besides its keys, in words."""
    if not _is_leaf(node):
        kind, type_name, keys, _ = node
        return type_name if kind == MAPPING else f"{type_name} of {len(keys)}"
    description = node[1]
    if (tensors := tensors_of(description)) is None:
        return description if isinstance(description, str) else str(description[1])
    where = "" if tensors.is_array or tensors.device_type == "cpu" else f" on {description[3]}"
    return f"{description[0]} of {description[1]}, shape {tensors.shape}{where}"


def is_plain(description: Any) -> bool:
    """Whether it describes a leaf that is neither a tensor nor an array."""
    if type(description) is str:
        return description in {_NUMBER, _CONSTANT}
    is_pair = type(description) is tuple and [type(each) for each in description] == [str, str]
    return is_pair and bool(description[0] == "object")


def is_key(key: Any) -> bool:
    """Whether comparing a key that arrived costs no more than its bytes."""
    if type(key) in {tuple, frozenset}:
        return all(map(is_key, key))
    if type(key) is range:
        return length_of(key) <= _KEY_NUMBERS_MAX
    return not isinstance(key, (torch.Tensor, BaseException))


def can_be_made(kind: Any, type_name: Any, keys: Sequence[Any]) -> bool:
    """Whether a rank that lacks such a container can make it, with these keys."""
    if not isinstance(type_name, str) or type_name not in _MADE:
        return False
    is_sequence = type_name in {"list", "tuple"}
    return kind == (_SEQUENCE if is_sequence else MAPPING) and (
        not is_sequence or list(keys) == list(range(len(keys)))
    )


def aligned(node: Any, own: Any) -> list[Any]:
    """This rank's own leaf for each leaf of a merged structure; ``ABSENT`` where it has none."""
    if _is_leaf(node):
        return [own]
    kind, _, keys, children = node
    found = []
    for key, child in zip(keys, children, strict=True):
        found += aligned(child, _own_member(kind, own, key))
    return found


def _own_member(kind: str, own: Any, key: Any) -> Any:
    if own is ABSENT or (kind == MAPPING and key not in own):
        return ABSENT
    return ABSENT if kind == _SEQUENCE and key >= len(own) else _member(kind, own, key)


def rebuild(node: Any, own: Any, results: Sequence[Any]) -> Any:
    """A new object of a merged structure.

    Args:
        node: the structure.
        own: this rank's operand, whose containers' types the result takes; it is not changed.
        results: one for each leaf.
    """
    if _is_leaf(node):
        return results[node[0]]
    kind, type_name, keys, children = node
    members = [
        rebuild(child, _own_member(kind, own, key), results)
        for key, child in zip(keys, children, strict=True)
    ]
    if kind == _SEQUENCE:
        return _sequence_like(_MADE[type_name]() if own is ABSENT else own, members)
    if kind == _FIELDS and isinstance(own, tuple):
        return own._make(members)  # type: ignore[attr-defined]  # a named tuple
    made = _MADE[type_name]() if own is ABSENT else copy.copy(own)
    if kind == MAPPING:
        made.clear()
        for key, member in zip(keys, members, strict=True):
            made[key] = member
    else:
        for key, member in zip(keys, members, strict=True):
            object.__setattr__(made, key, member)  # also where the class is frozen
    return made


def _sequence_like(own: Any, members: list[Any]) -> Any:
    if isinstance(own, tuple):
        return type(own)(members)
    made = copy.copy(own)
    made[:] = members
    return made


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
