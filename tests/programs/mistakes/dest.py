"""mpi4py calls the argument ``dest``.

ranks: 2
all: any
    says dest … dst
"""

import objcomm

objcomm.init()
objcomm.send("batch", dest=1)
