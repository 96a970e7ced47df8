"""Containers of a user's, for reductions leaf by leaf."""

import dataclasses
from typing import Any, NamedTuple

# Elements of float32 that travel outside of messages, and in several pieces.
LARGE = 1_500_000


class Loss(NamedTuple):
    """A named tuple of a user's."""

    total: Any
    parts: list[int]


@dataclasses.dataclass(frozen=True)
class Stats:
    """A dataclass of a user's, which nobody can assign to."""

    count: int
    loss: Loss
    name: str = "val"
