"""Rank 2 loads for longer than the others' timeout.

ranks: 3
0-1: TransportTimeout
    says rank 2 did not arrive within 1 s
    says rank 2 … now at @loading in load_shard
    says its last was barrier (call 0) at @barrier
    says rank 0 … all_gather (call 1) at @gather
    says timeout=
    never no answer
2: TransportTimeout
    says rank 2 did not arrive within 1 s
"""

import time

import objcomm


def load_shard() -> str:
    """Decompress a file, for example."""
    time.sleep(3)  # @loading
    return "shard"


objcomm.init()
objcomm.barrier()  # @barrier
shard = load_shard() if objcomm.rank() == 2 else ""
objcomm.all_gather(shard, timeout=1)  # @gather
