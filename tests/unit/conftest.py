"""What all unit tests have in common, whichever of them run, in which order and how slowly."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.flights import Begin, Begun

# A dozen threads stand for ranks; each with threads of torch's own would fight for the cores.
torch.set_num_threads(1)


@pytest.fixture
def begun() -> Iterator[Begin]:
    """Begins works, and ends those that a test leaves in flight."""
    made: list[Begun] = []

    def begin(outcome: Any = None) -> Begun:
        made.append(Begun(outcome))
        return made[-1]

    yield begin
    for each in made:
        each.end().exception()
