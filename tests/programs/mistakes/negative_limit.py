"""A timeout is computed from a deadline that has passed.

ranks: 2
all: UsageError
    says barrier: timeout=-3 must be a positive number of seconds
"""

import objcomm

objcomm.init()
objcomm.barrier(timeout=-3)
