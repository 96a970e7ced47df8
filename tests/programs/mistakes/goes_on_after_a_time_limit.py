"""Rank 0 catches a timeout and keeps using the group, which the timeout has broken.

ranks: 2
0: BrokenGroupError
    says all_gather … can no longer carry objects … TransportTimeout
    says rank 1 did not arrive within 0.5 s
    says make a new process group, or restart the job
1: any
"""

import contextlib
import time

import objcomm

objcomm.init()
objcomm.barrier()
if objcomm.rank() == 1:
    time.sleep(2)
with contextlib.suppress(objcomm.TransportTimeout):
    objcomm.barrier(timeout=0.5)
objcomm.all_gather("batch")
