"""Short forms of the soak: 40 seconds of random operations, and some thousand broadcasts."""

import functools

import pytest

from tests.soak import launch

_SECONDS = 40.0
_CHECKPOINT_SECONDS = 3.0
_BROADCASTS = 3000

# The allocator, Gloo's pools and each operation with each kind of payload need some thousand turns
# to settle, however long a shared machine takes for them.
_WARM_UP_TURNS = 4000
_WARM_UP = 4
_JUDGED_AT_LEAST = 3


def test_two_threads_may_be_the_first_to_use_two_groups() -> None:
    outcome = launch.run_on_ranks(2, "first_uses.first_uses", {"count": 20}, seconds=0.0)
    assert not outcome.failures, _texts(outcome)


@functools.cache
def _soaked() -> launch.Outcome:
    given = {"seed": 1, "seconds": _SECONDS, "checkpoint_seconds": _CHECKPOINT_SECONDS}
    return launch.run_on_ranks(4, "run.soak", given, seconds=_SECONDS)


@functools.cache
def _broadcast() -> launch.Outcome:
    given = {"count": _BROADCASTS}
    return launch.run_on_ranks(2, "broadcasts.broadcasts", given, seconds=_SECONDS)


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
    unsettled = sum(each.turns < _WARM_UP_TURNS for each in figures[0])
    warm_up = min(max(_WARM_UP, unsettled), len(figures[0]) - _JUDGED_AT_LEAST)
    assert not launch.complaints(figure, figures, warm_up)


def test_every_one_of_many_broadcasts_arrives() -> None:
    outcome = _broadcast()
    assert not outcome.failures, _texts(outcome)
    assert outcome.figures[0][-1].turns == _BROADCASTS


@pytest.mark.parametrize("figure", launch.JUDGED)
def test_many_broadcasts_leave_nothing_behind(figure: str) -> None:
    assert not launch.complaints(figure, _broadcast().figures, _WARM_UP)
