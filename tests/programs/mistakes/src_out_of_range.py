"""Ranks are counted from 1.

ranks: 2
all: UsageError
    says broadcast: src=2 … 0-1 | broadcast: src=2 … 0 to 1
    never group_src
"""

import objcomm

objcomm.init()
objcomm.broadcast("config", src=2)
