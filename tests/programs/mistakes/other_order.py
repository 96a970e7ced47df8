"""Rank 1 makes the same two calls in another order.

ranks: 2
all: DesyncError
    says rank 0 … all_gather (call 0) at @first
    says rank 1 … all_reduce (call 0) at @second
    says same order
"""

import objcomm

objcomm.init()
if objcomm.rank() == 0:
    losses = objcomm.all_gather(0.5)  # @first
    count = objcomm.all_reduce(32)
else:
    count = objcomm.all_reduce(32)  # @second
    losses = objcomm.all_gather(0.5)
