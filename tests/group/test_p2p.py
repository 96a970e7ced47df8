"""Messages from rank to rank, on real ranks: what is sent arrives, in order, whoever waits how."""

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import Envelope, UsageError
from tests.group.helpers import assert_group_works, subgroup, tell_all
from tests.ranks import ranks, solo
from tests.same import assert_same
from tests.samples import make, names
from tests.workers import here

LARGE_NBYTES = 300_000


def left() -> int:
    return (here().rank - 1) % here().world_size


def right() -> int:
    return (here().rank + 1) % here().world_size


def swap(obj: Any, **options: Any) -> Any:
    """Between ranks 0 and 1; the others do nothing."""
    if here().rank < 2:
        return objcomm.sendrecv(obj, 1 - here().rank, 1 - here().rank, **options)
    return None


@ranks(1, 2)
@pytest.mark.parametrize("obj", [None, "small", bytes(LARGE_NBYTES), torch.ones(200_000)])
def test_a_rank_sends_to_itself(obj: Any) -> None:
    mine = here().rank
    objcomm.send(obj, mine)
    objcomm.send("other", mine, tag=3)
    assert objcomm.iprobe(mine) == Envelope(mine, mine, 0, 0)
    assert objcomm.recv(mine, tag=3) == "other"
    assert_same(objcomm.recv(), obj)
    assert objcomm.iprobe(tag=None) is None
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
    assert work.wait(20) == "later"


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
@pytest.mark.parametrize(
    "nbytes", [0, 1, 32_000, 32_768, 33_000, 40_000, 65_000, 66_000, 5_000_001, 64 << 20]
)
def test_any_size_arrives(nbytes: int) -> None:
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


@ranks(2)
def test_the_extreme_tags_serve() -> None:
    for tag in (0, 1, 2**31, 2**32 - 1, np.int64(5)):
        assert swap(f"tag {tag}", tag=tag) == f"tag {tag}"


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


@ranks(2, 3)
def test_many_in_flight_are_waited_for_in_any_order() -> None:
    receiving = [objcomm.irecv(left(), tag=tag) for tag in range(25)]
    sizes = [(tag * 7919) % 90_000 for tag in range(25)]
    order = random.Random(here().rank).sample(range(25), 25)
    sending = [objcomm.isend((tag, bytes(sizes[tag])), right(), tag=tag) for tag in order]
    for tag in random.Random(5).sample(range(25), 25):
        got = receiving[tag].wait()
        assert (got[0], len(got[1])) == (tag, sizes[tag])
    objcomm.wait_all(sending)
    for work in objcomm.as_completed(sending):
        assert work.result() is None


@ranks(2)
def test_receives_of_one_tag_are_served_in_the_order_in_which_they_began() -> None:
    if here().rank == 0:
        works = [objcomm.irecv(1) for _ in range(20)]
        assert objcomm.wait_all(works[::-1]) == list(range(20))[::-1]
    else:
        objcomm.wait_all([objcomm.isend(number, 0) for number in range(20)])


@ranks(2)
def test_threads_have_tags_of_their_own() -> None:
    def talk(tag: int) -> list[int]:
        got = []
        for turn in range(15):
            sent = (tag, turn, bytes(tag * turn * 500))
            back = objcomm.sendrecv(sent, right(), left(), tag=tag)
            got.append(back[1] if back[0] == tag else -1)
        return got

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(talk, range(8))) == [list(range(15))] * 8
    assert_group_works()


@ranks(2)
def test_many_threads_send_and_one_receives_all() -> None:
    if here().rank == 0:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda number: objcomm.send((number, bytes(50_000)), 1), range(60)))
    else:
        assert sorted(objcomm.recv(0)[0] for _ in range(60)) == list(range(60))


@ranks(3, 4, joined=False)
def test_two_ranks_need_nobody_else() -> None:
    """The very first use of the group, while the others are not in any call of objcomm."""
    place = here()
    dist.init_process_group(
        "gloo", store=place.store("p2p"), rank=place.rank, world_size=place.world_size
    )
    assert swap(place.rank) == (1 - place.rank if place.rank < 2 else None)
    tell_all("two have talked", "")
    assert_group_works()


@ranks(2, 3)
def test_messages_go_between_collectives_in_flight() -> None:
    works: list[Any] = []
    for turn in range(10):
        works.append(objcomm.all_gather((here().rank, turn), async_op=True))
        sending = objcomm.isend(bytes(turn * 10_000), right(), tag=turn)
        assert len(objcomm.recv(left(), tag=turn)) == turn * 10_000
        works.append(objcomm.broadcast(turn, async_op=True))
        sending.wait()
    for turn in range(10):
        assert works[2 * turn].wait() == [(each, turn) for each in range(here().world_size)]
        assert works[2 * turn + 1].wait() == turn


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
                with pytest.raises(UsageError, match="not in this group"):
                    objcomm.recv(src, group=group)
            with pytest.raises(UsageError, match="no rank 2"):
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
        until = time.monotonic() + 15
        while objcomm.iprobe(1) is None:
            assert time.monotonic() < until
            time.sleep(0.001)
        assert "iprobe" not in objcomm.stats()
        assert objcomm.recv(1) == "here"
    else:
        time.sleep(0.3)
        objcomm.send("here", 0)


@ranks(2)
def test_messages_can_be_awaited() -> None:
    async def talk() -> list[Any]:
        receiving = [objcomm.recv(left(), tag=tag, async_op=True) for tag in range(5)]
        for tag in range(5):
            await objcomm.send(tag * "x", right(), tag=tag, async_op=True)
        return [await each for each in receiving]

    assert asyncio.run(talk()) == ["x" * tag for tag in range(5)]


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


@ranks(2)
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_are_told_before_anything_is_sent(kind: str) -> None:
    objcomm.reset_stats()
    if here().rank == 0:
        with pytest.raises(UsageError):
            WRONG[kind]()
    under_way = [
        entry
        for group in objcomm.recorder.dump()["groups"]
        for entry in group["entries"]
        if entry["outcome"] == "under way"
    ]
    assert under_way == []
    assert objcomm.stats() == {}
    assert swap("works") == "works"


@ranks(2)
def test_a_sender_waits_when_nobody_asks_for_its_messages() -> None:
    """A rank keeps 64 MiB of another's small messages at most."""
    count = 3000
    if here().rank == 0:
        for number in range(count):
            objcomm.send((number, bytes(30_000)), 1, tag=1)
        objcomm.send("done", 1, tag=2)
    else:
        time.sleep(1.0)
        for number in range(count):
            assert objcomm.recv(0, tag=1)[0] == number
        assert objcomm.recv(0, tag=2) == "done"


@ranks(2)
def test_a_receive_of_another_tag_takes_more_in_than_is_kept() -> None:
    if here().rank == 0:
        for number in range(2500):
            objcomm.send((number, bytes(30_000)), 1, tag=1)
        objcomm.send("urgent", 1, tag=2)
    else:
        assert objcomm.recv(0, tag=2) == "urgent"
        assert [objcomm.recv(0, tag=1)[0] for _ in range(2500)] == list(range(2500))


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
def test_another_key_is_no_key() -> None:
    objcomm.configure(key=f"rank {here().rank} has this key alone", everywhere=True)
    with pytest.raises(objcomm.ObjcommError):
        swap("not believed", timeout=10.0)


@ranks(2)
def test_the_callback_of_a_collective_may_send() -> None:
    """A pair's messages are no part of the calls that the group makes in turn."""

    def add(a: int, b: int) -> int:
        objcomm.send(a + b, here().rank, tag=6)
        return a + b

    assert objcomm.all_reduce(1, add) == 2
    if objcomm.iprobe(here().rank, tag=6):
        assert objcomm.recv(here().rank, tag=6) == 2


@ranks(2)
def test_main_thread_and_background_thread_receive_side_by_side() -> None:
    got: list[Any] = []
    if here().rank == 0:
        thread = threading.Thread(target=lambda: got.append(objcomm.recv(1, tag=1)))
        thread.start()
        assert objcomm.recv(1, tag=2) == "main"
        thread.join()
        assert got == ["background"]
    else:
        objcomm.send("main", 0, tag=2)
        objcomm.send("background", 0, tag=1)
