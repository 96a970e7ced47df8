"""Many messages at a time: outstanding, from several threads, and beside collectives."""

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import objcomm
from objcomm._p2p import mailbox
from tests.group.helpers import (
    assert_group_works,
    hear,
    say,
    when_main_thread_waits,
)
from tests.group.pairs import left, right
from tests.ranks import ranks
from tests.workers import here


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


@ranks(2)
def test_messages_can_be_awaited() -> None:
    async def talk() -> list[Any]:
        receiving = [objcomm.recv(left(), tag=tag, async_op=True) for tag in range(5)]
        for tag in range(5):
            await objcomm.send(tag * "x", right(), tag=tag, async_op=True)
        return [await each for each in receiving]

    assert asyncio.run(talk()) == ["x" * tag for tag in range(5)]


@ranks(2)
def test_a_sender_waits_when_nobody_asks_for_its_messages() -> None:
    """A rank keeps at most 64 MiB of another's small messages; here, 1 MiB."""
    count = 200
    if here().rank == 0:
        assert objcomm.recv(1) == "go on"
        when_main_thread_waits(lambda: say("rank 0 waits"))
        for number in range(count):
            objcomm.send((number, bytes(30_000)), 1, tag=1)
        objcomm.send("done", 1, tag=2)
    else:
        with mock.patch.object(mailbox, "_KEPT_MAX_NBYTES", 1 << 20):
            objcomm.send("go on", 0)
            hear("rank 0 waits")
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


@ranks(2)
def test_the_callback_of_a_collective_may_send() -> None:
    """A pair's messages are not part of the sequence of the group's calls."""

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
