"""What a time limit tells: who is missing, where everybody is, and who does not answer."""

import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import BrokenGroupError, TransportTimeout
from tests.group.helpers import assert_group_works, tell_all
from tests.ranks import ranks
from tests.workers import here

# Promised within 1 s of the limit; a loaded machine gets more.
LATE_S = 4.0


def timeout_of(seconds: float, call: Any = objcomm.all_gather) -> TransportTimeout:
    """The error of a call that waits in vain."""
    began = time.monotonic()
    with pytest.raises(TransportTimeout) as caught:
        call("x", timeout=seconds)
    waited = time.monotonic() - began
    assert seconds * 0.99 <= waited < seconds + LATE_S
    return caught.value


@ranks(3, disposable=True)
def test_a_timeout_tells_where_each_rank_is() -> None:
    objcomm.barrier("before")
    if here().rank == 1:
        objcomm.gather("sent", dst=0)
        tell_all("over", "")
        return
    if here().rank == 0:
        objcomm.gather(None)
    else:
        objcomm.gather("sent", dst=0)
    error = timeout_of(2.0)
    assert error.missing == (1,)
    assert error.silent == ()
    assert not error.is_store_silent
    for rank in (0, 2):
        where = error.positions[rank]
        assert (where.operation, where.sequence, where.is_over) == ("all_gather", 2, False)
        assert "test_timeouts.py" in where.call_site
        assert 1.0 < where.seconds < 2.0 + LATE_S
    missing = error.positions[1]
    assert (missing.operation, missing.sequence, missing.is_over) == ("gather", 1, True)
    assert "rank 1 is in no call; its last was gather (call 1)" in str(error)
    with pytest.raises(BrokenGroupError, match="TransportTimeout"):
        objcomm.barrier()
    tell_all("over", "")


@ranks(3, disposable=True)
def test_the_shortest_limit_ends_every_ranks_wait() -> None:
    objcomm.barrier()
    if here().rank == 0:
        timeout_of(1.5)
    elif here().rank == 1:
        began = time.monotonic()
        with pytest.raises(TransportTimeout) as caught:
            objcomm.all_gather("x")  # the group's own limit is half an hour
        assert time.monotonic() - began < 1.5 + LATE_S
        assert caught.value.missing == (2,)
        assert caught.value.seconds == 1.5
    tell_all("over", "")


@ranks(2, disposable=True)
def test_a_stopped_rank_gives_no_answer() -> None:
    pids = objcomm.all_gather(os.getpid())
    if here().rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        try:
            error = timeout_of(1.5)
        finally:
            os.kill(pids[1], signal.SIGCONT)
        assert error.silent == error.missing == (1,)
        assert "rank 1: no answer" in str(error)
    tell_all("over", "")


@ranks(2, 3)
def test_a_rank_that_is_resumed_in_time_completes() -> None:
    pids = objcomm.all_gather(os.getpid())
    mine = bytes([here().rank]) * 20_000_000
    if here().rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        resume = threading.Timer(1.5, os.kill, (pids[1], signal.SIGCONT))
        resume.start()
    gathered = objcomm.all_gather(mine, timeout=15)
    assert gathered == [bytes([rank]) * 20_000_000 for rank in range(len(pids))]
    assert_group_works()


@ranks(2, disposable=True)
def test_a_first_use_that_not_all_ranks_make_can_be_made_again() -> None:
    if here().rank == 0:
        error = timeout_of(0.7)
        assert error.missing == (1,)
    tell_all("tried", "")
    assert_group_works()


@ranks(2, disposable=True)
def test_slow_work_before_a_call_may_be_allowed_any_time() -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    objcomm.barrier(group=group)
    if here().rank == 0:
        time.sleep(2.5)
    assert objcomm.broadcast(here().rank, group=group, timeout=float("inf")) == 0
    assert_group_works(group)


def _host_a_store(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@ranks(2, joined=False)
@pytest.mark.parametrize("is_first_use", [True, False])
def test_a_stopped_store_does_not_hold_a_rank(*, is_first_use: bool) -> None:
    """The store's host is a process of its own, which stops before the wait ends."""
    rendezvous = here().store("port")
    if here().rank == 0:
        ours, theirs = multiprocessing.Pipe()
        pid = os.fork()  # multiprocessing gives a worker, which is a daemon, no children
        if pid == 0:
            _host_a_store(theirs)
            os._exit(0)
        rendezvous.set("port", f"{ours.recv()} {pid}")
    port, pid = map(int, rendezvous.get("port").decode().split())
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=here().rank, world_size=2)
    if not is_first_use:
        objcomm.barrier()
    tell_all("joined", "")
    if here().rank == 0:
        os.kill(pid, signal.SIGSTOP)
        try:
            error = timeout_of(1.5)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert error.is_store_silent
        assert error.missing == (1,)
        assert "store: no answer" in str(error)
    tell_all("over", "")
