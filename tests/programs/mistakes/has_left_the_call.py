"""Rank 0's broadcast waits for no rank, and is over when the others' call reveals the mismatch.

ranks: 3
all: DesyncError
    says rank 0 called broadcast (call 1) … at @broadcast
    says ranks 1-2 called gather (call 1) … at @gather
    never rank 0 is in broadcast
    never objcomm.TransportError
"""

import time

import objcomm

objcomm.init()
objcomm.barrier()
if objcomm.rank() == 0:
    objcomm.broadcast("config")  # @broadcast
    time.sleep(1)
    objcomm.barrier()
else:
    objcomm.gather("state", dst=1)  # @gather
    objcomm.barrier()
