"""mpi4py calls the argument ``root``.

ranks: 2
all: any
    says root … src
"""

import objcomm

objcomm.init()
objcomm.broadcast("config", root=0)
