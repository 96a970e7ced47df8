"""WORLD_SIZE was exported by hand, without a rank.

ranks: 1, by hand
all: UsageError
    says init: WORLD_SIZE=2 is set … RANK … torchrun
"""

import os

import objcomm

del os.environ["RANK"]
os.environ["WORLD_SIZE"] = "2"
objcomm.init()
