"""Messages from rank to rank that never meet: who is out of step, and who only looks so."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import objcomm
from objcomm import DesyncError
from tests.group.helpers import assert_group_works, error_in, subgroup, tell_all
from tests.group.pairs import LARGE, assert_pair_works
from tests.ranks import ranks
from tests.workers import here

# Who is out of step


def out_of_step(*calls: Callable[[], Any] | None) -> DesyncError | None:
    """Rank after rank makes its call, and raises; who has none does nothing."""
    objcomm.barrier()
    mine = calls[here().rank] if here().rank < len(calls) else None
    error = None if mine is None else error_in(DesyncError, mine)
    tell_all("out of step", "")
    return error


CIRCLES: dict[str, list[Callable[[], Any]]] = {
    "both receive": [lambda: objcomm.recv(1), lambda: objcomm.recv(0)],
    "both send something large": [lambda: objcomm.send(LARGE, 1), lambda: objcomm.send(LARGE, 0)],
    "recv and all_gather": [lambda: objcomm.recv(1), *[lambda: objcomm.all_gather(1)] * 2],
    "send of something large and barrier": [
        lambda: objcomm.send(LARGE, 1),
        *[lambda: objcomm.barrier("of the others")] * 2,
    ],
    "works": [lambda: objcomm.irecv(1).wait(), lambda: objcomm.isend(LARGE, 0, tag=4).wait()],
    "probe and recv": [lambda: objcomm.probe(1), lambda: objcomm.recv(0, tag=5)],
    "another tag": [lambda: objcomm.send(LARGE, 1, tag=1), lambda: objcomm.recv(0, tag=2)],
}


CIRCLES_OF_THREE: dict[str, list[Callable[[], Any]]] = {
    "receives": [lambda: objcomm.recv(1), lambda: objcomm.recv(2), lambda: objcomm.recv(0)],
    "send, recv, barrier": [
        lambda: objcomm.send(LARGE, 1),
        lambda: objcomm.recv(2),
        objcomm.barrier,
    ],
    "recv, send, all_gather": [
        lambda: objcomm.recv(1),
        lambda: objcomm.send(LARGE, 2),
        lambda: objcomm.all_gather(1),
    ],
}


@ranks(2, 3)
@pytest.mark.parametrize("have_met", [False, True], ids=["strangers", "met"])
@pytest.mark.parametrize("kind", CIRCLES)
def test_two_that_are_out_of_step_hear_of_it_and_work_on(kind: str, *, have_met: bool) -> None:
    with subgroup(*range(here().world_size)):
        if have_met:
            assert_pair_works()
        error = out_of_step(*CIRCLES[kind])
        if error is not None:
            assert {0, 1} <= set(error.positions)
            for position in error.positions.values():
                assert Path(__file__).name in position.call_site
        assert_pair_works()
        assert_group_works()


@ranks(3)
@pytest.mark.parametrize("kind", CIRCLES_OF_THREE)
def test_a_circle_of_three(kind: str) -> None:
    error = out_of_step(*CIRCLES_OF_THREE[kind])
    assert error is not None
    assert here().rank in error.positions
    assert_pair_works()
    assert_group_works()


# And who is not


@ranks(2)
def test_a_slow_peer_is_no_desync() -> None:
    objcomm.barrier()
    if here().rank == 0:
        assert objcomm.recv(1) == "late"
        objcomm.send(LARGE, 1)
    else:
        time.sleep(1.6)
        objcomm.send("late", 0)
        time.sleep(1.6)
        assert objcomm.recv(0) == LARGE
    assert_group_works()


@ranks(2)
def test_a_background_thread_may_send_while_its_main_thread_waits() -> None:
    objcomm.barrier()
    if here().rank == 0:
        assert objcomm.recv(1) == "from the background"
        objcomm.barrier()
    else:

        def send_late() -> None:
            time.sleep(1.8)
            objcomm.send("from the background", 0)

        thread = threading.Thread(target=send_late)
        thread.start()
        objcomm.barrier()
        thread.join()


@ranks(2)
def test_a_background_thread_may_receive_while_main_threads_meet() -> None:
    objcomm.barrier()
    if here().rank == 0:
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(objcomm.recv, 1)
            objcomm.barrier()
            time.sleep(1.3)
            objcomm.barrier()
            assert later.result() == "after both"
    else:
        objcomm.barrier()
        objcomm.barrier()
        objcomm.send("after both", 0)


@ranks(2)
def test_what_was_begun_and_nobody_waits_for_is_no_desync() -> None:
    objcomm.barrier()
    receiving = objcomm.irecv(1 - here().rank)
    objcomm.barrier()
    time.sleep(1.5)
    objcomm.barrier()
    objcomm.send(LARGE[:100], 1 - here().rank)
    assert len(receiving.wait()) == 100


@ranks(2)
def test_a_payload_that_takes_its_time_is_no_desync() -> None:
    def slow(seconds: float) -> Iterator[None]:
        time.sleep(seconds)
        yield

    nbytes = 256 << 20
    if here().rank == 0:
        objcomm.send(bytes(nbytes), 1)
        objcomm.recv(1)
    else:
        list(slow(1.2))
        assert len(objcomm.recv(0)) == nbytes
        list(slow(1.2))
        objcomm.send("done", 0)


@ranks(3)
def test_a_chain_behind_a_slow_rank_is_no_desync() -> None:
    objcomm.barrier()
    if here().rank == 2:
        time.sleep(1.8)
        objcomm.send("go", 1)
        assert objcomm.recv(0) == "round"
    elif here().rank == 1:
        assert objcomm.recv(2) == "go"
        objcomm.send("on", 0)
    else:
        assert objcomm.recv(1) == "on"
        objcomm.send("round", 2)
    assert_group_works()
