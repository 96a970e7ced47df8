"""``gather`` returns its list on rank 0 only, and None on the others.

ranks: 2
0: TransportError
    says rank 1 … ended … TypeError
    says rank 1 … last … gather (call 0) … at @gather
    never lost its network
1: TypeError
    says 'NoneType' object is not iterable
"""

import objcomm

objcomm.init()
losses = objcomm.gather(0.5)  # @gather
mean = sum(losses) / 2
objcomm.barrier()
