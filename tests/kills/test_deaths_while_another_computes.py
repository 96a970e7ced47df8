"""A rank dies before its call while another one computes: every waiting rank notices the death."""

import os
import random
import signal
from typing import Any

import pytest

import objcomm
from objcomm import TransportError, TransportTimeout
from tests.group.helpers import error_in, hear, in_thread, say, tell_all, when_main_thread_waits
from tests.kills.plan import CALLS, FIRST_USE, GROUP, Trial, before_their_calls
from tests.kills.run import carry_out
from tests.ranks import ranks
from tests.workers import here

#: Each way to wait once, with the dead rank and the busy one in different positions.
CORE = [
    Trial("barrier"),
    Trial("all_gather", 4, victim=3, busy=1),
    Trial("all_reduce", 4, victim=2, busy=1),
    Trial("gather"),
    Trial("all_to_all", victim=1, busy=0),
    Trial("scan"),
    Trial("reduce_scatter", 4, victim=3, busy=2),
    Trial("broadcast with confirm"),
    Trial("all_gather async"),
    Trial("split"),
    Trial("node_group", 4, victim=3, busy=2),
    Trial("main_first"),
    Trial("reduce_and_broadcast", victim=2, busy=0),
    Trial("barrier", where=GROUP),
    Trial("all_gather", where=FIRST_USE),
    Trial("barrier", is_over_gloo=True),
    Trial("all_gather", 4, victim=3, busy=1, is_over_gloo=True),
]
_WITHIN_ITS_LIMIT = [
    Trial("barrier", limit=1.0),
    Trial("barrier", limit=2.5),
    Trial("all_gather", limit=1.0, is_over_gloo=True),
]


@pytest.mark.timed
@pytest.mark.parametrize("trial", CORE, ids=str)
def test_waiting_ranks_name_a_dead_rank_within_2_s_and_continue_without_it(trial: Trial) -> None:
    assert any(map(trial.must_hear, trial.waiting))
    assert not carry_out(trial)


@pytest.mark.long
@pytest.mark.timed
@pytest.mark.parametrize("operation", CALLS)
def test_waiting_ranks_name_the_dead_in_each_operation_with_any_two_ranks(operation: str) -> None:
    trial = random.choice(list(before_their_calls(operation)))
    assert not carry_out(trial), str(trial)


@pytest.mark.timed
@pytest.mark.parametrize("trial", _WITHIN_ITS_LIMIT, ids=str)
def test_a_limit_that_expires_meanwhile_reports_the_death(trial: Trial) -> None:
    """The error does not give a position of the dead rank."""
    assert not carry_out(trial)


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.long)])
@ranks(3, expect_dead={2})
def test_a_survivor_may_create_a_group_without_a_desync(turn: int) -> None:
    """Rank 1 learns of it in a message and continues; rank 0 still waits in the world for both."""
    del turn
    objcomm.barrier()
    if here().rank == 1:
        objcomm.send("met", 2)
    elif here().rank == 2:
        objcomm.recv(1)
    tell_all("all have met", "")
    if here().rank == 2:
        hear("rank 0 calls")
        os.kill(os.getpid(), signal.SIGKILL)
    if here().rank == 0:
        say("rank 0 calls")
        error = error_in(TransportError, lambda: objcomm.all_gather("x", timeout=300))
    else:
        error = error_in(TransportError, lambda: objcomm.recv(2, timeout=300))
    assert not isinstance(error, TransportTimeout), error
    assert error.peers == (2,)
    group: Any = objcomm.new_group([0, 1], timeout=300)
    assert objcomm.all_gather(here().rank, group=group) == [0, 1]


@pytest.mark.timed
@ranks(3, expect_dead={2})
def test_one_lane_reports_a_death_while_another_waits_for_the_same_rank() -> None:
    """A broadcast needs only its source; the concurrent gather also needs the dead rank."""
    objcomm.barrier()
    heard: list[BaseException] = []

    def collect() -> None:
        with objcomm.lane("beside"):
            heard.append(error_in(TransportError, lambda: objcomm.gather(1)))

    if here().rank == 2:
        hear("rank 0 waits")
        os.kill(os.getpid(), signal.SIGKILL)
    if here().rank == 0:
        collecting = in_thread(collect)
        when_main_thread_waits(lambda: say("rank 0 waits"))
        error = error_in(TransportError, lambda: objcomm.broadcast(None, src=1))
        collecting.join()
        assert (error.peers, heard[0].peers) == ((2,), (2,))  # type: ignore[attr-defined]
        say("rank 0 has heard")
    hear("rank 0 has heard")
