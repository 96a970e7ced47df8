"""A library has initialized torch.distributed, and the program asks for another backend.

ranks: 2
all: UsageError
    says backend='nccl' … torch.distributed is initialized with … gloo … leave backend out
"""

import torch.distributed as dist

import objcomm

dist.init_process_group("gloo")
objcomm.init("nccl")
