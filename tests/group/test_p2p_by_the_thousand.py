"""Thousands of outstanding messages: few threads, and each request completes on its own."""

import contextlib
import os
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, TransportError, TransportTimeout
from objcomm._failures import inquiry, watchdog
from objcomm._failures.watchdog import board_thread_of
from objcomm._p2p import mailbox
from tests.group.helpers import (
    assert_group_works,
    error_in,
    hear,
    say,
    subgroup,
    tell_all,
    when_main_thread_waits,
)
from tests.group.pairs import LARGE, assert_pair_works, left, right
from tests.ranks import OVER_GLOO, ranks
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here

#: A pair's listener, its three kinds of jobs, the notice that an offered message is taken, and the
#: process's other threads. With Gloo, each wait for a send that may miss the peer's end has its
#: own thread.
FEW_THREADS = 16


@contextlib.contextmanager
def few_threads() -> Iterator[list[int]]:
    """Check that this block starts only a few threads, however many requests it makes."""
    start, started = threading.Thread.start, list[int]()
    before = threading.active_count()
    most = [before]

    def counted(thread: threading.Thread) -> None:
        started.append(1)
        start(thread)
        most.append(threading.active_count())

    with mock.patch.object(threading.Thread, "start", counted):
        yield most
    assert max(most) <= before + FEW_THREADS


@ranks(2, 3)
def test_a_thousand_requests_share_a_few_threads() -> None:
    count = 1000
    with few_threads():
        receiving = [objcomm.irecv(left()) for _ in range(count)]
        sending = [objcomm.isend(number, right()) for number in range(count)]
        assert objcomm.wait_all(receiving) == list(range(count))
        objcomm.wait_all(sending)
    assert_group_works()


@ranks(2)
def test_a_thousand_requests_with_different_tags_complete_in_any_order() -> None:
    count = 1000
    with few_threads():
        receiving = {tag: objcomm.irecv(left(), tag=tag) for tag in range(count)}
        sending = [objcomm.isend(tag, right(), tag=tag) for tag in reversed(range(count))]
        assert {tag: work.wait() for tag, work in receiving.items()} == dict(
            enumerate(range(count))
        )
        assert sum(work.result() is None for work in objcomm.as_completed(sending)) == count


@ranks(1, 2)
def test_a_thousand_receives_of_a_ranks_own_messages_keep_their_limits() -> None:
    own = here().rank
    with few_threads():
        works: list[Any] = [objcomm.irecv(own, timeout=0.2) for _ in range(300)]
        late = [objcomm.irecv(own, tag=1) for _ in range(300)]
        for work in works:
            with pytest.raises(TransportTimeout):
                work.wait(PATIENCE_S)
    for number in range(300):
        objcomm.send(number, own, tag=1)
    assert objcomm.wait_all(late) == list(range(300))


def _large_in_reverse(count: int) -> None:
    """Receive the last message first; its sender waits for that one before all others."""
    objects = [bytes([number % 251]) * (40_000 + 997 * number) for number in range(count)]
    if here().rank == 0:
        with few_threads():
            works = [objcomm.isend(obj, 1, tag=tag) for tag, obj in enumerate(objects)]
            works[-1].wait()
            assert not works[0].done()
            objcomm.send("the last one was taken", 1, tag=count)
            objcomm.wait_all(works)
    else:
        assert objcomm.recv(0, tag=count - 1) == objects[-1]
        assert objcomm.recv(0, tag=count) == "the last one was taken"
        with few_threads():
            coming = [objcomm.irecv(0, tag=tag) for tag in reversed(range(count - 1))]
            assert objcomm.wait_all(coming) == objects[-2::-1]
    assert_pair_works()
    assert_group_works()


@ranks(2)
def test_large_messages_without_number_are_taken_in_any_order() -> None:
    _large_in_reverse(150)


@ranks(2, environment=OVER_GLOO)
def test_large_messages_are_received_in_any_order_over_gloo() -> None:
    _large_in_reverse(60)


@ranks(4)
def test_a_subgroup_takes_large_messages_in_any_order() -> None:
    with subgroup(1, 3) as group:
        if here().rank in {1, 3}:
            works = [
                objcomm.isend(
                    bytes(50_000 + tag), group_dst=1 - dist.get_rank(group), tag=tag, group=group
                )
                for tag in range(5)
            ]
            for tag in reversed(range(5)):
                assert len(objcomm.recv(tag=tag, group=group)) == 50_000 + tag
            objcomm.wait_all(works)
        tell_all("subgroup", "")


@ranks(2)
def test_a_large_message_is_taken_where_the_way_back_is_full() -> None:
    """Rank 1 receives nothing from rank 0 until rank 0 has received its message."""
    count = 80
    if here().rank == 0:
        assert objcomm.recv(1) == "go on"
        works = [objcomm.isend((number, bytes(30_000)), 1, tag=1) for number in range(count)]
        assert objcomm.recv(1, tag=7) == LARGE
        objcomm.wait_all(works)
    else:
        with mock.patch.object(mailbox, "_KEPT_MAX_NBYTES", 1 << 20):
            objcomm.send("go on", 0)
            objcomm.isend(LARGE, 0, tag=7).wait()
            assert [objcomm.recv(0, tag=1)[0] for _ in range(count)] == list(range(count))


# Failures


@ranks(2, disposable=True)
def test_each_send_in_the_queue_keeps_its_own_limit() -> None:
    if here().rank == 0:
        first = objcomm.isend("first", 1)  # the two ranks are not connected yet
        second: Any = objcomm.isend("second", 1, timeout=0.3)
        large: Any = objcomm.isend(LARGE, 1, timeout=0.3)
        third = objcomm.isend("third", 1)
        for work in (second, large):
            error = error_in(TransportTimeout, partial(work.wait, PATIENCE_S))
            assert (error.missing, error.seconds) == ((1,), 0.3)
        assert not first.done()
        tell_all("two limits have passed", "")
        objcomm.wait_all([first, third])
    else:
        tell_all("two limits have passed", "")
        assert [objcomm.recv(0), objcomm.recv(0)] == ["first", "third"]
    assert_pair_works()
    assert_group_works()


@ranks(2)
def test_what_was_offered_and_never_taken_ends_at_its_limit() -> None:
    with subgroup(0, 1) as group:
        assert_pair_works(group)
        if here().rank == 0:
            # The timeout lets the earlier messages be offered first, or this one would end alone.
            works: list[Any] = [
                objcomm.isend(LARGE, 1, tag=tag, timeout=3 if tag == 3 else None, group=group)
                for tag in range(5)
            ]
            for work in works:
                error = error_in(TransportTimeout, partial(work.wait, PATIENCE_S))
                assert error.missing == (1,)
            say("all have ended")
        else:
            hear("all have ended")
            error_in(TransportError, lambda: objcomm.recv(0, group=group))
        assert_group_works(group)
    assert_group_works()


@ranks(2, expect_dead=[1])
def test_a_death_ends_all_requests() -> None:
    assert_pair_works()
    if here().rank == 1:
        for tag in range(50):  # a send still in rank 0's queue would fail as later calls do
            objcomm.probe(0, tag=tag)
        hear("rank 0 waits")
        os._exit(3)
    works: list[Any] = [objcomm.irecv(1, tag=tag) for tag in range(200)]
    works += [objcomm.isend(LARGE[:50_000], 1, tag=tag) for tag in range(50)]
    when_main_thread_waits(lambda: say("rank 0 waits"))
    with few_threads():
        for work in works:
            assert error_in(TransportError, partial(work.wait, PATIENCE_S)).peers == (1,)


@ranks(2, 3)
def test_a_block_that_fails_elsewhere_ends_all_of_its_receives() -> None:
    """With three ranks, the failing one is not connected to the two that wait for each other."""
    works: list[Any] = []

    def fail_or_wait() -> None:
        if here().rank == here().world_size - 1:
            hear("rank 0 waits")
            raise LookupError("of the last rank")
        if here().rank == 1:
            hear("rank 0 has heard")
            return
        works.extend(objcomm.irecv(1, tag=tag) for tag in range(100))
        when_main_thread_waits(lambda: say("rank 0 waits"))
        try:
            works[0].wait()
        finally:  # while the block is open: its exit would end them too
            wait_until(lambda: all(work.done() for work in works), "the end of all")
            say("rank 0 has heard")

    def counted(*given: Any) -> bool:
        are_ended.append(look(*given))
        return are_ended[-1]

    look, are_ended = inquiry._end_if_verdict_posted, list[bool]()  # noqa: SLF001  # nothing public counts its looks
    assert_pair_works()
    with (
        mock.patch.object(inquiry, "_end_if_verdict_posted", counted),
        pytest.raises(CollectiveError, match="of the last rank"),
        objcomm.fail_together(),
    ):
        fail_or_wait()
    # One look ends all hundred; on a busy machine the next may come before they have ended.
    assert sum(are_ended) < len(works) / 2 or not works
    for work in works:
        assert "of the last" in str(error_in(CollectiveError, partial(work.wait, PATIENCE_S)))
    assert_pair_works()
    assert_group_works()


@ranks(2)
def test_the_watchdog_reports_a_thousand_waits_as_one() -> None:
    world: Any = dist.group.WORLD
    told, board = watchdog._watchdogs.watchdog(), board_thread_of(world)  # noqa: SLF001  # what other ranks see
    before = len(told.snapshot(board, 1).lanes)  # those of groups that earlier tests used
    works = [objcomm.irecv(1 - here().rank, tag=tag) for tag in range(1000)]
    assert len(told.snapshot(board, 1).lanes) - before < 10
    objcomm.barrier()
    for tag in range(1000):
        objcomm.send(tag, 1 - here().rank, tag=tag)
    assert objcomm.wait_all(works) == list(range(1000))
