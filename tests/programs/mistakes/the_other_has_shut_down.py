"""Only rank 0 gathers; rank 1 has finished and shut down.

ranks: 2
0: any
    says rank 1 … left … @shutdown
    never died
    never it lives
"""

import objcomm

objcomm.init()
objcomm.barrier()
if objcomm.is_main():
    objcomm.gather("report")
objcomm.shutdown()  # @shutdown
