"""The operator's name is misspelled.

ranks: 2
all: UsageError
    says all_reduce: op='summ' … max, mean, min, prod, sum
"""

import objcomm

objcomm.init()
objcomm.all_reduce(0.5, op="summ")
