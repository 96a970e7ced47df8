"""-1 is passed for the last rank, as for the last index of a list.

ranks: 2
all: UsageError
    says broadcast: src=-1 … 0-1 | broadcast: src=-1 … 0 to 1
    never group_src
    never member
"""

import objcomm

objcomm.init()
objcomm.broadcast("config", src=-1)
