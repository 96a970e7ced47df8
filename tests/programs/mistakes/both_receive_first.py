"""Each rank waits for the other's message before it sends its own.

ranks: 2
all: DesyncError
    says rank 0 … recv … at @recv
    says rank 1 … recv … at @recv
    says each waits for
    says sendrecv | send first
    never every rank must make the same calls in the same order
"""

import objcomm

objcomm.init()
theirs = objcomm.recv(1 - objcomm.rank())  # @recv
objcomm.send("mine", 1 - objcomm.rank())
