"""A thread communicates at the same time as the main thread, without a lane.

ranks: 2
all: exit 0
    says UsageError … lane
    says with objcomm.lane(
"""

import threading

import objcomm

objcomm.init()
objcomm.barrier()
thread = threading.Thread(target=objcomm.all_gather, args=("evaluated",))
thread.start()
thread.join()
objcomm.barrier()
