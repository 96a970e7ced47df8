"""Point-to-point messages that are refused, late or interrupted: which rank raises what."""

import gc
import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import objcomm
from objcomm import BrokenGroupError, CollectiveError, DecodeError, TransportError, TransportTimeout
from objcomm._transport.streams import StreamLink
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
from tests.group.pairs import LARGE, assert_pair_works
from tests.group.watched import hastily, patiently
from tests.ranks import ranks
from tests.waits import PATIENCE_S, within
from tests.workers import here

# Refusals


@ranks(2)
@pytest.mark.parametrize("is_async", [False, True])
def test_an_object_that_cannot_be_encoded_raises_on_both(*, is_async: bool) -> None:
    bad = RefusesToPickle(ValueError("not this one"))
    if here().rank == 0:
        send = objcomm.send if not is_async else lambda *given: objcomm.isend(*given).wait()
        error = error_in(CollectiveError, lambda: send(bad, 1))
        assert "not this one" in str(error.__cause__)
    else:
        receive = objcomm.recv if not is_async else lambda src: objcomm.irecv(src).wait()
        error = error_in(CollectiveError, lambda: receive(0))
    assert list(error.failures) == [0]
    assert "not this one" in str(error)
    assert_pair_works()
    assert_group_works()


@ranks(1, 2)
def test_a_rank_that_sends_to_itself_raises_alike() -> None:
    own = here().rank
    bad = RefusesToPickle(ValueError("not this one"))
    for call in (
        lambda: objcomm.send(bad, own),
        lambda: objcomm.isend(bad, own).wait(),
        lambda: objcomm.send(RefusesToArrive(own), own),
    ):
        error = error_in(CollectiveError, call)
        assert list(error.failures) == [own]
        assert error.__cause__ is not None
    assert objcomm.iprobe(own) is None


@ranks(2)
def test_an_object_that_cannot_be_rebuilt_raises_on_the_receiver_alone() -> None:
    for obj in (RefusesToArrive(1), (RefusesToArrive(1), LARGE)):
        if here().rank == 0:
            objcomm.send(obj, 1)
        else:
            error_in(DecodeError, lambda: objcomm.recv(0))
    assert_pair_works()


@ranks(2)
def test_a_small_message_that_is_refused_harms_nobody() -> None:
    if here().rank == 0:
        objcomm.send("pickled", 1)
        objcomm.send(Path("x"), 1)
    else:
        error_in(DecodeError, lambda: objcomm.recv(0, accept=["msgpack"]))
        error_in(DecodeError, lambda: objcomm.recv(0, allow=[]))
    assert_pair_works()


@ranks(2)
@pytest.mark.parametrize(
    "options", [{"accept": ["msgpack"]}, {"max_nbytes": 1000}], ids=["codec", "limit"]
)
def test_a_large_message_that_is_refused_raises_on_both(options: dict[str, Any]) -> None:
    objcomm.barrier()
    if here().rank == 0:
        error = error_in(CollectiveError, lambda: objcomm.send(LARGE, 1))
        assert list(error.failures) == [1]
    else:
        with objcomm.configure(**options):
            error_in(objcomm.ObjcommError, lambda: objcomm.recv(0))
    assert_pair_works()
    assert_group_works()


# Timeouts


@ranks(2)
def test_a_receive_that_waits_too_long_loses_nothing() -> None:
    objcomm.barrier()
    tell_all("both have met", "")
    if here().rank == 0:
        began = time.monotonic()
        with patiently():
            error = error_in(TransportTimeout, lambda: objcomm.recv(1, tag=3, timeout=0.5))
        assert time.monotonic() - began >= 0.5
        assert error.missing == (1,)
        assert error.positions[0].operation == "recv"
        assert error.positions[1].is_over
        assert Path(__file__).name in error.positions[0].call_site
        with pytest.raises(TransportTimeout):
            objcomm.probe(1, timeout=0.2)
        with pytest.raises(TransportTimeout):
            objcomm.irecv(timeout=0.2).wait()
        say("all limits have passed")
        objcomm.send("now", 1)
        assert [objcomm.recv(1, tag=tag) for tag in (0, 3)] == ["late", LARGE]
    else:
        hear("all limits have passed")  # in ``recv`` it would be out of step with rank 0
        assert objcomm.recv(0) == "now"
        objcomm.send("late", 0)
        objcomm.send(LARGE, 0, tag=3)
    assert_pair_works()
    assert_group_works()


@ranks(3)
def test_a_limit_tells_where_the_awaited_rank_is() -> None:
    objcomm.barrier()
    with subgroup(1, 2) as others:
        if here().rank == 0:
            hear("rank 1 waits")
            with patiently():
                error = error_in(TransportTimeout, lambda: objcomm.recv(1, timeout=0.5))
                assert error.positions[1].operation == "barrier"
                assert not error.positions[1].is_over
                error = error_in(TransportTimeout, lambda: objcomm.recv(timeout=0.5))
            assert set(error.missing) == {1, 2}
            say("told where rank 1 is")
        elif here().rank == 1:
            when_main_thread_waits(lambda: say("rank 1 waits"))
            objcomm.barrier(group=others)
        else:
            hear("told where rank 1 is")
            objcomm.barrier(group=others)
    assert_pair_works()


@ranks(2)
def test_a_send_that_waits_too_long_ends_these_two_ranks_connection_only() -> None:
    with subgroup(0, 1) as group:
        other = 1 - here().rank
        assert objcomm.sendrecv("met", other, other, group=group) == "met"
        if here().rank == 0:
            error = error_in(
                TransportTimeout, lambda: objcomm.send(LARGE, 1, group=group, timeout=0.5)
            )
            assert error.missing == (1,)
            tell_all("late", "")
        else:
            tell_all("late", "")
            error_in(TransportError, lambda: objcomm.recv(0, group=group))
        with pytest.raises(BrokenGroupError):
            objcomm.send(1, other, group=group)
        assert_group_works(group)
        assert_group_works()


@pytest.mark.timed
@ranks(2)
def test_many_sends_to_a_rank_that_never_comes_end_at_their_limit() -> None:
    """Each waits for the one before it; together they take one timeout plus 2 s to report."""
    with subgroup(0, 1) as group:
        if here().rank == 0:
            with within(1.0 + 2.0):
                works = [objcomm.isend(number, 1, timeout=1.0, group=group) for number in range(10)]
                for work in works:
                    with pytest.raises(TransportTimeout):
                        work.wait()
        tell_all("over", "")


# Ctrl-C


@ranks(2)
@pytest.mark.parametrize("src", [1, None])
def test_an_interrupted_receive_loses_no_message(src: int | None) -> None:
    objcomm.barrier()
    if here().rank == 0:
        when_main_thread_waits(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            objcomm.recv(src)
        objcomm.send("go on", 1)
        assert objcomm.recv(src) == "first"
        assert objcomm.recv(src) == LARGE
    else:
        assert objcomm.recv(0) == "go on"
        objcomm.send("first", 0)
        objcomm.send(LARGE, 0)
    assert_pair_works()
    assert_group_works()


@ranks(2)
def test_an_interrupted_probe_and_wait_lose_nothing() -> None:
    if here().rank == 0:
        work = objcomm.irecv(1, tag=2)
        for call in (work.wait, lambda: objcomm.probe(1)):
            when_main_thread_waits(lambda: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                call()
        objcomm.send("go on", 1)
        assert work.wait() == "to the work"
        assert objcomm.recv(1) == "to the probe"
    else:
        assert objcomm.recv(0) == "go on"
        objcomm.send("to the work", 0, tag=2)
        objcomm.send("to the probe", 0)


@ranks(2, disposable=True)
@pytest.mark.parametrize("call", ["send", "sendrecv"])
def test_an_interrupted_send_of_something_large_is_told(call: str) -> None:
    assert_pair_works()
    if here().rank == 0:
        when_main_thread_waits(lambda: os.kill(os.getpid(), signal.SIGINT))
        args = (LARGE, 1) if call == "send" else (LARGE, 1, 1)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with pytest.raises(KeyboardInterrupt):
                getattr(objcomm, call)(*args)
            gc.collect()
        assert not [str(each.message) for each in warned]
    tell_all("interrupted", "")
    if here().rank == 1 and call == "send":
        error = error_in(TransportError, lambda: objcomm.recv(0))
        assert error.peers == (0,)
    elif call == "sendrecv":
        if here().rank == 1:
            assert objcomm.recv(0) == LARGE
        tell_all("taken", "")
    assert_group_works()


@ranks(2, disposable=True)
def test_an_interrupted_rank_closes_its_connections_even_if_another_thread_is_slow() -> None:
    """The thread that asks the store closes them too; the caller does not wait long for it."""
    assert_pair_works()
    if here().rank == 0:
        is_told, close = threading.Event(), StreamLink.abort

        def late(link: StreamLink, farewell: bytes = b"") -> None:
            if threading.current_thread() is not threading.main_thread():
                is_told.wait(PATIENCE_S)
            close(link, farewell)

        when_main_thread_waits(lambda: os.kill(os.getpid(), signal.SIGINT))
        with mock.patch.object(StreamLink, "abort", late):
            with hastily(), pytest.raises(KeyboardInterrupt):
                objcomm.send(LARGE, 1)
            tell_all("interrupted", "")
            tell_all("heard", "")
            is_told.set()
    else:
        tell_all("interrupted", "")
        error_in(TransportError, lambda: objcomm.recv(0))
        tell_all("heard", "")
    assert_group_works()


# Blocks that fail together


@ranks(2, 3)
@pytest.mark.parametrize("src", [1, None])
def test_a_block_that_fails_elsewhere_ends_a_receive(src: int | None) -> None:
    def fail_or_wait() -> None:
        if here().rank == 1:
            hear("rank 0 waits")
            raise LookupError("of rank 1")
        if here().rank == 0:
            when_main_thread_waits(lambda: say("rank 0 waits"))
        objcomm.recv(src if here().rank == 0 else 1)

    assert_pair_works()
    with pytest.raises(CollectiveError, match="on rank 1"), objcomm.fail_together():
        fail_or_wait()
    for _ in range(2):  # the failure does not reach the next calls
        assert_pair_works()
        objcomm.send("any", (here().rank + 1) % here().world_size, tag=5)
        assert objcomm.recv(tag=5) == "any"
        assert_group_works()
