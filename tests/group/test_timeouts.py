"""What a timeout reports: missing ranks, each rank's position, and ranks that do not answer."""

import contextlib
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import objcomm
from objcomm import BrokenGroupError, TransportTimeout
from objcomm._failures import inquiry, watchdog
from objcomm._failures.deadlock import WaitSnapshot
from objcomm._failures.mesh import Mesh
from objcomm._failures.verdict import Verdict
from objcomm._observe.history import CallRecord
from objcomm._transport import link
from objcomm._transport.lane import Lane
from objcomm._transport.store import loopback_store
from tests.group.helpers import (
    AWAIT_RANK_1,
    assert_group_works,
    error_in,
    hear,
    say,
    subgroup,
    tell_all,
    thread_states,
    when_main_thread_waits,
)
from tests.group.operations import OPERATIONS
from tests.group.watched import hastily, patiently
from tests.ranks import ranks, solo
from tests.waits import PATIENCE_S, wait_until, within
from tests.workers import here

# Long enough to distinguish a timeout from no wait at all.
LIMIT_S = 0.3


def timeout_of(call: Any = objcomm.all_gather, **options: Any) -> Any:
    """Return the error of a call that times out."""
    began = time.monotonic()
    error = error_in(TransportTimeout, lambda: call("x", timeout=LIMIT_S, **options))
    assert time.monotonic() - began >= LIMIT_S * 0.99
    assert error.seconds == LIMIT_S
    return error


@contextlib.contextmanager
def met() -> Iterator[dist.ProcessGroup]:
    """A group of all ranks, which have met in it; none destroys it while another uses it."""
    with subgroup(*range(here().world_size)) as group:
        objcomm.barrier(group=group)
        yield group
        tell_all("all have left the group", "")


@ranks(2)
def test_a_timeout_is_never_taken_for_a_death() -> None:
    """Gloo counts in whole milliseconds, and may wake before or after the timeout."""
    groups: list[Any] = [dist.new_group([0, 1]) for _ in range(12)]
    for group in groups:
        objcomm.barrier(group=group)
    if here().rank == 0:
        with patiently():
            works = []
            for turn, group in enumerate(groups):
                name = [*AWAIT_RANK_1][turn % len(AWAIT_RANK_1)]
                limit: Any = {"timeout": 1.0 + 0.0005 * turn, "group": group, "async_op": True}
                works.append(OPERATIONS[name](1, **AWAIT_RANK_1[name], **limit))
            for work in works:
                assert error_in(TransportTimeout, work.wait).missing == (1,)
    tell_all("the end", "")


@ranks(3)
def test_a_rank_that_has_sent_and_returned_is_not_named() -> None:
    with met() as group:
        if here().rank == 1:
            objcomm.gather(1, group=group)
        tell_all("rank 1 has returned", "")
        if here().rank == 0:
            with patiently():
                assert timeout_of(objcomm.gather, group=group).missing == (2,)


@ranks(3)
def test_a_timeout_reports_where_each_rank_is() -> None:
    with met() as group:
        objcomm.gather("sent", dst=0, group=group)
        if here().rank == 1:
            return
        if here().rank == 2:
            when_main_thread_waits(lambda: say("rank 2 waits"))
        else:
            hear("rank 2 waits")
        limit_s = LIMIT_S if here().rank == 0 else None
        with patiently(), pytest.raises(TransportTimeout) as caught:
            objcomm.all_gather("x", group=group, timeout=limit_s)
        error = caught.value
        assert isinstance(error, TimeoutError)
        assert (error.missing, error.silent, error.is_store_silent) == ((1,), (), False)
        for rank in (0, 2):
            where = error.positions[rank]
            assert (where.operation, where.sequence, where.is_over) == ("all_gather", 2, False)
            assert "test_timeouts.py" in where.call_site
            assert where.seconds >= LIMIT_S * 0.99
        missing = error.positions[1]
        assert (missing.operation, missing.sequence, missing.is_over) == ("gather", 1, True)
        assert re.search(r"helpers\.py:\d+ in (hear|tell_all)", missing.line)
        assert f"rank 1 is in no call, now at {missing.line}" in str(error)
        assert "; its last was gather (call 1)" in str(error)
        with pytest.raises(BrokenGroupError, match="TransportTimeout"):
            objcomm.barrier(group=group)


@pytest.mark.timed
@ranks(3)
def test_the_shortest_limit_ends_every_ranks_wait_within_a_second() -> None:
    limits = {0: 1.0, 1: None}  # the group's own timeout is 30 min
    with met() as group:
        if here().rank == 2:
            return
        if here().rank == 0:
            hear("rank 1 calls")
        else:
            say("rank 1 calls")
        call = partial(objcomm.all_gather, "x", group=group, timeout=limits[here().rank])
        with within(2.0):
            error = error_in(TransportTimeout, call)
        assert (error.missing, error.seconds) == ((2,), 1.0)


@ranks(2)
def test_a_first_use_that_timed_out_can_be_repeated() -> None:
    with subgroup(0, 1) as group:
        if here().rank == 0:
            with patiently():
                assert timeout_of(group=group).missing == (1,)
        tell_all("tried", "")
        assert_group_works(group)


@ranks(2)
def test_a_calls_own_limit_outlasts_the_groups() -> None:
    """Each rank is late for one of two calls, by more than the groups' timeout."""
    groups: list[Any] = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        # Set afterwards, or it would apply to creating the group too.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_S), group)  # noqa: SLF001  # no public way
        objcomm.barrier(group=group, timeout=PATIENCE_S)
    mine, works, limits = here().rank, {}, (PATIENCE_S, float("inf"))
    for turn in (mine, 1 - mine):
        works[turn] = objcomm.all_gather(
            mine, group=groups[turn], timeout=limits[turn], async_op=True
        )
        if turn == mine:
            tell_all("one call of each rank has begun", "")
            time.sleep(LIMIT_S + 0.5)  # the delay itself; a longer one changes nothing
    assert objcomm.wait_all([works[0], works[1]]) == [[0, 1]] * 2
    if mine == 0:  # the group's timeout, which was outlasted
        with pytest.raises(TransportTimeout):
            objcomm.recv(1, group=groups[0])
    tell_all("the end", "")


@ranks(2)
def test_a_call_that_succeeds_after_its_limit_ends_no_later_one() -> None:
    """Rank 1 arrives after rank 0's timeout, but before anything ends rank 0's call."""
    with met() as group:
        if here().rank == 0:
            watching = watchdog._watchdogs.watchdog()  # noqa: SLF001  # nothing public shows its fallbacks

            def expire(*_: object) -> None:
                """Act as a slow store; the test decides when the fallback is due."""
                say("rank 0's limit has passed")

            with (
                mock.patch.object(inquiry, "expire", expire),
                mock.patch.object(watchdog, "_EXPIRY_SECONDS", 2 * PATIENCE_S),
                mock.patch.object(link, "_GRACE_SECONDS", 2 * PATIENCE_S),
            ):
                assert objcomm.all_gather(0, timeout=LIMIT_S, group=group) == [0, 1]
            # Rank 1 may have arrived after the store was asked, but before the fallback was set.
            # An earlier test's fallback may still be there, for less than a second.
            later = time.monotonic() + PATIENCE_S
            wait_until(
                lambda: any(due > later for due, _ in watching._fallbacks),  # noqa: SLF001  # likewise
                "what is due",
            )
            ends = [end for _, end in watching._fallbacks]  # noqa: SLF001  # likewise
            watching._fallbacks = [(0.0, end) for end in ends]  # noqa: SLF001  # likewise
            watching._nudge()  # noqa: SLF001  # likewise
            wait_until(lambda: not watching._fallbacks, "what was due")  # noqa: SLF001  # likewise
        else:
            hear("rank 0's limit has passed")
            assert objcomm.all_gather(1, group=group) == [0, 1]
        tell_all("what was due is done", "")
        assert_group_works(group)


@ranks(2)
def test_a_call_that_succeeds_while_others_are_asked_ends_no_later_one() -> None:
    """Rank 1 arrives after it has answered that it is elsewhere."""
    with met() as group:
        if here().rank == 0:
            has_returned, make = threading.Event(), inquiry.timeout_verdict

            def timeout_verdict(
                mesh: Mesh, lane: Lane, entry: CallRecord, answers: dict[int, WaitSnapshot] | None
            ) -> Verdict:
                if answers is not None:
                    say("rank 1 has answered")
                    has_returned.wait(PATIENCE_S)
                return make(mesh, lane, entry, answers)

            with patiently(), mock.patch.object(inquiry, "timeout_verdict", timeout_verdict):
                assert objcomm.all_gather(0, timeout=LIMIT_S, group=group) == [0, 1]
                has_returned.set()
                world: Any = dist.group.WORLD
                watchdog.board_thread_of(world).call(lambda _: None)  # it has continued
        else:
            hear("rank 1 has answered")
            assert objcomm.all_gather(1, group=group) == [0, 1]
        tell_all("the answer has arrived", "")
        assert_group_works(group)


@ranks(2)
def test_the_users_group_survives_a_timeout_of_ours() -> None:
    with met() as group:
        if here().rank == 0:
            timeout_of(group=group)
        gathered = [None, None]
        dist.all_gather_object(gathered, here().rank, group=group)
        assert gathered == [0, 1]


@ranks(2, joined=False)
@pytest.mark.parametrize("is_first_use", [True, False])
def test_a_stopped_store_does_not_hold_a_rank(*, is_first_use: bool) -> None:
    """A separate process hosts the store, and is stopped before the wait ends."""
    rendezvous = here().store("port")
    if here().rank == 0:
        ours, theirs = multiprocessing.Pipe()
        pid = os.fork()  # multiprocessing forbids a daemon, such as a worker, to have children
        if pid == 0:
            store = loopback_store()
            theirs.send(store.port)
            theirs.recv()
            os._exit(0)
        rendezvous.set("port", f"{ours.recv()} {pid}")
    port, pid = map(int, rendezvous.get("port").decode().split())
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=here().rank, world_size=2)
    if not is_first_use:
        objcomm.barrier()
    tell_all("joined", "")
    if here().rank == 0:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: thread_states(pid) == {"T"}, "the store to stop")
        try:
            with hastily():
                error = timeout_of()
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert error.is_store_silent
        assert error.missing == (1,)
        assert "store: no answer" in str(error)
    tell_all("over", "")


@solo()
def test_ranks_that_set_endless_limits_meet_and_talk() -> None:
    def work() -> list[Any]:
        objcomm.init(timeout=float("inf"))
        other = 1 - objcomm.rank()
        got = objcomm.sendrecv(1, other, other, timeout=timedelta.max)
        part = objcomm.split(objcomm.rank(), timeout=10**400)
        return [got, *objcomm.all_gather(2, timeout=1e300), objcomm.world_size(part)]

    assert objcomm.launch(work, 2, joined=False, timeout=1e300) == [[1, 2, 2, 1]] * 2
