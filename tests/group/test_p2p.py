"""Point-to-point messages: every object arrives, in order, at the right rank."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import Envelope, UsageError
from tests.group.helpers import (
    assert_group_works,
    hear,
    say,
    subgroup,
    tell_all,
)
from tests.group.pairs import LARGE_NBYTES, left, right, swap
from tests.ranks import ranks, solo
from tests.same import assert_same
from tests.samples import make, names
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here


@ranks(1, 2)
def test_a_rank_sends_to_itself() -> None:
    mine = here().rank
    for obj in (None, "small", bytes(LARGE_NBYTES), torch.ones(200_000)):
        objcomm.send(obj, mine)
        objcomm.send("other", mine, tag=3)
        assert objcomm.iprobe(mine) == Envelope(mine, mine, 0, 0)
        assert objcomm.recv(mine, tag=3) == "other"
        assert_same(objcomm.recv(mine), obj)
        assert objcomm.iprobe(mine, tag=None) is None
        with pytest.raises(UsageError, match="send it first"):
            objcomm.recv(mine)


@ranks(1, 2)
def test_what_a_rank_sends_to_itself_is_a_copy() -> None:
    mine = [torch.zeros(3)]
    objcomm.send(mine, here().rank)
    mine[0] += 1
    assert objcomm.recv(here().rank)[0].tolist() == [0, 0, 0]
    work = objcomm.irecv(here().rank, tag=None)
    assert not work.done()
    objcomm.isend("later", here().rank, tag=8).wait()
    assert work.wait(PATIENCE_S) == "later"


@solo()
def test_a_world_that_is_not_initialised_is_a_rank_alone() -> None:
    objcomm.send({"a": 1}, 0)
    assert objcomm.recv() == {"a": 1}
    assert objcomm.sendrecv("x", 0, 0, tag=4) == "x"
    assert objcomm.stats()["send"].calls == 2
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
def test_from_any_rank_with_any_tag() -> None:
    size = here().world_size
    if here().rank == 0:
        got = [objcomm.recv(tag=None) for _ in range(3 * (size - 1))]
        for rank in range(1, size):
            assert [tag for sender, tag in got if sender == rank] == [0, 1, 2]
        for rank in range(1, size):
            objcomm.send("go on", rank)
        for _ in range(size - 1):
            found = objcomm.probe(tag=9)
            assert found.src == found.group_src
            assert found.nbytes > LARGE_NBYTES
            assert objcomm.recv(found.src, tag=9)[0] == found.src
    else:
        for tag in range(3):
            objcomm.send((here().rank, tag), 0, tag=tag)
        assert objcomm.recv(0) == "go on"
        objcomm.send((here().rank, bytes(LARGE_NBYTES)), 0, tag=9)


@ranks(2, 3)
def test_both_may_send_first() -> None:
    objcomm.barrier()
    peers = [rank for rank in range(here().world_size) if rank != here().rank]
    for peer in peers:
        objcomm.send(here().rank, peer, tag=4)
    assert [objcomm.recv(peer, tag=4) for peer in peers] == peers


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("nbytes", [10, 2_000_000])
def test_a_ring(nbytes: int) -> None:
    obj = (here().rank, bytes(nbytes))
    for _ in range(here().world_size):
        obj = objcomm.sendrecv(obj, right(), left())
    assert obj[0] == here().rank
    got = objcomm.sendrecv(here().rank, right(), left(), tag=here().rank, recv_tag=left())
    assert got == left()


@ranks(3, 4, joined=False)
def test_two_ranks_need_nobody_else() -> None:
    """This is the group's first use, and the other ranks are not in any objcomm call."""
    place = here()
    dist.init_process_group(
        "gloo", store=place.store("p2p"), rank=place.rank, world_size=place.world_size
    )
    assert swap(place.rank) == (1 - place.rank if place.rank < 2 else None)
    tell_all("two have talked", "")
    assert_group_works()


@ranks(4)
def test_a_subgroup_has_its_own_ranks_and_messages() -> None:
    with subgroup(1, 3) as group:
        if here().rank in {1, 3}:
            mine = (1, 3).index(here().rank)
            other = (3, 1)[mine]
            objcomm.send("world", other)
            objcomm.send("global", other, group=group)
            objcomm.send("group", group_dst=1 - mine, group=group)
            found = objcomm.probe(other, group=group)
            assert found[:3] == (other, 1 - mine, 0)
            assert objcomm.recv(other, group=group) == "global"
            assert objcomm.recv(group_src=1 - mine, group=group) == "group"
            assert objcomm.recv(other) == "world"
            assert (
                objcomm.sendrecv(here().rank, group_dst=1 - mine, group_src=1 - mine, group=group)
                == other
            )
            objcomm.send("any", other, group=group)
            assert objcomm.recv(group=group) == "any"
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
def test_a_probe_tells_and_takes_nothing() -> None:
    if here().rank == 0:
        assert objcomm.iprobe(1) is None
        objcomm.send("go", 1)
        found = objcomm.probe(1, tag=None)
        assert found == objcomm.iprobe(1, tag=None) == objcomm.probe(tag=5)
        assert found[:3] == (1, 1, 5)
        assert LARGE_NBYTES < found.nbytes < LARGE_NBYTES + 10_000
        assert len(objcomm.recv(tag=found.tag)) == LARGE_NBYTES
        assert objcomm.recv(1) == "small"
        assert objcomm.iprobe(tag=None) is None
    else:
        assert objcomm.recv(0) == "go"
        objcomm.isend(bytes(LARGE_NBYTES), 0, tag=5).wait()
        objcomm.send("small", 0)
    objcomm.barrier()


@ranks(2)
def test_a_loop_of_probes_sees_a_message_that_is_under_way() -> None:
    if here().rank == 0:
        objcomm.reset_stats()
        assert objcomm.iprobe(1) is None
        say("rank 0 has looked in vain")
        wait_until(lambda: objcomm.iprobe(1), "the message")
        assert "iprobe" not in objcomm.stats()
        assert objcomm.recv(1) == "here"
    else:
        hear("rank 0 has looked in vain")
        objcomm.send("here", 0)


@ranks(2)
@pytest.mark.parametrize("nbytes", [60_000, 300_000, 700_000, 1_400_000])
def test_a_rank_that_keeps_sending_learns_what_was_received(nbytes: int) -> None:
    """The sender may run ahead only as far as it knows what the receiver has taken."""
    for at in range(40):
        if here().rank == 0:
            objcomm.send(bytes([at]) * nbytes, 1)
        else:
            assert objcomm.recv(0) == bytes([at]) * nbytes
        got = objcomm.broadcast(bytes([at]) * nbytes if here().rank == 0 else None, 0)
        assert got == bytes([at]) * nbytes
