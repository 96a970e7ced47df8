"""Rank 0 writes a last report after the shutdown.

ranks: 2
all: UsageError
    says all_gather: … before objcomm.shutdown
"""

import objcomm

objcomm.init()
objcomm.barrier()
objcomm.shutdown()  # @shutdown
losses = objcomm.all_gather(0.5)
