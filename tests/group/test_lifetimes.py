"""What the library holds on to: nothing that was sent, received or destroyed."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from tests.group.helpers import Held
from tests.group.operations import OBJECT_OPERATIONS, OPERATIONS
from tests.ranks import ranks


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", OBJECT_OPERATIONS)
def test_neither_what_was_sent_nor_what_arrived_is_kept(name: str) -> None:
    gc.disable()  # memory of this size must not wait for the collector
    try:
        mine = Held()
        got: Any = OPERATIONS[name](mine)
        several = got if isinstance(got, list) else [got]
        kept = [weakref.ref(obj) for obj in (mine, *several) if obj is not None]
        # Another call, because the last one's messages might be the ones that are kept.
        objcomm.barrier()
        del mine, got, several
        assert [ref() for ref in kept] == [None] * len(kept)
    finally:
        gc.enable()


@ranks(2)
def test_memory_does_not_grow_with_the_number_of_calls() -> None:
    def call_often() -> int:
        for turn in range(100):
            objcomm.all_gather((turn, bytes(100_000)))
            objcomm.all_reduce(torch.ones(20_000))
            objcomm.gather("small")
        gc.collect()
        return len(gc.get_objects())

    call_often()
    before = call_often()
    assert call_often() - before < 50


@ranks(2, disposable=True)
def test_a_destroyed_group_leaves_no_socket_and_no_thread() -> None:
    def use_and_destroy(turns: int) -> tuple[int, int]:
        for _ in range(turns):
            group: Any = dist.new_group([0, 1])
            assert objcomm.all_gather(objcomm.rank(), group=group) == [0, 1]
            with objcomm.lane("side"):
                objcomm.barrier(group=group)
            dist.destroy_process_group(group)
            del group
            gc.collect()
        own = Path("/proc/self")
        return len(list(own.joinpath("fd").iterdir())), len(list(own.joinpath("task").iterdir()))

    sockets, threads = use_and_destroy(3)
    now = use_and_destroy(10)
    # Gloo closes in a thread of its own, so the last group's may still be there.
    assert now[0] <= sockets + 4
    assert now[1] <= threads + 2
