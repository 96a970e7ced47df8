"""The message has a tag, but the receiver passes none, which means tag 0.

ranks: 2
1: DesyncError
    says rank 1 … recv … at @recv … takes tag=0
    says tag=5 from rank 0
    says tag=None
    never every rank must make the same calls in the same order
0: any
"""

import objcomm

objcomm.init()
if objcomm.rank() == 0:
    objcomm.send("batch", 1, tag=5)
else:
    objcomm.recv(0)  # @recv
objcomm.barrier()
