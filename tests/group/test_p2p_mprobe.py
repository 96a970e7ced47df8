"""Matched probes: a message is taken out for one receiver, and received later or never."""

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, DecodeError, DesyncError, TransportError, UsageError
from objcomm._calls.group import resolve
from objcomm._p2p.peer import peers_of
from tests.group.helpers import error_in, hear, in_thread, say, subgroup, tell_all
from tests.group.pairs import LARGE, assert_all_works, die, each_size, improbed, left, right
from tests.group.watched import closely, patiently
from tests.ranks import OVER_GLOO, ranks
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here

FINDS: dict[str, Callable[..., objcomm.Message]] = {"mprobe": objcomm.mprobe, "improbe": improbed}

# Messages that are taken out


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", FINDS)
@pytest.mark.parametrize("is_any", [False, True])
@each_size
def test_a_held_message_is_found_by_no_other_call_and_received_once(
    name: str, obj: Any, *, is_any: bool
) -> None:
    src, tag = (None, None) if is_any else (left(), 5)
    sending = objcomm.isend(obj, right(), tag=5)
    found = FINDS[name](src, tag=tag)
    assert found.envelope[:3] == (left(), left(), 5)
    assert (found.envelope.nbytes > len(obj)) == (here().world_size > 1)
    assert "not received" in repr(found)
    assert objcomm.iprobe(tag=None) is None
    assert objcomm.improbe(tag=None) is None
    assert found.recv() == obj
    sending.wait()
    assert Path(__file__).name in repr(found)
    with pytest.raises(UsageError, match=r"received already at .*test_p2p_mprobe\.py"):
        found.recv()
    with pytest.raises(UsageError, match="received already"):
        found.irecv()


@ranks(2)
@pytest.mark.parametrize("is_async", [False, True])
def test_held_messages_are_received_in_any_order(*, is_async: bool) -> None:
    sent = [("a", 1), ("b", LARGE), ("c", 3), ("d", LARGE)]
    if here().rank == 0:
        works = [objcomm.isend(obj, 1) for obj in sent]
        objcomm.send("behind them", 1, tag=1)
        objcomm.wait_all(works)
    else:
        assert objcomm.recv(0, tag=1) == "behind them"
        found = [objcomm.mprobe(0) for _ in sent][::-1]
        assert objcomm.improbe(0) is None
        if is_async:
            receiving = [each.irecv() for each in found]
            assert not any(work.cancel() for work in receiving)
            assert objcomm.wait_all(receiving) == sent[::-1]
            assert [work.envelope for work in receiving] == [each.envelope for each in found]
        else:
            assert [each.recv() for each in found] == sent[::-1]


@ranks(2)
def test_calls_that_wait_get_messages_in_the_order_in_which_they_began() -> None:
    if here().rank == 0:
        works = [objcomm.irecv(1, tag=tag) for tag in (None, 3)]
        say("two wait")
        found = objcomm.mprobe(1, tag=3)
        assert [work.wait(PATIENCE_S) for work in works] == ["first", "second"]
        assert found.recv() == "third"
    else:
        hear("two wait")
        for name in ("first", "second", "third"):
            objcomm.send(name, 0, tag=3)


@ranks(2)
def test_a_held_message_is_received_with_the_options_of_a_receive() -> None:
    for obj in ("pickled", torch.ones(3), "kept"):
        objcomm.send(obj, right())
    refused, placed, kept = (objcomm.mprobe(left()) for _ in range(3))
    error_in(DecodeError, lambda: refused.recv(accept=["msgpack"]))
    with pytest.raises(UsageError, match="received already"):  # as after a refused ``recv``
        refused.recv()
    assert placed.recv(device="meta").device.type == "meta"
    wrong: dict[str, Any]
    for wrong in ({"timeout": -1}, {"allow": [3]}, {"device": "no device"}):
        with pytest.raises(UsageError):
            kept.recv(**wrong)
    assert kept.recv(timeout=1, accept=["pickle"], allow=[]) == "kept"
    assert_all_works()


@ranks(2, environment=OVER_GLOO)
def test_matched_probes_work_over_gloo_and_with_a_key() -> None:
    with objcomm.configure(key="a key of more than sixteen bytes"), subgroup(0, 1) as group:
        works = [objcomm.issend(obj, right(), tag=len(obj), group=group) for obj in ("a", LARGE)]
        for obj in (LARGE, "a"):
            assert objcomm.mprobe(left(), tag=len(obj), group=group).recv() == obj
        objcomm.wait_all(works)
        dist.barrier(group)


# Senders


@ranks(2)
@each_size
@pytest.mark.parametrize("send", [objcomm.ssend, objcomm.send], ids=["ssend", "send"])
def test_a_sender_that_waits_for_the_receive_keeps_waiting(send: Any, obj: Any) -> None:
    assert_all_works()
    if here().rank == 1:
        sending = in_thread(lambda: send(obj, 0, tag=5))
        hear("rank 0 has found it")
        waits = send is objcomm.ssend or obj is LARGE
        assert sending.is_alive() or not waits
        say("rank 1 has looked")
        sending.join()
    else:
        found = objcomm.mprobe(1, tag=5)
        say("rank 0 has found it")
        hear("rank 1 has looked")
        assert found.recv() == obj


@ranks(2)
def test_ssend_of_a_rank_to_itself_completes_when_a_thread_receives() -> None:
    got: list[Any] = []
    waiting = in_thread(lambda: got.append(objcomm.mprobe(tag=6).recv()))
    box = peers_of(resolve(None)).mailbox
    wait_until(lambda: box.is_wanted(here().rank, 6), "the other thread")
    objcomm.ssend("to the thread", here().rank, tag=6)
    waiting.join()
    assert got == ["to the thread"]


# Threads


@ranks(2, 3)
@pytest.mark.parametrize("name", FINDS)
def test_each_thread_receives_the_message_that_it_has_found(name: str) -> None:
    """With ``probe`` and then ``recv``, another thread could take the message in between."""
    each_sends = 60
    if here().rank == 0:

        def take(_: int) -> None:
            found = FINDS[name](tag=None)
            assert found.recv()[:2] == (found.envelope.src, found.envelope.tag)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(take, range(each_sends * (here().world_size - 1))))
        assert objcomm.iprobe(tag=None) is None
    else:
        objs = [(here().rank, number, bytes(number % 2 * 50_000)) for number in range(each_sends)]
        objcomm.wait_all([objcomm.isend(obj, 0, tag=obj[1]) for obj in objs])


@ranks(2)
@each_size
def test_of_several_threads_one_receives_a_held_message(obj: Any) -> None:
    sending = objcomm.isend(obj, right())
    found = objcomm.mprobe(left())
    start = threading.Barrier(4)

    def receive(_: int) -> Any:
        start.wait(PATIENCE_S)
        try:
            return found.recv()
        except UsageError:
            return None

    with ThreadPoolExecutor(4) as pool:
        assert [each for each in pool.map(receive, range(4)) if each is not None] == [obj]
    sending.wait()


# Messages that are never received


@ranks(1, 2)
@each_size
def test_a_message_that_is_dropped_returns_to_its_place(obj: Any) -> None:
    sending = objcomm.isend(obj, right())
    objcomm.isend("later", right()).wait()
    objcomm.barrier()
    found: Any = objcomm.mprobe(left())
    del found
    for find in (objcomm.iprobe, objcomm.probe):
        assert find(left()) is not None
    assert objcomm.recv(left()) == obj
    assert objcomm.recv(left()) == "later"
    objcomm.isend("in a cycle", right()).wait()
    cycle: Any = [objcomm.mprobe(left())]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert objcomm.mprobe(left()).recv() == "in a cycle"
    sending.wait()
    assert_all_works()


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
    assert_all_works()


@ranks(2)
def test_a_message_that_no_thread_can_receive_returns_to_its_place() -> None:
    objcomm.send("kept", right())
    found = objcomm.mprobe(left())
    no_threads = RuntimeError("can't start new thread")
    with mock.patch("objcomm._transport.threads.SerialQueue.submit", side_effect=no_threads):
        work = found.irecv()
    with pytest.raises(RuntimeError, match="new thread"):
        work.wait(PATIENCE_S)
    assert objcomm.recv(left()) == "kept"
    assert_all_works()


@ranks(2)
def test_a_received_message_keeps_nothing() -> None:
    objcomm.send("received", right())
    found = objcomm.mprobe(left())
    assert found.recv() == "received"
    kept = [each for each in gc.get_referents(found) if isinstance(each, list) and each]
    assert kept == []
    del found
    assert objcomm.iprobe(left()) is None


@ranks(2)
def test_a_forked_process_neither_receives_a_held_message_nor_returns_it() -> None:
    for obj in ("one", "two"):
        objcomm.send(obj, right())
    found: Any = [objcomm.mprobe(left()) for _ in range(2)]
    with mock.patch.object(resolve(None), "_forks", -1):
        with pytest.raises(UsageError, match="forked process"):
            found[0].recv()
        del found[1]
    assert objcomm.iprobe(left()) is None
    assert found[0].recv() == "one"
    assert_all_works()


# Failures


@ranks(2)
def test_a_desync_loses_no_held_message_that_had_arrived() -> None:
    assert_all_works()
    objcomm.send("held", right())
    sending: Any = objcomm.isend(LARGE, right(), tag=1)
    whole, partial = objcomm.mprobe(left()), objcomm.mprobe(left(), tag=1)
    tell_all("both hold two", "")
    with closely(), patiently():
        error: Any = error_in(DesyncError, lambda: objcomm.mprobe(left(), tag=9))
    assert {each.operation for each in error.positions.values()} == {"mprobe"}
    assert whole.recv() == "held"
    error_in(DesyncError, partial.recv)  # not all of it had arrived
    error_in(DesyncError, sending.wait)
    assert_all_works()


@ranks(2)
def test_a_message_sent_in_a_failed_block_cannot_be_received() -> None:
    held: list[objcomm.Message] = []

    def fail() -> None:
        objcomm.send("of the block", right())
        held.append(objcomm.mprobe(left()))
        tell_all("both hold it", "")
        if here().rank == 1:
            raise LookupError("of rank 1")
        objcomm.recv(left(), tag=9)

    assert_all_works()
    with pytest.raises(CollectiveError, match="of rank 1"), objcomm.fail_together():
        fail()
    assert_all_works()
    assert "of rank 1" in str(error_in(CollectiveError, held[0].recv))
    assert_all_works()


def _check_death_before_the_receive() -> None:
    if here().rank == 1:
        for tag in (0, 2):
            objcomm.send("whole", 0, tag=tag)
        _ = [objcomm.isend(LARGE, 0, tag=tag) for tag in (1, 3)]
        hear("rank 0 holds all")
        die()
    found = [objcomm.mprobe(1, tag=tag) for tag in range(4)]
    say("rank 0 holds all")
    error_in(TransportError, lambda: objcomm.recv(1, tag=9))
    assert [found[0].recv(), found[2].irecv().wait()] == ["whole", "whole"]
    assert error_in(TransportError, found[1].recv).peers == (1,)
    assert error_in(TransportError, found[3].irecv().wait).peers == (1,)


@ranks(2, expect_dead=[1])
def test_after_a_death_held_messages_that_had_arrived_are_received() -> None:
    _check_death_before_the_receive()


@ranks(2, expect_dead=[1], environment=OVER_GLOO)
def test_after_a_death_held_messages_that_had_arrived_are_received_over_gloo() -> None:
    _check_death_before_the_receive()


@ranks(2)
def test_held_messages_that_have_arrived_outlive_their_group() -> None:
    with subgroup(0, 1) as group:
        objcomm.send("whole", right(), group=group)
        sending: Any = objcomm.isend(LARGE, right(), tag=1, group=group)
        whole, partial = (objcomm.mprobe(left(), tag=tag, group=group) for tag in (0, 1))
        objcomm.barrier(group=group)
    del group
    gc.collect()
    assert whole.recv() == "whole"
    for call in (partial.recv, sending.wait):
        assert "destroyed" in error_in(TransportError, call).reason
    assert_all_works()
