"""Reduction operators: a user's callable, or a named operator with exact results.

All operands are combined here: two objects at a time, with the lower ranks' on the left, or plain
tensors of all ranks, element by element. Small tensors collected on one rank and pieces of large
tensors are combined by the same function, so the size of a tensor does not change its result. This
module knows objects and torch, and numpy only if an operand needs it; it knows no messages.
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

# Operators that go leaf by leaf through containers, and operators that take whole objects.
_LeafwiseName: TypeAlias = Literal["sum", "prod", "min", "max", "mean", "any", "all"]
_WholeName: TypeAlias = Literal["argmin", "argmax", "concat", "union", "counter"]

#: The names that ``op=`` accepts.
NamedOperator: TypeAlias = Literal[_LeafwiseName, _WholeName]


@dataclass(frozen=True, slots=True)
class Op(Generic[T]):
    """A user-defined operator, accepted wherever ``op=`` is; pass the same one on every rank.

    Attributes:
        fn: takes a value from lower ranks and a value from higher ranks, and returns their
            combination. It must be associative, and may modify and return its left argument.
        commutative: whether ``fn(a, b)`` equals ``fn(b, a)``. If so, ``reduce`` combines directly
            toward its destination instead of sending the final result there, and the order of
            operands may depend on the destination.
        identity: returned by ``exscan`` on the first rank, which has no ranks before it. ``reduce``
            and ``all_reduce`` do not use it, because no group is empty.
        slow: whether ``fn`` costs more than a message. If so, ranks always combine in pairs along
            a tree, in log2(world size) steps, even if one rank could fold all small operands.

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


#: What ``op=`` accepts.
OpLike: TypeAlias = Callable[[T, T], T] | Op[T] | NamedOperator


def _unchanged(obj: Any, _: int) -> Any:
    return obj


@dataclass(frozen=True, slots=True)
class Operator:
    """How objects are reduced.

    Attributes:
        name: the name that ranks compare in headers. Callables with equal options share one,
            because a function has no name that all processes agree on.
        combine: takes a value from lower ranks and a value from higher ranks; may modify the first.
        prepare: applied first to each rank's object, with that rank's number within the group.
        finish: takes the last combination and the number of operands.
        present: converts a result, which is plain data so that every codec accepts it, to what
            users get.
        elementwise: torch's function to combine two tensors, if containers are reduced leaf by
            leaf; otherwise None.
        is_commutative: whether the order of operands does not matter.
        is_slow: whether combining costs more than a message.
        identity: the combination of no operands.
        dtype: dtype in which to accumulate tensors, as the caller passed it; None lets each
            tensor's dtype decide.
        may_lack: whether keys of mappings may be missing on some ranks.
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
        """Text that must be the same on all ranks."""
        return f"{self.name}{self.dtype or ''}{'?' * self.may_lack}"

    def fold(self, operands: Iterable[Any], count: int) -> Any:
        """Combine ``count`` prepared operands, in rank order, and finish the result."""
        return self.finish(functools.reduce(self.combine, operands), count)

    def alone(self, obj: Any) -> Any:
        """Return the result in a world of one."""
        return self.present(self.fold([self.prepare(obj, 0)], 1))


class Extreme(NamedTuple):
    """The result of ``argmin`` and ``argmax``.

    Attributes:
        value: the least or greatest operand.
        rank: the lowest rank within the group that passed it.
    """

    value: Any
    rank: Any


#: The operators of torch's own collectives.
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
    """Return the operator that ``op=`` and a reduction's other arguments describe.

    Args:
        op: as the user passed it, like ``dtype`` and ``missing``.
        operation: the operation that the user called, for error messages.
        dtype: dtype in which to accumulate tensors.
        missing: ``"error"`` or ``"skip"``.

    Raises:
        UsageError: ``op`` is not a callable, an ``Op`` or a known name; or another argument is
            invalid, or does not apply to this operator.
    """
    found = _operator_of(op)
    prefix = f"{operation}: " if operation else ""
    if found is None:
        known = OPERATORS_ELSEWHERE.get(op.lower()) if isinstance(op, str) else None
        hint = f"; it is called {known!r} here" if known else ""
        raise UsageError(
            f"{prefix}op={op!r} must be a callable of two objects, an objcomm.Op or one of "
            f"{', '.join(sorted(_NAMED))}{hint}"
        )
    if missing not in ("error", "skip"):  # not a set, because a list is not hashable
        raise UsageError(f"{prefix}missing={missing!r} must be 'error' or 'skip'")
    if missing == "skip" and found.elementwise is None:
        raise UsageError(
            f"{prefix}missing='skip' works only with the named ops that combine leaf by leaf"
        )
    if dtype is None and missing == "error":
        return found
    if dtype is not None:
        _check_dtype(found, dtype, prefix)
    return replace(found, dtype=dtype, may_lack=missing == "skip")


def _check_dtype(operator: Operator, dtype: object, prefix: str) -> None:
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{prefix}dtype={dtype!r} must be a torch.dtype or None")
    if not _has_fractions(dtype):
        raise UsageError(
            f"{prefix}dtype={dtype} is not a floating-point dtype; without dtype=, "
            "integers are summed exactly"
        )
    if operator.name not in _ADDING:
        raise UsageError(f"{prefix}dtype= is for sum, prod and mean, not for {operator.name!r}")


def _operator_of(op: object) -> Operator | None:
    if isinstance(op, Op):
        # What selects the algorithm must be equal on all ranks, or they would wait for each other.
        name = "callable" + " commutative" * op.commutative + " slow" * op.slow
        return Operator(
            name, op.fn, is_commutative=op.commutative, is_slow=op.slow, identity=op.identity
        )
    if type(op).__name__ == "RedOpType":  # torch's ReduceOp, which happens to be callable
        op = REDUCE_OPS.get(getattr(op, "name", ""))
    if callable(op):
        return Operator("callable", op)
    return _NAMED.get(op) if isinstance(op, str) else None


def numpy() -> Any:
    """Import numpy, which is optional."""
    import numpy as np  # noqa: PLC0415  # only when needed

    return np


def is_numpy(obj: object) -> bool:
    """Return whether ``obj`` is an array or a numpy scalar."""
    return type(obj).__module__ == "numpy" and hasattr(obj, "dtype")


def is_array(obj: object) -> bool:
    """Return whether ``obj`` is a tensor or an array; numpy scalars count as numbers."""
    return isinstance(obj, torch.Tensor) or (is_numpy(obj) and type(obj).__name__ == "ndarray")


def _is_numpy_integer(obj: Any) -> bool:
    return is_numpy(obj) and not is_array(obj) and obj.dtype.kind in "iu"


def _is_nan(obj: Any) -> Any:
    """Return whether a number, or each element of an array, is NaN."""
    return obj != obj  # noqa: PLR0124  # True only for NaN in Python, torch and numpy


def _form_of(obj: Any) -> str:
    """Return kind, dtype and shape as text."""
    kind = f"a {type(obj).__module__}.{type(obj).__qualname__}".replace("builtins.", "")
    return f"{kind} of {obj.dtype}, shape {tuple(obj.shape)}" if is_array(obj) else kind


def _must_match(ours: str, theirs: str) -> None:
    """Compare the forms of two operands.

    Raises:
        UsageError: they differ.
    """
    if ours != theirs:
        raise UsageError(f"the ranks gave {ours} and {theirs}; give the same on every rank")


def _alike(combine: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Reject arrays of different kinds, dtypes or shapes, which would be converted or broadcast."""

    def checked(left: Any, right: Any) -> Any:
        if not (is_array(left) or is_array(right)):
            return combine(left, right)
        _must_match(_form_of(left), _form_of(right))
        combined = combine(left, right)
        # NumPy turns zero-dimensional arrays into scalars.
        return combined if is_array(combined) else numpy().asarray(combined)

    return checked


def _without_wrapping(combine: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Combine numpy integer scalars as Python ints; convert the result back if it fits."""

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
    """Reject objects that ``+`` would join or ``min`` would compare."""
    if isinstance(obj, _CONTAINERS):
        raise UsageError(
            f"this named op combines numbers, tensors and arrays, not a {type(obj).__name__}; "
            "give another op, such as 'concat' or 'union', or a callable of two objects"
        )
    # The fold runs on one rank and must not record gradient history on that rank alone.
    return obj.detach() if isinstance(obj, torch.Tensor) else obj


def _number(obj: Any, _: int = 0) -> Any:
    """Return an operand to add or multiply; a bool counts as 0 or 1, whatever the world size."""
    is_bool = isinstance(obj, bool) or (is_numpy(obj) and type(obj).__name__ in ("bool", "bool_"))
    return int(obj) if is_bool else _combinable(obj)


class _Sum(NamedTuple):
    """A sum that will become a mean."""

    form: str
    dtype: Any
    total: Any


def _to_average(obj: Any, _: int = 0) -> Any:
    """Convert to a type that can be added and divided without losing digits of the mean."""
    obj = _number(obj)
    if isinstance(obj, torch.Tensor):
        return _Sum(_form_of(obj), obj.dtype, obj.to(wide_dtype("mean", obj.dtype, None)))
    if is_numpy(obj):
        # At least double precision; long doubles and complex numbers keep their type.
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
    """Return whether, or for which elements, ``right`` is better; ties keep the lower rank's.

    NaN propagates: it counts as both the least and the greatest.
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
    """Return an operand with the rank that passed it, once per element of an array."""
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
    """Join two operands of the same kind; arrays along their first dimension.

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
    """Return the members of both; in a dict, those of the lower ranks come first.

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
    # A list of tensors has no truth value. Values that cannot be compared count as different.
    with contextlib.suppress(Exception):
        if is_array(left) or is_array(right):
            return _form_of(left) == _form_of(right) and bool((left == right).all())
        return bool(left == right)
    return False


def _counted(obj: Any, _: int = 0) -> Any:
    # Strings are iterable, too, but counting their characters is more likely a mistake.
    if isinstance(obj, (str, bytes)):
        raise UsageError(f"counter counts the members of an iterable; put the {obj!r} into a list")
    return dict(collections.Counter(obj))


def _counts_added(left: Any, right: Any) -> Any:
    for member, count in right.items():  # unlike a Counter's +, keeps counts of zero and below
        left[member] = left.get(member, 0) + count
    return left


_add, _multiply = _alike(_without_wrapping(operator.add)), _alike(_without_wrapping(operator.mul))

# torch.minimum and torch.maximum propagate NaN, too.
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

#: Dtypes that are combined element by element; torch has no arithmetic for the others.
DTYPES = _WHOLE | _HALF | _WIDE

# Below 32,768 elements, torch works on the calling thread alone. With a rank on every core, threads
# that wait for each other made a reduction 8 times slower. A chunk this small also stays in cache.
_CHUNK_NUMEL = 30_720


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def operand_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor is sent: truth values take one byte."""
    return torch.bool if op in {"any", "all"} else dtype


def result_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a result: as ``operand_dtype``, but float64 for the mean of integers."""
    if op == "mean" and not _has_fractions(dtype):
        return torch.float64
    return operand_dtype(op, dtype)


def wide_dtype(op: str, dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which sums and products accumulate before they are rounded once.

    Args:
        op: the operator's name.
        dtype: dtype of the operands.
        wanted: dtype that the user passed. It never narrows the operands, and integers ignore it.
    """
    if op not in _ADDING:
        return operand_dtype(op, dtype)
    if wanted is not None and _has_fractions(dtype):
        return torch.promote_types(dtype, wanted)
    if op == "mean":
        return torch.complex128 if dtype.is_complex else torch.float64
    return torch.float32 if dtype in _HALF else dtype


def combine_tensors(
    op: str,
    operands: Sequence[torch.Tensor],
    into: torch.Tensor,
    wide: torch.dtype,
    *,
    total: torch.Tensor | None = None,
    count: int = 0,
    is_over: bool = True,
) -> None:
    """Combine one tensor of each rank, in rank order.

    Args:
        op: the operator's name.
        operands: flat, of equal length, in ``operand_dtype``; not modified unless one of them is
            ``into``.
        into: receives the result, in ``result_dtype``, or a total, in ``wide``. It must not overlap
            the operands, except that for ``mean`` it may be one of them.
        wide: see ``wide_dtype``.
        total: as in ``Combine``, in ``wide``; not modified.
        count: likewise.
        is_over: likewise.
    """
    combine: Any = _NAMED[op].elementwise
    count = count or len(operands)
    operands = operands if total is None else [total, *operands]
    for target, first, *others in _chunks(into, operands):
        if others and op != "mean" and wide == first.dtype == into.dtype:
            so_far = combine(first, others.pop(0), out=target)
        else:
            so_far = first.to(wide, copy=True)
        for other in others:
            combine(so_far, other, out=so_far)
        if op == "mean" and is_over:
            so_far.div_(count)
        if so_far is not target:
            target.copy_(so_far)


def average_tensors(
    operands: Sequence[torch.Tensor],
    into: torch.Tensor,
    *,
    total: torch.Tensor | None = None,
    count: int = 0,
    is_over: bool = True,  # noqa: ARG001  # as in ``Combine``: there is no last step
) -> None:
    """Compute the mean as DistributedDataParallel does: add up each operand's share, in rank order.

    The sum cannot overflow unless the mean does. Half-precision operands are accumulated in
    float32, others in their own dtype.

    Args:
        operands: floating-point or complex, flat and of equal length.
        into: receives the result; may be one of the operands.
        total: as in ``Combine``; not modified.
        count: likewise.
        is_over: likewise.
    """
    share = 1 / (count or len(operands))
    wide = wide_dtype("sum", into.dtype, None)
    operands = operands if total is None else [total, *operands]
    for target, first, *others in _chunks(into, operands):
        so_far = first.to(wide, copy=True)
        if total is None:
            so_far *= share
        for other in others:
            so_far.add_(other.to(wide), alpha=share)
        target.copy_(so_far)


def _chunks(
    into: torch.Tensor, operands: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, ...]]:
    numel = _CHUNK_NUMEL if into.device.type == "cpu" else max(1, into.numel())
    return zip(into.split(numel), *[each.split(numel) for each in operands], strict=True)
