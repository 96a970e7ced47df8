"""``src`` defaults to the group's first rank; here it is rank 0, which is not in the group.

ranks: 3
1-2: UsageError
    says broadcast: src=0 … group … 1-2 … group_src=
0: exit 0
"""

import objcomm

objcomm.init()
if objcomm.rank() > 0:
    group = objcomm.new_group([1, 2])
    objcomm.broadcast("config", src=0, group=group)
