"""Rank 0, which hosts the store, never starts, and the user gives up.

ranks: 2, by hand
0: exit 1
1: KeyboardInterrupt
    never frame #
"""

import os
import signal
import sys
import threading
import time

import objcomm

if os.environ["RANK"] == "0":
    sys.exit("no such module")


def give_up() -> None:
    """Press Ctrl-C, for at most 8 s."""
    for _ in range(8):
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(4)


threading.Thread(target=give_up, daemon=True).start()
objcomm.init(timeout=20)
