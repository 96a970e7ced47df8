"""A server probes for requests again after its own group has shut down.

ranks: 2
all: UsageError
    says iprobe: … shutdown
    never earlier error
    never call objcomm.init
"""

import objcomm

objcomm.init()
group = objcomm.dup()
objcomm.barrier(group=group)
objcomm.shutdown()
objcomm.iprobe(0, group=group)
