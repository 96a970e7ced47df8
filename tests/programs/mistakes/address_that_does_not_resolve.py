"""MASTER_ADDR has a typo.

ranks: 2, by hand
all: StartError
    says node017.invalid
    says MASTER_ADDR
    says resolve | not known | unknown | no such host
    never frame #
"""

import os

import objcomm

os.environ["MASTER_ADDR"] = "node017.invalid"
objcomm.init(timeout=5)
