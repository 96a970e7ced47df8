"""The kernel kills rank 2 when memory runs out, while all others wait for it.

ranks: 3
0-1: TransportError
    says all_gather … rank 2 … its process, … has ended | all_gather … rank 2 … died
    never rank 0
    never rank 1
2: exit -9
"""

import os
import signal

import objcomm

objcomm.init()
objcomm.barrier()
if objcomm.rank() == 2:
    os.kill(os.getpid(), signal.SIGKILL)
objcomm.all_gather("batch")
