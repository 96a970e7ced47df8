"""Short versions of the soak: thousands of random operations, and thousands of broadcasts."""

import pytest

from tests.ranks import OVER_GLOO
from tests.soak import launch

pytestmark = pytest.mark.long

# Only a hang should reach it: the operations take 90 s on a quiet machine. Beside a dozen busy
# processes 300 s were too few, although no single wait lasted a minute.
_LIMIT_SECONDS = 1200.0

# The allocator, Gloo's pools and each operation with each kind of payload settle within this many
# turns: four ranks' Python blocks grew by 340 to 910 between turns 2,200 and 4,000, by 220 to 230
# between 3,200 and 5,000, and by 70 to 470 between 4,000 and 5,600. A leak of one block in every
# second turn shows in the remaining turns.
_WARM_UP_TURNS = 3200
_TURNS = 5000
_TURNS_BETWEEN = 200

_BROADCASTS = 3000
_WARM_UP = 4  # measurements of the broadcasts

LINKS = pytest.mark.parametrize("environment", [{}, OVER_GLOO], ids=["one host's link", "Gloo"])


def test_two_threads_may_be_the_first_to_use_two_groups() -> None:
    _run(2, "first_uses.first_uses", {"count": 20})


@pytest.mark.lasting
@LINKS
def test_random_operations_match_the_model_and_leave_nothing(environment: dict[str, str]) -> None:
    given = {"seed": 1, "turns": _TURNS, "checkpoint": _TURNS_BETWEEN}
    outcome = _run(4, "run.soak", given, environment)
    last = outcome.figures[0][-1]
    assert last.turns > 1000
    assert last.errors > 100
    assert last.groups > 10
    warm_up = sum(each.turns < _WARM_UP_TURNS for each in outcome.figures[0])
    assert not _grown(outcome, warm_up)


@LINKS
def test_many_broadcasts_arrive_and_leave_nothing(environment: dict[str, str]) -> None:
    outcome = _run(2, "broadcasts.broadcasts", {"count": _BROADCASTS}, environment)
    assert outcome.figures[0][-1].turns == _BROADCASTS
    assert not _grown(outcome, _WARM_UP)


def _run(
    world_size: int, function: str, given: dict[str, int], environment: dict[str, str] | None = None
) -> launch.Outcome:
    outcome = launch.run_on_ranks(
        world_size, function, given, seconds=_LIMIT_SECONDS, environment=environment
    )
    texts = [f"rank {each.rank} {each.outcome}:\n{each.text}" for each in outcome.failures]
    assert not texts, "\n".join(texts)
    return outcome


def _grown(outcome: launch.Outcome, warm_up: int) -> list[str]:
    """List the complaints about the figures that are judged."""
    return [
        complaint
        for figure in launch.JUDGED
        for complaint in launch.complaints(figure, outcome.figures, warm_up)
    ]
