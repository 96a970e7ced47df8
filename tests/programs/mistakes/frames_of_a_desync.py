"""Ranks make different calls; the traceback shows the program's line and folds the library's.

ranks: 2
all: DesyncError
    shows %differ
    never /objcomm/_
    never objcomm._
    never During handling of the above exception
    never direct cause of the following exception
"""

import objcomm

objcomm.init()
objcomm.all_gather(1) if objcomm.is_main() else objcomm.barrier()  # @differ
