"""Only rank 0 gathers; the others have finished and shut down.

ranks: 4
0: any
    says to rank … left … @shutdown
    never lost its network
    never died
    never rank 0 ended
"""

import objcomm

objcomm.init()
objcomm.barrier()
if objcomm.is_main():
    objcomm.gather("report")
objcomm.shutdown()  # @shutdown
