"""Who polls: limits of a wait's own close no circle, and lose no message."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import objcomm
from objcomm import DesyncError, TransportTimeout
from tests.group.helpers import (
    assert_group_works,
    error_in,
    is_said,
    say,
    subgroup,
)
from tests.group.pairs import LARGE, assert_pair_works
from tests.group.watched import after_looks, closely, patiently
from tests.ranks import ranks
from tests.waits import wait_until
from tests.workers import here

LOOKS = 6

POLLS: dict[str, Callable[[], Any]] = {
    "recv": lambda: objcomm.recv(1, tag=9, timeout=0.2),
    "probe": lambda: objcomm.probe(1, tag=9, timeout=0.2),
    "irecv": lambda: objcomm.irecv(1, tag=9, timeout=0.2).wait(),
    "recv from any": lambda: objcomm.recv(tag=9, timeout=0.2),
    "sendrecv": lambda: objcomm.sendrecv("early", 1, 1, tag=8, recv_tag=9, timeout=0.2),
}


@ranks(2)
@pytest.mark.parametrize("have_met", [False, True])
@pytest.mark.parametrize("kind", POLLS)
def test_who_polls_is_in_no_circle_with_who_waits_for_him(kind: str, *, have_met: bool) -> None:
    objcomm.barrier()
    if have_met or kind == "sendrecv":
        assert_pair_works()
    if here().rank == 0:
        with closely():
            while not is_said("rank 1 was looked at"):
                error_in(TransportTimeout, POLLS[kind])
        objcomm.send("later", 1)
    else:
        with after_looks(LOOKS, partial(say, "rank 1 was looked at")):
            assert objcomm.recv(0) == "later"
        while objcomm.iprobe(0, tag=8):  # of ``sendrecv``
            assert objcomm.recv(0, tag=8) == "early"
    assert_group_works()


@ranks(2)
def test_a_work_that_is_waited_for_with_a_limit_is_in_no_circle() -> None:
    if here().rank == 0:
        work = objcomm.irecv(1, tag=9)
        with closely():
            while not is_said("rank 1 was looked at"):
                with pytest.raises(TimeoutError):
                    work.wait(timeout=0.2)
        objcomm.send("later", 1)
        assert work.wait() == "answer"
    else:
        with after_looks(LOOKS, partial(say, "rank 1 was looked at")):
            assert objcomm.recv(0) == "later"
        objcomm.send("answer", 0, tag=9)


@ranks(2)
def test_a_send_with_a_limit_of_its_own_is_in_no_circle() -> None:
    """Rank 0's message is large, and rank 1 waits for another one that never comes."""
    with subgroup(0, 1) as group:
        assert_pair_works(group)
        with closely(), patiently():
            if here().rank == 0:
                with after_looks(LOOKS, partial(say, "rank 0 was looked at")):
                    objcomm.send(LARGE, 1, group=group, timeout=60)
                objcomm.send("small", 1, tag=5, group=group)
            else:
                while not is_said("rank 0 was looked at"):
                    with pytest.raises(TransportTimeout):
                        objcomm.recv(0, tag=5, group=group, timeout=0.5)
                assert objcomm.recv(0, group=group) == LARGE
                assert objcomm.recv(0, tag=5, group=group) == "small"


@ranks(2)
def test_a_wait_without_a_limit_is_found_where_who_polled_waits_at_last() -> None:
    objcomm.barrier()
    if here().rank == 0:
        with closely(), patiently():
            for _ in range(3):
                error_in(TransportTimeout, POLLS["recv"])
            error = error_in(DesyncError, lambda: objcomm.recv(1, tag=9))
    else:
        with closely(), patiently():
            error = error_in(DesyncError, lambda: objcomm.recv(0))
    assert set(error.positions) == {0, 1}
    assert_pair_works()


@ranks(2)
def test_many_polls_lose_no_message_and_meet_no_false_desync() -> None:
    turns = 8
    with closely():
        if here().rank == 0:
            for turn in range(turns):
                for _ in range(4):
                    error_in(TransportTimeout, lambda: objcomm.recv(1, tag=9, timeout=0.15))
                objcomm.send(turn, 1)
                assert _polled(turn) == [(turn, "a"), (turn, "b")]
        else:
            for turn in range(turns):
                assert objcomm.recv(0) == turn
                objcomm.send((turn, "a"), 0, tag=9)
                objcomm.send((turn, "b"), 0, tag=9)
    assert objcomm.iprobe(1 - here().rank, tag=None) is None
    assert_group_works()


def _polled(turn: int) -> list[Any]:
    """Two messages: one by receives that may be too early, one as soon as a probe has seen it."""
    found: list[Any] = []

    def is_there() -> bool:
        try:
            found.append(objcomm.recv(1, tag=9, timeout=0.05 if turn % 2 else 0.2))
        except TransportTimeout:
            return False
        return True

    wait_until(is_there, "a message")
    wait_until(lambda: objcomm.iprobe(1, tag=9), "another message")
    return [*found, objcomm.recv(1, tag=9)]
