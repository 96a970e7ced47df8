"""The call is under ``if objcomm.is_main()``, so only rank 0 makes it.

ranks: 2
all: DesyncError
    says rank 0 … gather (call 0) … at @gather
    says rank 1 … barrier (call 0) at @barrier
    says every rank must make the same calls in the same order
"""

import objcomm

objcomm.init()
if objcomm.is_main():
    objcomm.gather(0.25)  # @gather
objcomm.barrier()  # @barrier
