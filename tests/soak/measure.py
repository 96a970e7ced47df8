"""What one process holds, and whether it grew."""

import contextlib
import ctypes
import gc
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

# A closed connection's descriptors and a thread's end show after a moment.
_SETTLED_SECONDS = 0.3
_SETTLE_MAX_SECONDS = 10.0

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # glibc, <malloc.h>


class Figures(NamedTuple):
    """One process at one moment, when nothing is under way.

    Attributes:
        seconds: since the start.
        turns: operations that this rank has done.
        errors: how many of them had to raise on this rank.
        groups: subgroups made and destroyed so far, by any rank.
        resident_nbytes: physical memory, after free memory was given back.
        blocks: objects that Python's allocator holds; unlike memory, no matter of chance.
        threads: of the whole process, those of torch included.
        descriptors: open files and sockets.
        keys: in the store, less those that torch leaves for each group and those of each rank.
        microseconds: median of the last operations, where there is but one kind.
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
    """Let glibc give every large block back at once, so that what is resident is in use.

    By default it raises its threshold for that up to 32 MiB and has an arena for each thread:
    resident memory then wanders by 60 MiB in a minute, and a leak hides in that.
    """
    with contextlib.suppress(AttributeError):  # glibc has it
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 128 * 1024)
        mallopt(_M_ARENA_MAX, 1)


def no_idle_threads() -> None:
    """Let threads end when they have no job, for as long as this process lives.

    They stay for seconds, in case another job comes: how many a busy machine finds there is a
    matter of chance, and one that never ends hides among them.
    """
    for name in ("_IDLE_SECONDS", "_LINGER_SECONDS"):
        mock.patch.object(threads, name, _SETTLED_SECONDS / 10).start()


def held(descriptors_before: int = sys.maxsize) -> tuple[int, int, int, int]:
    """Resident bytes, Python's blocks, threads and descriptors, once they stand still.

    Args:
        descriptors_before: how many there were the last time; more may be some that close late.
    """
    gc.collect()
    expires = time.monotonic() + _SETTLE_MAX_SECONDS
    before, now = (-1, -1), _handles()
    while (before != now or now[1] > descriptors_before) and time.monotonic() < expires:
        time.sleep(_SETTLED_SECONDS)
        before, now = now, _handles()
    with contextlib.suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    return _resident_nbytes(), sys.getallocatedblocks(), *now


def keys_in(store: dist.Store, world_size: int) -> int:
    """How many keys there are besides those that a rank has one of, once it waited for long."""
    board = dist.PrefixStore("objcomm", store_of(dist.group.WORLD))
    own = [f"{kind}/{rank}" for kind in ("where", "process") for rank in range(world_size)]
    while True:
        count = store.num_keys()
        others = count - sum(board.check([key]) for key in ["asked", *own])
        if store.num_keys() == count:  # else a rank has written one meanwhile
            return int(others)


def _handles() -> tuple[int, int]:
    own = Path("/proc/self")
    return len(list(own.joinpath("task").iterdir())), len(list(own.joinpath("fd").iterdir()))


def _resident_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def trend(values: Sequence[float]) -> float:
    """How much a series grew from its first third to its last, by their medians."""
    third = max(1, len(values) // 3)
    return statistics.median(values[-third:]) - statistics.median(values[:third])
