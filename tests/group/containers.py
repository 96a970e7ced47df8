"""User-defined containers for reductions leaf by leaf."""

import dataclasses
from typing import Any, NamedTuple

# Elements of float32 that travel outside of messages, and in several pieces.
LARGE = 1_500_000


class Loss(NamedTuple):
    """A user's named tuple."""

    total: Any
    parts: list[int]


@dataclasses.dataclass(frozen=True)
class Stats:
    """A user's frozen dataclass."""

    count: int
    loss: Loss
    name: str = "val"
