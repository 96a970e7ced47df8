"""Reduction operators: a user's callable, or a named one with exact results.

Knows objects, not ranks: an operator prepares each rank's object, combines two at a time with the
lower ranks' on the left, and finishes the last.
"""

import numbers
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from objcomm.errors import UsageError


def _unchanged(obj: Any) -> Any:
    return obj


@dataclass(frozen=True, slots=True)
class Operator:
    """How objects are reduced.

    Attributes:
        name: what the ranks' headers compare; the same for all callables, because the same
            function has no name that all processes agree on.
        combine: takes what lower ranks gave and what higher ranks gave; it may change the first.
        prepare: applied to each rank's object first.
        finish: takes the last combination and the number of ranks.
    """

    name: str
    combine: Callable[[Any, Any], Any]
    prepare: Callable[[Any], Any] = _unchanged
    finish: Callable[[Any, int], Any] = lambda combined, _: combined


def operator_for(op: Callable[[Any, Any], Any] | str) -> Operator:
    """What ``op=`` means.

    Raises:
        UsageError: it is neither callable nor one of the names.
    """
    if callable(op):
        return Operator("callable", op)
    name: object = op  # whatever the caller passed
    named = _NAMED.get(name) if isinstance(name, str) else None
    if named is None:
        raise UsageError(
            f"op={op!r} is neither a callable of two objects nor one of {sorted(_NAMED)}"
        )
    return named


def _is_numpy(obj: object) -> bool:
    return type(obj).__module__ == "numpy" and hasattr(obj, "dtype")


def _is_array(obj: object) -> bool:
    """Tensors and arrays; numpy's scalars count as numbers."""
    return isinstance(obj, torch.Tensor) or (_is_numpy(obj) and type(obj).__name__ == "ndarray")


def _combinable(obj: Any) -> Any:
    """Refuse containers, which ``+`` would join and ``min`` would compare."""
    if isinstance(obj, (Mapping, list, tuple, set, frozenset, str, bytes, bytearray, type(None))):
        raise UsageError(
            f"a named op combines numbers, tensors and arrays, not a {type(obj).__name__}; "
            "give a callable of two objects"
        )
    # The fold runs on one rank, and must not leave a history of gradients on that rank alone.
    return obj.detach() if isinstance(obj, torch.Tensor) else obj


def _number(obj: Any) -> Any:
    """What can be added or multiplied: a bool counts as 0 or 1, at every world size."""
    is_bool = isinstance(obj, bool) or (_is_numpy(obj) and type(obj).__name__ in ("bool", "bool_"))
    return int(obj) if is_bool else _combinable(obj)


def _alike(combine: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Refuse arrays of other kinds, dtypes or shapes, which would be converted or stretched."""

    def checked(left: Any, right: Any) -> Any:
        if not (_is_array(left) or _is_array(right)):
            return combine(left, right)
        _must_match(_form(left), _form(right))
        combined = combine(left, right)
        # NumPy turns arrays without dimensions into scalars.
        return combined if _is_array(combined) else _with_no_dimensions(combined)

    return checked


def _must_match(ours: str, theirs: str) -> None:
    if ours != theirs:
        raise UsageError(f"the ranks gave {ours} and {theirs}; give the same on every rank")


def _with_no_dimensions(scalar: Any) -> Any:
    import numpy as np  # noqa: PLC0415  # numpy is optional

    return np.asarray(scalar)


def _form(obj: Any) -> str:
    kind = f"a {type(obj).__module__}.{type(obj).__qualname__}".replace("builtins.", "")
    return f"{kind} of {obj.dtype}, shape {tuple(obj.shape)}" if _is_array(obj) else kind


def _to_average(obj: Any) -> Any:
    """What can be added up and divided without losing digits that the mean needs."""
    obj = _number(obj)
    if isinstance(obj, torch.Tensor):
        wide = torch.complex128 if obj.dtype.is_complex else torch.float64
        return _Sum(_form(obj), obj.dtype, obj.to(wide))
    if _is_numpy(obj):
        import numpy as np  # noqa: PLC0415  # numpy is optional

        # At least double: a long double and a complex number stay what they are.
        return _Sum(_form(obj), obj.dtype, obj.astype(np.promote_types(obj.dtype, np.float64)))
    return _Sum("a number", None, obj)


class _Sum(NamedTuple):
    """A sum on its way to be a mean."""

    form: str
    dtype: Any
    total: Any


def _add_sums(left: _Sum, right: _Sum) -> _Sum:
    if _is_array(left.total) or _is_array(right.total):
        _must_match(left.form, right.form)
        return left._replace(total=_alike(operator.add)(left.total, right.total))
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
    return _with_no_dimensions(mean) if _is_array(combined.total) else mean


def _extreme(of_tensors: Callable[..., Any], of_arrays: str, of_numbers: Callable[..., Any]) -> Any:
    def combine(left: Any, right: Any) -> Any:
        if isinstance(left, torch.Tensor):
            return of_tensors(left, right)
        if _is_array(left):
            import numpy as np  # noqa: PLC0415  # numpy is optional

            return getattr(np, of_arrays)(left, right)
        # Not a number is contagious, as in the other two, wherever it stands.
        for member in (left, right):
            if isinstance(member, numbers.Number) and member != member:  # noqa: PLR0124  # only a NaN
                return member
        return of_numbers(left, right)

    return _alike(combine)


def _truth(obj: Any) -> Any:
    if isinstance(obj, torch.Tensor):
        return obj.bool()
    if _is_array(obj):
        return obj.astype(bool)
    return bool(obj)


_NAMED = {
    "sum": Operator("sum", _alike(operator.add), _number),
    "prod": Operator("prod", _alike(operator.mul), _number),
    "min": Operator("min", _extreme(torch.minimum, "minimum", min), _combinable),
    "max": Operator("max", _extreme(torch.maximum, "maximum", max), _combinable),
    "mean": Operator("mean", _add_sums, _to_average, _average),
    "any": Operator("any", _alike(operator.or_), _truth),
    "all": Operator("all", _alike(operator.and_), _truth),
}
