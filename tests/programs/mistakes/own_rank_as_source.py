"""Each rank passes its own rank as ``src``, so each is a source and waits for no rank.

ranks: 2
all: DesyncError
    says with root 0 at @broadcast … with root 1 at @broadcast
"""

import objcomm

objcomm.init()
config = objcomm.broadcast({"lr": 0.1}, src=objcomm.rank())  # @broadcast
objcomm.barrier()
