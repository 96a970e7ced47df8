"""A tensor keeps its strides: channels-last stays channels-last, an expanded row stays one row."""

import pytest
import torch

import objcomm


@pytest.mark.parametrize(
    "sent",
    [
        torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(4).expand(3, 4),
        torch.arange(6).view(2, 1, 3).expand(2, 5, 3),
    ],
    ids=["channels last", "permuted", "one row", "one row of each"],
)
def test_a_tensor_arrives_with_its_strides(codec: str, sent: torch.Tensor) -> None:
    got = objcomm.from_tensor(objcomm.to_tensor(sent, codec=codec))
    assert torch.equal(got, sent)
    assert got.stride() == sent.stride()
    assert got.untyped_storage().nbytes() == sent.untyped_storage().nbytes()
