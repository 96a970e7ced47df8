"""Ranks that are not in the same call: every rank raises, and the group keeps working.

No test sets a time limit for its calls. Without the watchdog they would wait half an hour.
"""

import contextlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import objcomm
from objcomm import DesyncError
from objcomm._calls.group import resolve
from objcomm._failures import watchdog
from objcomm._failures.mesh import Mesh
from objcomm._failures.verdict import Cause, Verdict
from objcomm._world import store_of
from objcomm.errors import Position
from tests.group.helpers import (
    assert_group_works,
    assert_no_verdict_stays,
    error_in,
    hear,
    in_thread,
    say,
    subgroup,
    tell_all,
)
from tests.group.logs import collected
from tests.group.watched import after_looks, closely, patiently
from tests.ranks import ranks
from tests.waits import PATIENCE_S, Slowness, wait_until, within
from tests.workers import here

HERE = Path(__file__).name

LARGE = bytes(3_000_000)
#: The call that rank 0 makes, and the one that the others make.
MISMATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "broadcast and all_gather": (lambda: objcomm.broadcast(1), lambda: objcomm.all_gather(1)),
    "gather and barrier": (lambda: objcomm.gather(1), objcomm.barrier),
    "all_reduce": (lambda: objcomm.all_gather(1), lambda: objcomm.all_reduce(1, "sum")),
    "scatter": (lambda: objcomm.scatter([1] * objcomm.world_size()), lambda: objcomm.broadcast(1)),
    "names of barriers": (lambda: objcomm.barrier("a"), lambda: objcomm.barrier("b")),
    "named ops": (lambda: objcomm.all_reduce(1, "sum"), lambda: objcomm.all_reduce(1, "max")),
    "roots of gather": (lambda: objcomm.gather(1, dst=0), lambda: objcomm.gather(1, dst=1)),
    "other as source": (lambda: objcomm.broadcast(1, src=1), lambda: objcomm.broadcast(1, src=0)),
    "self as source": (lambda: objcomm.broadcast(1, src=0), lambda: objcomm.broadcast(1, src=1)),
    "confirm": (lambda: objcomm.broadcast(1, confirm=True), lambda: objcomm.broadcast(1)),
    "large payloads": (lambda: objcomm.broadcast(LARGE), lambda: objcomm.all_gather(LARGE)),
}


def desync_in(*calls: Callable[[], Any]) -> DesyncError:
    """Return the error that one of these calls must raise, without making the calls after it.

    A rank that has nothing to wait for returns from its call and raises in the next one.
    """

    def make_calls() -> None:
        for call in calls:
            call()

    with closely(), patiently():
        error: DesyncError = error_in(DesyncError, make_calls)
    return error


@pytest.mark.timed
@ranks(2)
def test_ranks_that_are_out_of_step_raise_within_2_s() -> None:
    objcomm.barrier()
    tell_all("all have met", "")
    with within(2.0), pytest.raises(DesyncError):
        objcomm.barrier("a") if here().rank == 0 else objcomm.all_gather("b")
    assert_group_works()


@ranks(3)
@pytest.mark.parametrize("kind", MISMATCHES)
def test_every_rank_raises_and_the_group_keeps_working(kind: str) -> None:
    objcomm.barrier()
    mine = MISMATCHES[kind][min(here().rank, 1)]
    error = desync_in(mine, objcomm.barrier)
    assert here().rank in error.positions
    assert 0 in error.positions
    assert len(error.positions) >= 2
    for rank, position in error.positions.items():
        assert position.rank == rank
        assert HERE in position.call_site
    places = re.findall(r"(ranks?) ([-\d, ]+) (?:last )?called ", str(error))
    assert [text for text in places if text[1].startswith("0")] == [("rank", "0")]
    assert len(places) >= 2
    assert_group_works()


@ranks(2)
def test_a_desync_names_operation_number_and_line_of_both_ranks() -> None:
    objcomm.reset_stats()
    objcomm.barrier("one")
    numbers = tell_all("number", str(objcomm.stats()["barrier"].calls))
    if here().rank == 0:
        error = desync_in(lambda: objcomm.gather("x"))
    else:
        error = desync_in(lambda: objcomm.all_gather("x"), objcomm.barrier)
    assert numbers == ["1", "1"]
    assert [error.positions[rank].operation for rank in (0, 1)] == ["gather", "all_gather"]
    assert error.positions[0].sequence == error.positions[1].sequence
    assert error.reason == "different operations"
    lines = [error.positions[rank].call_site.rpartition(":")[2] for rank in (0, 1)]
    assert int(lines[0]) < int(lines[1])
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("how", ["by its message", "by a question", "by a check"])
def test_a_desync_of_barriers_shows_their_names(how: str) -> None:
    """Rank 0 gets the other name from a message, or by asking while it waits for the last rank."""
    size = objcomm.world_size()
    objcomm.barrier()
    name = "epoch\n\udce9 4" if here().rank == size - 1 else "epoch 3"
    with objcomm.check() if how == "by a check" else contextlib.nullcontext():
        if how == "by a question" and here().rank == 1 and size == 3:
            hear("the others know")
            with contextlib.suppress(DesyncError):
                objcomm.barrier(name)
        else:
            error = desync_in(lambda: objcomm.barrier(name))
            say("the others know")
            assert error.reason == "different names"
            assert error.positions[0].name == "epoch 3"
            assert error.positions[size - 1].name == "epoch\n? 4"
            assert "called barrier 'epoch 3' (call" in str(error)
            assert r"called barrier 'epoch\n? 4' (call" in str(error)
    assert_group_works()


@ranks(2)
def test_the_beginning_of_a_long_name_is_shown() -> None:
    """At least 31 bytes are shown, and no partial character."""
    error = desync_in(lambda: objcomm.barrier("a" + "é" * 40 if here().rank else "b" * 65))
    assert re.fullmatch("b{31,64}", error.positions[0].name)
    assert re.fullmatch("aé{15,31}", error.positions[1].name)
    assert_group_works()


@ranks(2)
def test_a_sender_that_is_some_calls_ahead_is_found() -> None:
    """Rank 0 sends in calls that rank 1 never makes, each a different operation."""
    objcomm.barrier()
    if here().rank == 0:
        desync_in(
            lambda: objcomm.gather("a", dst=1),
            lambda: objcomm.broadcast("b"),
            lambda: objcomm.all_gather("c"),
        )
    else:
        desync_in(lambda: objcomm.all_gather("c"))
    assert_group_works()


@ranks(3)
def test_a_rank_that_waits_for_a_third_one_raises_too() -> None:
    """Rank 2 sends to no rank that is out of step; it only waits for the hub's answer."""
    objcomm.barrier()

    def call() -> Any:
        return objcomm.all_gather(1) if here().rank else objcomm.gather(1, dst=1)

    error = desync_in(call, objcomm.barrier)
    assert here().rank in error.positions
    assert_group_works()


@ranks(2)
@pytest.mark.parametrize("is_first_use", [True, False])
def test_ranks_in_different_groups_raise(*, is_first_use: bool) -> None:
    with subgroup(0, 1) as one, subgroup(0, 1) as other:
        if not is_first_use:
            objcomm.barrier(group=one)
            objcomm.barrier(group=other)
        group = (one, other)[here().rank]
        error = desync_in(lambda: objcomm.all_gather("x", group=group))
        assert set(error.positions) == {0, 1}
        assert "of group" in str(error)
        tell_all(f"out of step {is_first_use}", "")
        assert_group_works(one)
        assert_group_works(other)


@pytest.mark.timed
@ranks(2)
def test_repeated_deadlocks_of_the_same_groups_are_reported_as_fast_as_the_first() -> None:
    """A rank that has raised waits again shortly after that deadlock was reported."""
    with subgroup(0, 1) as one, subgroup(0, 1) as other:
        objcomm.barrier(group=one)
        objcomm.barrier(group=other)
        took, mine = [], (one, other)[here().rank]
        with Slowness() as slowness:
            for _ in range(3):
                began = time.monotonic()
                error = error_in(DesyncError, lambda: objcomm.barrier(group=mine))
                took.append(time.monotonic() - began)
                assert error.reason == "each waits for another"
                assert_group_works(one)
                assert_group_works(other)
        assert max(took) <= 3.0 * slowness.factor, (took, slowness.factor)


@ranks(2)
def test_ranks_that_find_different_pairs_raise_the_same_error() -> None:
    """Among many ranks, two may each detect a different mismatch; with 12, in a third of calls."""
    positions = tuple(Position(rank, "gather", 1, rank, f"train.py:{rank}") for rank in (0, 1))
    standing = Verdict.of(Cause.DESYNC, reason="different roots", positions=positions)
    objcomm.barrier()
    mesh = world_mesh()
    mesh.board_thread.call(lambda board: board.propose(mesh.nonce, standing), PATIENCE_S)
    tell_all("posted", "")
    call = objcomm.barrier if here().rank == 1 else lambda: objcomm.all_gather("x")
    error = error_in(DesyncError, call)
    assert error.reason == "different roots"
    assert error.__cause__ is None
    assert error.__suppress_context__
    assert_group_works()


@contextlib.contextmanager
def in_a_circle() -> Iterator[dist.ProcessGroup]:
    """A group of this rank and the next one, so that three ranks can wait for each other."""
    with subgroup(0, 1) as a, subgroup(1, 2) as b, subgroup(0, 2) as c:
        yield (a, b, c)[here().rank]


@ranks(3)
def test_a_rank_that_checks_after_a_deadlock_was_broken_raises_too() -> None:
    """The others have raised, and its group has no name yet through which to report the error."""

    def look_when_the_others_have_raised() -> None:
        for rank in range(2):
            hear(f"rank {rank} has raised")
        watchdog.OVERDUE_SECONDS = 0.0

    with in_a_circle() as group, closely(), patiently():
        if here().rank < 2:
            error = error_in(DesyncError, lambda: objcomm.all_gather("x", group=group))
            say(f"rank {here().rank} has raised")
        else:
            # It answers questions from the start, so the others can find the deadlock.
            with mock.patch.object(watchdog, "OVERDUE_SECONDS", math.inf):
                in_thread(look_when_the_others_have_raised)
                error = error_in(DesyncError, lambda: objcomm.all_gather("x", group=group))
        assert error.reason == "each waits for another"
        tell_all("broken circle", "")
        assert_group_works()


@ranks(2)
def test_a_slow_rank_is_not_a_desync() -> None:
    """First rank 1 is late in the world, then rank 0 in another group."""
    with subgroup(0, 1) as other, closely():
        objcomm.barrier(group=other)
        objcomm.barrier()
        for slow, group in ((1, None), (0, other)):
            has_looked = f"rank {1 - slow} has looked"
            if here().rank == slow:
                hear(has_looked)
                assert objcomm.all_gather(here().rank, group=group) == [0, 1]
            else:
                with after_looks(20, partial(say, has_looked)):
                    assert objcomm.all_gather(here().rank, group=group) == [0, 1]


@ranks(3)
def test_waiting_for_a_rank_that_waits_for_a_slow_one_is_not_a_desync() -> None:
    with subgroup(1, 2) as pair, closely():
        if here().rank == 2:
            for rank in range(2):
                hear(f"rank {rank} has looked")
        with after_looks(20, partial(say, f"rank {here().rank} has looked")):
            if here().rank > 0:
                assert objcomm.all_gather(here().rank, group=pair) == [1, 2]
            assert objcomm.all_gather(here().rank) == [0, 1, 2]


@ranks(2)
def test_threads_that_wait_in_different_groups_are_not_a_desync() -> None:
    """Rank 0 first waits only in one group, and rank 1 only in the other."""
    with subgroup(0, 1) as other, closely():
        objcomm.barrier()
        results: list[Any] = []

        def gather_in_other() -> None:
            if here().rank == 1:
                hear("rank 0 has looked")
            results.append(objcomm.all_gather(here().rank, group=other))

        with after_looks(20, partial(say, f"rank {here().rank} has looked")):
            thread = in_thread(gather_in_other)
            if here().rank == 0:
                hear("rank 1 has looked")
            assert objcomm.all_gather(here().rank) == [0, 1]
            thread.join()
        assert results == [[0, 1]]


@ranks(2)
def test_another_lanes_thread_raises_too_and_keeps_working() -> None:
    objcomm.barrier()
    outcomes: list[str] = []
    is_used, is_known = threading.Event(), threading.Event()

    def evaluate() -> None:
        with objcomm.lane("eval"):
            objcomm.barrier()
            is_used.set()
            is_known.wait()
            try:
                objcomm.all_gather(1)
            except DesyncError:
                outcomes.append("raised")
            outcomes.append(str(objcomm.all_gather(here().rank)))

    thread = in_thread(evaluate)
    assert is_used.wait(PATIENCE_S)
    tell_all("lanes are used", "")
    desync_in(MISMATCHES["names of barriers"][here().rank])
    tell_all("lanes know", "")
    is_known.set()
    thread.join()
    assert outcomes == ["raised", "[0, 1]"]
    assert_group_works()


@ranks(2, disposable=True)
def test_many_desyncs_leave_nothing_behind() -> None:
    store = store_of(dist.group.WORLD)
    objcomm.barrier()
    for turn in range(12):
        desync_in(MISMATCHES["names of barriers"][here().rank])
        assert objcomm.all_gather(turn) == [turn, turn]
        if turn == 1:
            threads = threading.active_count()
    # The threads that made the last connections end a moment later.
    wait_until(lambda: threading.active_count() <= threads, "no more threads than before")
    tell_all("all are over", "")
    assert_no_verdict_stays(store)


@ranks(2, 3)
def test_a_check_finds_a_desync_in_the_same_call() -> None:
    objcomm.barrier()
    for mismatch in MISMATCHES.values():
        with objcomm.check():
            desync_in(mismatch[min(here().rank, 1)])
            assert_group_works()
        assert_group_works()


@ranks(2)
def test_a_check_on_one_rank_only_is_a_desync() -> None:
    objcomm.barrier()
    with objcomm.configure(check=here().rank == 0):
        desync_in(objcomm.barrier)
    assert_group_works()


@ranks(2, environment={"OBJCOMM_CHECK": "1"})
def test_the_environment_can_ask_for_checks() -> None:
    objcomm.broadcast(1)
    assert objcomm.stats()["broadcast"].exchanges == 2
    with objcomm.configure(check=False):
        objcomm.broadcast(1)
    assert objcomm.stats()["broadcast"].exchanges == 3


@ranks(2, 3)
def test_a_rank_that_only_sends_is_notified_before_its_next_call() -> None:
    objcomm.barrier()
    me = objcomm.rank()

    def two_calls() -> None:
        objcomm.broadcast(me, src=min(me, 1))  # rank 0 gives itself as source, the others rank 1
        if me == 0:
            wait_until(lambda: log.texts(logging.ERROR), "what has come was looked at")
            say("it was notified")
        hear("it was notified")
        objcomm.all_gather("next")

    with collected() as log, closely():
        # A rank that still waits for rank 1's message may raise there.
        error = error_in(DesyncError, two_calls)
    assert error.reason == "different roots"
    roots = {rank: each.root for rank, each in error.positions.items()}
    assert roots[0] == 0
    assert 1 in roots.values()  # -1 for a third rank already in its next call
    assert HERE in error.positions[0].call_site
    if me == 0:
        assert all(HERE in each for each in log.texts(logging.ERROR))
    assert_group_works()


def world_mesh() -> Mesh:
    """Return the mesh that joins all ranks, or last did; earlier tests may have left others."""
    mesh = resolve(None).mesh
    assert mesh is not None
    return mesh


@ranks(2)
def test_a_rank_notified_between_two_calls_reports_its_last_one() -> None:
    objcomm.all_gather("its last")
    mesh = world_mesh()
    if here().rank == 1:
        other = Position(0, "barrier", 1, -1, "train.py:3")
        mesh.settle(Verdict.of(Cause.DESYNC, reason="different operations", positions=(other,)))
    with closely():
        error = error_in(DesyncError, objcomm.barrier)
    assert here().rank in error.positions
    if here().rank == 1:
        assert error.positions[1].operation == "all_gather"
        assert error.positions[1].is_over
    assert_group_works()


def await_three_looks() -> None:
    """Wait until this rank's watchdog has looked three times."""
    watching = watchdog._watchdogs.watchdog()  # noqa: SLF001  # there is no public access
    enough = watching._looks + 3  # noqa: SLF001  # likewise
    wait_until(lambda: watching._looks >= enough, "three looks")  # noqa: SLF001  # likewise


class _Waits:
    """Encoding this waits until rank 0's watchdog has seen that rank 1 is in another call."""

    def __reduce__(self) -> tuple[Any, ...]:
        mesh = world_mesh()
        wait_until(lambda: mesh.verdict is not None, "the watchdog's look")
        return int, ()


@ranks(2)
def test_an_error_that_a_call_raises_is_not_logged_as_well() -> None:
    objcomm.barrier()
    obj, name = (1, "b") if here().rank else (_Waits(), "a")
    with collected() as log, closely():
        error = error_in(DesyncError, lambda: objcomm.all_gather(obj, name=name))
        await_three_looks()
    assert error.reason == "different names"
    assert not log.texts(logging.ERROR)
    assert_group_works()


@ranks(2)
def test_a_rank_that_is_behind_logs_no_error() -> None:
    objcomm.barrier()
    if objcomm.rank() == 1:
        for each in range(3):
            objcomm.broadcast(each, src=1)
        say("all are sent")
    else:
        hear("all are sent")
        with collected() as log:
            await_three_looks()
            assert not log.texts(logging.ERROR)
        assert [objcomm.broadcast(None, src=1) for _ in range(3)] == [0, 1, 2]
    assert_group_works()
