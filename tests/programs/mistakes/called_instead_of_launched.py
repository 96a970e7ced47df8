"""The function is called here, and its result is launched.

ranks: 1, by hand
all: UsageError
    says launch: fn=None must be a function
"""

import os

import objcomm


def train() -> None:
    """Stand for a program."""


for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
objcomm.launch(train(), 2)
