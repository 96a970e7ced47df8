"""No verdict is wrong or lost, whatever other threads, blocks, lanes and slow ranks do."""

import ctypes
import functools
import math
import os
import subprocess
import sys
from typing import Any

import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, DesyncError, TransportTimeout
from objcomm._failures import watchdog
from tests.group.helpers import (
    assert_group_works,
    error_in,
    hear,
    in_thread,
    is_waiting,
    say,
    stopped,
    subgroup,
    tell_all,
)
from tests.group.watched import after_looks, answering_every, closely, patiently
from tests.ranks import ranks, solo
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here


@ranks(3)
def test_an_old_answer_of_a_busy_rank_is_not_taken_for_a_deadlock() -> None:
    """Rank 2 reports that it waits for rank 1, then is too busy to report that it stopped."""
    rank, is_over = here().rank, here().folder / "is_over"
    if rank == 0:
        os.mkfifo(is_over)
    tell_all("the pipe is there", "")
    pipe = os.open(is_over, os.O_RDWR)
    with subgroup(0, 2) as ab, subgroup(1, 2) as cb, subgroup(0, 1) as ca:
        for group, members in ((ab, (0, 2)), (ca, (0, 1))):
            if rank in members:
                objcomm.barrier(group=group)
        if rank == 1:
            hear("rank 2 has reported that it waits")
            objcomm.barrier(group=cb)
        if rank == 2:
            hear("rank 0 has asked")
            with after_looks(2, fall_silent), answering_every(PATIENCE_S):
                objcomm.barrier(group=cb)
            hold_the_interpreter(pipe)
        if rank in (0, 2):
            with after_looks(2, lambda: say("rank 0 has asked") if rank == 0 else None):
                assert objcomm.all_gather(rank, group=ab) == [0, 2]
        if rank in (0, 1):
            with after_looks(20, lambda: os.write(pipe, b"!") if rank == 1 else None):
                assert objcomm.all_gather(rank, group=ca) == [0, 1]
        tell_all("over", "")
    os.close(pipe)


def fall_silent() -> None:
    """Report nothing more, as if the rank were already busy."""
    watchdog.OVERDUE_SECONDS = math.inf
    say("rank 2 has reported that it waits")


def hold_the_interpreter(pipe: int) -> None:
    """Hold the GIL, as a long sort or an extension may, so that no watchdog runs."""
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)


@ranks(2)
def test_a_call_inside_a_failed_block_never_pairs_with_one_outside() -> None:
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

    with closely(), patiently():
        error_in(CollectiveError, block)
    # Rank 1 was about to connect to rank 0 for its call inside, which must not match this one.
    assert objcomm.all_gather("outside") == ["outside"] * 2
    assert_group_works()


@ranks(2)
def test_a_failed_block_lets_other_threads_raise_as_well() -> None:
    with subgroup(0, 1) as group:
        objcomm.barrier(group=group)
        results: list[Any] = []

        def gather_in_turn() -> None:
            with objcomm.lane("background"):
                for turn in range(4):
                    if turn == 2 and here().rank == 1:
                        hear("rank 1 has raised")
                    try:
                        results.append(objcomm.all_gather(turn, group=group))
                    except CollectiveError:
                        results.append("failed")

        def block() -> None:
            with objcomm.fail_together():
                if here().rank == 0:
                    raise LookupError("no such shard")
                objcomm.barrier()

        thread = in_thread(gather_in_turn)
        wait_until(lambda: len(results) == 2, "two turns")
        if here().rank == 0:
            wait_until(lambda: is_waiting(group), "the third turn to wait for rank 1")
        tell_all("rank 0 waits", "")
        with closely(), patiently():
            error_in(CollectiveError, block)
        say(f"rank {here().rank} has raised")
        thread.join()
        assert results == [[0, 0], [1, 1], "failed", [3, 3]]


@ranks(2)
def test_a_desync_is_found_however_many_calls_another_lane_makes() -> None:
    objcomm.barrier()

    def broadcast_from_the_other() -> None:
        with objcomm.lane("odd"):
            error_in(DesyncError, lambda: objcomm.broadcast(1, src=1 - here().rank))

    def gather_forever() -> None:
        while True:
            objcomm.all_gather(1)

    with closely(), patiently():
        thread = in_thread(broadcast_from_the_other)
        error_in(DesyncError, gather_forever)
        thread.join()
    assert_group_works()


@ranks(3)
def test_limits_that_pass_together_all_name_the_rank_that_is_missing() -> None:
    groups: list[Any] = [dist.new_group([0, 1, 2]) for _ in range(3)]
    for group in groups:
        objcomm.barrier(group=group)
    pids = objcomm.all_gather(os.getpid())
    errors: list[TransportTimeout] = []

    def wait_in(group: Any) -> None:
        limit_s = 0.6 if here().rank == 0 else PATIENCE_S
        with objcomm.lane("waits"):
            call = functools.partial(objcomm.all_gather, 1, group=group, timeout=limit_s)
            errors.append(error_in(TransportTimeout, call))

    def wait_in_all() -> None:
        threads = [in_thread(functools.partial(wait_in, group)) for group in groups]
        wait_until(lambda: all(map(is_waiting, groups)), "all threads to wait")
        say(f"rank {here().rank} waits")
        for thread in threads:
            thread.join()
        assert [error.missing for error in errors] == [(2,)] * 3
        assert not any(error.is_store_silent for error in errors)

    # Rank 1 answers from the start, and rank 2 never does.
    with closely(), patiently(answers_s=3):
        if here().rank == 0:
            hear("rank 1 waits")
            with stopped(pids[2]):
                wait_in_all()
        elif here().rank == 1:
            wait_in_all()
    tell_all("over", "")


_ABANDONED = """
import threading, time, sys, torch.distributed as dist, objcomm
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=2)
objcomm.barrier()
def wait():
    with objcomm.lane("daemon"):
        objcomm.gather(1, dst=0)
threading.excepthook = lambda *_: None
threading.Thread(target=wait, daemon=True).start()
while objcomm.recorder.dump(group=dist.group.WORLD)["groups"][0]["entries"][-1]["awaits"] < 0:
    time.sleep(0.01)
"""


@solo()
def test_a_daemon_thread_that_waits_does_not_abort_a_clean_exit() -> None:
    """Rank 0 is a separate interpreter that exits while its thread waits for rank 1, this one."""
    meeting = str(here().folder / "meeting")
    program = subprocess.Popen([sys.executable, "-c", _ABANDONED, meeting], stderr=subprocess.PIPE)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=1, world_size=2)
    objcomm.barrier()
    _, printed = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == 0, printed.decode()
    assert b"terminate called" not in printed
