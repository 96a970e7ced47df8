"""The operator of a reduction itself communicates.

ranks: 2
all: CollectiveError
    says all_reduce failed on rank 0: … UsageError: barrier: a callback of all_reduce at @reduce
    says before or after it
    shows %barrier, in add
"""

import objcomm


def add(total: int, mine: int) -> int:
    """Add the values, and synchronize the ranks."""
    objcomm.barrier()  # @barrier
    return total + mine


objcomm.init()
objcomm.all_reduce(objcomm.rank(), add)  # @reduce
