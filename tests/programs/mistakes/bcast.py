"""mpi4py's name.

ranks: 2
all: AttributeError
    says bcast … objcomm.broadcast | bcast … 'broadcast'
"""

import objcomm

objcomm.init()
config = objcomm.bcast({"lr": 0.1})
