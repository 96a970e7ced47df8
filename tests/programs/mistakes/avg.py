"""torch's operator is called AVG, and here it is ``"mean"``.

ranks: 2
all: UsageError
    says 'avg' … 'mean' | 'avg' … "mean"
"""

import objcomm

objcomm.init()
objcomm.all_reduce(0.5, op="avg")
