"""The work of an asynchronous call is used as if it were the list.

ranks: 2
all: TypeError
    says Work … wait()
"""

import objcomm

objcomm.init()
losses = objcomm.all_gather(0.5, async_op=True)
mean = sum(losses) / 2
