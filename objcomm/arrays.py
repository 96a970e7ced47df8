"""Tensors and arrays as operands: what counts as one, how two of them must be alike.

Knows torch, and numpy only where an operand is of numpy; knows no operator and no rank.
"""

from collections.abc import Callable
from typing import Any

import torch

from objcomm.errors import UsageError


def is_numpy(obj: object) -> bool:
    """Arrays and numpy's scalars."""
    return type(obj).__module__ == "numpy" and hasattr(obj, "dtype")


def is_array(obj: object) -> bool:
    """Tensors and arrays; numpy's scalars count as numbers."""
    return isinstance(obj, torch.Tensor) or (is_numpy(obj) and type(obj).__name__ == "ndarray")


def alike(combine: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Refuse arrays of other kinds, dtypes or shapes, which would be converted or stretched."""

    def checked(left: Any, right: Any) -> Any:
        if not (is_array(left) or is_array(right)):
            return combine(left, right)
        must_match(form(left), form(right))
        combined = combine(left, right)
        # NumPy turns arrays without dimensions into scalars.
        return combined if is_array(combined) else with_no_dimensions(combined)

    return checked


def must_match(ours: str, theirs: str) -> None:
    """Hold two forms against each other.

    Raises:
        UsageError: they differ.
    """
    if ours != theirs:
        raise UsageError(f"the ranks gave {ours} and {theirs}; give the same on every rank")


def with_no_dimensions(scalar: Any) -> Any:
    """The array that numpy made a scalar of."""
    import numpy as np  # noqa: PLC0415  # numpy is optional

    return np.asarray(scalar)


def form(obj: Any) -> str:
    """Kind, dtype and shape as text."""
    kind = f"a {type(obj).__module__}.{type(obj).__qualname__}".replace("builtins.", "")
    return f"{kind} of {obj.dtype}, shape {tuple(obj.shape)}" if is_array(obj) else kind


def concatenated(left: Any, right: Any) -> Any:
    """Two of the same kind, one behind the other along their first dimension.

    Raises:
        UsageError: their kinds, dtypes or other dimensions differ.
    """
    if not is_array(left):
        must_match(form(left), form(right))
        return left + right
    must_match(_form_of_rows(left), _form_of_rows(right))
    if isinstance(left, torch.Tensor):
        return torch.cat([left, right])
    import numpy as np  # noqa: PLC0415  # numpy is optional

    return np.concatenate([left, right])


def _form_of_rows(obj: Any) -> str:
    if not is_array(obj):
        return form(obj)
    if not obj.ndim:
        raise UsageError("concat needs tensors and arrays of one dimension or more")
    return form(obj[:0])


def is_nan(obj: Any) -> Any:
    """Where an array, or whether a number, is not a number."""
    return obj != obj  # noqa: PLR0124  # true of a NaN alone, in Python, torch and numpy


def chosen(condition: Any, left: Any, right: Any) -> Any:
    """Element by element ``left`` where the condition holds, else ``right``."""
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, left, right)
    if not is_array(condition):
        return left if condition else right
    import numpy as np  # noqa: PLC0415  # numpy is optional

    return np.where(condition, left, right)


def filled_like(obj: Any, value: int) -> Any:
    """``value`` as an int64 array of the same shape, or as a plain int for a number."""
    if isinstance(obj, torch.Tensor):
        return torch.full_like(obj, value, dtype=torch.int64)
    if not is_array(obj):
        return value
    import numpy as np  # noqa: PLC0415  # numpy is optional

    return np.full(obj.shape, value, np.int64)


def without_wrapping(combine: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Combine numpy's integer scalars as Python's; the result is numpy's again where it fits."""

    def combined(left: Any, right: Any) -> Any:
        if not (_is_numpy_integer(left) or _is_numpy_integer(right)):
            return combine(left, right)
        plain = [each.item() if _is_numpy_integer(each) else each for each in (left, right)]
        exact = combine(*plain)
        if type(left) is not type(right):
            return exact
        import numpy as np  # noqa: PLC0415  # numpy is optional

        limits = np.iinfo(left.dtype)
        return type(left)(exact) if limits.min <= exact <= limits.max else exact

    return combined


def _is_numpy_integer(obj: Any) -> bool:
    return is_numpy(obj) and not is_array(obj) and obj.dtype.kind in "iu"
