"""The ranks were started by a launcher, but the program does not call ``init``.

ranks: 2
all: UsageError
    says all_gather: … objcomm.init
"""

import objcomm

losses = objcomm.all_gather(0.5)
