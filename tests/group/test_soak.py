"""Short forms of the soak: some thousand random operations, and as many broadcasts."""

import functools

import pytest

from tests.soak import launch

pytestmark = pytest.mark.alone

# Of a hang: the operations took 120 s on a quiet machine and 223 beside a busy loop.
_LIMIT_SECONDS = 280.0
_CHECKPOINT_SECONDS = 3.0
_BROADCASTS = 3000

# The allocator, Gloo's pools and each operation with each kind of payload need some thousand turns
# to settle, however long a shared machine takes for them.
_WARM_UP_TURNS = 4000
_TURNS = 6500
_WARM_UP = 4  # measurements of the broadcasts


def test_two_threads_may_be_the_first_to_use_two_groups() -> None:
    outcome = launch.run_on_ranks(2, "first_uses.first_uses", {"count": 20}, seconds=0.0)
    assert not outcome.failures, _texts(outcome)


@functools.cache
def _soaked() -> launch.Outcome:
    given = {"seed": 1, "seconds": 0, "turns": _TURNS, "checkpoint_seconds": _CHECKPOINT_SECONDS}
    return launch.run_on_ranks(4, "run.soak", given, seconds=_LIMIT_SECONDS)


@functools.cache
def _broadcast() -> launch.Outcome:
    given = {"count": _BROADCASTS}
    return launch.run_on_ranks(2, "broadcasts.broadcasts", given, seconds=_LIMIT_SECONDS)


def _texts(outcome: launch.Outcome) -> str:
    return "\n".join(f"rank {each.rank} {each.outcome}:\n{each.text}" for each in outcome.failures)


def test_every_result_of_random_operations_is_the_models() -> None:
    outcome = _soaked()
    assert not outcome.failures, _texts(outcome)
    last = outcome.figures[0][-1]
    assert last.turns > 1000
    assert last.errors > 100
    assert last.groups > 10


@pytest.mark.parametrize("figure", launch.JUDGED)
def test_random_operations_leave_nothing_behind(figure: str) -> None:
    figures = _soaked().figures
    warm_up = sum(each.turns < _WARM_UP_TURNS for each in figures[0])
    assert not launch.complaints(figure, figures, warm_up)


def test_every_one_of_many_broadcasts_arrives() -> None:
    outcome = _broadcast()
    assert not outcome.failures, _texts(outcome)
    assert outcome.figures[0][-1].turns == _BROADCASTS


@pytest.mark.parametrize("figure", launch.JUDGED)
def test_many_broadcasts_leave_nothing_behind(figure: str) -> None:
    assert not launch.complaints(figure, _broadcast().figures, _WARM_UP)
