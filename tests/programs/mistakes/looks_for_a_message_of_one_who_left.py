"""A server probes for requests from a rank that has shut down.

ranks: 2
0: any
    says iprobe: … rank 1 … left | iprobe: … rank 1 … shut down
    never earlier error
    never died
1: exit 0
"""

import time

import objcomm

objcomm.init()
objcomm.barrier()
if objcomm.rank() == 1:
    objcomm.send("request", 0)
    objcomm.shutdown()
else:
    objcomm.recv(1)
    time.sleep(1)
    while objcomm.iprobe(1) is None:
        time.sleep(0.1)
