"""Verdicts beside other threads, blocks, lanes and slow ranks: none is false, and none is lost."""

import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, DesyncError, TransportTimeout
from tests.group.helpers import SOON_S, assert_group_works, subgroup, tell_all
from tests.ranks import ranks, solo
from tests.workers import here


def hold_the_interpreter(seconds: float) -> None:
    """As a long sort does, or an extension that keeps the GIL: not even the watcher gets a turn."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def in_thread(body: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=body)
    thread.start()
    return thread


@ranks(3)
def test_a_busy_ranks_old_answer_closes_no_circle() -> None:
    with subgroup(0, 2) as ab, subgroup(1, 2) as cb, subgroup(0, 1) as ca:
        rank = here().rank
        for group, members in ((ab, (0, 2)), (ca, (0, 1))):
            if rank in members:
                objcomm.barrier(group=group)
        if rank == 1:
            time.sleep(1.6)
        if rank in (1, 2):
            objcomm.barrier(group=cb)
        if rank == 2:
            hold_the_interpreter(2.5)
        if rank in (0, 2):
            assert objcomm.all_gather(rank, group=ab) == [0, 2]
        if rank in (0, 1):
            assert objcomm.all_gather(rank, group=ca) == [0, 1]


@ranks(2)
def test_a_call_inside_of_a_failed_block_never_pairs_with_one_outside() -> None:
    objcomm.barrier()
    mine = here().rank

    def block() -> None:
        with objcomm.fail_together():
            try:
                objcomm.broadcast(1, src=1 - mine)
            except DesyncError:
                if mine == 0:
                    raise
            objcomm.all_gather("inside")

    with pytest.raises(CollectiveError):
        block()
    # Rank 1 was about to meet rank 0 for its call inside, and must not meet this one.
    assert objcomm.all_gather("outside") == ["outside"] * 2
    assert_group_works()


@ranks(2)
def test_a_failed_block_lets_other_threads_raise_as_well() -> None:
    with subgroup(0, 1) as group:
        objcomm.barrier(group=group)
        told: list[Any] = []

        def gather_in_turn() -> None:
            with objcomm.lane("background"):
                for turn in range(4):
                    if turn == 2 and here().rank == 1:
                        time.sleep(2)
                    try:
                        told.append(objcomm.all_gather(turn, group=group))
                    except CollectiveError:
                        told.append("failed")

        thread = in_thread(gather_in_turn)
        time.sleep(0.7)

        def block() -> None:
            with objcomm.fail_together():
                if here().rank == 0:
                    raise LookupError("no such shard")
                objcomm.barrier()

        with pytest.raises(CollectiveError):
            block()
        thread.join()
        assert told == [[0, 0], [1, 1], "failed", [3, 3]]


@ranks(2)
def test_a_desync_is_found_however_many_calls_another_lane_makes() -> None:
    objcomm.barrier()
    found: list[str] = []
    is_over = threading.Event()

    def broadcast_from_the_other() -> None:
        with objcomm.lane("odd"):
            began = time.monotonic()
            try:
                objcomm.broadcast(1, src=1 - here().rank)
            except DesyncError:
                assert time.monotonic() - began < SOON_S
                found.append("found")
            is_over.set()

    thread = in_thread(broadcast_from_the_other)

    def gather_for_ever() -> None:
        while True:
            objcomm.all_gather(1)

    with pytest.raises(DesyncError):
        gather_for_ever()
    assert is_over.wait(SOON_S)
    thread.join()
    assert found == ["found"]
    assert_group_works()


@ranks(3, disposable=True)
def test_limits_that_pass_together_all_name_the_rank_that_is_missing() -> None:
    groups = [dist.new_group([0, 1, 2]) for _ in range(3)]
    for group in groups:
        objcomm.barrier(group=group)
    pids = objcomm.all_gather(os.getpid())
    errors: list[Any] = []

    def wait_in(group: Any) -> None:
        with objcomm.lane("waits"), pytest.raises(TransportTimeout) as caught:
            objcomm.all_gather(1, group=group, timeout=1.5 if here().rank == 0 else 20)
        errors.append(caught.value)

    if here().rank == 0:
        os.kill(pids[2], signal.SIGSTOP)
    if here().rank < 2:
        for thread in [in_thread(functools.partial(wait_in, group)) for group in groups]:
            thread.join()
        assert [error.missing for error in errors] == [(2,)] * 3
        assert not any(error.is_store_silent for error in errors)
    if here().rank == 0:
        os.kill(pids[2], signal.SIGCONT)
    tell_all("over", "")


_ABANDONED = """
import threading, time, sys, torch.distributed as dist, objcomm
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
objcomm.barrier()
def wait():
    with objcomm.lane("daemon"):
        objcomm.gather(1, dst=0)
if rank == 0:
    threading.excepthook = lambda *_: None
    threading.Thread(target=wait, daemon=True).start()
time.sleep(0.5)
"""


@solo(deadline=60)
def test_a_daemon_thread_that_waits_does_not_abort_a_clean_exit() -> None:
    meeting = str(here().folder / "meeting")
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", _ABANDONED, meeting, str(rank)], stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for program in programs:
        _, printed = program.communicate(timeout=50)
        assert program.returncode == 0, printed.decode()
        assert b"terminate called" not in printed
