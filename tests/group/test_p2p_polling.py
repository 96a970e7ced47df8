"""Polling: a wait with its own timeout is in no deadlock, ends on time and loses no message."""

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

import objcomm
from objcomm import CollectiveError, DesyncError, TransportTimeout
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
from tests.group.pairs import LARGE, assert_pair_works
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
def test_a_work_that_is_waited_for_with_a_limit_is_in_no_circle() -> None:
    if here().rank == 0:
        work = objcomm.irecv(1, tag=9)
        with closely():
            while not is_said("rank 1 was looked at"):
                with pytest.raises(TimeoutError):
                    work.wait(timeout=0.2)
        objcomm.send("later", 1)
        assert work.wait() == "answer"
    else:
        with after_looks(LOOKS, partial(say, "rank 1 was looked at")):
            assert objcomm.recv(0) == "later"
        objcomm.send("answer", 0, tag=9)


@ranks(2)
def test_a_send_with_a_limit_of_its_own_is_in_no_circle() -> None:
    """Rank 0's message is large, and rank 1 waits for one that rank 0 sends later."""
    with subgroup(0, 1) as group:
        assert_pair_works(group)
        with closely(), patiently():
            if here().rank == 0:
                with after_looks(LOOKS, partial(say, "rank 0 was looked at")):
                    objcomm.send(LARGE, 1, group=group, timeout=60)
                objcomm.send("small", 1, tag=5, group=group)
            else:
                while not is_said("rank 0 was looked at"):
                    with pytest.raises(TransportTimeout):
                        objcomm.recv(0, tag=5, group=group, timeout=0.5)
                assert objcomm.recv(0, group=group) == LARGE
                assert objcomm.recv(0, tag=5, group=group) == "small"


@ranks(2)
def test_a_deadlock_is_found_once_a_polling_rank_waits_without_a_timeout() -> None:
    objcomm.barrier()
    if here().rank == 0:
        with closely(), patiently():
            for _ in range(3):
                error_in(TransportTimeout, POLLS["recv"])
            error = error_in(DesyncError, lambda: objcomm.recv(1, tag=9))
    else:
        with closely(), patiently():
            error = error_in(DesyncError, lambda: objcomm.recv(0))
    assert set(error.positions) == {0, 1}
    assert_pair_works()


@ranks(2)
def test_many_polls_lose_no_message_and_meet_no_false_desync() -> None:
    turns = 8
    with closely():
        if here().rank == 0:
            for turn in range(turns):
                for _ in range(4):
                    error_in(TransportTimeout, lambda: objcomm.recv(1, tag=9, timeout=0.15))
                objcomm.send(turn, 1)
                assert _polled(turn) == [(turn, "a"), (turn, "b")]
        else:
            for turn in range(turns):
                assert objcomm.recv(0) == turn
                objcomm.send((turn, "a"), 0, tag=9)
                objcomm.send((turn, "b"), 0, tag=9)
    assert objcomm.iprobe(1 - here().rank, tag=None) is None
    assert_group_works()


def _polled(turn: int) -> list[Any]:
    """Receive two messages: one by polling, one as soon as a probe finds it."""
    found: list[Any] = []

    def is_there() -> bool:
        try:
            found.append(objcomm.recv(1, tag=9, timeout=0.05 if turn % 2 else 0.2))
        except TransportTimeout:
            return False
        return True

    wait_until(is_there, "a message")
    wait_until(lambda: objcomm.iprobe(1, tag=9), "another message")
    return [*found, objcomm.recv(1, tag=9)]


# Messages that have arrived stay


def fall_out_of_step() -> None:
    with closely(), patiently():
        error_in(DesyncError, lambda: objcomm.recv(1 - here().rank, tag=1 + here().rank))


def fall_out_of_step_with_a_collective() -> None:
    with closely(), patiently():
        if here().rank == 0:
            error_in(DesyncError, objcomm.barrier)
        else:
            error_in(DesyncError, lambda: objcomm.recv(0, tag=2))


def refuse() -> None:
    if here().rank == 0:
        with objcomm.configure(max_nbytes=100_000):
            error_in(objcomm.WireError, lambda: objcomm.recv(1, tag=3))
    else:
        error_in(CollectiveError, lambda: objcomm.send(LARGE, 0, tag=3))


def pass_a_limit() -> None:
    if here().rank == 0:
        error_in(TransportTimeout, lambda: objcomm.recv(1, tag=3, timeout=0.2))
    tell_all("the limit has passed", "")


ERRORS: dict[str, Callable[[], None]] = {
    "desync": fall_out_of_step,
    "desync with a collective": fall_out_of_step_with_a_collective,
    "refusal": refuse,
    "limit": pass_a_limit,
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
    assert_pair_works()
    assert_group_works()


@ranks(2)
@pytest.mark.parametrize("kind", ["desync", "desync with a collective", "refusal"])
def test_a_message_whose_body_has_not_come_is_lost_and_its_sender_told(kind: str) -> None:
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
        assert _iprobe() is None
    assert_pair_works()
    assert_group_works()


def _iprobe() -> Any:
    """Probe; try again if the first probe raises the error that ended the connection."""
    try:
        return objcomm.iprobe(1, tag=9)
    except objcomm.ObjcommError:
        return objcomm.iprobe(1, tag=9)


@ranks(2)
def test_undelivered_messages_keep_their_order_after_the_connection_ends() -> None:
    assert_pair_works()
    if here().rank == 1:
        for text in ("first", "second"):
            objcomm.send(text, 0, tag=9)
        say("rank 1 has sent two")
        fall_out_of_step_with_a_collective()
        objcomm.send("third", 0, tag=9)
        say("rank 1 has sent three")
    else:
        with _slow_to_listen() as go_on:
            hear("rank 1 has sent two")
            fall_out_of_step_with_a_collective()
            wait_until(lambda: objcomm.iprobe(1, tag=9), "the first message")
            assert objcomm.iprobe(1, tag=8) is None  # listens to the new connection
            hear("rank 1 has sent three")
            time.sleep(0.1)  # time for the third to overtake the second, which it must not
            go_on.set()
            assert [objcomm.recv(1, tag=9) for _ in range(3)] == ["first", "second", "third"]
    assert_pair_works()
    assert_group_works()


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
def test_a_short_limit_tells_what_is_known_here() -> None:
    objcomm.barrier()
    if here().rank == 0:
        polls: dict[str, Callable[[], Any]] = {
            "recv": lambda: objcomm.recv(1, timeout=0.02),
            "probe": lambda: objcomm.probe(1, timeout=0.02),
        }
        for name, poll in polls.items():
            error = error_in(TransportTimeout, poll)
            assert (error.missing, error.seconds) == ((1,), 0.02)
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
    assert_pair_works()
    assert_group_works()


@pytest.mark.timed
@ranks(2)
@pytest.mark.parametrize(("limit_s", "longer_s"), [(0.02, 0.02), (0.2, 0.2), (0.5, 0.4)])
def test_a_limit_is_lengthened_by_itself_at_most(limit_s: float, longer_s: float) -> None:
    objcomm.barrier()
    polls = 10 if limit_s < 0.1 else 3
    if here().rank == 0:
        with within(polls * (limit_s + longer_s)):
            for _ in range(polls):
                error_in(TransportTimeout, lambda: objcomm.recv(1, timeout=limit_s))
    tell_all("over", "")


@pytest.mark.timed
@ranks(2)
def test_a_short_limit_of_what_waits_in_the_background_is_kept() -> None:
    objcomm.barrier()
    if here().rank == 0:
        with within(10 * 0.04):
            for _ in range(10):
                error_in(TransportTimeout, lambda: objcomm.irecv(timeout=0.02).wait())
    tell_all("over", "")
