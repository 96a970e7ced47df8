"""Tensors are summed, but the last batch of rank 1 is shorter.

ranks: 2
all: CollectiveError
    says obj['logits'] differs between rank 0 and rank 1: … shape (8, 2) … shape (5, 2)
    shows %reduce
"""

import torch

import objcomm

objcomm.init()
rows = 8 if objcomm.rank() == 0 else 5
objcomm.all_reduce({"logits": torch.ones(rows, 2)})  # @reduce
