"""Reduction operators: a user's callable, or a named one with exact results.

Knows objects, not ranks: an operator prepares each rank's object, combines two at a time with the
lower ranks' on the left, and finishes the last.
"""

import math
import numbers
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
    named = _NAMED.get(op)
    if named is None:
        raise UsageError(
            f"op={op!r} is neither a callable of two objects nor one of {sorted(_NAMED)}"
        )
    return named


def _is_array(obj: object) -> bool:
    return isinstance(obj, torch.Tensor) or (
        type(obj).__module__ == "numpy" and hasattr(obj, "dtype")
    )


def _combinable(obj: Any) -> Any:
    """Refuse containers, which ``+`` would join and ``min`` would compare."""
    if isinstance(obj, (Mapping, list, tuple, set, frozenset, str, bytes, bytearray, type(None))):
        raise UsageError(
            f"a named op combines numbers, tensors and arrays, not a {type(obj).__name__}; "
            "give a callable of two objects"
        )
    return obj


def _number(obj: Any) -> Any:
    """What can be added or multiplied: a bool counts as 0 or 1, at every world size."""
    return int(obj) if isinstance(obj, bool) else _combinable(obj)


def _to_average(obj: Any) -> Any:
    """What can be added up and divided without losing digits that the mean needs."""
    _combinable(obj)
    if isinstance(obj, torch.Tensor):
        wide = torch.complex128 if obj.dtype.is_complex else torch.float64
        return obj.dtype, obj.to(wide)
    if _is_array(obj):
        import numpy as np  # noqa: PLC0415  # numpy is optional

        return obj.dtype, obj.astype(np.complex128 if obj.dtype.kind == "c" else np.float64)
    return None, _number(obj)


def _add_averages(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
    return left[0], left[1] + right[1]


def _average(combined: tuple[Any, Any], size: int) -> Any:
    dtype, total = combined
    mean = total / size
    if dtype is None:
        return mean
    if isinstance(mean, torch.Tensor):
        return mean.to(dtype) if dtype.is_floating_point or dtype.is_complex else mean
    return mean.astype(dtype) if dtype.kind in "fc" else mean


def _extreme(of_tensors: Callable[..., Any], of_arrays: str, of_numbers: Callable[..., Any]) -> Any:
    def combine(left: Any, right: Any) -> Any:
        if isinstance(left, torch.Tensor):
            return of_tensors(left, right)
        if _is_array(left):
            import numpy as np  # noqa: PLC0415  # numpy is optional

            return getattr(np, of_arrays)(left, right)
        # Not a number is contagious, as in the other two, wherever it stands.
        for member in (left, right):
            if isinstance(member, numbers.Real) and math.isnan(member):
                return member
        return of_numbers(left, right)

    return combine


def _truth(obj: Any) -> Any:
    if isinstance(obj, torch.Tensor):
        return obj.bool()
    if _is_array(obj):
        return obj.astype(bool)
    return bool(obj)


_NAMED = {
    "sum": Operator("sum", operator.add, _number),
    "prod": Operator("prod", operator.mul, _number),
    "min": Operator("min", _extreme(torch.minimum, "minimum", min), _combinable),
    "max": Operator("max", _extreme(torch.maximum, "maximum", max), _combinable),
    "mean": Operator("mean", _add_averages, _to_average, _average),
    "any": Operator("any", operator.or_, _truth),
    "all": Operator("all", operator.and_, _truth),
}
