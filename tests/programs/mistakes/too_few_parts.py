"""The list has parts for two ranks, but there are three.

ranks: 3
all: CollectiveError
    says scatter failed on rank 0: … one object for each of 3 ranks, not a list of 2
    shows %scatter
"""

import objcomm

objcomm.init()
part = objcomm.scatter(["first half", "second half"])  # @scatter
