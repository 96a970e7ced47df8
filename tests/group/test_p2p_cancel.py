"""Receives that are cancelled before a message matches them."""

import asyncio
import gc
import warnings
import weakref
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from tests.group.helpers import assert_group_works, hear, say, subgroup, tell_all
from tests.group.pairs import LARGE, assert_pair_works, left, right
from tests.ranks import ranks
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here


@ranks(1, 2, 3)
@pytest.mark.parametrize("is_any", [False, True])
def test_a_cancelled_receive_takes_no_message(*, is_any: bool) -> None:
    src = None if is_any else left()
    first, second = objcomm.irecv(src), objcomm.irecv(src)
    assert first.cancel()
    assert first.done()
    assert not first.cancel()
    with pytest.raises(CancelledError, match=r"test_p2p_cancel\.py"):
        first.wait()
    assert isinstance(first.exception(), CancelledError)
    objcomm.barrier()
    objcomm.send("for the second", right())
    assert second.wait(PATIENCE_S) == "for the second"
    assert not second.cancel()
    assert second.wait() == "for the second"
    assert_group_works()


@ranks(4)
def test_a_subgroup_takes_back_its_own() -> None:
    with subgroup(1, 3) as group:
        if here().rank == 1:
            assert objcomm.irecv(3, group=group).cancel()
            objcomm.send("go on", 3, group=group)
            assert objcomm.recv(3, group=group) == "kept"
        elif here().rank == 3:
            assert objcomm.recv(1, group=group) == "go on"
            objcomm.send("kept", 1, group=group)
        tell_all("subgroup", "")


@ranks(2)
def test_a_matched_receive_cannot_be_cancelled() -> None:
    if here().rank == 0:
        work = objcomm.irecv(1, tag=5)
        hear("rank 1 has begun")
        assert objcomm.recv(1, tag=6) == "behind it"  # so the first message has matched its receive
        assert not work.cancel()
        assert work.wait(PATIENCE_S) == LARGE
    else:
        sending = objcomm.isend(LARGE, 0, tag=5)
        objcomm.send("behind it", 0, tag=6)
        say("rank 1 has begun")
        sending.wait()
    assert_pair_works()


@ranks(2)
def test_sends_and_collectives_are_not_taken_back() -> None:
    for work in (objcomm.isend("sent", right()), objcomm.all_gather(1, async_op=True)):
        assert not work.cancel()
        work.wait()
    assert objcomm.recv(left()) == "sent"


@ranks(2)
def test_a_cancelled_receive_does_not_warn_and_is_released() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work: Any = objcomm.irecv(left(), tag=9)
        assert work.cancel()
        gone = weakref.ref(work)
        del work
        gc.collect()
        assert gone() is None
    # Works that earlier tests dropped may be collected here, but they began in other files.
    assert [str(each.message) for each in caught if each.filename == __file__] == []
    (world,) = objcomm.recorder.dump(group=dist.group.WORLD)["groups"]
    entries = world["entries"]
    assert entries[-1]["outcome"] == "CancelledError"


@ranks(1, 2)
def test_who_awaits_it_is_cancelled() -> None:
    async def wait_in_vain() -> str:
        work = objcomm.irecv(left(), tag=9)
        waiting = asyncio.ensure_future(_awaited(work))
        await asyncio.sleep(0)
        assert work.cancel()
        try:
            await waiting
        except asyncio.CancelledError:
            return "cancelled"
        return "received"

    assert asyncio.run(wait_in_vain()) == "cancelled"


async def _awaited(work: Any) -> Any:
    return await work


@ranks(2)
def test_thousands_are_taken_back_while_messages_come() -> None:
    """Each message matches one receive or stays; none is lost."""
    count = 300
    if here().rank == 0:
        works = [objcomm.irecv(1) for _ in range(2 * count)]
        say("rank 0 has begun")
        wait_until(lambda: any(work.done() for work in works), "the first message")
        kept = [work for work in works if not work.cancel()]
        got = objcomm.wait_all(kept)
        got += [objcomm.recv(1) for _ in range(count - len(got))]
        assert got == list(range(count))
    else:
        hear("rank 0 has begun")
        for number in range(count):
            objcomm.send(number, 0)
    assert_pair_works()
    assert_group_works()
