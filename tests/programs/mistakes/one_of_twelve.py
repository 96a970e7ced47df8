"""One rank of twelve takes another branch.

ranks: 12
all: DesyncError
    says rank 5 … barrier (call 1) at @barrier … ranks 0-4, 6-11 … all_gather (call 1) at @gather
    never objcomm.TransportError
"""

import objcomm

objcomm.init()
objcomm.barrier()
if objcomm.rank() == 5:
    objcomm.barrier()  # @barrier
else:
    objcomm.all_gather(objcomm.rank())  # @gather
