"""Rank 1 is in an extension that holds the GIL, so its other threads can't answer.

ranks: 2
0: TransportTimeout
    says rank 1 did not arrive within 2 s
    says rank 1 … no answer … for | rank 1 … no answer … since | rank 1 … has failed (no answer)
1: any
"""

import ctypes

import objcomm

objcomm.init()
objcomm.barrier()
if objcomm.rank() == 1:
    ctypes.PyDLL(None).sleep(4)
objcomm.all_gather("batch", timeout=2)
