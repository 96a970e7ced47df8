"""The ranks were started with different learning rates.

ranks: 3
all: CollectiveError
    says ['lr']: 0.2 on rank 2, 0.1 on ranks 0-1
"""

import objcomm

objcomm.init()
objcomm.agree({"lr": 0.2 if objcomm.rank() == 2 else 0.1, "layers": (64, 10)})
