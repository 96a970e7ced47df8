"""What sync_model does with a model's buffers under each option."""

from typing import Any

import pytest
import torch
from torch import nn

import objcomm
from tests.ranks import ranks


@ranks(2)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.5]),
        ({"average_buffers": False}, [0.0, 0.0]),
        ({"sync_buffers": False}, [0.0, 1.0]),
        ({"sync_buffers": False, "average_buffers": False}, [0.0, 1.0]),
    ],
    ids=["averaged", "the first rank's", "left alone", "left alone twice"],
)
def test_buffers_are_averaged_shared_or_left_alone(
    options: dict[str, Any], expected: list[float]
) -> None:
    rank = objcomm.rank()
    for is_eager in (False, True):
        norm = nn.BatchNorm1d(1)
        means = norm.get_buffer("running_mean").fill_(rank)
        if is_eager:
            with objcomm.models.eager_sync_model(norm, **options):
                pass
        else:
            objcomm.models.sync_model(norm, **options)
        assert torch.equal(means, torch.tensor([expected[rank]]))
