"""The launcher is passed to ``objcomm.run`` instead of the other way round.

ranks: 1, by hand
all: any
    says torchrun … comes first
"""

import runpy
import sys

sys.argv = ["objcomm.run", "torchrun", "--nproc-per-node=2", "train.py"]
runpy.run_module("objcomm.run", run_name="__main__")
