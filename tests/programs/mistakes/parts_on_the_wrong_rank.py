"""Rank 0 has the parts, but ``src`` is 1.

ranks: 2
all: CollectiveError
    says scatter failed on rank 1: … one object for each of 2 ranks, not … None
"""

import objcomm

objcomm.init()
parts = ["first half", "second half"] if objcomm.is_main() else None
part = objcomm.scatter(parts, src=1)
