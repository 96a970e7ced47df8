"""A program written for two ranks runs on three.

ranks: 3
all: any
    says all_gather_object … list … 2 entries … 3 ranks … [None] * world_size
"""

import objcomm
from objcomm.compat.torch import all_gather_object

objcomm.init()
gathered = [None, None]
all_gather_object(gathered, objcomm.rank())
