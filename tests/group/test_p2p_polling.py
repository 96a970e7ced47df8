"""Polling ends on time, takes part in no deadlock, loses no message, and reports what ends it."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import objcomm
from objcomm import BrokenGroupError, CollectiveError, DesyncError, TransportError, TransportTimeout
from objcomm._failures import losses, watchdog
from objcomm._p2p import call
from objcomm._p2p.mailbox import Arrived, Mailbox
from tests.group.helpers import (
    assert_group_works,
    error_in,
    hear,
    is_said,
    say,
    stopped,
    subgroup,
    tell_all,
)
from tests.group.pairs import LARGE, assert_all_works, assert_pair_works, die
from tests.group.watched import after_looks, closely, patiently
from tests.ranks import ranks
from tests.waits import PATIENCE_S, wait_until, within
from tests.workers import here

LOOKS = 6

POLLS: dict[str, Callable[[], Any]] = {
    "recv": lambda: objcomm.recv(1, tag=9, timeout=0.2),
    "probe": lambda: objcomm.probe(1, tag=9, timeout=0.2),
    "irecv": lambda: objcomm.irecv(1, tag=9, timeout=0.2).wait(),
    "recv from any": lambda: objcomm.recv(tag=9, timeout=0.2),
    # Longer, so that its messages do not fill rank 1's mailbox, however late rank 1 is.
    "sendrecv": lambda: objcomm.sendrecv("early", 1, 1, tag=8, recv_tag=9, timeout=2),
}


@ranks(2)
@pytest.mark.parametrize("have_met", [False, True])
@pytest.mark.parametrize("kind", POLLS)
def test_a_polling_rank_does_not_deadlock_with_a_rank_that_waits_for_it(
    kind: str, *, have_met: bool
) -> None:
    objcomm.barrier()
    if have_met or kind == "sendrecv":
        assert_pair_works()
    if here().rank == 0:
        with closely():
            while not is_said("rank 1 was looked at"):
                error_in(TransportTimeout, POLLS[kind])
        objcomm.send("later", 1)
    else:
        with after_looks(LOOKS, partial(say, "rank 1 was looked at")):
            assert objcomm.recv(0) == "later"
        while objcomm.iprobe(0, tag=8):  # sent by ``sendrecv``
            assert objcomm.recv(0, tag=8) == "early"
    assert_group_works()


@ranks(2)
def test_a_work_that_is_waited_for_with_a_timeout_is_in_no_deadlock() -> None:
    if here().rank == 0:
        work = objcomm.irecv(1, tag=9)
        with closely():
            while not is_said("rank 1 was looked at"):
                error_in(TimeoutError, lambda: work.wait(timeout=0.2))
        objcomm.send("later", 1)
        assert work.wait() == "answer"
    else:
        with after_looks(LOOKS, partial(say, "rank 1 was looked at")):
            assert objcomm.recv(0) == "later"
        objcomm.send("answer", 0, tag=9)


@ranks(2)
def test_a_send_with_its_own_timeout_is_in_no_deadlock() -> None:
    """Rank 0's message is large, and rank 1 waits for one that rank 0 sends later."""
    with subgroup(0, 1) as group:
        assert_pair_works(group)
        with closely(), patiently():
            if here().rank == 0:
                with after_looks(LOOKS, partial(say, "rank 0 was looked at")):
                    objcomm.send(LARGE, 1, group=group, timeout=60)
                objcomm.send("small", 1, tag=5, group=group)
            else:
                poll = partial(objcomm.recv, 0, tag=5, group=group, timeout=0.5)
                while not is_said("rank 0 was looked at"):
                    error_in(TransportTimeout, poll)
                assert objcomm.recv(0, group=group) == LARGE
                assert objcomm.recv(0, tag=5, group=group) == "small"


@ranks(2)
def test_a_deadlock_is_found_once_a_polling_rank_waits_without_a_timeout() -> None:
    objcomm.barrier()
    with closely(), patiently():
        if here().rank == 0:
            for _ in range(3):
                error_in(TransportTimeout, POLLS["recv"])
            error = error_in(DesyncError, lambda: objcomm.recv(1, tag=9))
        else:
            error = error_in(DesyncError, lambda: objcomm.recv(0))
    assert set(error.positions) == {0, 1}
    assert_pair_works()


@ranks(2)
def test_many_polls_lose_no_message_and_raise_no_false_desync() -> None:
    def polled(timeout: float) -> Any:
        with contextlib.suppress(TransportTimeout):
            return objcomm.recv(1, tag=9, timeout=timeout)
        return None

    with closely():
        for turn in range(8):
            if here().rank == 0:
                for _ in range(4):
                    assert polled(0.15) is None
                objcomm.send(turn, 1)
                timeout = 0.05 if turn % 2 else 0.2
                assert wait_until(partial(polled, timeout), "a message") == (turn, "a")
                wait_until(lambda: objcomm.iprobe(1, tag=9), "another message")
                assert objcomm.recv(1, tag=9) == (turn, "b")
            else:
                assert objcomm.recv(0) == turn
                objcomm.send((turn, "a"), 0, tag=9)
                objcomm.send((turn, "b"), 0, tag=9)
    assert objcomm.iprobe(1 - here().rank, tag=None) is None
    assert_group_works()


# Messages that have arrived stay


def fall_out_of_step(call_of_rank_0: Callable[[], Any]) -> None:
    with closely(), patiently():
        own_call = call_of_rank_0 if here().rank == 0 else partial(objcomm.recv, 0, tag=2)
        error_in(DesyncError, own_call)


def refuse() -> None:
    if here().rank == 0:
        with objcomm.configure(max_nbytes=100_000):
            error_in(objcomm.WireError, lambda: objcomm.recv(1, tag=3))
    else:
        error_in(CollectiveError, lambda: objcomm.send(LARGE, 0, tag=3))


def time_out() -> None:
    if here().rank == 0:
        error_in(TransportTimeout, lambda: objcomm.recv(1, tag=3, timeout=0.2))
    tell_all("the timeout has expired", "")


ERRORS: dict[str, Callable[[], None]] = {
    "desync": lambda: fall_out_of_step(lambda: objcomm.recv(1, tag=1)),
    "desync with a collective": lambda: fall_out_of_step(objcomm.barrier),
    "refusal": refuse,
    "timeout": time_out,
}


@ranks(2)
@pytest.mark.parametrize("kind", ERRORS)
def test_arrived_messages_survive_recoverable_errors(kind: str) -> None:
    assert_pair_works()
    if here().rank == 1:
        for number in range(3):
            objcomm.send(number, 0, tag=9)
        objcomm.send("last", 0, tag=8)
        hear("rank 0 has seen all")
    else:
        wait_until(lambda: objcomm.iprobe(1, tag=8), "the last message")
        say("rank 0 has seen all")
    ERRORS[kind]()
    if here().rank == 1:
        objcomm.send(3, 0, tag=9)  # over new connections, which number messages from 0 again
        objcomm.send("later", 0, tag=8)
    else:
        assert objcomm.iprobe(1, tag=9) is not None
        assert [objcomm.recv(1, tag=8) for _ in range(2)] == ["last", "later"]
        assert [objcomm.recv(1, tag=9) for _ in range(4)] == [0, 1, 2, 3]
    assert_all_works()


@ranks(2)
@pytest.mark.parametrize("kind", ["desync", "desync with a collective", "refusal"])
def test_a_message_whose_body_has_not_arrived_is_lost_and_its_sender_raises(kind: str) -> None:
    assert_pair_works()
    if here().rank == 1:
        sending = objcomm.isend(LARGE, 0, tag=9)
        hear("rank 0 has seen it")
        ERRORS[kind]()
        error_in(objcomm.ObjcommError, sending.wait)
    else:
        wait_until(lambda: objcomm.iprobe(1, tag=9), "the message")
        say("rank 0 has seen it")
        ERRORS[kind]()
        with contextlib.suppress(objcomm.ObjcommError):  # the error that ended the connection
            objcomm.iprobe(1, tag=9)
        assert objcomm.iprobe(1, tag=9) is None
    assert_all_works()


@ranks(2)
def test_undelivered_messages_keep_their_order_after_the_connection_ends() -> None:
    assert_pair_works()
    if here().rank == 1:
        for text in ("first", "second"):
            objcomm.send(text, 0, tag=9)
        say("rank 1 has sent two")
        fall_out_of_step(objcomm.barrier)
        objcomm.send("third", 0, tag=9)
        say("rank 1 has sent three")
    else:
        with _slow_to_listen() as go_on:
            hear("rank 1 has sent two")
            fall_out_of_step(objcomm.barrier)
            wait_until(lambda: objcomm.iprobe(1, tag=9), "the first message")
            assert objcomm.iprobe(1, tag=8) is None  # listens to the new connection
            hear("rank 1 has sent three")
            time.sleep(0.1)  # time for the third to overtake the second, which it must not
            go_on.set()
            assert [objcomm.recv(1, tag=9) for _ in range(3)] == ["first", "second", "third"]
    assert_all_works()


@contextlib.contextmanager
def _slow_to_listen() -> Iterator[threading.Event]:
    """Block the thread that delivers the next message until the event is set."""
    go_on, slow = threading.Event(), list[int]()
    deliver = Mailbox.deliver

    def deliver_and_rest(box: Mailbox, arrival: Arrived) -> None:
        deliver(box, arrival)
        slow.append(threading.get_ident())
        if slow == slow[:1]:
            go_on.wait(PATIENCE_S)

    with mock.patch.object(Mailbox, "deliver", deliver_and_rest):
        yield go_on


# Timeouts


@ranks(2)
def test_a_short_timeout_reports_what_is_known_on_this_rank() -> None:
    objcomm.barrier()
    if here().rank == 0:
        for name in ("recv", "probe", "mprobe"):
            error = error_in(TransportTimeout, lambda: getattr(objcomm, name)(1, timeout=0.02))  # noqa: B023  # called immediately
            assert (error.operation, error.missing, error.seconds) == (name, (1,), 0.02)
            assert list(error.positions) == [0]
            assert error.positions[0].operation == name
            assert "test_p2p_polling.py" in error.positions[0].call_site
            assert error.silent == ()  # it was not asked
            assert not error.is_store_silent
        error = error_in(TransportTimeout, lambda: objcomm.irecv(timeout=0.02).wait())
        assert error.missing == (1,)
    assert_group_works()


@ranks(2)
def test_a_short_timeout_does_not_cut_off_a_message_that_is_arriving() -> None:
    """Rank 1 is stopped once its message's header has arrived, and resumed after the timeout."""
    pids = objcomm.all_gather(os.getpid())
    if here().rank == 0:
        wait_until(lambda: objcomm.iprobe(1, tag=9), "the message")
        with (
            mock.patch.object(call, "_TRANSFER_SECONDS", PATIENCE_S),
            stopped(pids[1]),
            after_looks(10, lambda: os.kill(pids[1], signal.SIGCONT)),
        ):
            assert objcomm.recv(1, tag=9, timeout=0.02) == LARGE
    else:
        objcomm.send(LARGE, 0, tag=9)
    assert_all_works()


@pytest.mark.timed
@ranks(2)
@pytest.mark.parametrize(
    ("timeout_s", "late_s", "is_async"),
    [(0.02, 0.02, False), (0.2, 0.2, False), (0.5, 0.4, False), (0.02, 0.02, True)],
)
def test_a_call_exceeds_its_timeout_by_at_most_as_much(
    timeout_s: float, late_s: float, *, is_async: bool
) -> None:
    def poll() -> None:
        if is_async:
            objcomm.irecv(timeout=timeout_s).wait()
        else:
            objcomm.recv(1, timeout=timeout_s)

    objcomm.barrier()
    polls = 10 if timeout_s < 0.1 else 3
    if here().rank == 0:
        with within(polls * (timeout_s + late_s)):
            for _ in range(polls):
                error_in(TransportTimeout, poll)
    tell_all("over", "")


# Polls that raise once nothing can arrive any more, as waiting calls do

KINDS = ["iprobe", "recv", "probe"]


def poll_once(kind: str, src: int | None = None, group: Any = None) -> Any:
    """Return what has arrived from one rank or any, or None."""
    if kind == "iprobe":
        return objcomm.iprobe(src, group=group)
    with contextlib.suppress(TransportTimeout):
        return getattr(objcomm, kind)(src, group=group, timeout=0.02)
    return None


def poll(kind: str, src: int | None = None, group: Any = None) -> Any:
    """Poll until a message or an error arrives."""
    return wait_until(lambda: poll_once(kind, src, group), "a message or an error")


def destroy_the_world() -> None:
    """Destroy this rank's process group, and wait until the store holds the reason."""
    dist.destroy_process_group()
    wait_until(
        lambda: all(each.name != "objcomm-board" for each in threading.enumerate()),
        "the end of the thread that writes it",
    )


@contextlib.contextmanager
def looking_when_said(topic: str) -> Iterator[None]:
    """Look for lost senders only after ``topic`` is said: a sender may give its reason late."""
    look = losses.look_for_senders

    def look_if_said(*given: Any) -> None:
        if is_said(topic):
            look(*given)

    with mock.patch.object(watchdog, "look_for_senders", look_if_said):
        yield


@ranks(2, expect_dead=[1])
@pytest.mark.parametrize(  # each of the others resembles one of these
    ("kind", "end", "src"),
    [("iprobe", "killed", 1), ("recv", "killed", None), ("probe", "destroyed", 1)],
)
def test_a_poll_for_a_first_message_reports_the_end_of_its_sender(
    kind: str, end: str, src: int | None
) -> None:
    # A new group: on existing connections, the kernel would report the end of a killed rank.
    group: Any = dist.new_group() if end == "killed" else None
    objcomm.barrier()
    if here().rank == 1:
        hear("rank 0 polls")
        if end == "destroyed":
            destroy_the_world()
        say("rank 1 has left")
        if end == "destroyed":
            hear("rank 0 has heard")
        die()
    with looking_when_said("rank 1 has left"):
        assert poll_once(kind, src, group) is None
        say("rank 0 polls")
        error = error_in(TransportError, lambda: poll(kind, src, group))
    assert not isinstance(error, TransportTimeout)
    assert error.peers == (1,)
    assert ("destroyed its process group" if end == "destroyed" else "has ended") in str(error)
    error_in(BrokenGroupError, lambda: objcomm.recv(1, group=group))
    say("rank 0 has heard")


@ranks(3, expect_dead=[1, 2])
def test_polling_for_any_rank_finds_messages_of_the_remaining_ranks() -> None:
    objcomm.barrier()
    if here().rank == 1:
        hear("rank 0 polls")
        destroy_the_world()
        say("rank 1 has left")
        hear("rank 0 has heard")
        die()
    if here().rank == 2:
        hear("rank 0 has heard of rank 1")
        objcomm.send("from rank 2", 0)
        hear("rank 0 has heard")
        die()
    assert objcomm.iprobe() is None
    say("rank 0 polls")
    hear("rank 1 has left")
    assert error_in(TransportError, lambda: poll("iprobe", 1)).peers == (1,)
    say("rank 0 has heard of rank 1")
    assert poll("iprobe").src == 2
    assert objcomm.recv() == "from rank 2"
    say("rank 0 has heard")


@ranks(3)
@pytest.mark.parametrize("kind", KINDS)
def test_polling_in_a_block_raises_when_another_rank_fails(kind: str) -> None:
    """Ranks 0 and 2 poll each other, so no connection to rank 1 reports the failure.

    They use a separate group because they may connect while the block fails, and one of them may
    then receive the failure twice.
    """
    own, other = here().rank, 2 - here().rank
    heard: list[CollectiveError] = []  # from polls; the block raises one for any error

    def fail_or_poll(group: Any) -> None:
        if own == 1:
            hear("rank 0 polls")
            hear("rank 2 polls")
            raise LookupError("of rank 1")
        assert poll_once(kind, other, group) is None
        say(f"rank {own} polls")
        heard.append(error_in(CollectiveError, lambda: poll(kind, other, group)))
        raise heard[0]

    with subgroup(0, 1, 2) as group:
        with (
            pytest.raises(CollectiveError, match="of rank 1"),
            objcomm.fail_together(group=group),
        ):
            fail_or_poll(group)
        assert len(heard) == (own != 1)
        tell_all("all have left the block", "")
    assert_group_works()


@ranks(3, expect_dead=[1])
@pytest.mark.parametrize("kind", KINDS)
def test_polling_in_a_block_raises_when_another_rank_dies(kind: str) -> None:
    own, other = here().rank, 2 - here().rank
    objcomm.sendrecv(own, (own + 1) % 3, (own - 1) % 3)

    def die_or_poll() -> None:
        with objcomm.fail_together():
            if own == 1:
                hear("rank 0 polls")
                hear("rank 2 polls")
                die()
            assert poll_once(kind, other) is None
            say(f"rank {own} polls")
            poll(kind, other)

    assert "rank 1 ended: its process" in str(error_in(CollectiveError, die_or_poll))
    survivors: Any = dist.new_group([0, 2], use_local_synchronization=True)
    assert_group_works(survivors)
