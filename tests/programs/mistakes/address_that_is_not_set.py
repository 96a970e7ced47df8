"""RANK and WORLD_SIZE were exported by hand, without an address where the ranks meet.

ranks: 2, by hand
all: UsageError
    says init: … MASTER_ADDR
    never torchrun has started
"""

import os

import objcomm

for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
    del os.environ[name]
objcomm.init(timeout=3)
