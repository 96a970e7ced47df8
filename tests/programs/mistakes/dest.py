"""mpi4py calls it ``dest``.

ranks: 2
all: any
    says dest … dst
"""

import objcomm

objcomm.init()
objcomm.send("batch", dest=1)
