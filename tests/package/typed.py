"""A user's program, for mypy to read with what was installed; never run."""

from typing import assert_type

import objcomm

assert_type(objcomm.broadcast({"lr": 0.1}), dict[str, float])
