"""Point-to-point messages: every object arrives, in order, at the right rank."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import objcomm
from objcomm import DesyncError, Envelope, TransportTimeout, UsageError
from tests.group.helpers import assert_group_works, error_in, hear, say, subgroup, tell_all
from tests.group.pairs import LARGE, assert_all_works, each_size, left, right, swap
from tests.group.watched import closely, patiently
from tests.ranks import OVER_GLOO, ranks, solo
from tests.same import assert_same
from tests.samples import make, names
from tests.waits import PATIENCE_S
from tests.workers import here, join


@ranks(1, 2)
def test_a_rank_sends_to_itself() -> None:
    own = here().rank
    for obj in (None, "small", LARGE, torch.ones(200_000)):
        objcomm.send(obj, own)
        objcomm.send("other", own, tag=3)
        assert objcomm.iprobe(own) == Envelope(own, own, 0, 0)
        assert objcomm.recv(own, tag=3) == "other"
        assert_same(objcomm.recv(own), obj)
        assert objcomm.iprobe(own, tag=None) is None
        for wait in (lambda: objcomm.recv(own), lambda: objcomm.mprobe(own)):
            assert "send it first" in str(error_in(UsageError, wait))


@ranks(1, 2)
def test_a_rank_receives_a_copy_of_what_it_sends_to_itself() -> None:
    own, obj = here().rank, [torch.zeros(3)]
    objcomm.send(obj, own)
    obj[0] += 1
    assert objcomm.recv(own)[0].tolist() == [0, 0, 0]
    work = objcomm.irecv(own, tag=None)
    assert not work.done()
    objcomm.isend("later", own, tag=8).wait()
    assert work.wait(PATIENCE_S) == "later"
    assert work.envelope == Envelope(own, own, 8, 0)


@solo()
def test_without_a_process_group_a_rank_sends_to_itself() -> None:
    objcomm.send({"a": 1}, 0)
    assert objcomm.recv() == {"a": 1}
    assert objcomm.sendrecv("x", 0, 0, tag=4) == "x"
    sending = objcomm.issend({"b": 2}, 0)
    found = objcomm.mprobe()
    assert objcomm.improbe() is None
    assert found.irecv().wait(PATIENCE_S) == {"b": 2}
    assert sending.wait(PATIENCE_S) is None
    calls = {name: counted.calls for name, counted in objcomm.stats().items()}
    assert calls == {"send": 2, "recv": 3, "issend": 1, "mprobe": 1}
    with pytest.raises(UsageError):
        objcomm.recv(timeout=0.1)
    with pytest.raises(UsageError):
        objcomm.probe()


@ranks(2)
def test_any_object_arrives() -> None:
    for name in names():
        if here().rank == 0:
            objcomm.send(make(name), 1)
        else:
            assert_same(objcomm.recv(0), make(name))


@ranks(2)
def test_any_size_arrives() -> None:
    for nbytes in (0, 1, 32_000, 32_768, 33_000, 40_000, 65_000, 66_000, 5_000_001, 64 << 20):
        sent = bytes([7]) * nbytes
        if here().rank == 0:
            objcomm.send(sent, 1)
            objcomm.send(np.frombuffer(sent, np.uint8), 1)
            objcomm.send(torch.frombuffer(bytearray(sent + b"."), dtype=torch.uint8), 1)
        else:
            assert objcomm.recv(0) == sent
            assert objcomm.recv(0).tobytes() == sent
            assert objcomm.recv(0).numel() == nbytes + 1


@ranks(2)
def test_a_tag_chooses_and_messages_of_one_tag_keep_their_order() -> None:
    if here().rank == 0:
        for number in range(30):
            objcomm.send((number, bytes(number * 900)), 1, tag=number % 3)
    else:
        for tag in (2, 0, 1):
            got = [objcomm.recv(0, tag=tag)[0] for _ in range(10)]
            assert got == list(range(tag, 30, 3))
        assert objcomm.iprobe(0, tag=None) is None


@ranks(2, 3, 4)
def test_a_rank_receives_from_any_rank_with_any_tag() -> None:
    others = range(1, here().world_size)
    if here().rank == 0:
        got = [objcomm.recv(tag=None) for _ in range(3 * len(others))]
        for rank in others:
            assert [tag for sender, tag in got if sender == rank] == [0, 1, 2]
            objcomm.send("go on", rank)
        for _ in others:
            found = objcomm.probe(tag=9)
            assert found.src == found.group_src
            assert found.nbytes > len(LARGE)
            assert objcomm.recv(found.src, tag=9)[0] == found.src
    else:
        for tag in range(3):
            objcomm.send((here().rank, tag), 0, tag=tag)
        assert objcomm.recv(0) == "go on"
        objcomm.send((here().rank, LARGE), 0, tag=9)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("nbytes", [10, 2_000_000])
def test_messages_go_around_a_ring(nbytes: int) -> None:
    obj = (here().rank, bytes(nbytes))
    for _ in range(here().world_size):
        obj = objcomm.sendrecv(obj, right(), left())
    assert obj[0] == here().rank
    got = objcomm.sendrecv(here().rank, right(), left(), tag=here().rank, recv_tag=left())
    assert got == left()


@ranks(3, 4, joined=False)
def test_two_ranks_need_no_other_rank() -> None:
    """This is the group's first use, and the other ranks are not in any objcomm call."""
    join(here(), "p2p")
    assert swap(here().rank) == (1 - here().rank if here().rank < 2 else None)
    tell_all("two have talked", "")
    assert_group_works()


@ranks(4)
def test_a_subgroup_has_its_own_ranks_and_messages() -> None:
    with subgroup(1, 3) as group:
        if here().rank in {1, 3}:
            mine = (1, 3).index(here().rank)
            other, peer = (3, 1)[mine], 1 - mine
            assert objcomm.irecv(other, tag=9, group=group).cancel()
            objcomm.send("world", other)
            objcomm.send("global", other, group=group)
            objcomm.send("group", group_dst=peer, group=group)
            found = objcomm.probe(other, group=group)
            assert found[:3] == (other, peer, 0)
            assert objcomm.recv(other, group=group) == "global"
            assert objcomm.recv(group_src=peer, group=group) == "group"
            assert objcomm.recv(other) == "world"
            got = objcomm.sendrecv(here().rank, group_dst=peer, group_src=peer, group=group)
            assert got == other
            objcomm.send("not for the cancelled receive", other, tag=9, group=group)
            obj, envelope = objcomm.recv(tag=None, group=group, with_envelope=True)
            assert obj == "not for the cancelled receive"
            assert envelope[:3] == (other, peer, 9)
            sending = objcomm.issend("synchronous", group_dst=peer, group=group)
            matched = objcomm.mprobe(other, tag=None, group=group)
            assert matched.envelope[:3] == (other, peer, 0)
            assert matched.recv() == "synchronous"
            sending.wait()
            works = [
                objcomm.isend(bytes(50_000 + tag), group_dst=peer, tag=tag, group=group)
                for tag in range(5)
            ]
            for tag in reversed(range(5)):
                assert len(objcomm.recv(tag=tag, group=group)) == 50_000 + tag
            objcomm.wait_all(works)
            for src in (0, 2):
                with pytest.raises(UsageError, match=f"recv: src={src} is not in this group"):
                    objcomm.recv(src, group=group)
            with pytest.raises(UsageError, match="send: group_dst=2 is not in this group of 2"):
                objcomm.send(1, group_dst=2, group=group)
        else:
            with pytest.raises(objcomm.NotInGroupError):
                objcomm.send(1, 1, group=group)
            with pytest.raises(objcomm.NotInGroupError):
                objcomm.recv(group=group)
        tell_all("subgroup", "")


@ranks(2)
def test_a_probe_describes_a_message_and_does_not_receive_it() -> None:
    if here().rank == 0:
        objcomm.reset_stats()
        assert objcomm.iprobe(1) is None
        objcomm.send("go", 1)
        found = objcomm.probe(1, tag=None)
        assert found == objcomm.iprobe(1, tag=None) == objcomm.probe(tag=5)
        assert found[:3] == (1, 1, 5)
        assert len(LARGE) < found.nbytes < len(LARGE) + 10_000
        assert objcomm.recv(tag=found.tag) == LARGE
        assert objcomm.recv(1) == "small"
        assert objcomm.iprobe(tag=None) is None
        assert "iprobe" not in objcomm.stats()
    else:
        assert objcomm.recv(0) == "go"
        objcomm.isend(LARGE, 0, tag=5).wait()
        objcomm.send("small", 0)
    objcomm.barrier()


@ranks(2)
@pytest.mark.parametrize("nbytes", [60_000, 300_000, 700_000, 1_400_000])
def test_a_rank_that_keeps_sending_learns_what_was_received(nbytes: int) -> None:
    """The sender may run ahead only as far as it knows what the receiver has taken."""
    for at in range(40):
        obj = bytes([at]) * nbytes
        if here().rank == 0:
            objcomm.send(obj, 1)
        else:
            assert objcomm.recv(0) == obj
        assert objcomm.broadcast(obj if here().rank == 0 else None, 0) == obj


# Synchronous sends complete when their message is received, and not before


def _completes_when_received(obj: Any) -> None:
    if here().rank == 1:
        work = objcomm.issend(obj, 0, tag=5)
        assert not work.done()
        objcomm.send("begun", 0)
        hear("rank 0 has looked")
        assert not work.done()
        say("rank 1 has looked")
        assert work.wait(PATIENCE_S) is None
        objcomm.ssend(obj, 0, tag=6)
    elif here().rank == 0:
        assert objcomm.recv(1) == "begun"
        assert objcomm.probe(1, tag=5).tag == 5  # it has arrived, and a probe does not receive it
        say("rank 0 has looked")
        hear("rank 1 has looked")
        assert objcomm.recv(1, tag=5) == obj
        assert objcomm.irecv(tag=6).wait() == obj
    assert_all_works()


@ranks(2, 3)
@each_size
def test_ssend_completes_when_its_message_is_received(obj: Any) -> None:
    _completes_when_received(obj)


@ranks(2, environment=OVER_GLOO)
def test_ssend_completes_when_its_message_is_received_over_gloo() -> None:
    _completes_when_received("small")


@ranks(1, 2)
def test_ssend_of_a_rank_to_itself_completes_when_the_rank_receives() -> None:
    own = here().rank
    receiving = objcomm.irecv(own)
    objcomm.ssend("wanted", own)
    assert receiving.wait() == "wanted"
    with pytest.raises(UsageError, match="start the receive first"):
        objcomm.ssend("unwanted", own)
    assert objcomm.iprobe(own) is None
    for is_found in (False, True):
        work = objcomm.issend("later", own)
        receive: Any = objcomm.mprobe(own).recv if is_found else partial(objcomm.recv, own)
        assert not work.done()
        assert receive() == "later"
        assert work.wait(PATIENCE_S) is None
    late: Any = objcomm.issend("too late", own, timeout=0.05)
    error_in(TransportTimeout, lambda: late.wait(PATIENCE_S))
    assert objcomm.recv(own) == "too late"


@ranks(2)
def test_hundreds_of_issends_complete_in_the_order_of_their_receives() -> None:
    count = 300
    if here().rank == 0:
        works = [objcomm.issend(number, 1, tag=number) for number in range(count)]
        assert objcomm.recv(1) == "one"
        works[-1].wait(PATIENCE_S)
        assert not any(work.done() for work in works[:-1])
        objcomm.send("the rest", 1, tag=count)
        objcomm.wait_all(works)
    else:
        assert objcomm.recv(0, tag=count - 1) == count - 1
        objcomm.send("one", 0)
        assert objcomm.recv(0, tag=count) == "the rest"
        assert [objcomm.recv(0, tag=tag) for tag in range(count - 1)] == list(range(count - 1))


@ranks(2)
@pytest.mark.parametrize("is_found", [False, True])
def test_a_message_whose_ssend_has_timed_out_may_still_be_received(*, is_found: bool) -> None:
    swap("met")
    if here().rank == 0:
        # Long enough for the message to be sent.
        error = error_in(TransportTimeout, lambda: objcomm.ssend("late", 1, timeout=3))
        assert (error.missing, error.seconds) == ((1,), 3)
        say("the timeout has expired")
        assert objcomm.recv(1) == "received"
    else:
        receive: Any = objcomm.mprobe(0).recv if is_found else partial(objcomm.recv, 0)
        hear("the timeout has expired")
        assert receive() == "late"
        objcomm.send("received", 0)
    assert_all_works()


@ranks(2)
def test_two_ranks_that_wait_for_each_others_receive_raise_and_lose_nothing() -> None:
    swap("met")
    work = objcomm.issend("both", right())
    objcomm.probe(left())  # a message not yet sent would be lost
    tell_all("both have arrived", "")
    with closely(), patiently():
        error: Any = error_in(DesyncError, work.wait)
    assert set(error.positions) == {0, 1}
    assert objcomm.recv(left()) == "both"
    assert_all_works()
