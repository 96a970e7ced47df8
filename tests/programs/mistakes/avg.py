"""torch's operator AVG is ``"mean"`` here.

ranks: 2
all: UsageError
    says 'avg' … 'mean' | 'avg' … "mean"
"""

import objcomm

objcomm.init()
objcomm.all_reduce(0.5, op="avg")
