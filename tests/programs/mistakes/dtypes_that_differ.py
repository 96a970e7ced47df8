"""Rank 1 computes in half precision.

ranks: 2
all: CollectiveError
    says obj['loss'] differs between rank 0 and rank 1: … float32 … float16
"""

import torch

import objcomm

objcomm.init()
dtype = torch.float32 if objcomm.rank() == 0 else torch.float16
objcomm.all_reduce({"loss": torch.ones(3, dtype=dtype)}, "mean")
