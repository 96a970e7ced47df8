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
