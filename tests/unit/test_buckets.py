"""Where tensors on several devices of one process are packed; `standin/models` has the rest."""

import torch

from objcomm._training.buckets import Rule, _Bucket


def test_tensors_of_two_devices_are_packed_on_that_of_the_first() -> None:
    bucket = _Bucket(Rule.AVERAGE, "meta")
    bucket.tensors += [torch.ones(2, device="meta"), torch.ones(3)]
    flat = bucket.open()
    assert (flat.device.type, flat.numel()) == ("meta", 5)
