"""torch's name.

ranks: 2
all: AttributeError
    says get_rank … objcomm.rank | get_rank … 'rank'
"""

import objcomm

objcomm.init()
if objcomm.get_rank() == 0:
    objcomm.barrier()
