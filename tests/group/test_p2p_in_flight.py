"""Many messages at a time: thousands of works, several threads, full mailboxes, cancellations."""

import asyncio
import contextlib
import gc
import os
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
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
from tests.group.pairs import LARGE, assert_all_works, assert_pair_works, improbed, left, right
from tests.ranks import OVER_GLOO, ranks
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here

#: A pair's listener, its three kinds of jobs, the notice that an offered message is taken, and the
#: process's other threads. With Gloo, each wait for a send that may miss the peer's end has its
#: own thread.
FEW_THREADS = 16


@contextlib.contextmanager
def few_threads() -> Iterator[None]:
    """Check that this block starts only a few threads, however many requests it makes."""
    start, before = threading.Thread.start, threading.active_count()
    counts = [before]

    def start_and_count(thread: threading.Thread) -> None:
        start(thread)
        counts.append(threading.active_count())

    with mock.patch.object(threading.Thread, "start", start_and_count):
        yield
    assert max(counts) <= before + FEW_THREADS


@ranks(2, 3)
def test_a_thousand_requests_share_a_few_threads() -> None:
    with few_threads():
        receiving = [objcomm.irecv(left()) for _ in range(1000)]
        sending = [objcomm.isend(number, right()) for number in range(1000)]
        assert objcomm.wait_all(receiving[::-1]) == list(reversed(range(1000)))
        objcomm.wait_all(sending)


@ranks(2, 3)
def test_a_thousand_requests_with_different_tags_complete_in_any_order() -> None:
    sizes = [0 if tag % 40 else tag * 7919 % 90_000 for tag in range(1000)]
    order = random.Random(here().rank).sample(range(1000), 1000)
    with few_threads():
        receiving = [objcomm.irecv(left(), tag=tag) for tag in range(1000)]
        sending = [objcomm.isend((tag, bytes(sizes[tag])), right(), tag=tag) for tag in order]
        for tag in random.Random(5).sample(range(1000), 1000):
            got = receiving[tag].wait()
            assert (got[0], len(got[1])) == (tag, sizes[tag])
        assert [work.result() for work in objcomm.as_completed(sending)] == [None] * 1000


@ranks(1, 2)
def test_hundreds_of_receives_from_itself_keep_their_timeouts() -> None:
    own = here().rank
    with few_threads():
        works: list[Any] = [objcomm.irecv(own, timeout=0.2) for _ in range(300)]
        late = [objcomm.irecv(own, tag=1) for _ in range(300)]
        for work in works:
            error_in(TransportTimeout, partial(work.wait, PATIENCE_S))
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
    assert_all_works()


@ranks(2)
def test_any_number_of_large_messages_is_received_in_any_order() -> None:
    _large_in_reverse(150)


@ranks(2, environment=OVER_GLOO)
def test_large_messages_are_received_in_any_order_over_gloo() -> None:
    _large_in_reverse(60)


@ranks(2)
def test_each_thread_may_use_its_own_tag() -> None:
    def talk(tag: int) -> list[int]:
        got = []
        for turn in range(15):
            sent = (tag, turn, bytes(tag * turn * 500))
            back = objcomm.sendrecv(sent, right(), left(), tag=tag)
            got.append(back[1] if back[0] == tag else -1)
        return got

    with ThreadPoolExecutor(8) as pool:
        talks = pool.map(talk, range(8))
        assert talk(8) == list(range(15))  # in the main thread
        assert list(talks) == [list(range(15))] * 8


@ranks(2)
def test_one_thread_receives_what_many_send() -> None:
    if here().rank == 0:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda number: objcomm.send((number, bytes(50_000)), 1), range(60)))
    else:
        assert sorted(objcomm.recv(0)[0] for _ in range(60)) == list(range(60))


@ranks(2)
def test_messages_can_be_awaited() -> None:
    async def talk() -> list[Any]:
        receiving = [objcomm.recv(left(), tag=tag, async_op=True) for tag in range(5)]
        for tag in range(5):
            await objcomm.send(tag * "x", right(), tag=tag, async_op=True)
        return [await each for each in receiving]

    assert asyncio.run(talk()) == ["x" * tag for tag in range(5)]


@ranks(2)
def test_the_callback_of_a_collective_may_send() -> None:
    """A pair's messages are not part of the sequence of the group's calls."""

    def add(a: int, b: int) -> int:
        objcomm.send(a + b, here().rank, tag=6)
        return a + b

    assert objcomm.all_reduce(1, add) == 2
    if objcomm.iprobe(here().rank, tag=6):
        assert objcomm.recv(here().rank, tag=6) == 2


# More messages than a rank keeps: 64 MiB of another's small messages, here 1 MiB

COUNT = 200


def send_numbers_and_then_urgent() -> None:
    assert objcomm.recv(1) == "go on"
    when_main_thread_waits(lambda: say("rank 0 waits"))
    for number in range(COUNT):
        objcomm.send((number, bytes(30_000)), 1, tag=1)
    objcomm.send("urgent", 1, tag=2)


@contextlib.contextmanager
def sender_waits() -> Iterator[None]:
    """Let rank 0 start to send, and enter the block when rank 1 keeps as much as it may."""
    with mock.patch.object(mailbox, "_KEPT_MAX_NBYTES", 1 << 20):
        objcomm.send("go on", 0)
        hear("rank 0 waits")
        yield


def numbers() -> list[int]:
    return [objcomm.recv(0, tag=1)[0] for _ in range(COUNT)]


@ranks(2)
@pytest.mark.parametrize("is_held", [False, True])
def test_a_sender_waits_until_its_messages_are_taken(*, is_held: bool) -> None:
    """Messages that matched probes hold count as taken, or holding many would stop the sender."""
    if here().rank == 0:
        send_numbers_and_then_urgent()
    else:
        with sender_waits():
            if is_held:
                held = [objcomm.mprobe(0, tag=1) for _ in range(COUNT)]
                assert [each.recv()[0] for each in held] == list(range(COUNT))
            else:
                assert numbers() == list(range(COUNT))
            assert objcomm.recv(0, tag=2) == "urgent"


def probed() -> Any:
    wait_until(lambda: objcomm.iprobe(0, tag=2), "the last message")
    return objcomm.recv(0, tag=2)


FINDS_URGENT: dict[str, Callable[[], Any]] = {
    "recv": lambda: objcomm.recv(0, tag=2),
    "iprobe": probed,
    "improbe": lambda: improbed(0, tag=2).recv(),
}


@ranks(2)
@pytest.mark.parametrize("kind", FINDS_URGENT)
def test_a_message_is_found_behind_more_than_is_kept(kind: str) -> None:
    """A receive lets all messages in that come before; each probe in vain lets in one more."""
    if here().rank == 0:
        send_numbers_and_then_urgent()
    else:
        with sender_waits():
            assert FINDS_URGENT[kind]() == "urgent"
        assert numbers() == list(range(COUNT))


@ranks(2)
def test_a_large_message_is_received_while_the_way_back_is_full() -> None:
    """Rank 1 receives nothing from rank 0 until rank 0 has received its message."""
    if here().rank == 0:
        assert objcomm.recv(1) == "go on"
        works = [objcomm.isend((number, bytes(30_000)), 1, tag=1) for number in range(COUNT)]
        assert objcomm.recv(1, tag=7) == LARGE
        objcomm.wait_all(works)
    else:
        with mock.patch.object(mailbox, "_KEPT_MAX_NBYTES", 1 << 20):
            objcomm.send("go on", 0)
            objcomm.isend(LARGE, 0, tag=7).wait()
            assert numbers() == list(range(COUNT))


# Cancelled receives


@ranks(1, 2, 3)
@pytest.mark.parametrize("is_any", [False, True])
def test_a_cancelled_receive_takes_no_message(*, is_any: bool) -> None:
    src = None if is_any else left()
    first, second = objcomm.irecv(src), objcomm.irecv(src)
    assert first.cancel()
    assert first.done()
    assert not first.cancel()
    with pytest.raises(CancelledError, match=r"test_p2p_in_flight\.py"):
        first.wait()
    assert isinstance(first.exception(), CancelledError)
    objcomm.barrier()
    objcomm.send("for the second", right())
    assert second.wait(PATIENCE_S) == "for the second"
    assert not second.cancel()
    assert second.wait() == "for the second"
    assert_group_works()


@ranks(2)
def test_a_matched_receive_cannot_be_cancelled() -> None:
    if here().rank == 0:
        work = objcomm.irecv(1, tag=5)
        hear("rank 1 has begun")
        assert objcomm.recv(1, tag=6) == "behind it"  # so the first message has matched its receive
        assert not work.cancel()
        assert work.wait(PATIENCE_S) == LARGE
    else:
        sending = objcomm.isend(LARGE, 0, tag=5)
        objcomm.send("behind it", 0, tag=6)
        say("rank 1 has begun")
        sending.wait()
    assert_pair_works()


@ranks(2)
def test_sends_and_collectives_cannot_be_cancelled() -> None:
    for work in (objcomm.isend("sent", right()), objcomm.all_gather(1, async_op=True)):
        assert not work.cancel()
        work.wait()
    assert objcomm.recv(left()) == "sent"


@ranks(2)
def test_a_cancelled_receive_does_not_warn_and_is_released() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work: Any = objcomm.irecv(left(), tag=9)
        assert work.cancel()
        gone = weakref.ref(work)
        del work
        gc.collect()
        assert gone() is None
    # Works that earlier tests dropped may be collected here, but they began in other files.
    assert [str(each.message) for each in caught if each.filename == __file__] == []
    (world,) = objcomm.recorder.dump(group=dist.group.WORLD)["groups"]
    assert world["entries"][-1]["outcome"] == "CancelledError"


@ranks(1, 2)
def test_a_task_that_awaits_a_cancelled_receive_is_cancelled() -> None:
    async def receive(work: Any) -> None:
        await work

    async def cancel_while_it_is_awaited() -> None:
        work = objcomm.irecv(left(), tag=9)
        task = asyncio.ensure_future(receive(work))
        await asyncio.sleep(0)
        assert work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_while_it_is_awaited())


@ranks(2)
def test_a_message_that_arrives_during_a_cancellation_is_not_lost() -> None:
    """Each message matches one receive or stays."""
    count = 300
    if here().rank == 0:
        works = [objcomm.irecv(1) for _ in range(2 * count)]
        say("rank 0 has begun")
        wait_until(lambda: any(work.done() for work in works), "the first message")
        got = objcomm.wait_all([work for work in works if not work.cancel()])
        got += [objcomm.recv(1) for _ in range(count - len(got))]
        assert got == list(range(count))
    else:
        hear("rank 0 has begun")
        for number in range(count):
            objcomm.send(number, 0)
    assert_all_works()


# Failures


@ranks(2, disposable=True)
def test_each_queued_send_keeps_its_own_timeout() -> None:
    if here().rank == 0:
        first = objcomm.isend("first", 1)  # the two ranks are not connected yet
        second: Any = objcomm.isend("second", 1, timeout=0.3)
        large: Any = objcomm.isend(LARGE, 1, timeout=0.3)
        third = objcomm.isend("third", 1)
        for wait in (second.wait, large.wait, partial(objcomm.send, "last", 1, timeout=0.3)):
            error = error_in(TransportTimeout, wait)
            assert (error.missing, error.seconds) == ((1,), 0.3)
        assert not first.done()
        tell_all("the timeouts have expired", "")
        objcomm.wait_all([first, third])
    else:
        tell_all("the timeouts have expired", "")
        assert [objcomm.recv(0), objcomm.recv(0)] == ["first", "third"]
    assert_all_works()


@ranks(2)
def test_an_offered_message_that_is_never_taken_ends_at_its_timeout() -> None:
    with subgroup(0, 1) as group:
        assert_pair_works(group)
        if here().rank == 0:
            # The timeout lets the earlier messages be offered first, or this one would end alone.
            works: list[Any] = [
                objcomm.isend(LARGE, 1, tag=tag, timeout=3 if tag == 3 else None, group=group)
                for tag in range(5)
            ]
            for work in works:
                assert error_in(TransportTimeout, partial(work.wait, PATIENCE_S)).missing == (1,)
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
def test_a_block_that_fails_on_another_rank_ends_all_of_its_receives() -> None:
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
    assert_all_works()


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
