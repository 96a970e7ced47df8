"""Named operators on equal tensors, element by element: in which dtype, and into which memory.

Small tensors that one rank has of all ranks and pieces of large ones are combined by the same
function, so a tensor's size does not change its result.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

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
