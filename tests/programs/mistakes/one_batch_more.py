"""The ranks have different numbers of batches, and rank 1's program ends first.

ranks: 2
0: any
    says rank 1 … ended … 2 calls … all_gather (call 1) at @step
    says call 2
    never lost its network
    never it died
1: any
    never died
"""

import objcomm

objcomm.init()
batches = range(3 if objcomm.rank() == 0 else 2)
for batch in batches:
    objcomm.all_gather(batch)  # @step
