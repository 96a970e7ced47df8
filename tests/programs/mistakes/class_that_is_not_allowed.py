"""Only plain data is allowed, but a path is sent.

ranks: 2
0: any
1: ForbiddenTypeError
    says pathlib.PosixPath | pathlib … PosixPath
    says rank 0
    says at @broadcast
    says allow=
"""

import pathlib

import objcomm

objcomm.init()
objcomm.configure(allow=[])
checkpoint = objcomm.broadcast(pathlib.Path("step-100.pt"))  # @broadcast
objcomm.shutdown()
