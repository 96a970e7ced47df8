"""The program never waits for the result of an asynchronous call.

ranks: 2
all: any
    says @begun: RuntimeWarning: all_gather was started here but never waited for
"""

import objcomm

objcomm.init()
objcomm.barrier()
if objcomm.rank() == 1:
    objcomm.recv(0)
objcomm.all_gather(0.5, async_op=True)  # @begun
if objcomm.rank() == 0:
    objcomm.send("now", 1)
