"""Point-to-point messages of a destroyed group leave nothing behind."""

import gc
import time
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

import objcomm
from objcomm import TransportError
from objcomm._calls import group as calls_group
from objcomm._failures.channel import say_farewell
from objcomm._failures.noticeboard import IDLE_SECONDS
from objcomm._failures.watchdog import board_thread_of
from objcomm._world import store_of
from tests.group.helpers import (
    assert_group_works,
    assert_no_verdict_stays,
    error_in,
    hear,
    join_over_tcp,
    keys_in,
    keys_of_verdicts,
    say,
    tell_all,
)
from tests.group.pairs import LARGE
from tests.open_files import open_files
from tests.ranks import ranks
from tests.waits import wait_until
from tests.workers import here


def _left_over() -> tuple[int, int]:
    return open_files(), len(list(Path("/proc/self/task").iterdir()))


def _use_and_destroy(turns: int) -> None:
    own, other = here().rank, 1 - here().rank
    for turn in range(turns):
        group: Any = dist.new_group([0, 1])
        assert objcomm.iprobe(tag=None, group=group) is None  # nothing of the last group
        objcomm.barrier(group=group)
        assert objcomm.sendrecv((own, turn), other, other, group=group) == (other, turn)
        for dst in (own, other):
            objcomm.send("never received", dst, tag=9, group=group)
        work: Any = objcomm.irecv(other, tag=8, group=group)
        objcomm.barrier(group=group)
        dist.destroy_process_group(group)
        del group
        error_in(TransportError, work.wait)
        del work
        gc.collect()


@ranks(2, disposable=True)
def test_a_destroyed_group_leaves_no_message_thread_socket_or_key() -> None:
    objcomm.barrier()
    _use_and_destroy(3)
    store: Any = store_of(dist.group.WORLD)

    def is_settled(descriptors: int, tasks: int) -> bool:
        """Gloo closes in its own thread, so the last group's descriptors and threads may remain."""
        own = _left_over()
        is_closed = own[0] <= descriptors + 4 and own[1] <= tasks + 2
        return is_closed and not keys_of_verdicts(store)

    wait_until(lambda: is_settled(*_left_over()), "the keys of verdicts to go")
    before = _left_over()
    keys = len([key for key in keys_in(store) if "objcomm" in key])
    tell_all("counted", "")
    _use_and_destroy(8)  # a leak of one per group shows
    wait_until(lambda: is_settled(*before), f"no more than {before} descriptors and threads")
    tell_all("settled", "")
    assert len([key for key in keys_in(store) if "objcomm" in key]) <= keys + 2


@ranks(2, disposable=True)
def test_a_farewell_that_reaches_the_store_late_leaves_no_key() -> None:
    world: Any = dist.group.WORLD
    store, other = store_of(world), 1 - here().rank
    objcomm.barrier()
    for late in range(2):
        group: Any = dist.new_group([0, 1])
        assert objcomm.sendrecv(here().rank, other, other, group=group) == other
        if here().rank == late:  # keep the board thread busy, as a question to ranks does
            board_thread_of(world).submit(lambda _, late=late: hear(f"destroyed {late}"))  # type: ignore[misc]  # a default
        dist.destroy_process_group(group)
        del group
        if here().rank != late:
            say(f"destroyed {late}")
    assert_no_verdict_stays(store)
    tell_all("settled", "")
    assert_group_works()


class Held:
    """An object that weak references can watch."""


@ranks(1, 2)
def test_no_object_is_kept_after_a_message() -> None:
    other = (here().rank + 1) % here().world_size
    for is_async in (False, True):
        mine = Held()
        if is_async:
            sending = objcomm.isend((mine, LARGE), other)
            got = objcomm.irecv(other).wait()
            sending.wait()
            del sending
        else:
            got = objcomm.sendrecv((mine, "small"), other, other)
        kept = [weakref.ref(mine), weakref.ref(got[0])]
        del mine, got
        wait_until(lambda kept=kept: all(each() is None for each in kept), "nobody to hold it")  # type: ignore[misc]  # a default


@ranks(2, joined=False)
def test_a_farewell_is_sent_after_its_world_is_destroyed() -> None:
    """On a busy machine, the farewell may come long after the group is destroyed."""
    rank, other = here().rank, 1 - here().rank
    store = join_over_tcp()
    assert objcomm.sendrecv(rank, other, other) == other

    def say_late(channels: Any) -> None:
        time.sleep(3 * IDLE_SECONDS)
        say_farewell(channels)

    with patch.object(calls_group, "say_farewell", say_late if rank == 0 else say_farewell):
        dist.destroy_process_group()
        gc.collect()
    tell_all("left", "")
    assert_no_verdict_stays(store)
    tell_all("seen", "")
