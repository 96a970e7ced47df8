"""Reduction operators: a user's callable, or a named one with exact results.

Knows objects, not messages: an operator prepares each rank's object, combines two at a time with
the lower ranks' on the left, and finishes the last.
"""

import collections
import numbers
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import torch

from objcomm._collectives.reduction.elementwise import (
    alike,
    chosen,
    concatenated,
    filled_like,
    form_of,
    is_array,
    is_nan,
    is_numpy,
    must_match,
    with_no_dimensions,
    without_wrapping,
)
from objcomm.errors import UsageError

T = TypeVar("T")

#: The names that ``op=`` takes.
NamedOperator: TypeAlias = Literal[
    "sum",
    "prod",
    "min",
    "max",
    "mean",
    "any",
    "all",
    "argmin",
    "argmax",
    "concat",
    "union",
    "counter",
]


def _unchanged(obj: Any, _: int) -> Any:
    return obj


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

    Examples:
        >>> import objcomm
        >>> longest = objcomm.Op(lambda a, b: max(a, b, key=len), slow=True)
        >>> objcomm.all_reduce("epoch", longest)
        'epoch'
    """

    fn: Callable[[T, T], T]
    commutative: bool = False
    identity: T | None = None
    slow: bool = False

    def __init__(
        self,
        fn: Callable[[T, T], T],
        *,
        commutative: bool = False,
        identity: T | None = None,
        slow: bool = False,
    ) -> None:
        """See the class.

        Raises:
            UsageError: ``fn`` is not callable.
        """
        if not callable(fn):
            raise UsageError(f"Op takes a callable of two objects, not {fn!r}")
        for name, value in (
            ("fn", fn),
            ("commutative", commutative),
            ("identity", identity),
            ("slow", slow),
        ):
            object.__setattr__(self, name, value)


#: What ``op=`` takes.
OpLike: TypeAlias = Callable[[T, T], T] | Op[T] | NamedOperator


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
        is_leafwise: whether containers are reduced leaf by leaf.
        is_commutative: whether operands may change places.
        is_slow: whether combining costs more than a message.
        identity: the combination of no operands.
    """

    name: str
    combine: Callable[[Any, Any], Any]
    prepare: Callable[[Any, int], Any] = _unchanged
    finish: Callable[[Any, int], Any] = lambda combined, _: combined
    present: Callable[[Any], Any] = lambda finished: finished
    is_leafwise: bool = False
    is_commutative: bool = False
    is_slow: bool = False
    identity: Any = None

    def alone(self, obj: Any) -> Any:
        """The result in a world of one."""
        return self.present(self.finish(self.prepare(obj, 0), 1))


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


def _is_reduce_op(op: object) -> bool:
    """Whether it is a member of ``torch.distributed.ReduceOp``, which is callable by accident."""
    return type(op).__name__ == "RedOpType"


def operator_for(op: Callable[[Any, Any], Any] | Op[Any] | str, operation: str = "") -> Operator:
    """What ``op=`` means.

    Args:
        op: as the user gave it.
        operation: what the user has called, for an error's text.

    Raises:
        UsageError: it is neither callable, nor an ``Op``, nor one of the names.
    """
    if isinstance(op, Op):
        # What decides about the way must agree, or ranks would wait for each other.
        name = "callable" + " commutative" * op.commutative + " slow" * op.slow
        return Operator(
            name,
            op.fn,
            is_commutative=op.commutative,
            is_slow=op.slow,
            identity=op.identity,
        )
    given: object = op  # whatever the caller passed
    if _is_reduce_op(op):
        given = REDUCE_OPS.get(getattr(op, "name", ""))
    if callable(given):
        return Operator("callable", given)
    named = _NAMED.get(given) if isinstance(given, str) else None
    if named is None:
        said_by = f"{operation}: " if operation else ""
        raise UsageError(
            f"{said_by}op={op!r} must be a callable of two objects, an objcomm.Op or one of "
            f"{', '.join(sorted(_NAMED))}"
        )
    return named


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


def _to_average(obj: Any, _: int = 0) -> Any:
    """What can be added up and divided without losing digits that the mean needs."""
    obj = _number(obj)
    if isinstance(obj, torch.Tensor):
        wide = torch.complex128 if obj.dtype.is_complex else torch.float64
        return _Sum(form_of(obj), obj.dtype, obj.to(wide))
    if is_numpy(obj):
        import numpy as np  # noqa: PLC0415  # numpy is optional

        # At least double: a long double and a complex number stay what they are.
        double = np.promote_types(obj.dtype, np.float64)
        return _Sum(form_of(obj), obj.dtype, obj.astype(double))
    return _Sum("a number", None, obj)


class _Sum(NamedTuple):
    """A sum on its way to be a mean."""

    form: str
    dtype: Any
    total: Any


def _add_sums(left: _Sum, right: _Sum) -> _Sum:
    if is_array(left.total) or is_array(right.total):
        must_match(left.form, right.form)
        return left._replace(total=alike(operator.add)(left.total, right.total))
    same = left.dtype == right.dtype
    return _Sum(left.form, left.dtype if same else None, left.total + right.total)


def _average(combined: _Sum, size: int) -> Any:
    dtype, mean = combined.dtype, combined.total / size
    if dtype is None:
        return mean
    if isinstance(mean, torch.Tensor):
        return mean.to(dtype) if dtype.is_floating_point or dtype.is_complex else mean
    if dtype.kind in "fc":
        mean = mean.astype(dtype)
    return with_no_dimensions(mean) if is_array(combined.total) else mean


def _extreme(of_tensors: Callable[..., Any], of_arrays: str, of_numbers: Callable[..., Any]) -> Any:
    def combine(left: Any, right: Any) -> Any:
        if isinstance(left, torch.Tensor):
            return of_tensors(left, right)
        if is_array(left):
            import numpy as np  # noqa: PLC0415  # numpy is optional

            return getattr(np, of_arrays)(left, right)
        # Not a number is contagious, as in the other two, wherever it stands.
        for member in (left, right):
            if isinstance(member, numbers.Number) and is_nan(member):
                return member
        return of_numbers(left, right)

    return alike(combine)


def _truth(obj: Any, _: int = 0) -> Any:
    if isinstance(obj, torch.Tensor):
        return obj.bool()
    if is_array(obj):
        return obj.astype(bool)
    return bool(obj)


_Located = tuple[Any, Any]


def _located(obj: Any, rank: int) -> _Located:
    obj = _combinable(obj)
    return obj, filled_like(obj, rank)


def _first_extreme(
    is_better: Callable[[Any, Any], Any],
) -> Callable[[_Located, _Located], _Located]:
    """Of two the better, element by element; the left one, of the lower rank, where they tie."""

    def combine(left: _Located, right: _Located) -> _Located:
        (ours, our_rank), (theirs, their_rank) = left, right
        if is_array(ours) or is_array(theirs):
            must_match(form_of(ours), form_of(theirs))
            taken = (is_better(theirs, ours) | is_nan(theirs)) & ~is_nan(ours)
            rank = chosen(taken, their_rank, our_rank)
            return chosen(taken, theirs, ours), rank
        if is_nan(ours):
            return left
        return right if is_nan(theirs) or is_better(theirs, ours) else left

    return combine


_SEQUENCES = (list, tuple, str, bytes, bytearray)


def _sequence(obj: Any, _: int = 0) -> Any:
    if isinstance(obj, torch.Tensor):
        return obj.detach()
    if not is_array(obj) and not isinstance(obj, _SEQUENCES):
        raise UsageError(
            "concat joins lists, tuples, texts, bytes, tensors and arrays, "
            f"not a {type(obj).__name__}"
        )
    return obj


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
        must_match(form_of(left), form_of(right))
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
    try:
        return _are_equal_members(left, right)
    except Exception:  # noqa: BLE001  # a list of tensors has no truth; what can't be compared differs
        return False


def _are_equal_members(left: Any, right: Any) -> bool:
    if is_array(left) or is_array(right):
        is_alike = is_array(left) and is_array(right) and form_of(left) == form_of(right)
        return is_alike and bool((left == right).all())
    return bool(left == right)


def _counted(obj: Any, _: int = 0) -> Any:
    # Texts are iterables, too, but nobody counts letters of ranks by mistake only once.
    if isinstance(obj, (str, bytes)):
        raise UsageError(f"counter counts the members of an iterable; put the {obj!r} into a list")
    return dict(collections.Counter(obj))


def _counts_added(left: Any, right: Any) -> Any:
    for member, count in right.items():  # unlike a Counter's +, keeps counts of zero and below
        left[member] = left.get(member, 0) + count
    return left


_NAMED: dict[str, Operator] = {
    "sum": Operator("sum", alike(without_wrapping(operator.add)), _number, is_leafwise=True),
    "prod": Operator("prod", alike(without_wrapping(operator.mul)), _number, is_leafwise=True),
    "min": Operator("min", _extreme(torch.minimum, "minimum", min), _combinable, is_leafwise=True),
    "max": Operator("max", _extreme(torch.maximum, "maximum", max), _combinable, is_leafwise=True),
    "mean": Operator("mean", _add_sums, _to_average, _average, is_leafwise=True),
    "any": Operator("any", alike(operator.or_), _truth, is_leafwise=True),
    "all": Operator("all", alike(operator.and_), _truth, is_leafwise=True),
    "argmin": Operator("argmin", _first_extreme(operator.lt), _located, present=Extreme._make),
    "argmax": Operator("argmax", _first_extreme(operator.gt), _located, present=Extreme._make),
    "concat": Operator("concat", concatenated, _sequence),
    "union": Operator("union", _united, _set_or_mapping),
    "counter": Operator("counter", _counts_added, _counted, present=collections.Counter),
}
