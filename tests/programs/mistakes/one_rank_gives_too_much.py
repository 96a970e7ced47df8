"""Rank 1 passes one object too many.

ranks: 2
all: CollectiveError
    says all_to_all failed on rank 1: … one object for each of 2 ranks, not a list of 3
"""

import objcomm

objcomm.init()
objcomm.all_to_all([b"part"] * (2 + objcomm.rank()))
