"""Point-to-point calls that fail half-way: no thread can start, or Ctrl-C between two steps."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import objcomm
from objcomm import TransportTimeout
from objcomm._failures import watchdog
from objcomm._p2p import mailbox
from objcomm._transport.threads import ThreadPool
from tests.group.helpers import subgroup, tell_all
from tests.ranks import ranks, solo
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here


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


@contextlib.contextmanager
def interrupted(*, after: bool) -> Iterator[None]:
    """Interrupt this thread right before or after it hands a call to another thread."""
    submit, here_only = ThreadPool.submit, threading.get_ident()

    def interrupt(pool: ThreadPool, job: Callable[[], None]) -> None:
        is_here = threading.get_ident() == here_only  # a call that was handed over submits jobs too
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


def under_way(group: dist.ProcessGroup) -> list[str]:
    entries = objcomm.recorder.dump(group=group)["groups"][0]["entries"]
    return [each["operation"] for each in entries if each["outcome"] == "under way"]


def await_the_end_of_all(group: dist.ProcessGroup) -> None:
    wait_until(lambda: not under_way(group), "the end of all calls")


# Sends


@ranks(2)
def test_a_send_without_a_thread_does_not_block_later_sends() -> None:
    with pair_that_has_met() as group:
        if here().rank == 0:
            with no_new_threads("objcomm-pool"), pytest.raises(RuntimeError, match="new thread"):
                objcomm.isend("never", 1, group=group)
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
            await_the_end_of_all(group)
        else:
            got = objcomm.recv(0, group=group)
            assert got == "next" or (is_handed_over and objcomm.recv(0, group=group) == "next")


@ranks(2, disposable=True)
def test_a_send_keeps_its_limit_while_it_waits_behind_another() -> None:
    if here().rank == 0:
        first = objcomm.isend("first", 1)
        with pytest.raises(TransportTimeout) as caught:
            objcomm.send("second", 1, timeout=0.5)
        assert (caught.value.missing, caught.value.seconds) == ((1,), 0.5)
        third = objcomm.isend("third", 1)
        tell_all("the second one's limit has passed", "")
        objcomm.wait_all([first, third])
    else:
        tell_all("the second one's limit has passed", "")
        assert [objcomm.recv(0), objcomm.recv(0)] == ["first", "third"]


# Receives


@ranks(2)
@pytest.mark.parametrize("name", ["objcomm-listen", "objcomm-connect"])
@pytest.mark.parametrize("src", [1, None])
def test_a_receive_that_cannot_begin_takes_nothing_and_the_next_one_can(
    name: str, src: int | None
) -> None:
    with subgroup(0, 1) as group:
        if here().rank == 0:
            with no_new_threads(name):
                with pytest.raises(RuntimeError, match="new thread"):
                    objcomm.recv(src, group=group)
                work: Any = objcomm.irecv(src, group=group)
                with pytest.raises(RuntimeError, match="new thread"):
                    work.wait(PATIENCE_S)
                with pytest.raises(RuntimeError, match="new thread"):
                    objcomm.iprobe(src, group=group)
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
            await_the_end_of_all(group)
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
                    with pytest.raises(RuntimeError, match="new thread"):
                        work.wait(PATIENCE_S)
            assert objcomm.recv(1, group=group) == "kept"
            assert under_way(group) == []
            objcomm.send("still connected", 1, group=group)
        else:
            assert objcomm.recv(0, group=group) == "now"
            objcomm.send("kept", 0, group=group)
            assert objcomm.recv(0, group=group) == "still connected"


@ranks(2)
def test_a_limit_that_passes_when_there_can_be_no_more_threads_ends_the_work() -> None:
    with pair_that_has_met() as group:
        own, other = here().rank, 1 - here().rank
        with no_new_threads("objcomm-pool"):
            works: list[Any] = [
                objcomm.irecv(src, timeout=0.3, tag=4, group=group) for src in (own, other)
            ]
            for work in works:
                with pytest.raises(RuntimeError, match="new thread"):
                    work.wait(PATIENCE_S)
        with pytest.raises(TransportTimeout):  # the watchdog still runs
            objcomm.irecv(other, timeout=0.3, tag=4, group=group).wait(PATIENCE_S)
        objcomm.barrier(group=group)


@solo()
def test_the_watcher_outlives_what_it_could_not_end() -> None:
    watching = watchdog._watchdogs.watchdog()  # noqa: SLF001  # nothing public shows its fallbacks
    went_on = threading.Event()

    def fail() -> None:
        raise RuntimeError("of a test")

    watching._fallbacks += [(0.0, fail), (0.0, went_on.set)]  # noqa: SLF001  # the same
    watching._nudge()  # noqa: SLF001  # the same
    assert went_on.wait(PATIENCE_S)
    assert watching.is_alive()


# Probes


@ranks(2)
def test_a_loop_of_probes_sees_a_message_behind_more_than_is_kept() -> None:
    """Each probe that finds nothing lets one more message in."""
    count = 80
    if here().rank == 0:
        assert objcomm.recv(1) == "go on"
        for number in range(count):
            objcomm.send((number, bytes(30_000)), 1, tag=1)
        objcomm.send("urgent", 1, tag=2)
    else:
        with mock.patch.object(mailbox, "_KEPT_MAX_NBYTES", 1 << 20):
            objcomm.send("go on", 0)
            wait_until(lambda: objcomm.iprobe(0, tag=2), "the message behind the others")
        assert objcomm.recv(0, tag=2) == "urgent"
        assert [objcomm.recv(0, tag=1)[0] for _ in range(count)] == list(range(count))
