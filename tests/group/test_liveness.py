"""Liveness follows the processes: a death is detected without any connection."""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import objcomm
from objcomm import BrokenGroupError, CollectiveError, DesyncError, TransportError, TransportTimeout
from objcomm._algorithms import transfers
from objcomm._calls.group import resolve
from objcomm._failures import losses, watchdog
from objcomm._failures.mesh import Mesh
from objcomm._failures.noticeboard import StoreSilentError
from objcomm._transport import connect, rendezvous
from tests.group.helpers import (
    assert_group_works,
    error_in,
    hear,
    join_over_tcp,
    say,
    tell_all,
    when_main_thread_waits,
)
from tests.group.reports import told_when
from tests.ranks import OVER_GLOO, ranks
from tests.waits import PATIENCE_S
from tests.workers import here

KILLED, ENDED = "killed", "ended"


def end_this_process(how: str) -> None:
    """End as by a signal, or as a program that has finished."""
    if how == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    atexit._run_exitfuncs()  # noqa: SLF001  # a process of multiprocessing's leaves without
    os._exit(0)


def end_rank_1(how: str = KILLED) -> None:
    """End rank 1 as soon as all ranks are here."""
    tell_all("all are here", "")
    if here().rank == 1:
        end_this_process(how)


def error_of_a_loss(call: Callable[[], object]) -> Any:
    """The error of a call that lost a rank, with what the store reports, however late."""
    with mock.patch.object(watchdog, "_INTERRUPT_SECONDS", PATIENCE_S):
        return error_in(TransportError, call)


def assert_names(rank: int, how: str, call: Callable[[], object]) -> None:
    """Check that the call raises and names the rank whose process has ended."""
    error = error_of_a_loss(call)
    assert not isinstance(error, TransportTimeout), error
    assert error.peers == (rank,)
    assert ("its program has ended" in error.reason) == (how == ENDED), error.reason


# Before there are connections, and between two


@pytest.mark.parametrize("how", [KILLED, ENDED])
@ranks(3, expect_dead={1})
def test_the_end_of_a_rank_is_noticed_after_an_error_that_the_group_outlives(how: str) -> None:
    objcomm.barrier()
    error_in(DesyncError, objcomm.barrier if here().rank == 1 else lambda: objcomm.all_gather(1))
    end_rank_1(how)
    assert_names(1, how, objcomm.barrier)


@pytest.mark.parametrize("how", [KILLED, ENDED])
@ranks(3, expect_dead={1})
def test_the_end_of_a_rank_is_noticed_in_the_first_use_of_another_group(how: str) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    if here().rank < 2:
        objcomm.barrier(group=first)
    end_rank_1(how)
    assert_names(1, how, lambda: objcomm.barrier(group=second))


@ranks(2, expect_dead={1})
def test_the_end_of_a_rank_that_never_used_objcomm_is_noticed() -> None:
    """Only torch's own connection reports it; the process was not known before."""
    if here().rank == 1:
        hear("rank 0 calls")
        end_this_process(ENDED)
    say("rank 0 calls")
    error = error_in(TransportError, lambda: objcomm.gather(1))
    assert error.peers == (1,)
    assert error.operation.startswith("gather")


@ranks(3, expect_dead={1})
def test_a_first_use_that_a_dead_rank_would_have_joined_fails_on_all_others() -> None:
    """One of them learns it from torch's own connection; the other would wait in the next call."""
    end_rank_1()
    assert error_in(TransportError, lambda: objcomm.broadcast(None, src=1)).peers == (1,)
    error_in(BrokenGroupError, lambda: objcomm.all_gather(1, timeout=300))


@ranks(3, expect_dead={1})
def test_a_rank_that_connects_notices_the_end_of_any_rank_not_only_of_those_it_awaits() -> None:
    """Rank 2 awaits rank 0, which reports nothing about rank 1."""
    end_rank_1()
    if here().rank == 0:
        hear("rank 2 has raised")
    assert error_in(TransportError, objcomm.barrier).peers == (1,)
    if here().rank == 2:
        say("rank 2 has raised")
    survivors: Any = dist.new_group([0, 2], use_local_synchronization=True)
    assert_group_works(survivors)


@ranks(3, expect_dead={1})
def test_a_receive_from_any_rank_fails_if_one_ended_before_it_connected() -> None:
    end_rank_1()
    if here().rank == 0:
        assert error_in(TransportError, objcomm.recv).peers == (1,)
        say("rank 0 has raised")
    hear("rank 0 has raised")


def counted(looks: threading.Semaphore) -> Callable[..., Any]:
    """``loss_in``, which counts its looks once rank 1 is known to have ended."""

    def look(meeting: Mesh, *args: Any) -> Any:
        verdict = losses.loss_in(meeting, *args)
        if meeting.board_thread.processes.end_of(1):
            looks.release()
        return verdict

    return look


@pytest.mark.parametrize("how", [KILLED, ENDED])
@ranks(3, expect_dead={1})
def test_a_rank_that_connects_slowly_gets_what_another_sent_before_its_end(how: str) -> None:
    """All have met, so rank 1 may send and end while the others are about to use their sockets."""
    tell_all("all are here", "")
    if here().rank == 1:
        objcomm.broadcast("its last words", src=1)
        end_this_process(how)
    looks = threading.Semaphore(0)

    def slow_forget(*args: Any) -> None:
        looks.acquire()
        looks.acquire()  # so the first one has not ended the call
        rendezvous.forget(*args)

    with (
        mock.patch.object(watchdog, "loss_in", counted(looks)),
        mock.patch.object(connect, "forget", slow_forget),
        mock.patch.object(losses, "LAST_BYTES_SECONDS", 60.0),
    ):
        assert objcomm.broadcast(None, src=1) == "its last words"
    survivors: Any = dist.new_group([0, 2], use_local_synchronization=True)
    assert_group_works(survivors)


# While ranks are connected


@pytest.mark.parametrize("how", [KILLED, ENDED])
@ranks(2, expect_dead={1})
def test_a_rank_that_gets_no_turn_for_long_gets_what_another_sent_before_its_end(how: str) -> None:
    """Two calls' messages are in this host's memory, and the watchdog may not move them."""
    objcomm.barrier()
    if here().rank == 1:
        hear("rank 0 waits")
        objcomm.broadcast("all but", src=1)
        objcomm.broadcast("its last words", src=1)
        end_this_process(how)
    looks = threading.Semaphore(0)
    loop: Any = resolve(None)._whole.mesh.link._loop  # type: ignore[union-attr]  # noqa: SLF001  # nothing public holds up a thread there
    events = loop.events

    def poll(seconds: float) -> Any:
        found = events.poll(seconds)
        if found and threading.current_thread() is threading.main_thread():
            looks.acquire()
            looks.acquire(timeout=1.0)  # none follows if the first one has ended the call
        return found

    when_main_thread_waits(lambda: say("rank 0 waits"))
    with (
        mock.patch.object(watchdog, "loss_in", counted(looks)),
        mock.patch.object(losses, "LAST_BYTES_SECONDS", 0.0),
    ):
        with mock.patch.object(loop, "events", mock.Mock(wraps=events, poll=poll)):
            assert objcomm.broadcast(None, src=1) == "all but"
        assert objcomm.broadcast(None, src=1) == "its last words"


def on_another_host_without_a_store(mesh: Any) -> contextlib.ExitStack:
    """A rank that learns of a death neither from the kernel nor from the store."""
    blind, thread = contextlib.ExitStack(), mesh.board_thread
    blind.enter_context(mock.patch.object(thread, "call", side_effect=StoreSilentError))
    blind.enter_context(mock.patch.object(thread, "submit"))
    knows_nothing: dict[str, Any] = {"killed": {}, "has_died": False, "end_of": ""}
    for name, answer in knows_nothing.items():
        blind.enter_context(mock.patch.object(thread.processes, name, return_value=answer))
    return blind


@ranks(4, expect_dead={2})
def test_a_rank_that_closes_its_connections_says_which_rank_has_died() -> None:
    """A rank that cannot find out would take the closing rank for the dead one."""
    objcomm.barrier()
    me = here().rank
    if me == 2:
        hear("rank 3 waits")
        end_this_process(KILLED)
    if me == 3:
        when_main_thread_waits(lambda: say("rank 3 waits"))
        with on_another_host_without_a_store(resolve(None).mesh):
            error = error_in(TransportError, lambda: objcomm.broadcast(None, src=1))
    else:
        hear("rank 3 waits")
        error = error_of_a_loss(lambda: (objcomm.gather(me, dst=1), objcomm.barrier()))
    assert error.peers == (2,)
    survivors: Any = dist.new_group([0, 1, 3], use_local_synchronization=True)
    assert_group_works(survivors)


@pytest.mark.parametrize("nbytes", [4 << 20, 10])
@ranks(2, expect_dead={1}, environment=OVER_GLOO)
def test_a_send_that_gloo_forgets_is_given_up_when_its_receiver_has_died(nbytes: int) -> None:
    """A quarter of plain kills leave a rank in a wait like this, which nothing can wake."""
    objcomm.barrier()
    if here().rank == 1:
        hear("rank 0 is stuck")
        end_this_process(KILLED)

    def never(sent: transfers.Transfers) -> None:
        sent.entry.awaits = 1
        say("rank 0 is stuck")
        threading.Event().wait()

    with mock.patch.object(transfers.Transfers, "_await_sends", never):
        assert_names(1, KILLED, lambda: objcomm.gather(bytes(nbytes), dst=1))


@ranks(3, disposable=True)
def test_ranks_that_wait_in_a_group_raise_when_another_rank_destroys_it() -> None:
    group = dist.new_group([0, 1, 2])
    objcomm.barrier(group=group)
    if here().rank == 1:
        hear("rank 0 waits")
        dist.destroy_process_group(group)  # and ``group`` stays
    else:
        if here().rank == 0:
            say("rank 0 waits")
        error = error_in(TransportError, lambda: objcomm.all_gather("a", group=group))
        assert error.peers == (1,)
        assert "it is alive" in error.reason
    tell_all("all have raised", "")
    assert_group_works()


# The ranks that are named


@ranks(3, expect_dead={1, 2})
def test_a_rank_that_raises_because_another_died_is_not_the_one_that_is_named() -> None:
    objcomm.barrier()
    if here().rank == 2:
        hear("rank 1 waits")
        end_this_process(KILLED)
    if here().rank == 1:
        say("rank 1 waits")
        sys.last_value = error_of_a_loss(lambda: objcomm.recv(2))
        end_this_process(ENDED)
    error = error_of_a_loss(lambda: objcomm.recv(1))
    assert error.peers == (2,), error


@ranks(2, disposable=True)
def test_a_main_thread_that_has_failed_is_reported_though_another_thread_continues() -> None:
    """Python waits for that thread before it exits, perhaps forever."""
    if here().rank == 0:
        objcomm.barrier()
        error = error_in(TransportError, lambda: objcomm.all_gather("a"))
        assert error.peers == (1,)
        assert "its main thread ended with ValueError: no such file" in error.reason
        say("rank 0 has raised")
        return
    main = threading.Thread(target=objcomm.barrier)
    main.start()
    main.join()
    with mock.patch.object(threading, "main_thread", return_value=main):
        sys.last_value = ValueError("no such file")  # as Python keeps what it has printed
        hear("rank 0 has raised")


@ranks(3, expect_dead={0}, joined=False)
def test_ranks_that_connect_when_the_stores_host_dies_do_not_blame_each_other() -> None:
    join_over_tcp()
    groups = dist.new_group([1, 2]), dist.new_group([1, 2])
    objcomm.barrier()
    if here().rank == 0:
        hear("rank 1 waits")
        end_this_process(KILLED)
    if here().rank == 2:
        hear("rank 1 has raised")
        return
    whole = resolve(groups[0])._whole  # noqa: SLF001  # nothing public says that it has the store
    told_when(lambda: whole.mesh is not None and whole.mesh.nonce, "rank 1 waits")
    for group in groups:  # the second has no connection to the store
        error = error_in(TransportError, partial(objcomm.all_gather, "a", group=group))
        assert error.peers == ()
        assert "the store where ranks meet is gone" in error.reason
        assert "; rank 0 of the world: its process, " in error.reason
    say("rank 1 has raised")


@ranks(3, expect_dead={0}, joined=False)
def test_ranks_in_a_block_notice_a_death_though_the_store_died_with_that_rank() -> None:
    """They wait for each other, and no rank is left to ask them."""
    rank = here().rank
    join_over_tcp()
    objcomm.barrier()

    def wait_inside() -> None:
        with objcomm.fail_together():
            if rank == 0:
                hear("rank 1 is inside")
                hear("rank 2 is inside")
                end_this_process(KILLED)
            say(f"rank {rank} is inside")
            objcomm.recv(3 - rank)

    assert "rank 0 ended: " in str(error_in(CollectiveError, wait_inside))
