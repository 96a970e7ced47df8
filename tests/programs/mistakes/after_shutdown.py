"""Rank 0 writes a last report when the group is gone.

ranks: 2
all: UsageError
    says all_gather: … before objcomm.shutdown
"""

import objcomm

objcomm.init()
objcomm.barrier()
objcomm.shutdown()  # @shutdown
losses = objcomm.all_gather(0.5)
