"""Rank 1 has skipped an epoch, as the names of the barriers show.

ranks: 2
all: DesyncError
    says rank 0 … barrier … 'epoch 3' … at @barrier
    says rank 1 … barrier … 'epoch 4' … at @barrier
"""

import objcomm

objcomm.init()
epoch = 3 if objcomm.is_main() else 4
objcomm.barrier(f"epoch {epoch}")  # @barrier
