"""The lanes are named after the ranks, so no two calls match.

ranks: 2
all: any
    says rank 0 … all_gather … eval 0 … at @gather | rank 0 … all_gather … at @gather … eval 0
    says rank 1 … all_gather … eval 1 … at @gather | rank 1 … all_gather … at @gather … eval 1
    never lost its network
"""

import threading

import objcomm


def evaluate() -> None:
    """Gather on a separate lane."""
    with objcomm.lane(f"eval {objcomm.rank()}"):
        objcomm.all_gather("evaluated", timeout=3)  # @gather


objcomm.init()
objcomm.barrier()
thread = threading.Thread(target=evaluate)
thread.start()
thread.join()
