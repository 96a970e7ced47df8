"""Point-to-point messages: tags, keys, arguments and counts."""

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import objcomm
from objcomm import UsageError
from tests.group.pairs import LARGE_NBYTES, right, swap
from tests.ranks import ranks
from tests.workers import here


@ranks(2)
def test_the_extreme_tags_serve() -> None:
    for tag in (0, 1, 2**31, 2**32 - 1, np.int64(5)):
        assert swap(f"tag {tag}", tag=tag) == f"tag {tag}"


@ranks(2)
def test_it_is_counted_and_recorded() -> None:
    swap("the two meet")
    objcomm.reset_stats()
    swap(bytes(1000))
    stats = objcomm.stats()
    assert (stats["send"].calls, stats["recv"].calls) == (1, 1)
    assert stats["send"].sent_nbytes == stats["recv"].received_nbytes > 1000
    told = objcomm.recorder.dump(group=dist.group.WORLD)
    entries = told["groups"][0]["entries"][-2:]
    assert {entry["operation"] for entry in entries} == {"send", "recv"}
    assert {entry["root"] for entry in entries} == {1 - here().rank}, entries
    assert {entry["outcome"] for entry in entries} == {"returned"}


WRONG: dict[str, Any] = {
    "no receiver": lambda: objcomm.send(1),
    "two receivers": lambda: objcomm.send(1, 0, group_dst=0),
    "two senders": lambda: objcomm.recv(0, group_src=0),
    "no such rank": lambda: objcomm.send(1, 7),
    "a rank that is none": lambda: objcomm.recv(0.5),  # type: ignore[call-overload]
    "a negative tag": lambda: objcomm.send(1, 0, tag=-1),
    "too large a tag": lambda: objcomm.recv(0, tag=2**32),
    "a tag that is none": lambda: objcomm.recv(0, tag="a"),  # type: ignore[call-overload]
    "a tag that is a bool": lambda: objcomm.send(1, 0, tag=True),
    "any tag for a sender": lambda: objcomm.send(1, 0, tag=None),  # type: ignore[call-overload]
    "a limit of zero": lambda: objcomm.recv(0, timeout=0),
    "an unknown codec": lambda: objcomm.send(1, 0, codec="morse"),
    "no receiver of both": lambda: objcomm.sendrecv(1),
    "a device that is none for both": lambda: objcomm.sendrecv(1, 1, 1, device="cudaa"),
    "a tag that is none for both": lambda: objcomm.sendrecv(1, 1, 1, recv_tag=-1),
    "no such sender of both": lambda: objcomm.sendrecv(1, 1, 7),
    "a probe of no rank": lambda: objcomm.iprobe(-1),
}


def under_way() -> list[dict[str, Any]]:
    groups = objcomm.recorder.dump()["groups"]
    entries = [entry for group in groups for entry in group["entries"]]
    return [entry for entry in entries if entry["outcome"] == "under way"]


@ranks(2)
def test_wrong_arguments_are_told_before_anything_is_sent() -> None:
    before = under_way()
    for kind, call in WRONG.items():
        objcomm.reset_stats()
        if here().rank == 0:
            with pytest.raises(UsageError):
                call()
        assert under_way() == before, kind
        assert objcomm.stats() == {}, kind
        assert swap(kind) == kind


@ranks(2, disposable=True)
def test_messages_are_signed() -> None:
    objcomm.configure(key="a key of more than sixteen bytes", everywhere=True)
    for nbytes in (10, LARGE_NBYTES):
        assert swap(bytes(nbytes)) == bytes(nbytes)
    objcomm.send("self", here().rank)
    assert objcomm.recv(here().rank) == "self"
    works = [objcomm.irecv(tag=tag) for tag in range(5)]
    objcomm.wait_all([objcomm.isend(tag, right(), tag=tag) for tag in range(5)])
    assert objcomm.wait_all(works) == list(range(5))


@ranks(2, disposable=True)
def test_a_key_can_hold_in_a_block() -> None:
    with objcomm.configure(key="a key of more than sixteen bytes"):
        assert swap("signed") == "signed"
        assert swap(bytes(LARGE_NBYTES)) == bytes(LARGE_NBYTES)


@ranks(2, disposable=True)
def test_ranks_with_different_keys_cannot_exchange_messages() -> None:
    objcomm.configure(key=f"rank {here().rank} has this key alone", everywhere=True)
    with pytest.raises(objcomm.ObjcommError):
        swap("not believed", timeout=10.0)
