"""mpi4py's name.

ranks: 2
all: AttributeError
    says allgather … all_gather
"""

import objcomm

objcomm.init()
losses = objcomm.allgather(0.5)
