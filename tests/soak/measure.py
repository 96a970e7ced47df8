"""The resources that one process holds, and whether they grew."""

import contextlib
import ctypes
import gc
import linecache
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch.distributed as dist

from objcomm._transport import threads
from objcomm._world import store_of

MEBIBYTE = 1 << 20

# A closed connection's descriptors and an ended thread take a moment to disappear.
_SETTLED_SECONDS = 0.3
_SETTLE_MAX_SECONDS = 10.0

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # glibc, <malloc.h>


class Figures(NamedTuple):
    """One process at one moment, when no operation is in progress.

    Attributes:
        seconds: since the start.
        turns: operations that this rank has completed.
        errors: how many of them raised on this rank, as expected.
        groups: subgroups created and destroyed so far, by any rank.
        resident_nbytes: physical memory, after free memory was returned.
        blocks: objects in Python's allocator; unlike memory, a deterministic number.
        threads: of the whole process, including torch's.
        descriptors: open files and sockets.
        keys: in the store, except torch's for each group and those of each rank.
        microseconds: median duration of the last operations, if there is only one kind.
    """

    seconds: float
    turns: int
    errors: int
    groups: int
    resident_nbytes: int
    blocks: int
    threads: int
    descriptors: int
    keys: int
    microseconds: float = 0.0


def steady_allocator() -> None:
    """Make glibc return every large block immediately, so that resident memory is memory in use.

    By default it raises its threshold for this up to 32 MiB and has an arena for each thread:
    resident memory then varies by 60 MiB within a minute, which hides a leak.
    """
    with contextlib.suppress(AttributeError):  # glibc only
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 128 * 1024)
        mallopt(_M_ARENA_MAX, 1)


def no_idle_threads() -> None:
    """Let threads end when they have no job, for the lifetime of this process.

    They stay for seconds in case of another job: how many of them a busy machine sees is random,
    and one that never ends would be hidden among them.
    """
    for name in ("_IDLE_SECONDS", "_LINGER_SECONDS"):
        mock.patch.object(threads, name, _SETTLED_SECONDS / 10).start()


def held(descriptors_before: int = sys.maxsize) -> tuple[int, int, int, int]:
    """Return resident bytes, Python's blocks, threads and descriptors, once they are stable.

    Args:
        descriptors_before: the previous number of descriptors; more of them may be some that close
            late.
    """
    # The first error or long wait in a file keeps all its lines: some 20,000 blocks in all.
    linecache.clearcache()
    gc.collect()
    expires = time.monotonic() + _SETTLE_MAX_SECONDS
    before, now = (-1, -1), _handles()
    while (before != now or now[1] > descriptors_before) and time.monotonic() < expires:
        time.sleep(_SETTLED_SECONDS)
        before, now = now, _handles()
    with contextlib.suppress(AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
    return _resident_nbytes(), sys.getallocatedblocks(), *now


def keys_in(store: dist.Store, world_size: int) -> int:
    """Count the store's keys, except those that a rank has once it has waited for long."""
    board = dist.PrefixStore("objcomm", store_of(dist.group.WORLD))
    own = [f"{kind}/{rank}" for kind in ("where", "process") for rank in range(world_size)]
    while True:
        count = store.num_keys()
        others = count - sum(board.check([key]) for key in ["asked", *own])
        if store.num_keys() == count:  # otherwise a rank has written one meanwhile
            return int(others)


def _handles() -> tuple[int, int]:
    own = Path("/proc/self")
    return len(list(own.joinpath("task").iterdir())), len(list(own.joinpath("fd").iterdir()))


def _resident_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def trend(values: Sequence[float]) -> float:
    """Return how much a series grew from its first third to its last, by their medians."""
    third = max(1, len(values) // 3)
    return statistics.median(values[-third:]) - statistics.median(values[:third])
