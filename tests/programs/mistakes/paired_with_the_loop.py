"""Rank 0 has one more batch, so its last step is paired with rank 1's call after the loop.

ranks: 2
all: any
    says rank 0 … all_gather (call 2) at @step … may have been paired
    says rank 1 … all_gather (call 2) at @totals … may have been paired
    says find out which rank makes an extra call
0: any
    says rank 1 … ended … 3 calls … all_gather (call 2) at @totals
"""

import objcomm

objcomm.init()
for step in range(3 if objcomm.rank() == 0 else 2):
    objcomm.all_gather(step)  # @step
totals = objcomm.all_gather({"rank": objcomm.rank()})  # @totals
