"""Received tensors should go to a GPU, but there is none.

ranks: 2
0: exit 0
1: DecodeError
    says rank 0 … broadcast … at @broadcast … device 'cuda' … cannot use
    says pass another device=
"""

import torch

import objcomm

objcomm.init("gloo")
weights = objcomm.broadcast({"w": torch.ones(3)}, device="cuda")  # @broadcast
