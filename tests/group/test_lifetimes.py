"""The library keeps no reference to anything sent, received or destroyed."""

import gc
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from tests.group.helpers import Held, fill_history
from tests.group.operations import OBJECT_OPERATIONS, OPERATIONS
from tests.open_files import open_files
from tests.ranks import ranks
from tests.waits import wait_until


@ranks(1, 3)
@pytest.mark.parametrize("name", OBJECT_OPERATIONS)
def test_neither_what_was_sent_nor_what_arrived_is_kept(name: str) -> None:
    gc.disable()  # memory of this size must not wait for the collector
    try:
        mine = Held()
        got: Any = OPERATIONS[name](mine)
        several = got if isinstance(got, list) else [got]
        kept = [weakref.ref(obj) for obj in (mine, *several) if obj is not None]
        # Make another call, because the messages of the last one might be kept.
        objcomm.barrier()
        del mine, got, several
        assert [ref() for ref in kept] == [None] * len(kept)
    finally:
        gc.enable()


@ranks(2)
def test_memory_does_not_grow_with_the_number_of_calls() -> None:
    def call_often() -> int:
        for turn in range(25):
            objcomm.all_gather((turn, bytes(100_000)))
            objcomm.all_reduce(torch.ones(20_000))
            objcomm.gather("small")
        gc.collect()
        return len(gc.get_objects())

    fill_history()
    counts = [call_often() for _ in range(5)]
    # A leak shows in each round; a thread that starts or ends affects only one of them.
    assert min(after - before for before, after in pairwise(counts)) < 15, counts


@ranks(2, disposable=True)
def test_a_destroyed_group_leaves_no_socket_and_no_thread() -> None:
    def use_and_destroy(turns: int) -> None:
        for _ in range(turns):
            group: Any = dist.new_group([0, 1])
            assert objcomm.all_gather(objcomm.rank(), group=group) == [0, 1]
            with objcomm.lane("side"):
                objcomm.barrier(group=group)
            dist.destroy_process_group(group)
            del group
        gc.collect()

    def kept() -> tuple[int, int]:
        return open_files(), len(list(Path("/proc/self/task").iterdir()))

    def is_as_before() -> bool:
        """Gloo closes in a separate thread, so the last group's may still be there."""
        now = kept()
        return now[0] <= sockets + 4 and now[1] <= threads + 2

    use_and_destroy(2)
    sockets, threads = kept()
    use_and_destroy(8)
    wait_until(is_as_before, "the sockets and threads of destroyed groups to go")
