"""Point-to-point messages: tags, envelopes, keys, arguments and counts."""

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, DecodeError, UsageError
from tests.group.helpers import RefusesToArrive, RefusesToPickle, assert_group_works, error_in
from tests.group.pairs import LARGE, assert_pair_works, left, right, swap, under_way
from tests.ranks import ranks
from tests.workers import here


@ranks(2)
def test_extreme_tags_can_be_used() -> None:
    for tag in (0, 1, 2**31, 2**32 - 1, np.int64(5)):
        assert swap(f"tag {tag}", tag=tag) == f"tag {tag}"


@ranks(2)
def test_messages_are_counted_and_recorded() -> None:
    swap("the two meet")
    objcomm.reset_stats()
    swap(bytes(1000))
    stats = objcomm.stats()
    assert (stats["send"].calls, stats["recv"].calls) == (1, 1)
    assert stats["send"].sent_nbytes == stats["recv"].received_nbytes > 1000
    (world,) = objcomm.recorder.dump(group=dist.group.WORLD)["groups"]
    entries = [(each["operation"], each["root"], each["outcome"]) for each in world["entries"][-2:]]
    assert sorted(entries) == [(name, 1 - here().rank, "returned") for name in ("recv", "send")]


WRONG: dict[str, Any] = {
    "no receiver": lambda: objcomm.send(1),
    "two receivers": lambda: objcomm.send(1, 0, group_dst=0),
    "two senders": lambda: objcomm.recv(0, group_src=0),
    "no such rank": lambda: objcomm.send(1, 7),
    "a fraction as rank": lambda: objcomm.recv(0.5),  # type: ignore[call-overload]  # wrong on purpose
    "a negative tag": lambda: objcomm.send(1, 0, tag=-1),
    "too large a tag": lambda: objcomm.recv(0, tag=2**32),
    "a text as tag": lambda: objcomm.recv(0, tag="a"),  # type: ignore[call-overload]  # wrong on purpose
    "a bool as tag": lambda: objcomm.send(1, 0, tag=True),
    "any tag for a sender": lambda: objcomm.send(1, 0, tag=None),  # type: ignore[call-overload]  # wrong on purpose
    "a timeout of zero": lambda: objcomm.recv(0, timeout=0),
    "an unknown codec": lambda: objcomm.send(1, 0, codec="morse"),
    "sendrecv without a receiver": lambda: objcomm.sendrecv(1),
    "sendrecv to an unknown device": lambda: objcomm.sendrecv(1, 1, 1, device="cudaa"),
    "sendrecv with a negative tag": lambda: objcomm.sendrecv(1, 1, 1, recv_tag=-1),
    "sendrecv from no such rank": lambda: objcomm.sendrecv(1, 1, 7),
    "a probe of no rank": lambda: objcomm.iprobe(-1),
}


@ranks(2)
def test_wrong_arguments_are_reported_before_anything_is_sent() -> None:
    before = under_way()
    for kind, call in WRONG.items():
        objcomm.reset_stats()
        if here().rank == 0:
            with pytest.raises(UsageError):
                call()
        assert under_way() == before, kind
        assert objcomm.stats() == {}, kind
        assert swap(kind) == kind


# Envelopes


@ranks(1, 2, 3)
def test_an_envelope_names_the_sender_of_a_receive_from_any_rank() -> None:
    sending = objcomm.isend("small", right(), tag=7)  # ``send`` would wait for the ranks to connect
    obj, envelope = objcomm.recv(tag=None, with_envelope=True)
    assert (obj, envelope[:3]) == ("small", (left(), left(), 7))
    sending.wait()
    sending = objcomm.isend(LARGE, right(), tag=8)
    found = objcomm.probe(tag=None)
    got: Any = objcomm.recv(with_envelope=True, tag=8, async_op=True).wait()
    assert got == (LARGE, found)
    sending.wait()
    rank = here().rank
    got = objcomm.sendrecv(rank, right(), recv_tag=None, tag=rank, with_envelope=True)
    assert (got[0], got[1][:3]) == (left(), (left(), left(), left()))
    assert objcomm.sendrecv("plain", right(), left(), recv_tag=None, tag=5) == "plain"
    assert_group_works()


@ranks(2, 3)
def test_a_work_has_the_envelope_of_what_it_received() -> None:
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


@ranks(2)
def test_a_work_has_an_envelope_even_if_the_object_cannot_be_rebuilt() -> None:
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


# Keys


@ranks(2, disposable=True)
@pytest.mark.parametrize("everywhere", [False, True])
def test_messages_are_signed_with_a_key(*, everywhere: bool) -> None:
    with objcomm.configure(key="a key of more than sixteen bytes", everywhere=everywhere):
        for obj in ("small", bytes(300_000), LARGE):  # the second is sent in one piece
            assert swap(obj) == obj
        objcomm.send("self", here().rank)
        assert objcomm.recv(here().rank) == "self"
        receiving = [objcomm.irecv(tag=tag) for tag in range(5)]
        objcomm.wait_all([objcomm.isend(tag, right(), tag=tag) for tag in range(5)])
        assert objcomm.wait_all(receiving) == list(range(5))
        sending = [objcomm.issend(obj, right(), tag=len(obj)) for obj in ("small", LARGE)]
        for obj in (LARGE, "small"):
            assert objcomm.recv(left(), tag=len(obj)) == obj
        objcomm.wait_all(sending)


@ranks(2, disposable=True)
def test_ranks_with_different_keys_cannot_exchange_messages() -> None:
    objcomm.configure(key=f"rank {here().rank} has this key alone", everywhere=True)
    with pytest.raises(objcomm.ObjcommError):
        swap("refused", timeout=10.0)
