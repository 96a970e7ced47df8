"""Every rank receives from rank 0, even rank 0 itself.

ranks: 2
0: any
    says recv: rank 0 … of its own | recv: rank 0 … itself
    shows %recv
1: any
"""

import objcomm

objcomm.init()
objcomm.send("batch", 1 - objcomm.rank())
batch = objcomm.recv(0)  # @recv
