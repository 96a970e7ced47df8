"""Settings and fixtures of all unit tests."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.flights import Begin, Begun

# A dozen threads play the ranks; torch's own threads for each would compete for the cores.
torch.set_num_threads(1)


@pytest.fixture
def begun() -> Iterator[Begin]:
    """Begin works, and end those that a test leaves outstanding."""
    made: list[Begun] = []

    def begin(outcome: Any = None) -> Begun:
        made.append(Begun(outcome))
        return made[-1]

    yield begin
    for each in made:
        each.end().exception()
