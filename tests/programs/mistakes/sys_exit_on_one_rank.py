"""Rank 1 finds nothing to do and exits.

ranks: 2
0: TransportError
    says rank 1 … ended
    says barrier (call 0) at @barrier
    never lost its network
1: exit 120
    says no batches
    says DesyncError: … all_gather (call 1) at @gather … barrier (call 0) at @barrier
    never Traceback
"""

import sys
import time

import objcomm

objcomm.init()
objcomm.barrier()  # @barrier
if objcomm.rank() == 1:
    time.sleep(1)  # so that rank 0 is in the call
    sys.exit("no batches")
objcomm.all_gather("batch")  # @gather
