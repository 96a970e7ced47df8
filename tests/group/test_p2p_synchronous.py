"""Synchronous sends complete when their message is received, and no sooner."""

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import (
    CollectiveError,
    DecodeError,
    DesyncError,
    TransportError,
    TransportTimeout,
    UsageError,
)
from tests.group.helpers import (
    RefusesToArrive,
    RefusesToPickle,
    assert_group_works,
    error_in,
    hear,
    say,
    subgroup,
    tell_all,
    when_main_thread_waits,
)
from tests.group.pairs import LARGE, assert_pair_works, left, right
from tests.group.watched import closely, patiently
from tests.ranks import OVER_GLOO, ranks, solo
from tests.waits import PATIENCE_S
from tests.workers import here


def _ends_when_received(obj: Any) -> None:
    if here().rank == 1:
        work = objcomm.issend(obj, 0, tag=5)
        assert not work.done()
        objcomm.send("begun", 0)
        hear("rank 0 has looked")
        assert not work.done()
        say("rank 1 has looked")
        assert work.wait(PATIENCE_S) is None
        objcomm.ssend(obj, 0, tag=6)
    elif here().rank == 0:
        assert objcomm.recv(1) == "begun"
        assert objcomm.probe(1, tag=5).tag == 5  # it has arrived, and a probe does not receive it
        say("rank 0 has looked")
        hear("rank 1 has looked")
        assert objcomm.recv(1, tag=5) == obj
        assert objcomm.irecv(tag=6).wait() == obj
    assert_pair_works()
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("obj", ["small", LARGE], ids=["small", "large"])
def test_it_ends_when_its_message_is_received(obj: Any) -> None:
    _ends_when_received(obj)


@ranks(2, environment=OVER_GLOO)
def test_ssend_completes_when_its_message_is_received_over_gloo() -> None:
    _ends_when_received("small")


@ranks(4)
def test_a_subgroup_has_its_own() -> None:
    with subgroup(1, 3) as group:
        if here().rank == 3:
            objcomm.ssend("from the second", group_dst=0, group=group)
        elif here().rank == 1:
            assert objcomm.recv(3, group=group) == "from the second"
        tell_all("subgroup", "")


@ranks(1, 2)
def test_to_itself_it_ends_when_the_rank_receives() -> None:
    own = here().rank
    receiving = objcomm.irecv(own)
    objcomm.ssend("wanted", own)
    assert receiving.wait() == "wanted"
    with pytest.raises(UsageError, match="start the receive first"):
        objcomm.ssend("unwanted", own)
    assert objcomm.iprobe(own) is None
    work = objcomm.issend("later", own)
    assert not work.done()
    assert objcomm.recv(own) == "later"
    assert work.wait(PATIENCE_S) is None
    late: Any = objcomm.issend("too late", own, timeout=0.05)
    error_in(TransportTimeout, lambda: late.wait(PATIENCE_S))
    assert objcomm.recv(own) == "too late"
    bad = RefusesToPickle(ValueError("not this one"))
    error_in(CollectiveError, lambda: objcomm.issend(bad, own).wait())


@solo()
def test_a_world_that_is_not_initialised_is_a_rank_alone() -> None:
    work = objcomm.issend({"a": 1}, 0)
    assert objcomm.recv() == {"a": 1}
    assert work.wait(PATIENCE_S) is None
    assert objcomm.stats()["issend"].calls == 1


@ranks(2)
def test_hundreds_end_in_the_order_in_which_they_are_received() -> None:
    count = 300
    if here().rank == 0:
        works = [objcomm.issend(number, 1, tag=number) for number in range(count)]
        assert objcomm.recv(1) == "one"
        works[-1].wait(PATIENCE_S)
        assert not any(work.done() for work in works[:-1])
        objcomm.send("the rest", 1, tag=count)
        objcomm.wait_all(works)
    else:
        assert objcomm.recv(0, tag=count - 1) == count - 1
        objcomm.send("one", 0)
        assert objcomm.recv(0, tag=count) == "the rest"
        assert [objcomm.recv(0, tag=tag) for tag in range(count - 1)] == list(range(count - 1))


# Failures


@ranks(2)
def test_a_small_one_whose_limit_passes_may_still_be_received() -> None:
    assert_pair_works()
    if here().rank == 0:
        # Long enough for the message to be sent.
        error = error_in(TransportTimeout, lambda: objcomm.ssend("late", 1, timeout=3))
        assert (error.missing, error.seconds) == ((1,), 3)
        say("the limit has passed")
        assert objcomm.recv(1) == "received"
    else:
        hear("the limit has passed")
        assert objcomm.recv(0) == "late"
        objcomm.send("received", 0)
    assert_pair_works()
    assert_group_works()


@ranks(2)
def test_an_error_of_the_sender_reaches_both_and_of_the_receiver_one() -> None:
    if here().rank == 0:
        bad = RefusesToPickle(ValueError("not this one"))
        error_in(CollectiveError, lambda: objcomm.ssend(bad, 1))
        objcomm.ssend(RefusesToArrive(1), 1)  # it was received, but can't be rebuilt there
    else:
        error_in(CollectiveError, lambda: objcomm.recv(0))
        error_in(DecodeError, lambda: objcomm.recv(0))
    assert_pair_works()


@ranks(2)
def test_two_that_wait_for_each_other_hear_of_it() -> None:
    assert_pair_works()
    work = objcomm.issend("both", right())
    objcomm.probe(left())  # a message not yet sent would be lost
    tell_all("both have come", "")
    with closely(), patiently():
        error: Any = error_in(DesyncError, work.wait)
    assert set(error.positions) == {0, 1}
    assert objcomm.recv(left()) == "both"  # it has arrived, and stays
    assert_pair_works()
    assert_group_works()


@ranks(2, expect_dead=[1])
def test_a_death_ends_it() -> None:
    assert_pair_works()
    if here().rank == 1:
        hear("rank 0 waits")
        os.kill(os.getpid(), signal.SIGKILL)
    when_main_thread_waits(lambda: say("rank 0 waits"))
    assert error_in(TransportError, lambda: objcomm.ssend("never", 1)).peers == (1,)


@ranks(2)
def test_one_that_is_interrupted_may_still_be_received() -> None:
    assert_pair_works()
    if here().rank == 0:
        when_main_thread_waits(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            objcomm.ssend("interrupted", 1)
        say("interrupted")
    else:
        hear("interrupted")
        assert objcomm.recv(0) == "interrupted"
    assert_pair_works()
    assert_group_works()


@ranks(2)
def test_it_is_signed_with_a_key() -> None:
    with objcomm.configure(key="a key of more than sixteen bytes"), subgroup(0, 1) as group:
        works = [objcomm.issend(obj, right(), tag=len(obj), group=group) for obj in ("a", LARGE)]
        for nbytes in (len(LARGE), 1):
            assert len(objcomm.recv(left(), tag=nbytes, group=group)) == nbytes
        objcomm.wait_all(works)
        dist.barrier(group)
