"""Point-to-point messages that are refused, late or interrupted: which rank raises what."""

import contextlib
import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import (
    BrokenGroupError,
    CollectiveError,
    DecodeError,
    ObjcommError,
    TransportError,
    TransportTimeout,
    UsageError,
)
from objcomm._algorithms.exchange import Exchange
from objcomm._failures import watchdog
from objcomm._p2p.call import Receive
from objcomm._transport.frames import AHEAD_MAX
from objcomm._transport.streams import StreamLink
from objcomm._transport.threads import ThreadPool
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
from tests.group.pairs import LARGE, assert_all_works, assert_pair_works, right, swap, under_way
from tests.group.watched import hastily, patiently
from tests.ranks import ranks, solo
from tests.waits import PATIENCE_S, wait_until, within
from tests.workers import here

# Refusals

#: Functions that send to a rank, and functions that receive from it.
EXCHANGES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "send, recv": (objcomm.send, objcomm.recv),
    "isend, irecv": (
        lambda *given: objcomm.isend(*given).wait(),
        lambda src, **options: objcomm.irecv(src, **options).wait(),
    ),
    "ssend, recv": (objcomm.ssend, objcomm.recv),
    "send, mprobe": (
        objcomm.send,
        lambda src, **options: objcomm.mprobe(src).recv(**options),
    ),
}
BAD = RefusesToPickle(ValueError("not this one"))


@ranks(2)
@pytest.mark.parametrize("kind", EXCHANGES)
def test_an_object_that_cannot_be_encoded_raises_on_both_ranks(kind: str) -> None:
    send, receive = EXCHANGES[kind]
    if here().rank == 0:
        error = error_in(CollectiveError, lambda: send(BAD, 1))
        assert "not this one" in str(error.__cause__)
    else:
        error = error_in(CollectiveError, lambda: receive(0))
    assert list(error.failures) == [0]
    assert "not this one" in str(error)
    assert_all_works()


def send_large(dst: int, group: Any = None) -> None:
    """Send what `refuse_large` of the receiver refuses, which ends the pair's connection."""
    error_in(CollectiveError, lambda: objcomm.send(LARGE, dst, codec="pickle", group=group))


def refuse_large(src: int, group: Any = None) -> None:
    """Refuse what `send_large` sends."""
    error_in(DecodeError, lambda: objcomm.recv(src, accept=["msgpack"], group=group))


@ranks(3)
def test_a_receive_from_any_rank_keeps_its_timeout_when_all_connections_are_new() -> None:
    if here().rank == 0:
        waiting = objcomm.irecv(tag=5, timeout=3)
        for peer in (1, 2):
            refuse_large(peer)
            assert objcomm.recv(peer) == "again"
        error_in(TransportTimeout, partial(waiting.wait, PATIENCE_S))
    else:
        send_large(0)
        objcomm.send("again", 0)
    assert_all_works()


@ranks(2)
def test_a_message_is_received_although_its_sender_cannot_be_told() -> None:
    with pair_that_has_met() as group:
        if here().rank == 0:
            tell = Receive._report_received  # noqa: SLF001  # held up here

            def tell_late(self: Any, mesh: Any, lane: Any) -> None:
                say("refuse")
                wait_until(lambda: mesh.verdict is not None, "the end of the connection")
                tell(self, mesh, lane)

            sending = objcomm.isend(LARGE, 1, codec="pickle", group=group)
            objcomm.probe(1, tag=1, group=group)
            with mock.patch.object(Receive, "_report_received", tell_late):
                assert objcomm.recv(1, tag=1, group=group) == "here"
            error_in(CollectiveError, sending.wait)
        else:
            sending = objcomm.issend("here", 0, tag=1, group=group)
            hear("refuse")
            refuse_large(0, group)
            error_in(CollectiveError, sending.wait)
    assert_all_works()


@ranks(2)
def test_sendrecv_from_itself_raises_before_anything_is_sent() -> None:
    rank = here().rank
    other = 1 - rank
    error_in(UsageError, lambda: objcomm.sendrecv("unsent", other, rank), match=r"^sendrecv: rank")
    assert objcomm.sendrecv("sent", other, other) == "sent"
    assert_all_works()


@ranks(2)
def test_a_large_message_that_begins_late_gets_the_receives_time_again() -> None:
    with pair_that_has_met() as group:
        if here().rank == 0:
            take_in = Receive._taken_in  # noqa: SLF001  # likewise

            def take_in_late(self: Any, *given: Any) -> Any:
                self._deadline.remaining = 0.1
                return take_in(self, *given)

            with mock.patch.object(Receive, "_taken_in", take_in_late):
                assert objcomm.recv(1, group=group, timeout=PATIENCE_S) == LARGE
        else:
            send_rest = Exchange.send_rest

            def send_rest_late(self: Any, *given: Any) -> None:
                time.sleep(3)  # more than the 2 s that each such message gets
                send_rest(self, *given)

            with mock.patch.object(Exchange, "send_rest", send_rest_late):
                objcomm.send(LARGE, 0, group=group)
    assert_all_works()


@ranks(2)
def test_waits_that_time_out_leave_nothing_in_a_work() -> None:
    assert_all_works()  # so that waiting moves the connection
    if here().rank == 0:
        work = objcomm.irecv(1, tag=9)
        for _ in range(3):
            error_in(TimeoutError, partial(work.wait, 0.3))
        assert work._signals == []  # noqa: SLF001  # nothing public shows it
        say("waited")
        assert work.wait() == "late"
    else:
        hear("waited")
        objcomm.send("late", 0, tag=9)
    assert_all_works()


@ranks(1, 2)
def test_a_rank_that_sends_a_bad_object_to_itself_raises() -> None:
    own = here().rank
    for call in (
        lambda: objcomm.send(BAD, own),
        lambda: objcomm.isend(BAD, own).wait(),
        lambda: objcomm.issend(BAD, own).wait(),
        lambda: objcomm.send(RefusesToArrive(own), own),
    ):
        error = error_in(CollectiveError, call)
        assert list(error.failures) == [own]
        assert error.__cause__ is not None
    assert objcomm.iprobe(own) is None


@ranks(2)
@pytest.mark.parametrize("kind", EXCHANGES)
def test_a_message_that_cannot_be_rebuilt_raises_on_the_receiver_alone(kind: str) -> None:
    send, receive = EXCHANGES[kind]
    refused: list[tuple[Any, dict[str, Any]]] = [
        (RefusesToArrive(1), {}),
        ((RefusesToArrive(1), LARGE), {}),
        ("pickled", {"accept": ["msgpack"]}),
        (Path("x"), {"allow": []}),
    ]
    for obj, options in refused:
        if here().rank == 0:
            send(obj, 1)
        else:
            error_in(DecodeError, partial(receive, 0, **options))
    assert_pair_works()


@ranks(2)
@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize(
    ("option", "error"),
    [({"accept": ["msgpack"]}, DecodeError), ({"max_nbytes": 1000}, objcomm.WireError)],
    ids=["codec", "limit"],
)
def test_a_large_message_that_is_refused_raises_on_both_ranks(
    kind: str, option: dict[str, Any], error: type[Exception]
) -> None:
    send, receive = EXCHANGES[kind]
    objcomm.barrier()
    if here().rank == 0:
        assert list(error_in(CollectiveError, lambda: send(LARGE, 1)).failures) == [1]
    else:
        with objcomm.configure(**option):
            error_in(error, lambda: receive(0))
    assert_all_works()


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
        for call in (
            lambda: objcomm.probe(1, timeout=0.2),
            lambda: objcomm.mprobe(1, timeout=0.2),
            lambda: objcomm.irecv(timeout=0.2).wait(),
        ):
            assert error_in(TransportTimeout, call).missing == (1,)
        say("all timeouts have expired")
        objcomm.send("now", 1)
        assert [objcomm.recv(1, tag=tag) for tag in (0, 3)] == ["late", LARGE]
    else:
        hear("all timeouts have expired")  # in ``recv`` it would be out of step with rank 0
        assert objcomm.recv(0) == "now"
        objcomm.send("late", 0)
        objcomm.send(LARGE, 0, tag=3)
    assert_all_works()


@ranks(3)
def test_a_timeout_reports_where_the_awaited_rank_is() -> None:
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
            say("rank 0 knows where rank 1 is")
        elif here().rank == 1:
            when_main_thread_waits(lambda: say("rank 1 waits"))
            objcomm.barrier(group=others)
        else:
            hear("rank 0 knows where rank 1 is")
            objcomm.barrier(group=others)
    assert_pair_works()


@ranks(2)
def test_a_send_that_waits_too_long_ends_only_the_connection_of_these_ranks() -> None:
    with subgroup(0, 1) as group:
        assert swap("met", group=group) == "met"
        if here().rank == 0:
            late = partial(objcomm.send, LARGE, 1, group=group, timeout=0.5)
            assert error_in(TransportTimeout, late).missing == (1,)
            tell_all("late", "")
        else:
            tell_all("late", "")
            error_in(TransportError, lambda: objcomm.recv(0, group=group))
        error_in(BrokenGroupError, lambda: objcomm.send(1, right(), group=group))
        assert_group_works(group)
        assert_group_works()


@pytest.mark.timed
@ranks(2)
def test_many_sends_to_a_rank_that_never_receives_end_at_their_timeout() -> None:
    """Each waits for the one before it; together they take one timeout plus 2 s to report."""
    with subgroup(0, 1) as group:
        if here().rank == 0:
            with within(1.0 + 2.0):
                works = [objcomm.isend(number, 1, timeout=1.0, group=group) for number in range(10)]
                for work in works:
                    error_in(TransportTimeout, work.wait)
        tell_all("over", "")


# Ctrl-C


def interrupt(call: Callable[[], Any]) -> None:
    """Press Ctrl-C when a call waits."""
    when_main_thread_waits(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        call()


@ranks(2)
@pytest.mark.parametrize("src", [1, None])
def test_interrupted_receives_and_probes_lose_no_message(src: int | None) -> None:
    objcomm.barrier()
    if here().rank == 0:
        work = objcomm.irecv(src, tag=2)
        interrupt(lambda: objcomm.recv(src))
        interrupt(lambda: objcomm.probe(src))
        interrupt(lambda: objcomm.mprobe(src))
        interrupt(work.wait)
        say("all are interrupted")
        assert objcomm.recv(src) == "first"
        assert objcomm.recv(src) == LARGE
        assert objcomm.mprobe(src).recv() == "third"
        assert work.wait() == "to the work"
    else:
        hear("all are interrupted")
        for obj in ("first", LARGE, "third"):
            objcomm.send(obj, 0)
        objcomm.send("to the work", 0, tag=2)
    assert_all_works()


@ranks(2)
def test_the_message_of_an_interrupted_ssend_may_still_be_received() -> None:
    assert_pair_works()
    if here().rank == 0:
        interrupt(lambda: objcomm.ssend("interrupted", 1))
        say("interrupted")
    else:
        hear("interrupted")
        assert objcomm.recv(0) == "interrupted"
    assert_all_works()


@ranks(2, disposable=True)
@pytest.mark.parametrize("call", ["send", "sendrecv"])
def test_an_interrupted_large_send_does_not_block_its_receiver(call: str) -> None:
    assert_pair_works()
    if here().rank == 0:
        args = (LARGE, 1) if call == "send" else (LARGE, 1, 1)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            interrupt(lambda: getattr(objcomm, call)(*args))
            gc.collect()
        assert [str(each.message) for each in warned] == []
    tell_all("interrupted", "")
    if here().rank == 1 and call == "send":
        assert error_in(TransportError, lambda: objcomm.recv(0)).peers == (0,)
    elif here().rank == 1:
        assert objcomm.recv(0) == LARGE
    tell_all("received", "")
    assert_group_works()


@ranks(2, disposable=True)
@pytest.mark.parametrize("ahead", [AHEAD_MAX, AHEAD_MAX + 1])  # the last one is held back
@pytest.mark.parametrize("call", ["ssend", "sendrecv"])
def test_what_changes_after_an_interrupted_send_is_not_sent(call: str, ahead: int) -> None:
    assert_pair_works()
    if here().rank == 0:
        other = objcomm.recv(1)
        os.kill(other, signal.SIGSTOP)
        works = [objcomm.isend(number, 1, tag=1) for number in range(ahead)]
        mine = torch.zeros(1_000_000, dtype=torch.uint8)
        args = (mine, 1) if call == "ssend" else (mine, 1, 1)
        interrupt(lambda: getattr(objcomm, call)(*args))
        mine.fill_(1)
        os.kill(other, signal.SIGCONT)
        with contextlib.suppress(ObjcommError):
            objcomm.isend("the end", 1).wait()
        for work in works[:AHEAD_MAX]:
            work.wait()
    else:
        objcomm.send(os.getpid(), 0)
        assert [objcomm.recv(0, tag=1) for _ in range(AHEAD_MAX)] == list(range(AHEAD_MAX))
        with contextlib.suppress(ObjcommError):
            got = objcomm.recv(0)
            assert got == "the end" if isinstance(got, str) else not got.any()
    tell_all("received", "")
    assert_group_works()


@ranks(2, disposable=True)
def test_an_interrupted_rank_closes_its_connections_even_if_another_thread_is_slow() -> None:
    """The thread that asks the store closes them too; the caller does not wait long for it."""
    assert_pair_works()
    if here().rank == 0:
        may_close, close = threading.Event(), StreamLink.abort

        def close_late(link: StreamLink, farewell: bytes = b"") -> None:
            if threading.current_thread() is not threading.main_thread():
                may_close.wait(PATIENCE_S)
            close(link, farewell)

        with mock.patch.object(StreamLink, "abort", close_late):
            with hastily():
                interrupt(lambda: objcomm.send(LARGE, 1))
            tell_all("interrupted", "")
            tell_all("heard", "")
            may_close.set()
    else:
        tell_all("interrupted", "")
        error_in(TransportError, lambda: objcomm.recv(0))
        tell_all("heard", "")
    assert_group_works()


# Calls that fail at their start: no thread can start, or Ctrl-C between two steps


@contextlib.contextmanager
def no_new_threads(name: str) -> Iterator[None]:
    """Refuse to start threads of this name, as a container at its thread limit does."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with mock.patch.object(threading.Thread, "start", refuse):
        yield


def assert_lacks_thread(call: Callable[[], object]) -> None:
    assert "new thread" in str(error_in(RuntimeError, call))


@contextlib.contextmanager
def interrupted(*, after: bool) -> Iterator[None]:
    """Interrupt this thread right before or after it hands a call to another thread."""
    submit, interrupted_thread = ThreadPool.submit, threading.get_ident()

    def interrupt(pool: ThreadPool, job: Callable[[], None]) -> None:
        is_here = threading.get_ident() == interrupted_thread  # others submit jobs too
        if after or not is_here:
            submit(pool, job)
        if is_here:
            raise KeyboardInterrupt

    with mock.patch.object(ThreadPool, "submit", interrupt):
        yield


@contextlib.contextmanager
def pair_that_has_met() -> Iterator[dist.ProcessGroup]:
    """Yield a group whose ranks 0 and 1 are connected and have no idle threads yet."""
    with subgroup(0, 1) as group:
        if here().rank == 0:
            objcomm.send("met", 1, group=group)
        else:
            assert objcomm.recv(0, group=group) == "met"
        yield group


@ranks(2)
def test_a_send_without_a_thread_does_not_block_later_sends() -> None:
    with pair_that_has_met() as group:
        if here().rank == 0:
            with no_new_threads("objcomm-pool"):
                assert_lacks_thread(lambda: objcomm.isend("never", 1, group=group))
            assert under_way(group) == []
            objcomm.send("next", 1, group=group)
        else:
            assert objcomm.recv(0, group=group) == "next"


@ranks(2)
@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_send_interrupted_at_its_start_does_not_block_later_sends(
    *, is_handed_over: bool
) -> None:
    with pair_that_has_met() as group:
        if here().rank == 0:
            with interrupted(after=is_handed_over), pytest.raises(KeyboardInterrupt):
                objcomm.isend("interrupted", 1, group=group)
            objcomm.send("next", 1, group=group)
            wait_until(lambda: not under_way(group), "the end of all calls")
        else:
            got = objcomm.recv(0, group=group)
            assert got == "next" or (is_handed_over and objcomm.recv(0, group=group) == "next")


@ranks(2)
@pytest.mark.parametrize("name", ["objcomm-listen", "objcomm-connect"])
@pytest.mark.parametrize("src", [1, None])
def test_a_receive_that_cannot_begin_takes_nothing_and_the_next_one_can(
    name: str, src: int | None
) -> None:
    with subgroup(0, 1) as group:
        if here().rank == 0:
            with no_new_threads(name):
                assert_lacks_thread(lambda: objcomm.recv(src, group=group))
                work: Any = objcomm.irecv(src, group=group)
                assert_lacks_thread(partial(work.wait, PATIENCE_S))
                assert_lacks_thread(lambda: objcomm.iprobe(src, group=group))
            assert under_way(group) == []
            assert [objcomm.recv(src, group=group) for _ in range(2)] == ["first", "second"]
        else:
            objcomm.send("first", 0, group=group)
            objcomm.send("second", 0, group=group)


@ranks(2)
@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_receive_that_is_interrupted_as_it_begins_leaves_the_message(
    *, is_handed_over: bool
) -> None:
    with pair_that_has_met() as group:
        if here().rank == 0:
            objcomm.send("now", 1, group=group)
            objcomm.probe(1, group=group)
            with interrupted(after=is_handed_over), pytest.raises(KeyboardInterrupt):
                objcomm.irecv(1, group=group)
            got = objcomm.recv(1, group=group)
            assert got == "first" or (is_handed_over and got == "second")
            assert got == "second" or objcomm.recv(1, group=group) == "second"
            wait_until(lambda: not under_way(group), "the end of all calls")
        else:
            assert objcomm.recv(0, group=group) == "now"
            objcomm.send("first", 0, group=group)
            objcomm.send("second", 0, group=group)


@ranks(2)
def test_a_message_that_no_thread_can_receive_fails_the_works_and_is_kept() -> None:
    with pair_that_has_met() as group:
        if here().rank == 0:
            with no_new_threads("objcomm-pool"):
                works: list[Any] = [objcomm.irecv(src, group=group) for src in (1, None, 1)]
                objcomm.send("now", 1, group=group)
                for work in works:
                    assert_lacks_thread(partial(work.wait, PATIENCE_S))
            assert objcomm.recv(1, group=group) == "kept"
            assert under_way(group) == []
            objcomm.send("still connected", 1, group=group)
        else:
            assert objcomm.recv(0, group=group) == "now"
            objcomm.send("kept", 0, group=group)
            assert objcomm.recv(0, group=group) == "still connected"


@ranks(2)
def test_a_timeout_ends_a_receive_even_if_no_thread_can_start() -> None:
    with pair_that_has_met() as group:
        own, other = here().rank, 1 - here().rank
        with no_new_threads("objcomm-pool"):
            works: list[Any] = [
                objcomm.irecv(src, timeout=0.3, tag=4, group=group) for src in (own, other)
            ]
            for work in works:
                assert_lacks_thread(partial(work.wait, PATIENCE_S))
        late: Any = objcomm.irecv(other, timeout=0.3, tag=4, group=group)
        error_in(TransportTimeout, partial(late.wait, PATIENCE_S))  # the watchdog still runs
        objcomm.barrier(group=group)


@solo()
def test_the_watchdog_survives_a_fallback_that_raises() -> None:
    watching = watchdog._watchdogs.watchdog()  # noqa: SLF001  # nothing public shows its fallbacks
    continued = threading.Event()

    def fail() -> None:
        raise RuntimeError("of a test")

    watching._fallbacks += [(0.0, fail), (0.0, continued.set)]  # noqa: SLF001  # the same
    watching._nudge()  # noqa: SLF001  # the same
    assert continued.wait(PATIENCE_S)
    assert watching.is_alive()


# Blocks that fail together


@ranks(2, 3)
@pytest.mark.parametrize("src", [1, None])
def test_a_block_that_fails_on_another_rank_ends_a_receive(src: int | None) -> None:
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
        objcomm.send("any", right(), tag=5)
        assert objcomm.recv(tag=5) == "any"
        assert_group_works()
