"""Matched probes whose message is never received, and their other failures."""

import gc
import os
import signal
from typing import Any
from unittest import mock

import pytest

import objcomm
from objcomm import (
    CollectiveError,
    DecodeError,
    DesyncError,
    TransportError,
    TransportTimeout,
    UsageError,
)
from objcomm._calls.group import resolve
from tests.group.helpers import (
    RefusesToArrive,
    RefusesToPickle,
    assert_group_works,
    error_in,
    hear,
    in_thread,
    say,
    subgroup,
    tell_all,
    when_main_thread_waits,
)
from tests.group.pairs import IDS, LARGE, OBJECTS, assert_pair_works, left, right
from tests.group.watched import closely, patiently
from tests.ranks import OVER_GLOO, ranks
from tests.waits import PATIENCE_S
from tests.workers import here

# Messages that are never received


@ranks(1, 2)
@pytest.mark.parametrize("obj", OBJECTS, ids=IDS)
def test_what_nobody_refers_to_goes_back_to_its_place(obj: Any) -> None:
    sending = objcomm.isend(obj, right())
    objcomm.isend("later", right()).wait()
    objcomm.barrier()
    found: Any = objcomm.mprobe(left())
    del found
    for find in (objcomm.iprobe, objcomm.probe):
        assert find(left()) is not None
    assert objcomm.recv(left()) == obj
    assert objcomm.recv(left()) == "later"
    objcomm.isend("in a circle", right()).wait()
    deadlock: Any = [objcomm.mprobe(left())]
    deadlock.append(deadlock)
    del deadlock
    gc.collect()
    assert objcomm.mprobe(left()).recv() == "in a circle"
    sending.wait()
    assert_group_works()


@ranks(2)
def test_a_dropped_message_wakes_a_waiting_receive() -> None:
    if here().rank == 0:
        found: Any = objcomm.mprobe(1)
        work = objcomm.irecv(1)
        waiting = in_thread(lambda: say("received", objcomm.recv(1, timeout=PATIENCE_S)))
        assert not work.done()
        del found
        assert work.wait(PATIENCE_S) == "first"
        objcomm.send("once more", 1)
        waiting.join()
        assert hear("received") == "second"
    else:
        objcomm.send("first", 0)
        assert objcomm.recv(0) == "once more"
        objcomm.send("second", 0)
    assert_pair_works()


@ranks(2)
def test_what_no_thread_can_take_in_goes_back() -> None:
    objcomm.send("kept", right())
    found = objcomm.mprobe(left())
    no_threads = RuntimeError("can't start new thread")
    with mock.patch("objcomm._transport.threads.SerialQueue.submit", side_effect=no_threads):
        work = found.irecv()
    with pytest.raises(RuntimeError, match="new thread"):
        work.wait(PATIENCE_S)
    assert objcomm.recv(left()) == "kept"
    assert_pair_works()


@ranks(2)
def test_what_was_received_keeps_nothing() -> None:
    objcomm.send("received", right())
    found = objcomm.mprobe(left())
    assert found.recv() == "received"
    kept = [each for each in gc.get_referents(found) if isinstance(each, list) and each]
    assert kept == []
    del found
    assert objcomm.iprobe(left()) is None


@ranks(2)
def test_a_forked_process_neither_receives_it_nor_gives_it_back() -> None:
    for obj in ("one", "two"):
        objcomm.send(obj, right())
    found: Any = [objcomm.mprobe(left()) for _ in range(2)]
    with mock.patch.object(resolve(None), "_forks", -1):
        with pytest.raises(UsageError, match="forked process"):
            found[0].recv()
        del found[1]
    assert objcomm.iprobe(left()) is None
    assert found[0].recv() == "one"
    assert_pair_works()
    assert_group_works()


# Failures


@ranks(2)
def test_errors_of_the_sender_and_the_receiver_come_with_the_receive() -> None:
    if here().rank == 0:
        bad = RefusesToPickle(ValueError("not this one"))
        error_in(CollectiveError, lambda: objcomm.send(bad, 1))
        objcomm.send(RefusesToArrive(1), 1)
        error_in(CollectiveError, lambda: objcomm.send(LARGE, 1))
    else:
        error_in(CollectiveError, objcomm.mprobe(0).recv)
        error_in(DecodeError, objcomm.mprobe(0).recv)
        refused = objcomm.mprobe(0)
        error_in(DecodeError, lambda: refused.recv(accept=["msgpack"]))
    assert_pair_works()
    assert_group_works()


@ranks(2)
def test_a_limit_and_an_interrupt_lose_nothing() -> None:
    assert_pair_works()
    if here().rank == 0:
        error = error_in(TransportTimeout, lambda: objcomm.mprobe(1, timeout=0.3))
        assert (error.operation, error.missing) == ("mprobe", (1,))
        when_main_thread_waits(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            objcomm.mprobe(1)
        say("interrupted")
        assert objcomm.mprobe(1).recv() == "late"
    else:
        hear("interrupted")
        objcomm.send("late", 0)
    assert_pair_works()
    assert_group_works()


@ranks(2)
def test_two_that_wait_for_each_other_hear_of_it_and_what_is_held_stays() -> None:
    assert_pair_works()
    objcomm.send("held", right())
    sending: Any = objcomm.isend(LARGE, right(), tag=1)
    whole, parted = objcomm.mprobe(left()), objcomm.mprobe(left(), tag=1)
    tell_all("both hold two", "")
    with closely(), patiently():
        error: Any = error_in(DesyncError, lambda: objcomm.mprobe(left(), tag=9))
    assert {each.operation for each in error.positions.values()} == {"mprobe"}
    assert whole.recv() == "held"
    error_in(DesyncError, parted.recv)  # not all of it had arrived
    error_in(DesyncError, sending.wait)
    assert_pair_works()
    assert_group_works()


@ranks(2)
def test_what_a_failed_block_has_sent_is_received_by_nobody() -> None:
    held: list[objcomm.Message] = []

    def fail() -> None:
        objcomm.send("of the block", right())
        held.extend(objcomm.mprobe(left()) for _ in range(1))
        tell_all("both hold it", "")
        if here().rank == 1:
            raise LookupError("of rank 1")
        objcomm.recv(left(), tag=9)

    assert_pair_works()
    with pytest.raises(CollectiveError, match="of rank 1"), objcomm.fail_together():
        fail()
    assert_pair_works()
    assert "of rank 1" in str(error_in(CollectiveError, held[0].recv))
    assert_pair_works()
    assert_group_works()


@ranks(2, expect_dead=[1], environment=OVER_GLOO)
def test_a_death_before_the_receive_over_gloo() -> None:
    _dies_before_the_receive()


@ranks(2, expect_dead=[1])
def test_a_death_before_the_receive() -> None:
    _dies_before_the_receive()


def _dies_before_the_receive() -> None:
    if here().rank == 1:
        for tag in (0, 2):
            objcomm.send("whole", 0, tag=tag)
        _ = [objcomm.isend(LARGE, 0, tag=tag) for tag in (1, 3)]
        hear("rank 0 holds all")
        os.kill(os.getpid(), signal.SIGKILL)
    found = [objcomm.mprobe(1, tag=tag) for tag in range(4)]
    say("rank 0 holds all")
    error_in(TransportError, lambda: objcomm.recv(1, tag=9))
    assert [found[0].recv(), found[2].irecv().wait()] == ["whole", "whole"]
    assert error_in(TransportError, found[1].recv).peers == (1,)
    assert error_in(TransportError, found[3].irecv().wait).peers == (1,)


@ranks(2, expect_dead=[1])
def test_a_death_ends_the_wait_for_a_message() -> None:
    assert_pair_works()
    if here().rank == 1:
        hear("rank 0 waits")
        os.kill(os.getpid(), signal.SIGKILL)
    when_main_thread_waits(lambda: say("rank 0 waits"))
    assert error_in(TransportError, lambda: objcomm.mprobe(1)).peers == (1,)
    with pytest.raises(objcomm.ObjcommError):
        objcomm.mprobe(1)


@ranks(2)
def test_after_the_groups_end_what_is_whole_is_received() -> None:
    with subgroup(0, 1) as group:
        objcomm.send("whole", right(), group=group)
        sending: Any = objcomm.isend(LARGE, right(), tag=1, group=group)
        whole, parted = (objcomm.mprobe(left(), tag=tag, group=group) for tag in (0, 1))
        objcomm.barrier(group=group)
    del group
    gc.collect()
    assert whole.recv() == "whole"
    for call in (parted.recv, sending.wait):
        assert "destroyed" in error_in(TransportError, call).reason
    assert_pair_works()
    assert_group_works()
