"""Rank 2 fails before ``init``; after 10 s a log names it, and then all ranks raise.

ranks: 3
0: StartError
    says rank 2 has not arrived
    says WARNING … rank 2
    never frame #
1: StartError
    says rank 2 has not arrived
2: exit 1
"""

import logging
import os
import sys

import objcomm

logging.basicConfig(level=logging.WARNING)
if os.environ["RANK"] == "2":
    sys.exit("no such module")
objcomm.init(timeout=13)
