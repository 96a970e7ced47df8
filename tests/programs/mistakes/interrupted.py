"""A user interrupts only rank 1 while it waits.

ranks: 2
0: TransportError
    says rank 1 … interrupted | rank 1 … KeyboardInterrupt
    never KeyboardInterrupt:
    never died
1: KeyboardInterrupt
    never objcomm.TransportError
"""

import signal
import time

import objcomm

objcomm.init()
objcomm.barrier()
if objcomm.rank() == 1:
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
else:
    time.sleep(1)
objcomm.all_gather("batch")
