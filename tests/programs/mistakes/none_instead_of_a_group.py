"""Rank 0 is not in the group and passes None, which means every rank.

ranks: 3
0: any
    says ranks 1-2 … ended … the last split … at @split; this is call
    says group=None
    never lost its network
    never died
"""

import objcomm

objcomm.init()
group = objcomm.split("workers" if objcomm.rank() > 0 else None)  # @split
if objcomm.rank() == 0:
    group = None
scores = objcomm.all_gather(objcomm.rank(), group=group)
