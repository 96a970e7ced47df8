"""The test harness itself: what it runs, and what it reports when a rank fails."""

import os
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import ranks, run_on_ranks, solo
from tests.workers import here


@ranks(1, 2, 3)
def test_the_body_runs_on_every_rank_of_each_world() -> None:
    place = here()
    assert dist.get_rank() == place.rank
    assert dist.get_world_size() == place.world_size


@ranks(2)
@pytest.mark.parametrize("seed", [1, 2])
def test_parameters_reach_the_ranks(seed: int) -> None:
    assert random.Random(seed).random() == random.Random(int(seed)).random()
    assert seed in {1, 2}


@ranks(2, expect_dead={1})
def test_a_rank_may_die_where_that_is_expected() -> None:
    if here().rank == 1:
        os._exit(3)


@ranks(2, joined=False)
def test_ranks_can_start_without_a_process_group() -> None:
    assert not dist.is_initialized()


@solo(environment={"WORLD_SIZE": "4"})
def test_a_solo_body_gets_its_environment() -> None:
    assert os.environ["WORLD_SIZE"] == "4"
    assert "RANK" not in os.environ
    assert not dist.is_initialized()


def fail_on_rank_one(answer: int) -> None:
    sys.stdout.write("printed before")
    if here().rank == 1:
        assert [answer] == [41]


def wait_on_rank_zero() -> None:
    if here().rank == 0:
        threading.Event().wait()


def exit_on_rank_one() -> None:
    if here().rank == 1:
        os._exit(7)


def pass_everywhere() -> None:
    pass


def failure_of(function: Callable[..., None], **arguments: Any) -> str:
    """Return the report of two ranks that fail; later tests get a working pool."""
    run_on_ranks(2, pass_everywhere)  # they reach their wait within the deadline
    with pytest.raises(pytest.fail.Exception) as caught:
        run_on_ranks(2, function, **arguments)
    run_on_ranks(2, pass_everywhere)
    return str(caught.value)


def test_a_failure_is_reported_with_its_rank_values_and_output() -> None:
    report = failure_of(fail_on_rank_one, answer=42)
    assert "[rank 1] " in report
    assert "[42] == [41]" in report
    assert "printed before" in report
    assert "[rank 0]" not in report


def test_a_missed_deadline_shows_the_stacks_and_ends_the_pool() -> None:
    report = failure_of(wait_on_rank_zero, deadline=5)
    assert "[rank 0] hung" in report
    assert "wait_on_rank_zero" in report


def test_an_unexpected_death_is_reported_with_its_exit_code() -> None:
    report = failure_of(exit_on_rank_one)
    assert "[rank 1] died" in report
    assert "exit code 7" in report
