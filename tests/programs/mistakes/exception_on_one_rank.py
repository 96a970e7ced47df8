"""Rank 1 raises between two calls, while rank 0 waits in the next one.

ranks: 2
0: TransportError
    says rank 1 … ended … FileNotFoundError
    says rank 1 … last … barrier (call 0) at @barrier
    never lost its network
1: FileNotFoundError
    never objcomm.errors
    never objcomm.TransportError
"""

import pathlib

import objcomm

objcomm.init()
objcomm.barrier()  # @barrier
if objcomm.rank() == 1:
    pathlib.Path("/no/such/shard").read_bytes()
objcomm.all_gather("shard")
