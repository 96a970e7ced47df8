"""The backend needs a GPU, but there is none.

ranks: 2
all: any
    says init: backend='nccl' … without nccl … 'gloo' | init: backend='nccl' … no GPU … 'gloo'
    never frame #
"""

import objcomm

objcomm.init("nccl")
objcomm.barrier()
