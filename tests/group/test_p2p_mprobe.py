"""Matched probes: a message is taken out for one receiver and received later."""

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
from objcomm import DecodeError, TransportTimeout, UsageError
from objcomm._calls.group import resolve
from objcomm._p2p import mailbox
from objcomm._p2p.peer import peers_of
from tests.group.helpers import (
    assert_group_works,
    error_in,
    hear,
    in_thread,
    say,
    subgroup,
    tell_all,
)
from tests.group.pairs import IDS, LARGE, OBJECTS, assert_pair_works, left, right
from tests.ranks import OVER_GLOO, ranks, solo
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here


def improbed(src: int | None = None, **options: Any) -> objcomm.Message:
    found = wait_until(lambda: objcomm.improbe(src, **options), "a message")
    assert found is not None
    return found


FINDS: dict[str, Callable[..., objcomm.Message]] = {"mprobe": objcomm.mprobe, "improbe": improbed}


# Messages that are taken out


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", FINDS)
@pytest.mark.parametrize("is_any", [False, True])
@pytest.mark.parametrize("obj", OBJECTS, ids=IDS)
def test_nothing_else_finds_it_and_it_is_received_once(
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
    assert_group_works()


@ranks(1, 2)
def test_nothing_to_take_out() -> None:
    assert objcomm.improbe(left(), tag=3) is None
    assert objcomm.improbe(tag=None) is None
    with pytest.raises(UsageError, match="send it first"):
        objcomm.mprobe(here().rank)
    assert_group_works()


@solo()
def test_a_world_that_is_not_initialised_is_a_rank_alone() -> None:
    objcomm.send({"a": 1}, 0)
    found = objcomm.mprobe()
    assert objcomm.improbe() is None
    assert found.irecv().wait(PATIENCE_S) == {"a": 1}
    counted = objcomm.stats()
    assert counted["mprobe"].calls == counted["recv"].calls == 1
    assert "improbe" not in counted


@ranks(4)
def test_a_subgroup_has_its_own() -> None:
    with subgroup(3, 1) as group:
        if here().rank == 3:
            objcomm.send("from the second", 1, tag=2, group=group)
        elif here().rank == 1:
            found = objcomm.mprobe(3, tag=None, group=group)
            assert found.envelope[:3] == (3, dist.get_group_rank(group, 3), 2)
            assert found.recv() == "from the second"
        tell_all("subgroup", "")


@ranks(2)
@pytest.mark.parametrize("is_blocking", [False, True])
def test_each_is_received_as_it_was_found_in_any_order(*, is_blocking: bool) -> None:
    sent = [("a", 1), ("b", LARGE), ("c", 3), ("d", LARGE)]
    if here().rank == 0:
        works = [objcomm.isend(obj, 1) for obj in sent]
        objcomm.send("behind them", 1, tag=1)
        objcomm.wait_all(works)
    else:
        assert objcomm.recv(0, tag=1) == "behind them"
        found = [objcomm.mprobe(0) for _ in sent]
        assert objcomm.improbe(0) is None
        taken = reversed(found)
        if is_blocking:
            got = [each.recv() for each in taken]
        else:
            got = objcomm.wait_all([each.irecv() for each in taken])
        assert got == sent[::-1]
    assert_pair_works()
    assert_group_works()


@ranks(2)
def test_of_several_that_wait_the_first_gets_the_message() -> None:
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
    assert_pair_works()


@ranks(2)
def test_a_work_of_one_tells_who_sent_and_is_not_taken_back() -> None:
    sending = objcomm.isend(LARGE, right(), tag=4)
    found = objcomm.mprobe(left(), tag=4)
    work = found.irecv()
    assert not work.cancel()
    assert work.wait(PATIENCE_S) == LARGE
    assert work.envelope == found.envelope
    sending.wait()
    assert_pair_works()


@ranks(2)
def test_options_are_those_of_a_receive() -> None:
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
    assert_pair_works()
    assert_group_works()


@ranks(2, environment=OVER_GLOO)
def test_matched_probes_work_over_gloo_and_with_a_key() -> None:
    with objcomm.configure(key="a key of more than sixteen bytes"), subgroup(0, 1) as group:
        works = [objcomm.issend(obj, right(), tag=len(obj), group=group) for obj in OBJECTS]
        for obj in reversed(OBJECTS):
            found = objcomm.mprobe(left(), tag=len(obj), group=group)
            assert found.recv() == obj
        objcomm.wait_all(works)
        dist.barrier(group)


# Senders


@ranks(2)
@pytest.mark.parametrize("obj", OBJECTS, ids=IDS)
@pytest.mark.parametrize("send", [objcomm.ssend, objcomm.send], ids=["ssend", "send"])
def test_a_sender_that_waits_for_the_receive_waits_on(send: Any, obj: Any) -> None:
    assert_pair_works()
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
    assert_pair_works()
    assert_group_works()


@ranks(1, 2)
def test_what_a_rank_sends_to_itself() -> None:
    own = here().rank
    work = objcomm.issend("later", own)
    found = objcomm.mprobe(own)
    assert not work.done()
    assert found.recv() == "later"
    assert work.wait(PATIENCE_S) is None
    assert_group_works()


@ranks(2)
def test_ssend_of_a_rank_to_itself_ends_when_a_thread_receives_what_it_has_found() -> None:
    got: list[Any] = []
    waiting = in_thread(lambda: got.append(objcomm.mprobe(tag=6).recv()))
    box = peers_of(resolve(None)).mailbox
    wait_until(lambda: box.is_wanted(here().rank, 6), "the other thread")
    objcomm.ssend("to the thread", here().rank, tag=6)
    waiting.join()
    assert got == ["to the thread"]
    assert_pair_works()


@ranks(2)
def test_ssend_times_out_if_the_found_message_is_never_received() -> None:
    assert_pair_works()
    if here().rank == 0:
        # Long enough for the message to be sent.
        error = error_in(TransportTimeout, lambda: objcomm.ssend("late", 1, timeout=3))
        assert error.missing == (1,)
        say("the limit has passed")
        assert objcomm.recv(1) == "received"
    else:
        found = objcomm.mprobe(0)
        hear("the limit has passed")
        assert found.recv() == "late"
        objcomm.send("received", 0)
    assert_pair_works()
    assert_group_works()


@ranks(2)
def test_what_is_held_fills_no_room() -> None:
    """Otherwise, taking out every message to receive it later would stop the sender."""
    count = 40
    if here().rank == 0:
        assert objcomm.recv(1) == "go on"
        for number in range(count):
            objcomm.send((number, bytes(30_000)), 1, tag=1)
    else:
        with mock.patch.object(mailbox, "_KEPT_MAX_NBYTES", 100_000):
            objcomm.send("go on", 0)
            found = [objcomm.mprobe(0, tag=1) for _ in range(count)]
        assert [each.recv()[0] for each in found] == list(range(count))
    assert_pair_works()


@ranks(2)
def test_a_loop_that_takes_out_sees_a_message_behind_more_than_is_kept() -> None:
    count = 80
    if here().rank == 0:
        assert objcomm.recv(1) == "go on"
        for number in range(count):
            objcomm.send((number, bytes(30_000)), 1, tag=1)
        objcomm.send("urgent", 1, tag=2)
    else:
        with mock.patch.object(mailbox, "_KEPT_MAX_NBYTES", 1 << 20):
            objcomm.send("go on", 0)
            assert improbed(0, tag=2).recv() == "urgent"
        assert [objcomm.recv(0, tag=1)[0] for _ in range(count)] == list(range(count))


# Threads


@ranks(2, 3)
@pytest.mark.parametrize("name", FINDS)
def test_of_many_threads_each_receives_what_it_has_found(name: str) -> None:
    """With ``probe`` and then ``recv``, another thread could take the message in between."""
    each_sends, threads = 60, 4
    size = here().world_size
    if here().rank == 0:
        count = each_sends * (size - 1)

        def take(_: int) -> bool:
            found = FINDS[name](tag=None)
            src, number, _ = found.recv()
            return bool((src, number) == (found.envelope.src, found.envelope.tag))

        with ThreadPoolExecutor(threads) as pool:
            assert list(pool.map(take, range(count))) == [True] * count
        assert objcomm.iprobe(tag=None) is None
    else:
        works = [
            objcomm.isend((here().rank, number, bytes(number % 2 * 50_000)), 0, tag=number)
            for number in range(each_sends)
        ]
        objcomm.wait_all(works)
    assert_group_works()


@ranks(2)
@pytest.mark.parametrize("obj", OBJECTS, ids=IDS)
def test_any_thread_receives_it_and_of_several_one(obj: Any) -> None:
    sending = objcomm.isend(obj, right())
    found = objcomm.mprobe(left())
    got: list[Any] = []
    start = threading.Barrier(4)

    def receive() -> None:
        start.wait(PATIENCE_S)
        try:
            got.append(found.recv())
        except UsageError as error:
            got.append(error)

    threads = [in_thread(receive) for _ in range(4)]
    for thread in threads:
        thread.join()
    assert sorted(isinstance(each, UsageError) for each in got) == [False, True, True, True]
    assert [each for each in got if not isinstance(each, UsageError)] == [obj]
    sending.wait()
    assert_pair_works()
