"""Point-to-point calls that never match: ranks out of step, and ranks that only look so."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import objcomm
from objcomm import DesyncError, TransportTimeout
from objcomm._failures import watchdog
from objcomm._failures.inquiry import investigate
from objcomm._transport import connect
from objcomm._transport.rendezvous import meet
from tests.group.helpers import error_in, hear, in_thread, is_said, say, subgroup, tell_all
from tests.group.pairs import LARGE, assert_all_works, assert_pair_works
from tests.group.watched import after_looks, closely, patiently
from tests.ranks import ranks
from tests.waits import wait_until, within
from tests.workers import here

Call = Callable[[dist.ProcessGroup], Any]

# Ranks that are out of step


def out_of_step(group: dist.ProcessGroup, *calls: Call) -> Any:
    """Return the DesyncError of this rank's call, or None if it has no call to make."""
    objcomm.barrier(group=group)
    tell_all("all are here", "")
    own, error = here().rank, None
    with closely(), patiently():
        if own < len(calls):
            error = error_in(DesyncError, lambda: calls[own](group))
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


CYCLES: dict[str, list[Call]] = {
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
CYCLES_OF_THREE: dict[str, list[Call]] = {
    "receives": [recv(1), recv(2), recv(0)],
    "send, recv, barrier": [send(1), recv(2), barrier],
    "recv, send, all_gather": [recv(1), send(2), all_gather],
}


@ranks(2, 3)
@pytest.mark.parametrize("kind", CYCLES)
def test_two_ranks_that_wait_for_each_other_both_raise_and_then_continue(kind: str) -> None:
    for have_met in (False, True):
        with subgroup(*range(here().world_size)) as group:
            if have_met:
                assert_pair_works(group)
            error = out_of_step(group, *CYCLES[kind])
            if error is not None:
                assert {0, 1} <= set(error.positions)
                for position in error.positions.values():
                    assert Path(__file__).name in position.call_site
            assert_all_works(group)


@ranks(3)
@pytest.mark.parametrize("kind", CYCLES_OF_THREE)
def test_three_ranks_that_wait_for_each_other_raise(kind: str) -> None:
    with subgroup(0, 1, 2) as group:
        error = out_of_step(group, *CYCLES_OF_THREE[kind])
        assert error is not None
        assert here().rank in error.positions
        assert_all_works(group)


@ranks(2)
def test_a_desync_names_the_tags_that_have_arrived() -> None:
    def send_and_wait(group: dist.ProcessGroup) -> None:
        objcomm.send("x", 1, tag=5, group=group)
        objcomm.recv(1, group=group)

    with subgroup(0, 1) as group:
        error = out_of_step(group, send_and_wait, recv(0))
        assert error is not None
        assert error.reason == "each waits for another to send or receive"
        unmatched = "it takes tag=0, but tag=5 from rank 0 has arrived; tag=None takes any"
        assert error.positions[1].unmatched == unmatched
        assert "rank 1 is in recv (call 0) from rank 0 at " in str(error)
        assert f"({unmatched})" in str(error)
        assert "every rank must make the same calls" not in str(error)
        if here().rank == 1:
            assert objcomm.recv(0, tag=5, group=group) == "x"
        assert_all_works(group)


@ranks(2)
def test_a_timeout_names_the_first_tags_that_have_arrived() -> None:
    objcomm.barrier()
    if here().rank == 0:
        for tag in range(1, 6):
            objcomm.send(tag, 1, tag=tag)
        hear("late")
    else:
        objcomm.probe(0, tag=5)  # all have arrived
        with patiently():
            error = error_in(TransportTimeout, lambda: objcomm.recv(0, timeout=1.0))
        first = ", ".join(f"tag={tag} from rank 0" for tag in (1, 2, 3))
        unmatched = f"it takes tag=0, but {first} have arrived; tag=None takes any"
        assert error.positions[1].unmatched == unmatched
        say("late")
        assert [objcomm.recv(0, tag=tag) for tag in range(1, 6)] == [1, 2, 3, 4, 5]
    assert_all_works()


@ranks(2)
def test_two_ranks_that_are_still_connecting_both_raise_on_a_deadlock() -> None:
    """Rank 1 finds it and leaves before rank 0 looks, so no verdict can wait for rank 0."""

    def meet_later(store: dist.Store, rank: int, size: int, progress: Any, door: str) -> Any:
        wait_until(lambda: progress.is_over, "the meeting to be given up")
        return meet(store, rank, size, progress, door)

    def look_later(*given: Any) -> None:
        if here().rank == 1 or is_said("rank 1 raised"):
            investigate(*given)

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
def test_two_ranks_that_wait_for_each_other_raise_within_2_s() -> None:
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


# Ranks that are not out of step


def looked_at(topic: str) -> AbstractContextManager[None]:
    """Say a topic once the watchdog has looked at this rank's wait several times."""
    return after_looks(4, partial(say, topic))


@ranks(2)
def test_a_slow_rank_or_payload_is_not_a_desync() -> None:
    nbytes = 128 << 20  # takes long enough for the receiver's wait to be looked at
    objcomm.barrier()
    if here().rank == 0:
        with looked_at("rank 0 receives"):
            assert objcomm.recv(1) == "late"
        with looked_at("rank 0 sends"):
            objcomm.send(bytes(nbytes), 1)
    else:
        hear("rank 0 receives")
        objcomm.send("late", 0)
        hear("rank 0 sends")
        with closely():
            assert len(objcomm.recv(0)) == nbytes
    assert_all_works()


@ranks(2)
def test_a_background_thread_may_send_while_its_main_thread_waits() -> None:
    objcomm.barrier()
    if here().rank == 0:
        with looked_at("rank 0 receives"):
            assert objcomm.recv(1) == "from the background"
        objcomm.barrier()
    else:

        def send_late() -> None:
            hear("rank 0 receives")
            hear("rank 1 waits")
            objcomm.send("from the background", 0)

        thread = in_thread(send_late)
        with looked_at("rank 1 waits"):
            objcomm.barrier()
        thread.join()


@ranks(2)
def test_a_background_thread_may_receive_while_main_threads_meet() -> None:
    objcomm.barrier()
    if here().rank == 0:
        with closely():
            receiving = in_thread(lambda: say("received", objcomm.recv(1)))
            objcomm.barrier()
            hear("rank 1 waits")
            objcomm.barrier()
            receiving.join()
        assert hear("received") == "after both"
    else:
        objcomm.barrier()
        with looked_at("rank 1 waits"):
            objcomm.barrier()
        objcomm.send("after both", 0)


@ranks(2)
def test_a_work_that_no_rank_waits_for_is_not_a_desync() -> None:
    objcomm.barrier()
    receiving = objcomm.irecv(1 - here().rank)
    objcomm.barrier()
    if here().rank == 0:
        with looked_at("rank 0 waits"):
            objcomm.barrier()
    else:
        hear("rank 0 waits")
        objcomm.barrier()
    objcomm.send(LARGE[:100], 1 - here().rank)
    assert len(receiving.wait()) == 100


@ranks(3)
def test_a_chain_of_waits_behind_a_slow_rank_is_not_a_desync() -> None:
    objcomm.barrier()
    if here().rank == 2:
        hear("rank 0 waits")
        hear("rank 1 waits")
    else:
        with looked_at(f"rank {here().rank} waits"):
            assert objcomm.recv(here().rank + 1) == "go"
    objcomm.send("go", (here().rank - 1) % 3)
    if here().rank == 2:
        assert objcomm.recv(0) == "go"
    assert_all_works()
