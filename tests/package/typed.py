"""A user's program, type-checked by mypy with the installed package; never run."""

from typing import assert_type

import objcomm

assert_type(objcomm.broadcast({"lr": 0.1}), dict[str, float])
