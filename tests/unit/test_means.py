"""Means of values that exceed single precision."""

import pytest
import torch

from objcomm._collectives.reduction import operators


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex128])
@pytest.mark.parametrize("numel", [1, 100_000])
def test_a_mean_is_computed_in_double_precision(dtype: torch.dtype, numel: int) -> None:
    operands = [torch.full((numel,), 2**40 + odd, dtype=dtype) for odd in (1, 2, 6)]
    into = torch.empty(numel, dtype=operators.result_dtype("mean", dtype))
    operators.combine_tensors("mean", operands, into, operators.wide_dtype("mean", dtype, None))
    assert torch.equal(into, torch.full_like(into, 2**40 + 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_shares_are_the_same_whether_added_together_or_after_a_total(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    operands = [torch.randn(50_000, dtype=dtype, generator=generator) for _ in range(3)]
    want = torch.empty_like(operands[0])
    operators.average_tensors(operands, want)
    total = torch.empty(50_000, dtype=operators.wide_dtype("sum", dtype, None))
    operators.average_tensors(operands[:2], total, count=3, is_over=False)
    into = operands[2]  # the result may overwrite an operand
    operators.average_tensors(operands[2:], into, total=total, count=3)
    assert torch.equal(into, want)
