"""A short form of ``python -m tests.kills``: kills at any call inside the package."""

import random
import time
from collections.abc import Iterator

import pytest

from tests.kills.__main__ import side_by_side
from tests.kills.plan import CALLS, WHERE, Trial, before_their_calls, drawn, needs

_SECONDS = 40.0
_BESIDE = 2


@pytest.mark.long
@pytest.mark.lasting
@pytest.mark.timed
def test_survivors_of_a_kill_anywhere_name_it_within_2_s_and_go_on() -> None:
    seed = random.randrange(1 << 32)
    source, until = random.Random(seed), time.monotonic() + _SECONDS

    def trials() -> Iterator[Trial]:
        while time.monotonic() < until:
            yield drawn(source)

    found = {str(trial): broken for trial, broken in side_by_side(trials(), _BESIDE) if broken}
    assert not found, f"seed {seed}"


def test_a_trial_is_read_as_it_was_written() -> None:
    source = random.Random(1)
    for _ in range(100):
        trial = drawn(source)
        assert Trial.parsed(str(trial)) == trial
        assert trial.operation in CALLS
        assert trial.where in WHERE
        assert trial.busy != trial.victim


def test_which_ranks_must_notice_a_death() -> None:
    """A destination waits for all ranks; the ranks that send to it wait for none."""
    assert needs("gather", 0, 3) == {1, 2}
    assert needs("reduce async", 1, 3) == set()
    assert needs("broadcast", 2, 3) == {0}
    assert needs("scatter", 0, 3) == set()
    assert needs("broadcast with confirm", 0, 3) == {1, 2}
    assert needs("barrier", 1, 3) == {0, 2}
    for operation in CALLS:
        trials = list(before_their_calls(operation))
        assert trials
        assert not any(trial.busy == trial.victim for trial in trials)
