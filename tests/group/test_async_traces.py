"""What asynchronous operations leave behind, and where they can be seen."""

import linecache
import warnings
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, DecodeError
from objcomm._transport import threads as line_module
from tests.group.helpers import (
    Held,
    RefusesToArrive,
    RefusesToPickle,
    assert_group_works,
    hear,
    is_waiting,
    say,
    tell_all,
)
from tests.group.in_flight import lines
from tests.group.test_lifetimes import no_collector
from tests.ranks import ranks
from tests.waits import wait_until
from tests.workers import here

# How long an idle thread lingers in the tests that wait for its end.
_SHORT_LINGER_S = 0.05

# What operations leave behind


@ranks(1, 2)
def test_a_work_never_waited_for_is_reported_at_its_line() -> None:
    with (
        mock.patch.object(line_module, "_LINGER_SECONDS", _SHORT_LINGER_S),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        objcomm.all_gather(1, async_op=True)
        objcomm.barrier()
        objcomm.all_reduce(RefusesToPickle(LookupError("lost")), "max", async_op=True)
        objcomm.barrier()
        _end_lines()
    # Works dropped by earlier tests may be collected here, but were started in other files.
    reported = [each for each in caught if each.filename == __file__]
    assert [each.category for each in reported] == [RuntimeWarning] * 2
    assert all("async_op=True" in linecache.getline(__file__, each.lineno) for each in reported)
    assert str(reported[0].message) == "all_gather was started here but never waited for"
    assert "lost" in str(reported[1].message) or here().world_size == 1


def _end_lines() -> None:
    """Wait until all lines' threads have ended, since they are the last to hold a work."""
    wait_until(lambda: not lines(), "the threads of all lines to end")


@ranks(2)
def test_only_asynchronous_calls_get_a_thread_and_it_ends_when_idle() -> None:
    _end_lines()
    objcomm.all_gather(1)
    with objcomm.lane("quiet"):
        objcomm.all_gather(1)
    assert _names_of_lines() == []

    with mock.patch.object(line_module, "_LINGER_SECONDS", _SHORT_LINGER_S):
        if here().rank == 1:
            hear("rank 0 has looked")
        works = [objcomm.all_gather(turn, async_op=True) for turn in range(20)]
        if here().rank == 0:  # no operation has finished
            assert _names_of_lines() == ["objcomm-line"]
        with objcomm.lane("loud"):
            works += [objcomm.all_gather(turn, async_op=True) for turn in range(20)]
        if here().rank == 0:
            assert _names_of_lines() == ["objcomm-line", "objcomm-line loud"]
            say("rank 0 has looked")
        objcomm.wait_all(works)
        _end_lines()
    assert_group_works()


def _names_of_lines() -> list[str]:
    return sorted(thread.name for thread in lines())


@ranks(2)
def test_a_call_that_failed_in_flight_keeps_nothing() -> None:
    def fail(_left: Any, _right: Any) -> Any:
        raise LookupError("by design")

    with no_collector():
        mine = Held()
        work = objcomm.all_reduce(mine, fail, async_op=True)
        with pytest.raises(CollectiveError):
            work.wait()
        kept: list[weakref.ref[Any]] = [weakref.ref(mine), weakref.ref(work)]
        objcomm.barrier(async_op=True).wait()
        objcomm.barrier()
        del mine, work
        assert [ref() for ref in kept] == [None] * 2


@ranks(2)
def test_a_receive_that_failed_in_flight_keeps_nothing() -> None:
    objcomm.barrier()
    with no_collector():
        if here().rank == 0:
            objcomm.send(RefusesToArrive(1), 1)
        else:
            work = objcomm.irecv(0)
            with pytest.raises(DecodeError):
                work.wait()
            kept = weakref.ref(work)
            del work
            wait_until(lambda: kept() is None, "its thread to let go of it, which it does last")
        objcomm.barrier()


# Where operations can be seen


@ranks(2)
def test_the_recorder_shows_what_is_in_flight() -> None:
    objcomm.barrier()
    if here().rank == 0:
        work = objcomm.all_gather(1, async_op=True)
        wait_until(is_waiting, "the call to wait for rank 1")
        last = _last_recorded()
        assert (last["operation"], last["outcome"], last["ms"]) == ("all_gather", "under way", None)
        assert (last["awaits"], last["call_site"]) == (1, work.call_site)
    tell_all("looked", "")
    if here().rank == 1:
        work = objcomm.all_gather(1, async_op=True)
    work.wait()
    assert _last_recorded()["outcome"] == "returned"


def _last_recorded() -> dict[str, Any]:
    (group,) = objcomm.recorder.dump(group=dist.group.WORLD)["groups"]
    last: dict[str, Any] = group["entries"][-1]
    return last


@ranks(2)
def test_works_may_outlive_a_profiler() -> None:
    for _ in range(10):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            works = [objcomm.all_gather(bytes(100_000), async_op=True) for _ in range(3)]
        objcomm.wait_all(works)
    assert_group_works()
