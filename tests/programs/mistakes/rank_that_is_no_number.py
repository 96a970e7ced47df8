"""A shell variable in the job's script was not expanded.

ranks: 1, by hand
all: UsageError
    says RANK='$SLURM_PROCID' … integer | RANK='$SLURM_PROCID' … whole number
"""

import os

import objcomm

os.environ["RANK"] = "$SLURM_PROCID"
objcomm.init()
