"""The operator of a reduction divides by the value of one rank.

ranks: 2
all: CollectiveError
    says all_reduce failed on rank … ZeroDivisionError: division by zero
    shows %divide, in <lambda>
"""

import objcomm

objcomm.init()
objcomm.all_reduce(objcomm.rank() - 1, lambda total, mine: total / mine)  # @divide
