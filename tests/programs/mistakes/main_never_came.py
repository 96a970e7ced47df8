"""Rank 0, which hosts the store, has failed before ``init``.

ranks: 3, by hand
0: exit 1
1-2: StartError
    says init: … rank 0 … has not started
    says MASTER_ADDR
    never frame #
"""

import os
import sys

import objcomm

if os.environ["RANK"] == "0":
    sys.exit("no such module")
objcomm.init(timeout=3)
