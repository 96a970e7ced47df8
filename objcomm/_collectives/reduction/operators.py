"""Reduction operators: a user's callable, or a named one with exact results.

The one place where operands are combined: two objects, with the lower ranks' on the left, or the
plain tensors of all ranks, element by element. Small tensors that one rank has of all ranks and
pieces of large ones are combined by the same function, so a tensor's size does not change its
result. Knows objects and torch, and numpy only where an operand is of numpy; knows no messages.
"""

import collections
import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import torch

from objcomm._config import OPERATORS_ELSEWHERE
from objcomm.errors import UsageError

T = TypeVar("T")

# Those that go leaf by leaf through containers, and those that take whole objects.
_LeafwiseName: TypeAlias = Literal["sum", "prod", "min", "max", "mean", "any", "all"]
_WholeName: TypeAlias = Literal["argmin", "argmax", "concat", "union", "counter"]

#: The names that ``op=`` takes.
NamedOperator: TypeAlias = Literal[_LeafwiseName, _WholeName]


@dataclass(frozen=True, slots=True)
class Op(Generic[T]):
    """An operator of one's own, accepted wherever ``op=`` is; give the same on every rank.

    Attributes:
        fn: takes what lower ranks gave and what higher ranks gave, and returns their combination.
            It must be associative; it may change and return its left argument.
        commutative: whether ``fn(a, b)`` equals ``fn(b, a)``. ``reduce`` then combines straight
            towards its destination, where it otherwise sends the result there at the end; the
            order of operands may change with the destination.
        identity: what ``exscan`` gives the first rank, which has no rank before it; None by
            default. ``reduce`` and ``all_reduce`` do not use it, because no group is empty.
        slow: whether ``fn`` costs more than a message. Ranks then combine in pairs along a tree,
            in log2(world size) steps, even where one rank could take all small operands at once.

    Raises:
        UsageError: ``fn`` is not callable.

    Examples:
        >>> import objcomm
        >>> longest = objcomm.Op(lambda a, b: max(a, b, key=len), slow=True)
        >>> objcomm.all_reduce("epoch", longest)
        'epoch'
    """

    fn: Callable[[T, T], T]
    _: KW_ONLY
    commutative: bool = False
    identity: T | None = None
    slow: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise UsageError(f"Op takes a callable of two objects, not {self.fn!r}")


#: What ``op=`` takes.
OpLike: TypeAlias = Callable[[T, T], T] | Op[T] | NamedOperator


def _unchanged(obj: Any, _: int) -> Any:
    return obj


@dataclass(frozen=True, slots=True)
class Operator:
    """How objects are reduced.

    Attributes:
        name: what the ranks' headers compare; the same for all callables, because the same
            function has no name that all processes agree on.
        combine: takes what lower ranks gave and what higher ranks gave; it may change the first.
        prepare: applied to each rank's object first, with that rank's number in the group.
        finish: takes the last combination and the number of operands.
        present: makes of a result, which is plain so that every codec takes it, what users get.
        elementwise: torch's function that combines two tensors, if containers are reduced leaf by
            leaf; else None.
        is_commutative: whether operands may change places.
        is_slow: whether combining costs more than a message.
        identity: the combination of no operands.
        dtype: in which floating dtype the caller wants tensors to be added up; None for each
            tensor's own choice.
        may_lack: whether keys of containers may be missing on some ranks.
    """

    name: str
    combine: Callable[[Any, Any], Any]
    prepare: Callable[[Any, int], Any] = _unchanged
    finish: Callable[[Any, int], Any] = _unchanged
    present: Callable[[Any], Any] = lambda finished: finished
    elementwise: Callable[..., torch.Tensor] | None = None
    is_commutative: bool = False
    is_slow: bool = False
    identity: Any = None
    dtype: torch.dtype | None = None
    may_lack: bool = False

    @property
    def agreement(self) -> str:
        """What must be the same on all ranks."""
        return f"{self.name}{self.dtype or ''}{'?' * self.may_lack}"

    def fold(self, operands: Iterable[Any], count: int) -> Any:
        """The result of so many prepared operands, in rank order."""
        return self.finish(functools.reduce(self.combine, operands), count)

    def alone(self, obj: Any) -> Any:
        """The result in a world of one."""
        return self.present(self.fold([self.prepare(obj, 0)], 1))


class Extreme(NamedTuple):
    """What ``argmin`` and ``argmax`` give.

    Attributes:
        value: the least or greatest operand.
        rank: the lowest rank within the group that gave it.
    """

    value: Any
    rank: Any


#: What torch's own collectives call them.
REDUCE_OPS: dict[str, NamedOperator] = {
    "SUM": "sum",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "AVG": "mean",
}

_ADDING = frozenset({"sum", "prod", "mean"})


def operator_for(
    op: Callable[[Any, Any], Any] | Op[Any] | str,
    operation: str = "",
    dtype: torch.dtype | None = None,
    missing: str = "error",
) -> Operator:
    """What ``op=`` means, and what a reduction's other arguments say of it.

    Args:
        op: as the user gave it, like the last two.
        operation: what the user has called, for an error's text.
        dtype: in which to add up.
        missing: ``"error"`` or ``"skip"``.

    Raises:
        UsageError: ``op`` is neither callable, nor an ``Op``, nor one of the names; or the others
            make no sense, or not for this operator.
    """
    found = _operator_of(op)
    said_by = f"{operation}: " if operation else ""
    if found is None:
        known = OPERATORS_ELSEWHERE.get(op.lower()) if isinstance(op, str) else None
        hint = f"; it is called {known!r} here" if known else ""
        raise UsageError(
            f"{said_by}op={op!r} must be a callable of two objects, an objcomm.Op or one of "
            f"{', '.join(sorted(_NAMED))}{hint}"
        )
    if missing not in ("error", "skip"):  # no set: a list has no hash
        raise UsageError(f"{said_by}missing={missing!r} must be 'error' or 'skip'")
    if missing == "skip" and found.elementwise is None:
        raise UsageError(
            f"{said_by}missing='skip' works only with the named ops that combine leaf by leaf"
        )
    if dtype is None and missing == "error":
        return found
    if dtype is not None:
        _check_dtype(found, dtype, said_by)
    return replace(found, dtype=dtype, may_lack=missing == "skip")


def _check_dtype(operator: Operator, dtype: object, said_by: str) -> None:
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{said_by}dtype={dtype!r} must be a torch.dtype or None")
    if not _has_fractions(dtype):
        raise UsageError(
            f"{said_by}dtype={dtype} is not a floating-point dtype; without dtype=, "
            "integers are summed exactly"
        )
    if operator.name not in _ADDING:
        raise UsageError(f"{said_by}dtype= is for sum, prod and mean, not for {operator.name!r}")


def _operator_of(op: object) -> Operator | None:
    if isinstance(op, Op):
        # What decides about the way must agree, or ranks would wait for each other.
        name = "callable" + " commutative" * op.commutative + " slow" * op.slow
        return Operator(
            name, op.fn, is_commutative=op.commutative, is_slow=op.slow, identity=op.identity
        )
    if type(op).__name__ == "RedOpType":  # a torch.distributed.ReduceOp, callable by accident
        op = REDUCE_OPS.get(getattr(op, "name", ""))
    if callable(op):
        return Operator("callable", op)
    return _NAMED.get(op) if isinstance(op, str) else None


def numpy() -> Any:
    """It is optional."""
    import numpy as np  # noqa: PLC0415  # not sooner

    return np


def is_numpy(obj: object) -> bool:
    """Arrays and numpy's scalars."""
    return type(obj).__module__ == "numpy" and hasattr(obj, "dtype")


def is_array(obj: object) -> bool:
    """Tensors and arrays; numpy's scalars count as numbers."""
    return isinstance(obj, torch.Tensor) or (is_numpy(obj) and type(obj).__name__ == "ndarray")


def _is_numpy_integer(obj: Any) -> bool:
    return is_numpy(obj) and not is_array(obj) and obj.dtype.kind in "iu"


def _is_nan(obj: Any) -> Any:
    """Where an array, or whether a number, is not a number."""
    return obj != obj  # noqa: PLR0124  # true of a NaN alone, in Python, torch and numpy


def _form_of(obj: Any) -> str:
    """Kind, dtype and shape as text."""
    kind = f"a {type(obj).__module__}.{type(obj).__qualname__}".replace("builtins.", "")
    return f"{kind} of {obj.dtype}, shape {tuple(obj.shape)}" if is_array(obj) else kind


def _must_match(ours: str, theirs: str) -> None:
    """Hold two forms against each other.

    Raises:
        UsageError: they differ.
    """
    if ours != theirs:
        raise UsageError(f"the ranks gave {ours} and {theirs}; give the same on every rank")


def _alike(combine: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Refuse arrays of other kinds, dtypes or shapes, which would be converted or stretched."""

    def checked(left: Any, right: Any) -> Any:
        if not (is_array(left) or is_array(right)):
            return combine(left, right)
        _must_match(_form_of(left), _form_of(right))
        combined = combine(left, right)
        # NumPy turns arrays without dimensions into scalars.
        return combined if is_array(combined) else numpy().asarray(combined)

    return checked


def _without_wrapping(combine: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Combine numpy's integer scalars as Python's; the result is numpy's again where it fits."""

    def combined(left: Any, right: Any) -> Any:
        if not (_is_numpy_integer(left) or _is_numpy_integer(right)):
            return combine(left, right)
        plain = [each.item() if _is_numpy_integer(each) else each for each in (left, right)]
        exact = combine(*plain)
        if type(left) is not type(right):
            return exact
        limits = numpy().iinfo(left.dtype)
        return type(left)(exact) if limits.min <= exact <= limits.max else exact

    return combined


_CONTAINERS = (Mapping, list, tuple, set, frozenset, str, bytes, bytearray, type(None))


def _combinable(obj: Any, _: int = 0) -> Any:
    """Refuse what ``+`` would join and ``min`` would compare."""
    if isinstance(obj, _CONTAINERS):
        raise UsageError(
            f"this named op combines numbers, tensors and arrays, not a {type(obj).__name__}; "
            "give another op, such as 'concat' or 'union', or a callable of two objects"
        )
    # The fold runs on one rank, and must not leave a history of gradients on that rank alone.
    return obj.detach() if isinstance(obj, torch.Tensor) else obj


def _number(obj: Any, _: int = 0) -> Any:
    """What can be added or multiplied: a bool counts as 0 or 1, at every world size."""
    is_bool = isinstance(obj, bool) or (is_numpy(obj) and type(obj).__name__ in ("bool", "bool_"))
    return int(obj) if is_bool else _combinable(obj)


class _Sum(NamedTuple):
    """A sum on its way to be a mean."""

    form: str
    dtype: Any
    total: Any


def _to_average(obj: Any, _: int = 0) -> Any:
    """What can be added up and divided without losing digits that the mean needs."""
    obj = _number(obj)
    if isinstance(obj, torch.Tensor):
        return _Sum(_form_of(obj), obj.dtype, obj.to(wide_dtype("mean", obj.dtype, None)))
    if is_numpy(obj):
        # At least double: a long double and a complex number stay what they are.
        double = numpy().promote_types(obj.dtype, "float64")
        return _Sum(_form_of(obj), obj.dtype, obj.astype(double))
    return _Sum("a number", None, obj)


def _add_sums(left: _Sum, right: _Sum) -> _Sum:
    if is_array(left.total) or is_array(right.total):
        _must_match(left.form, right.form)
        return left._replace(total=_alike(operator.add)(left.total, right.total))
    same = left.dtype == right.dtype
    return _Sum(left.form, left.dtype if same else None, left.total + right.total)


def _average(combined: _Sum, size: int) -> Any:
    dtype, mean = combined.dtype, combined.total / size
    if dtype is None:
        return mean
    if isinstance(mean, torch.Tensor):
        return mean.to(result_dtype("mean", dtype))
    if dtype.kind in "fc":
        mean = mean.astype(dtype)
    return numpy().asarray(mean) if is_array(combined.total) else mean


def _truth(obj: Any, _: int = 0) -> Any:
    if isinstance(obj, torch.Tensor):
        return obj.bool()
    return obj.astype(bool) if is_array(obj) else bool(obj)


def _is_taken(is_better: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Whether the right one is better, or where; the left one, of the lower rank, where they tie.

    A NaN is contagious: it is the least and the greatest, wherever it stands.
    """
    if not (is_array(left) or is_array(right)):
        return not _is_nan(left) and (_is_nan(right) or is_better(right, left))
    _must_match(_form_of(left), _form_of(right))
    return ~_is_nan(left) & (_is_nan(right) | is_better(right, left))


def _chosen(is_taken: Any, left: Any, right: Any) -> Any:
    if not is_array(left):
        return right if is_taken else left
    where = torch.where if isinstance(left, torch.Tensor) else numpy().where
    return where(is_taken, right, left)


def _extreme(is_better: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda left, right: _chosen(_is_taken(is_better, left, right), left, right)


def _located(obj: Any, rank: int) -> Any:
    """An operand and, for each of its elements, whose it is."""
    obj = _combinable(obj)
    if isinstance(obj, torch.Tensor):
        return obj, torch.full_like(obj, rank, dtype=torch.int64)
    return obj, numpy().full(obj.shape, rank, "int64") if is_array(obj) else rank


def _located_extreme(is_better: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def combine(left: Any, right: Any) -> Any:
        is_taken = _is_taken(is_better, left[0], right[0])
        return tuple(_chosen(is_taken, *each) for each in zip(left, right, strict=True))

    return combine


_SEQUENCES = (list, tuple, str, bytes, bytearray)


def _sequence(obj: Any, _: int = 0) -> Any:
    if isinstance(obj, torch.Tensor):
        return obj.detach()
    if not is_array(obj) and not isinstance(obj, _SEQUENCES):
        raise UsageError(
            "concat joins lists, tuples, strings, bytes, tensors and arrays, "
            f"not a {type(obj).__name__}"
        )
    return obj


def _concatenated(left: Any, right: Any) -> Any:
    """Two of the same kind, one behind the other along their first dimension.

    Raises:
        UsageError: their kinds, dtypes or other dimensions differ.
    """
    if not is_array(left):
        _must_match(_form_of(left), _form_of(right))
        return left + right
    _must_match(_form_of_rows(left), _form_of_rows(right))
    is_tensor = isinstance(left, torch.Tensor)
    return torch.cat([left, right]) if is_tensor else numpy().concatenate([left, right])


def _form_of_rows(obj: Any) -> str:
    if not is_array(obj):
        return _form_of(obj)
    if not obj.ndim:
        raise UsageError("concat needs tensors and arrays of one dimension or more")
    return _form_of(obj[:0])


def _set_or_mapping(obj: Any, _: int = 0) -> Any:
    if not isinstance(obj, (set, frozenset, dict)):
        raise UsageError(f"union takes sets, frozensets and dicts, not a {type(obj).__name__}")
    return obj


def _united(left: Any, right: Any) -> Any:
    """Members of either; the lower ranks' come first in a dict.

    Raises:
        UsageError: a key has different values, or one is a dict and the other a set.
    """
    if isinstance(left, dict) != isinstance(right, dict):
        _must_match(_form_of(left), _form_of(right))
    if isinstance(left, dict):
        for key in left.keys() & right.keys():
            if not _are_equal(left[key], right[key]):
                raise UsageError(
                    f"union: key {key!r} has different values on different ranks; give a callable "
                    "that says which one wins, such as operator.or_ for the highest rank's"
                )
    return left | right


def _are_equal(left: Any, right: Any) -> bool:
    if left is right:
        return True
    # A list of tensors has no truth value; what cannot be compared differs.
    with contextlib.suppress(Exception):
        if is_array(left) or is_array(right):
            return _form_of(left) == _form_of(right) and bool((left == right).all())
        return bool(left == right)
    return False


def _counted(obj: Any, _: int = 0) -> Any:
    # Texts are iterables, too, but nobody counts letters of ranks by mistake only once.
    if isinstance(obj, (str, bytes)):
        raise UsageError(f"counter counts the members of an iterable; put the {obj!r} into a list")
    return dict(collections.Counter(obj))


def _counts_added(left: Any, right: Any) -> Any:
    for member, count in right.items():  # unlike a Counter's +, keeps counts of zero and below
        left[member] = left.get(member, 0) + count
    return left


_add, _multiply = _alike(_without_wrapping(operator.add)), _alike(_without_wrapping(operator.mul))

# In torch's minimum and maximum, too, a NaN is contagious.
_NAMED: dict[str, Operator] = {
    each.name: each
    for each in (
        Operator("sum", _add, _number, elementwise=torch.add),
        Operator("prod", _multiply, _number, elementwise=torch.mul),
        Operator("min", _extreme(operator.lt), _combinable, elementwise=torch.minimum),
        Operator("max", _extreme(operator.gt), _combinable, elementwise=torch.maximum),
        Operator("mean", _add_sums, _to_average, _average, elementwise=torch.add),
        Operator("any", _alike(operator.or_), _truth, elementwise=torch.logical_or),
        Operator("all", _alike(operator.and_), _truth, elementwise=torch.logical_and),
        Operator("argmin", _located_extreme(operator.lt), _located, present=Extreme._make),
        Operator("argmax", _located_extreme(operator.gt), _located, present=Extreme._make),
        Operator("concat", _concatenated, _sequence),
        Operator("union", _united, _set_or_mapping),
        Operator("counter", _counts_added, _counted, present=collections.Counter),
    )
}

_WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_HALF = frozenset({torch.float16, torch.bfloat16})
_WIDE = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})

#: What is combined element by element; other dtypes have no arithmetic of their own in torch.
DTYPES = _WHOLE | _HALF | _WIDE

# Below 32,768 elements torch works on the calling thread alone. Where every core has a rank,
# threads that wait for each other made a reduction 8 times slower; and so much stays in the cache.
_CHUNK_NUMEL = 30_720


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def operand_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    """What travels of a tensor: a truth value is one byte."""
    return torch.bool if op in {"any", "all"} else dtype


def result_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    """What comes back: its own dtype, but float64 for the mean of integers."""
    if op == "mean" and not _has_fractions(dtype):
        return torch.float64
    return operand_dtype(op, dtype)


def wide_dtype(op: str, dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """In which dtype sums and products are added up before they are rounded, once.

    Args:
        op: the operator's name.
        dtype: the operands'.
        wanted: what the user asked for; never narrower than the operands, nor used for integers.
    """
    if op not in _ADDING:
        return operand_dtype(op, dtype)
    if wanted is not None and _has_fractions(dtype):
        return torch.promote_types(dtype, wanted)
    if op == "mean":
        return torch.complex128 if dtype.is_complex else torch.float64
    return torch.float32 if dtype in _HALF else dtype


def combine_tensors(
    op: str, operands: Sequence[torch.Tensor], into: torch.Tensor, wide: torch.dtype
) -> None:
    """Combine one tensor of each rank, in rank order.

    Args:
        op: the operator's name.
        operands: flat and of one length, in ``operand_dtype``; they are not changed.
        into: where the result goes, in ``result_dtype``; it may not overlap the operands, but
            for ``mean``, where it may be one of them.
        wide: see ``wide_dtype``.
    """
    combine: Any = _NAMED[op].elementwise
    for target, first, *others in _chunks(into, operands):
        if others and op != "mean" and wide == first.dtype == into.dtype:
            total = combine(first, others.pop(0), out=target)
        else:
            total = first.to(wide, copy=True)
        for other in others:
            combine(total, other, out=total)
        if total is not target:
            target.copy_(total.div_(len(operands)) if op == "mean" else total)


def average_tensors(operands: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """The mean as DistributedDataParallel takes it: shares of each are added up in rank order.

    No sum can overflow where the mean does not. Halves are added up in float32, the others in
    their own dtype.

    Args:
        operands: floating or complex, flat and of one length.
        into: where the result goes; it may be one of them.
    """
    share = 1 / len(operands)
    wide = wide_dtype("sum", into.dtype, None)
    for target, first, *others in _chunks(into, operands):
        total = first.to(wide) * share
        for other in others:
            total.add_(other.to(wide), alpha=share)
        target.copy_(total)


def _chunks(
    into: torch.Tensor, operands: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, ...]]:
    numel = _CHUNK_NUMEL if into.device.type == "cpu" else max(1, into.numel())
    return zip(into.split(numel), *[each.split(numel) for each in operands], strict=True)
