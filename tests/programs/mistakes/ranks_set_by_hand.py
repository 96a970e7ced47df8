"""RANK and WORLD_SIZE were exported by hand, but the program does not call ``init``.

ranks: 1, by hand
all: UsageError
    says WORLD_SIZE=2 … objcomm.init
    never torchrun has started
"""

import os

import objcomm

os.environ.update({"RANK": "0", "WORLD_SIZE": "2"})
losses = objcomm.all_gather(0.5)
