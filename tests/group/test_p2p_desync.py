"""Point-to-point calls that never match: ranks out of step, and ranks that only look so."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import objcomm
from objcomm import DesyncError, TransportTimeout
from objcomm._failures import watchdog
from objcomm._failures.inquiry import Waiting, investigate
from objcomm._failures.mesh import Mesh
from objcomm._failures.noticeboard import Board
from objcomm._transport import connect
from objcomm._transport.rendezvous import MeetingState, meet
from tests.group.helpers import (
    assert_group_works,
    error_in,
    hear,
    is_said,
    say,
    subgroup,
    tell_all,
)
from tests.group.pairs import LARGE, assert_pair_works
from tests.group.watched import after_looks, closely, patiently
from tests.ranks import ranks
from tests.waits import wait_until, within
from tests.workers import here

Call = Callable[[dist.ProcessGroup], Any]

# Ranks that are out of step


def out_of_step(group: dist.ProcessGroup, *calls: Call) -> DesyncError | None:
    """Return the DesyncError of this rank's call, or None if it has no call to make."""
    objcomm.barrier(group=group)
    tell_all("all are here", "")
    if here().rank >= len(calls):
        tell_all("out of step", "")
        return None
    with closely(), patiently():
        error: DesyncError = error_in(DesyncError, lambda: calls[here().rank](group))
        tell_all("out of step", "")
    return error


def recv(src: int, **options: Any) -> Call:
    return lambda group: objcomm.recv(src, group=group, **options)


def send(dst: int, **options: Any) -> Call:
    return lambda group: objcomm.send(LARGE, dst, group=group, **options)


def all_gather(group: dist.ProcessGroup) -> Any:
    return objcomm.all_gather(1, group=group)


def barrier(group: dist.ProcessGroup) -> None:
    objcomm.barrier("of the others", group=group)


CIRCLES: dict[str, list[Call]] = {
    "both receive": [recv(1), recv(0)],
    "both send something large": [send(1), send(0)],
    "recv and all_gather": [recv(1), all_gather, all_gather],
    "send of something large and barrier": [send(1), barrier, barrier],
    "works": [
        lambda group: objcomm.irecv(1, group=group).wait(),
        lambda group: objcomm.isend(LARGE, 0, tag=4, group=group).wait(),
    ],
    "probe and recv": [lambda group: objcomm.probe(1, group=group), recv(0, tag=5)],
    "another tag": [send(1, tag=1), recv(0, tag=2)],
}


CIRCLES_OF_THREE: dict[str, list[Call]] = {
    "receives": [recv(1), recv(2), recv(0)],
    "send, recv, barrier": [send(1), recv(2), barrier],
    "recv, send, all_gather": [recv(1), send(2), all_gather],
}


def assert_all_works(group: dist.ProcessGroup) -> None:
    assert_pair_works(group)
    assert_group_works(group)


@ranks(2, 3)
@pytest.mark.parametrize("kind", CIRCLES)
def test_two_that_are_out_of_step_hear_of_it_and_work_on(kind: str) -> None:
    for have_met in (False, True):
        with subgroup(*range(here().world_size)) as group:
            if have_met:
                assert_pair_works(group)
            error = out_of_step(group, *CIRCLES[kind])
            if error is not None:
                assert {0, 1} <= set(error.positions)
                for position in error.positions.values():
                    assert Path(__file__).name in position.call_site
            assert_all_works(group)


@ranks(2)
def test_a_receive_of_another_tag_names_what_has_come() -> None:
    with subgroup(0, 1) as group:

        def sends_and_waits(group: dist.ProcessGroup) -> None:
            objcomm.send("x", 1, tag=5, group=group)
            objcomm.recv(1, group=group)

        error = out_of_step(group, sends_and_waits, recv(0))
        assert error is not None
        assert error.reason == "each waits for another to send or receive"
        told = "it takes tag=0, but tag=5 from rank 0 has arrived; tag=None takes any"
        assert error.positions[1].unmatched == told
        assert "rank 1 is in recv (call 0) from rank 0 at " in str(error)
        assert f"({told})" in str(error)
        assert "every rank must make the same calls" not in str(error)
        if here().rank == 1:
            assert objcomm.recv(0, tag=5, group=group) == "x"
        assert_all_works(group)


@ranks(2)
def test_a_limit_of_a_receive_names_the_tags_that_have_come() -> None:
    objcomm.barrier()
    if here().rank == 0:
        for tag in range(1, 6):
            objcomm.send(tag, 1, tag=tag)
        hear("late")
    else:
        objcomm.probe(0, tag=5)  # all have arrived
        with patiently():
            error: TransportTimeout = error_in(
                TransportTimeout, lambda: objcomm.recv(0, timeout=1.0)
            )
        come = ", ".join(f"tag={tag} from rank 0" for tag in (1, 2, 3))
        told = f"it takes tag=0, but {come} have arrived; tag=None takes any"
        assert error.positions[1].unmatched == told
        say("late")
        assert [objcomm.recv(0, tag=tag) for tag in range(1, 6)] == [1, 2, 3, 4, 5]
    assert_group_works()


@ranks(3)
@pytest.mark.parametrize("kind", CIRCLES_OF_THREE)
def test_a_circle_of_three(kind: str) -> None:
    with subgroup(0, 1, 2) as group:
        error = out_of_step(group, *CIRCLES_OF_THREE[kind])
        assert error is not None
        assert here().rank in error.positions
        assert_all_works(group)


@ranks(2)
def test_two_ranks_that_are_still_connecting_both_raise_on_a_deadlock() -> None:
    """Rank 1 finds it and leaves before rank 0 looks, so no verdict can wait for rank 0."""

    def meet_later(
        store: dist.Store, rank: int, size: int, progress: MeetingState, door: str
    ) -> Any:
        wait_until(lambda: progress.is_over, "the meeting to be given up")
        return meet(store, rank, size, progress, door)

    def look_later(board: Board, meshes: Sequence[Mesh], waiting: Sequence[Waiting]) -> None:
        if here().rank == 1 or is_said("rank 1 raised"):
            investigate(board, meshes, waiting)

    with subgroup(0, 1) as one, subgroup(0, 1) as other:
        for group in (one, other):
            objcomm.barrier(group=group)
        with (
            mock.patch.object(connect, "meet", meet_later),
            mock.patch.object(watchdog, "investigate", look_later),
            patiently(),
            closely(),
        ):
            mine = (one, other)[here().rank]  # in the same group they would connect
            error_in(DesyncError, lambda: send(1 - here().rank)(mine))
            say(f"rank {here().rank} raised")
        for group in (one, other):
            assert_all_works(group)


@pytest.mark.timed
@ranks(3)
def test_two_that_are_out_of_step_hear_of_it_within_2_s() -> None:
    """Rank 2 measures, because another thread on a waiting rank could still send."""
    assert_pair_works()
    tell_all("all are here", "")
    if here().rank == 2:
        with within(2.0):
            hear("rank 0 raised")
            hear("rank 1 raised")
    else:
        with pytest.raises(DesyncError):
            objcomm.recv(1 - here().rank)
        say(f"rank {here().rank} raised")
    assert_pair_works()


# Ranks that are not: the watchdog looks at each several times before it continues

LOOKS = 4


@ranks(2)
def test_a_slow_peer_is_no_desync() -> None:
    objcomm.barrier()
    if here().rank == 0:
        with after_looks(LOOKS, partial(say, "rank 0 receives")):
            assert objcomm.recv(1) == "late"
        with after_looks(LOOKS, partial(say, "rank 0 sends")):
            objcomm.send(LARGE, 1)
    else:
        hear("rank 0 receives")
        objcomm.send("late", 0)
        hear("rank 0 sends")
        assert objcomm.recv(0) == LARGE
    assert_group_works()


@ranks(2)
def test_a_background_thread_may_send_while_its_main_thread_waits() -> None:
    objcomm.barrier()
    if here().rank == 0:
        with after_looks(LOOKS, partial(say, "rank 0 receives")):
            assert objcomm.recv(1) == "from the background"
        objcomm.barrier()
    else:

        def send_late() -> None:
            hear("rank 0 receives")
            hear("rank 1 waits")
            objcomm.send("from the background", 0)

        thread = threading.Thread(target=send_late)
        thread.start()
        with after_looks(LOOKS, partial(say, "rank 1 waits")):
            objcomm.barrier()
        thread.join()


@ranks(2)
def test_a_background_thread_may_receive_while_main_threads_meet() -> None:
    objcomm.barrier()
    if here().rank == 0:
        with ThreadPoolExecutor(1) as pool, closely():
            later = pool.submit(objcomm.recv, 1)
            objcomm.barrier()
            hear("rank 1 waits")
            objcomm.barrier()
            assert later.result() == "after both"
    else:
        objcomm.barrier()
        with after_looks(LOOKS, partial(say, "rank 1 waits")):
            objcomm.barrier()
        objcomm.send("after both", 0)


@ranks(2)
def test_what_was_begun_and_nobody_waits_for_is_no_desync() -> None:
    objcomm.barrier()
    receiving = objcomm.irecv(1 - here().rank)
    objcomm.barrier()
    if here().rank == 0:
        with after_looks(LOOKS, partial(say, "rank 0 waits")):
            objcomm.barrier()
    else:
        hear("rank 0 waits")
        objcomm.barrier()
    objcomm.send(LARGE[:100], 1 - here().rank)
    assert len(receiving.wait()) == 100


@ranks(2)
def test_a_payload_that_takes_its_time_is_no_desync() -> None:
    nbytes = 128 << 20
    if here().rank == 0:
        with after_looks(LOOKS, partial(say, "rank 0 sends")):
            objcomm.send(bytes(nbytes), 1)
        with after_looks(LOOKS, partial(say, "rank 0 receives")):
            objcomm.recv(1)
    else:
        hear("rank 0 sends")
        with closely():
            assert len(objcomm.recv(0)) == nbytes
        hear("rank 0 receives")
        objcomm.send("done", 0)


@ranks(3)
def test_a_chain_behind_a_slow_rank_is_no_desync() -> None:
    objcomm.barrier()
    if here().rank == 2:
        for rank in (0, 1):
            hear(f"rank {rank} waits")
        objcomm.send("go", 1)
        assert objcomm.recv(0) == "round"
    elif here().rank == 1:
        with after_looks(LOOKS, partial(say, "rank 1 waits")):
            assert objcomm.recv(2) == "go"
        objcomm.send("on", 0)
    else:
        with after_looks(LOOKS, partial(say, "rank 0 waits")):
            assert objcomm.recv(1) == "on"
        objcomm.send("round", 2)
    assert_group_works()
