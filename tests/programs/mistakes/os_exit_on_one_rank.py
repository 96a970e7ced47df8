"""Rank 1's process exits immediately, as some libraries make it do.

ranks: 2
0: TransportError
    says rank 1 … its process, … has ended | rank 1 … died, exited
    never shutdown
1: exit 3
"""

import os

import objcomm

objcomm.init()
objcomm.barrier()
if objcomm.rank() == 1:
    os._exit(3)
objcomm.all_gather("batch")
