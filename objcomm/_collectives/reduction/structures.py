"""An operand's structure: its containers and leaves, as plain data. Also, how two ranks' differ.

A structure is nested tuples: ``(number of the leaf, description)``, or ``(kind, type, keys,
members)``. It contains no class and no tensor, so structures can be compared without the objects
they describe, and ranks exchange them before anything large is sent. A received structure
determines what a rank reads and builds, so it is validated as a whole before any of that. This
module knows objects but no messages.
"""

import collections
import copy
import dataclasses
import datetime
import enum
import itertools
import math
import numbers
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch

from objcomm._codecs import tensors
from objcomm._codecs.nesting import Budget, Spread, length_of, weight_of
from objcomm._collectives.reduction import operators
from objcomm._collectives.reduction.operators import Operator
from objcomm._wire.failure_message import DifferenceError
from objcomm.errors import DecodeError, UsageError, shown

#: Marks a leaf that this rank does not have.
ABSENT = object()

#: The kind of each container on the way to a leaf, and the key within it.
Path: TypeAlias = tuple[tuple[str, Any], ...]

_NUMBER, CONSTANT, OBJECT = "number", "constant", "object"
_TENSOR, _ARRAY = "tensor", "array"
_CONSTANTS = (str, bytes, enum.Enum, type(None), torch.dtype, torch.device)
# Mappings may differ in the order of their keys, and may lack keys on some ranks.
_MAPPING, _FIELDS, _SEQUENCE = "mapping", "fields", "sequence"

_DTYPE_NAMES = frozenset(map(tensors.dtype_name, operators.DTYPES))

# Types of keys that an error shows in full; the text of other keys may have any length.
_SHORT = (str, bytes, bool, float, complex, type(None), enum.Enum, datetime.date, pathlib.PurePath)
# A range compared with a numpy scalar becomes an array, so ranges in keys must be short.
_KEY_NUMBERS_MAX = 1 << 10

# Containers that a rank lacking a part can create itself, without any user class.
_MADE: dict[str, tuple[str, Callable[[], Any]]] = {
    "dict": (_MAPPING, dict),
    "list": (_SEQUENCE, list),
    "tuple": (_SEQUENCE, tuple),
    "collections.OrderedDict": (_MAPPING, collections.OrderedDict),
}


class Leaf(NamedTuple):
    """One leaf of a structure, on the ranks that have it.

    Attributes:
        description: plain data.
        places: for each rank that has the leaf, its index among that rank's leaves.
    """

    description: Any
    places: dict[int, int]


def describe(obj: Any, operator: Operator, rank: int) -> tuple[Any, list[Any]]:
    """Return an operand's structure and its leaves.

    Raises:
        UsageError: the operator cannot combine a leaf; names its path.
    """
    leaves: list[Any] = []
    return _node_of(obj, (), operator, rank, leaves), leaves


def _node_of(obj: Any, path: Path, operator: Operator, rank: int, leaves: list[Any]) -> Any:
    kind, members = _members_of(obj)
    if kind:
        children = [
            _node_of(member, (*path, (kind, key)), operator, rank, leaves)
            for key, member in members.items()
        ]
        return kind, _type_name(obj), tuple(members), tuple(children)
    description, value = _described(obj, path, operator, rank)
    leaves.append(value)
    return len(leaves) - 1, description


def _members_of(obj: Any) -> tuple[str, dict[Any, Any]]:
    """Return a container's kind and its members by key; for a leaf, an empty kind and dict."""
    if isinstance(obj, dict):
        return _MAPPING, {key: obj[key] for key in obj}
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return _FIELDS, {name: getattr(obj, name) for name in obj._fields}
    if isinstance(obj, list) or type(obj) is tuple:  # a torch.Size is not a tuple of operands
        return _SEQUENCE, dict(enumerate(obj))
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return _FIELDS, {each.name: getattr(obj, each.name) for each in dataclasses.fields(obj)}
    return "", {}


def _type_name(obj: Any) -> str:
    kind = type(obj)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _described(obj: Any, path: Path, operator: Operator, rank: int) -> tuple[Any, Any]:
    if (found := described(obj)) is not None:
        if operator.name in {"min", "max"} and "complex" in found[0][1]:
            raise UsageError(f"{text_of(path)}: complex numbers have no {operator.name}")
        return found
    is_arraylike = isinstance(obj, torch.Tensor) or hasattr(obj, "__array_interface__")
    if operator.name in {"any", "all"} and not is_arraylike:
        return _NUMBER, bool(obj)
    if path and isinstance(obj, _CONSTANTS):
        return CONSTANT, obj
    try:
        operator.prepare(obj, rank)
    except UsageError as error:
        raise UsageError(f"{text_of(path)}: {error}") from error
    is_number = isinstance(obj, numbers.Number)
    return (_NUMBER if is_number else (OBJECT, _type_name(obj))), obj


def text_of(path: Path) -> str:
    """Return a path as a person would write it."""
    steps = (f".{key}" if kind == _FIELDS else f"[{_key_text(key)}]" for kind, key in path)
    return "".join(("obj", *steps))


def _key_text(key: Any) -> str:
    if type(key) is tuple:
        return f"({', '.join(map(_key_text, key))})"
    return repr(key) if isinstance(key, _SHORT) else shown(key)


def _is_leaf(node: Any) -> bool:
    return len(node) == len(("number", "description"))


def kind_of(description: Any) -> str:
    """Return whether it describes a number, a constant, another object, a tensor or an array."""
    return description if isinstance(description, str) else str(description[0])


def walk(node: Any, own: Any = ABSENT, path: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """Yield each leaf in order: its path, its description, and this rank's value or ``ABSENT``.

    Args:
        node: a structure.
        own: this rank's operand, which may lack parts of the structure.
        path: path of the node.
    """
    if _is_leaf(node):
        yield path, node[1], own
        return
    kind, _, keys, children = node
    _, members = _members_of(own)
    for key, child in zip(keys, children, strict=True):
        yield from walk(child, members.get(key, ABSENT), (*path, (kind, key)))


def merge(structures: Sequence[Any], *, may_lack: bool) -> tuple[Any, list[Leaf]]:
    """Merge all ranks' structures; members are ordered by the lowest rank that has them.

    Args:
        structures: one per rank, in rank order.
        may_lack: whether keys of mappings may be missing on some ranks.

    Returns:
        The merged structure and all its leaves.

    Raises:
        DifferenceError: they differ.
    """
    first, size = structures[0], len(structures)
    if all(each == first for each in structures[1:]):
        descriptions = (description for _, description, _ in walk(first))
        return first, [
            Leaf(each, dict.fromkeys(range(size), at)) for at, each in enumerate(descriptions)
        ]
    leaves: list[Leaf] = []
    return _merged(dict(enumerate(structures)), (), size, leaves, may_lack=may_lack), leaves


def _merged(
    nodes: Mapping[int, Any], path: Path, size: int, leaves: list[Leaf], *, may_lack: bool
) -> Any:
    """Merge one node of the ranks that have it; append its leaves."""
    (lowest, first), *others = nodes.items()
    for rank, node in others:
        if _form_of(node) != _form_of(first):
            _differ(path, lowest, rank, f"{_form_text(first)} and {_form_text(node)}")
    if _is_leaf(first):
        leaves.append(Leaf(first[1], {rank: node[0] for rank, node in nodes.items()}))
        return len(leaves) - 1, first[1]
    kind, type_name, _, _ = first
    if len(nodes) < size and type_name not in _MADE:
        lacking = next(rank for rank in range(size) if rank not in nodes)
        reason = f"only mappings, lists and tuples can be filled in, not {type_name}"
        _differ(path, lowest, lacking, reason)
    members = {rank: dict(zip(node[2], node[3], strict=True)) for rank, node in nodes.items()}
    children: dict[Any, Any] = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(members.values())):
        having = {rank: each[key] for rank, each in members.items() if key in each}
        step = (*path, (kind, key))
        if len(having) < len(members) and not (may_lack and kind == _MAPPING):
            lacking = next(rank for rank in members if rank not in having)
            reason = f"rank {lacking} has no such member; give it, or pass missing='skip'"
            _differ(step, next(iter(having)), lacking, reason)
        children[key] = _merged(having, step, size, leaves, may_lack=may_lack)
    return kind, type_name, tuple(children), tuple(children.values())


def _differ(path: Path, one: int, other: int, reason: str) -> NoReturn:
    raise DifferenceError(text_of(path), (min(one, other), max(one, other)), reason)


def _form_of(node: Any) -> Any:
    """Return what must be equal on every rank at a node, except its members' names."""
    if _is_leaf(node):
        return node[1]
    kind, type_name, keys, _ = node
    return kind, type_name, 0 if kind == _MAPPING else len(keys)


def _form_text(node: Any) -> str:
    if not _is_leaf(node):
        kind, type_name, keys, _ = node
        return type_name if kind == _MAPPING else f"{type_name} of {len(keys)}"
    description = node[1]
    if (about := tensors_of(description)) is None:
        return description if isinstance(description, str) else str(description[1])
    where = "" if about.is_array or about.device_type == "cpu" else f" on {about.device_type}"
    return f"{description[0]} of {description[1]}, shape {about.shape}{where}"


def checked(node: Any, own: Any = None) -> list[Leaf]:
    """Validate a received structure and return its leaves.

    Args:
        node: the structure.
        own: the structure of this rank's operand, if ``node`` must contain all of it. Then the
            ``places`` of each returned leaf that this rank has include the key 1.

    Raises:
        DecodeError: no rank would build such a structure, or it lacks a part of this rank's.
    """
    leaves: list[Leaf] = []
    _check(node, leaves, Budget("msgpack", memoryview(b""), ()))
    if own is None:
        return leaves
    try:
        merged, leaves = merge([node, own], may_lack=True)
    except DifferenceError as error:
        refuse(f"it does not fit what this rank gave at {error.path}: {error.reason}")
    if merged != node:
        refuse("it lacks a member that this rank gave")
    return leaves


def _check(node: Any, leaves: list[Leaf], budget: Budget) -> None:
    types = [type(each) for each in node] if isinstance(node, tuple) else None
    if types is not None and _is_leaf(node):
        number, description = node
        if type(number) is not int or number != len(leaves):
            refuse(f"a leaf has the number {shown(number)}")
        if tensors_of(description) is None and not _is_plain(description):
            refuse("the description of a leaf is invalid")
        leaves.append(Leaf(description, {0: number}))
        return
    if types != [str, str, tuple, tuple]:
        refuse("it does not hold a structure, or a container lacks a type or a list of members")
    kind, type_name, keys, children = node
    if not all(map(_is_key, keys)):
        refuse("a key is not plain data")
    try:
        Spread(budget, weight_of).add(keys)
        members = dict(zip(keys, children, strict=True))
    except (TypeError, ValueError):
        refuse("a container does not have as many keys as members")
    if len(members) != len(keys):
        refuse("a key appears twice")
    is_right = kind in {_MAPPING, _FIELDS, _SEQUENCE} and _MADE.get(type_name, (kind,))[0] == kind
    if not is_right or (kind == _SEQUENCE and keys != tuple(range(len(keys)))):
        refuse(f"a {type_name!r} is not a {kind!r} with these keys")
    for child in children:
        _check(child, leaves, budget)


def _is_plain(description: Any) -> bool:
    """Return whether it describes a leaf that is neither a tensor nor an array."""
    if type(description) is str:
        return description in {_NUMBER, CONSTANT}
    is_pair = type(description) is tuple and [type(each) for each in description] == [str, str]
    return is_pair and bool(description[0] == OBJECT)


def _is_key(key: Any) -> bool:
    """Return whether comparing a received key takes no more time than its bytes justify."""
    if type(key) in {tuple, frozenset}:
        return all(map(_is_key, key))
    if type(key) is range:
        return length_of(key) <= _KEY_NUMBERS_MAX
    return not isinstance(key, (torch.Tensor, BaseException))


def refuse(reason: str) -> NoReturn:
    """Reject data from another rank.

    Raises:
        DecodeError: always.
    """
    raise DecodeError("msgpack", f"a part of a reduction: {reason}")


def rebuild(node: Any, own: Any, results: Sequence[Any]) -> Any:
    """Build a new object from a merged structure.

    Args:
        node: the structure.
        own: this rank's operand, whose container types the result takes; it is not modified.
        results: one for each leaf.
    """
    if _is_leaf(node):
        return results[node[0]]
    kind, type_name, keys, children = node
    like = _MADE[type_name][1]() if own is ABSENT else own
    _, mine = _members_of(like)
    members = {
        key: rebuild(child, mine.get(key, ABSENT), results)
        for key, child in zip(keys, children, strict=True)
    }
    if isinstance(like, tuple):
        return like._make(members.values()) if kind == _FIELDS else tuple(members.values())  # type: ignore[attr-defined]  # a named tuple
    made = copy.copy(like)
    if kind == _SEQUENCE:
        made[:] = members.values()
    elif kind == _MAPPING:
        made.clear()
        for key, member in members.items():  # a Counter's update would add
            made[key] = member
    else:
        for name, member in members.items():
            object.__setattr__(made, name, member)  # works for frozen classes, too
    return made


class Tensors(NamedTuple):
    """The content of a tensor's or an array's description."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str
    is_array: bool

    @property
    def numel(self) -> int:
        """Number of elements, as a Python int, because a peer may send any shape."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize


def described(leaf: Any) -> tuple[Any, Any] | None:
    """Return a description and the leaf if it can be combined element by element, else None."""
    if tensors.is_plain_tensor(leaf) and leaf.dtype in operators.DTYPES and not leaf.is_meta:
        value = leaf.detach().resolve_conj().resolve_neg()
        name = tensors.dtype_name(value.dtype)
        return (_TENSOR, name, tuple(value.shape), value.device.type), value
    if tensors.is_plain_array(leaf) and leaf.dtype.isnative and leaf.dtype.name in _DTYPE_NAMES:
        return (_ARRAY, leaf.dtype.name, tuple(leaf.shape), "cpu"), leaf
    return None


def tensors_of(description: Any) -> Tensors | None:
    """Parse the description of a tensor or an array; return ``None`` for any other leaf.

    Raises:
        DecodeError: the description is malformed.
    """
    types = [type(each) for each in description] if type(description) is tuple else []
    if types[:1] != [str] or description[0] not in {_TENSOR, _ARRAY}:
        return None
    if types != [str, str, tuple, str]:
        raise DecodeError("tensor", "the description of a leaf is invalid")
    kind, dtype, shape, device_type = description
    tensors.check_shape(kind, shape)
    return Tensors(tensors.dtype_named(dtype), shape, device_type, kind == _ARRAY)


def flat_of(leaf: Any, op: str) -> torch.Tensor:
    """Return a tensor's or array's elements in C order, in the dtype to send; often a view."""
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    else:
        in_order = operators.numpy().ascontiguousarray(leaf)
        flat = tensors.describe_array(in_order)[1].view(tensors.dtype_named(leaf.dtype.name))
    return flat.to(operators.operand_dtype(op, flat.dtype))


def room_for(about: Tensors, op: str, device: torch.device | str) -> tuple[Any, torch.Tensor]:
    """Return a fresh result and a flat view of its elements."""
    dtype = operators.result_dtype(op, about.dtype)
    with torch.inference_mode(mode=False):
        tensor = torch.empty(about.shape, dtype=dtype, device=device)
        return (tensor.numpy() if about.is_array else tensor), tensor.view(-1)
