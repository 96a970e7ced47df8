"""Rank 1 loads for so long that rank 0 logs it; both continue.

ranks: 2
0: exit 0
    says rank 0 is in all_gather (call 1) at @gather
    says rank 1 … now at @loading in load_shard
1: exit 0
    never WARNING
"""

import logging
import time

import objcomm


def load_shard() -> str:
    """Decompress a file, for example."""
    time.sleep(3)  # @loading
    return "shard"


logging.basicConfig(level=logging.WARNING)
objcomm.configure(report_after=1.0)
objcomm.init()
objcomm.barrier()
shard = load_shard() if objcomm.rank() == 1 else ""
objcomm.all_gather(shard)  # @gather
objcomm.shutdown()
