"""Envelopes: the sender, tag and length that a receive reports."""

from typing import Any

import pytest

import objcomm
from objcomm import CollectiveError, DecodeError, Envelope, UsageError
from tests.group.helpers import (
    RefusesToArrive,
    RefusesToPickle,
    assert_group_works,
    error_in,
    subgroup,
    tell_all,
)
from tests.group.pairs import LARGE, assert_pair_works, left, right
from tests.ranks import ranks
from tests.waits import PATIENCE_S
from tests.workers import here


@ranks(1, 2, 3)
def test_a_receive_from_any_rank_tells_who_sent() -> None:
    sending = objcomm.isend("small", right(), tag=7)  # ``send`` would wait for the ranks to connect
    obj, envelope = objcomm.recv(tag=None, with_envelope=True)
    assert (obj, envelope[:3]) == ("small", (left(), left(), 7))
    sending.wait()
    sending = objcomm.isend(LARGE, right(), tag=8)
    found = objcomm.probe(tag=None)
    got: Any = objcomm.recv(with_envelope=True, tag=8, async_op=True).wait()
    assert got == (LARGE, found)
    sending.wait()


@ranks(2, 3)
def test_a_work_tells_who_sent_what_it_has_received() -> None:
    works = [objcomm.irecv(tag=tag) for tag in (3, 4)]
    with pytest.raises(UsageError, match="still running"):
        _ = works[0].envelope
    objcomm.barrier()
    sending = [objcomm.isend(LARGE, right(), tag=4), objcomm.isend("small", right(), tag=3)]
    assert objcomm.wait_all(works) == ["small", LARGE]
    assert [work.envelope[:3] for work in works] == [(left(), left(), tag) for tag in (3, 4)]
    assert works[1].envelope.nbytes > len(LARGE)
    objcomm.wait_all(sending)
    for work in (sending[0], objcomm.all_gather(1, async_op=True)):
        work.wait()
        with pytest.raises(UsageError, match="received no message"):
            _ = work.envelope


@ranks(1, 2, 3)
def test_sendrecv_takes_any_tag_and_tells_which() -> None:
    rank = here().rank
    got: Any = objcomm.sendrecv(rank, right(), recv_tag=None, tag=rank, with_envelope=True)
    obj, envelope = got
    assert (obj, envelope[:3]) == (left(), (left(), left(), left()))
    assert objcomm.sendrecv("plain", right(), left(), recv_tag=None, tag=5) == "plain"
    with pytest.raises(UsageError, match="tag="):
        objcomm.sendrecv("x", right(), recv_tag="other")  # type: ignore[arg-type]
    assert_group_works()


@ranks(4)
def test_in_a_subgroup_both_numbers_are_told() -> None:
    with subgroup(1, 3) as group:
        if here().rank == 3:
            objcomm.send("text", 1, tag=9, group=group)
        elif here().rank == 1:
            obj, envelope = objcomm.recv(tag=None, group=group, with_envelope=True)
            assert (obj, envelope.src, envelope.group_src, envelope.tag) == ("text", 3, 1, 9)
        tell_all("subgroup", "")


@ranks(1, 2)
def test_a_message_of_ones_own_has_no_length() -> None:
    own = here().rank
    work = objcomm.irecv(own, tag=None)
    objcomm.send("mine", own, tag=2)
    assert work.wait(PATIENCE_S) == "mine"
    assert work.envelope == Envelope(own, own, 2, 0)


@ranks(2)
def test_the_envelope_is_set_even_if_the_object_cannot_be_rebuilt() -> None:
    if here().rank == 0:
        objcomm.send(RefusesToArrive(1), 1, tag=4)
        error_in(CollectiveError, lambda: objcomm.send(RefusesToPickle(ValueError("no")), 1, tag=5))
    else:
        for tag, error in ((4, DecodeError), (5, CollectiveError)):
            work: Any = objcomm.irecv(tag=tag)
            error_in(error, work.wait)
            assert work.envelope[:3] == (0, 0, tag)
        late: Any = objcomm.irecv(0, timeout=0.05)
        error_in(objcomm.TransportTimeout, late.wait)
        with pytest.raises(UsageError, match="received no message"):
            _ = late.envelope
    assert_pair_works()
