"""Ranks were started, and the program does not call ``init``.

ranks: 2
all: UsageError
    says all_gather: … objcomm.init
"""

import objcomm

losses = objcomm.all_gather(0.5)
