"""Rank 0 uses the first group before the second, rank 1 after it.

ranks: 2
all: any
    says DesyncError: … out of step
    says rank 0 … barrier … at @first
    says rank 1 … barrier … at @second
    never lost its network
"""

import objcomm

objcomm.init()
train, evaluation = objcomm.dup(), objcomm.dup()
if objcomm.rank() == 0:
    objcomm.barrier(group=train)  # @first
    objcomm.barrier(group=evaluation)
else:
    objcomm.barrier(group=evaluation)  # @second
    objcomm.barrier(group=train)
