"""The group ranks of a group of two are 0 and 1; 2 is a global rank.

ranks: 3
1-2: UsageError
    says broadcast: group_src=2 … 0 to 1
0: exit 0
"""

import objcomm

objcomm.init()
if objcomm.rank() > 0:
    group = objcomm.new_group([1, 2])
    objcomm.broadcast("config", group_src=2, group=group)
