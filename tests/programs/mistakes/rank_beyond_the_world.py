"""Ranks were numbered from 1.

ranks: 1, by hand
all: UsageError
    says init: RANK=2 … between 0 and WORLD_SIZE=2 … counted from 0
"""

import os

import objcomm

os.environ.update({"RANK": "2", "WORLD_SIZE": "2"})
objcomm.init()
