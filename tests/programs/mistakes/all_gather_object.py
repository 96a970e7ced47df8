"""The name of torch's function, which fills a list.

ranks: 2
all: AttributeError
    says all_gather_object … all_gather
"""

import objcomm

objcomm.init()
losses = [None, None]
objcomm.all_gather_object(losses, 0.5)
