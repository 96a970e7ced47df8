"""The program calls the function and passes its result to ``launch``.

ranks: 1, by hand
all: UsageError
    says launch: fn=None must be a function
"""

import os

import objcomm


def train() -> None:
    """A program's main function."""


for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
objcomm.launch(train(), 2)
