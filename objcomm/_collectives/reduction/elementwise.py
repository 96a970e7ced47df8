"""Tensors and arrays as operands, and named operators on equal ones, element by element.

Small tensors that one rank has of all ranks and pieces of large ones are combined by the same
function, so a tensor's size does not change its result. Knows torch, and numpy only where an
operand is of numpy; knows no rank.
"""

from collections.abc import Callable, Iterator, Sequence
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
        must_match(form_of(left), form_of(right))
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


def form_of(obj: Any) -> str:
    """Kind, dtype and shape as text."""
    kind = f"a {type(obj).__module__}.{type(obj).__qualname__}".replace("builtins.", "")
    return f"{kind} of {obj.dtype}, shape {tuple(obj.shape)}" if is_array(obj) else kind


def concatenated(left: Any, right: Any) -> Any:
    """Two of the same kind, one behind the other along their first dimension.

    Raises:
        UsageError: their kinds, dtypes or other dimensions differ.
    """
    if not is_array(left):
        must_match(form_of(left), form_of(right))
        return left + right
    must_match(_form_of_rows(left), _form_of_rows(right))
    if isinstance(left, torch.Tensor):
        return torch.cat([left, right])
    import numpy as np  # noqa: PLC0415  # numpy is optional

    return np.concatenate([left, right])


def _form_of_rows(obj: Any) -> str:
    if not is_array(obj):
        return form_of(obj)
    if not obj.ndim:
        raise UsageError("concat needs tensors and arrays of one dimension or more")
    return form_of(obj[:0])


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


#: What is combined here; other dtypes have no arithmetic of their own in torch.
DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)

# Below 32,768 elements torch works on the calling thread alone. Where every core has a rank,
# threads that wait for each other made a reduction 8 times slower; and so much stays in the cache.
_CHUNK_NUMEL = 30_720

_HALF = frozenset({torch.float16, torch.bfloat16})

_IN_PLACE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.Tensor.add_,
    "mean": torch.Tensor.add_,
    "prod": torch.Tensor.mul_,
    "any": torch.Tensor.logical_or_,
    "all": torch.Tensor.logical_and_,
}
_INTO: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,  # a NaN is contagious in both
    "max": torch.maximum,
    "any": torch.logical_or,
    "all": torch.logical_and,
}


def operand_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    """What travels of a tensor: a truth value is one byte."""
    return torch.bool if op in {"any", "all"} else dtype


def result_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    """What comes back: its own dtype, but float64 for the mean of integers."""
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        return torch.float64
    return operand_dtype(op, dtype)


def wide_dtype(op: str, dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """In which dtype sums and products are added up before they are rounded, once.

    Args:
        op: the operator's name.
        dtype: the operands'.
        wanted: what the user asked for; never narrower than the operands, nor used for integers.
    """
    is_exact = not (dtype.is_floating_point or dtype.is_complex)
    if op not in {"sum", "prod", "mean"}:
        return operand_dtype(op, dtype)
    if wanted is not None and not is_exact:
        return torch.promote_types(dtype, wanted)
    if op == "mean":
        return torch.complex128 if dtype.is_complex else torch.float64
    return torch.float32 if dtype in _HALF else dtype


def combine(
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
    for target, *each in _chunks(into, operands):
        _combine_chunk(op, each, target, wide)


def average(operands: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """The mean as DistributedDataParallel takes it: shares of each are added up in rank order.

    No sum can overflow where the mean does not. Halves are added up in float32, the others in
    their own dtype.

    Args:
        operands: floating or complex, flat and of one length.
        into: where the result goes; it may be one of them.
    """
    share = 1 / len(operands)
    wide = torch.float32 if into.dtype in _HALF else into.dtype
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


def _combine_chunk(
    op: str, operands: Sequence[torch.Tensor], into: torch.Tensor, wide: torch.dtype
) -> None:
    first, *others = operands
    if not others and op != "mean":
        into.copy_(first)
    elif wide == first.dtype == into.dtype and op != "mean":
        combined = _INTO[op](first, others[0], out=into)
        for other in others[1:]:
            _INTO[op](combined, other, out=into)
    else:
        total = first.to(wide, copy=True)
        for other in others:
            _IN_PLACE[op](total, other)
        into.copy_(total.div_(len(operands)) if op == "mean" else total)
