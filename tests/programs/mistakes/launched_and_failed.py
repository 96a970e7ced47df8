"""One of the ranks that a script launches raises an exception.

ranks: 1, by hand
all: LaunchError
    says rank 1 … ValueError: the loss is nan
    shows /launched_and_failed.py", %raise, in train
    says rank 0
    never <dynamic-code>
    never it died
    never it lives
    never out of step
"""

import os
import time

import objcomm


def train() -> None:
    """Fail on one rank while the other waits for it."""
    if objcomm.rank() == 1:
        time.sleep(1)
        raise ValueError("the loss is nan")  # @raise
    objcomm.barrier()


for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
objcomm.launch(train, 2)
