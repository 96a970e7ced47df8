"""Rank 0 sends a message larger than rank 1's limit.

ranks: 2
0: CollectiveError
    says broadcast failed on rank 1: … WireError
    says 100000
1: WireError
    says rank 0 … 4000014 bytes, more than the limit of 100000 … max_nbytes
"""

import objcomm

objcomm.init()
objcomm.configure(max_nbytes=100_000 if objcomm.rank() == 1 else 1 << 30)
weights = objcomm.broadcast(bytes(4_000_000))
