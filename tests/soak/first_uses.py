"""Groups whose first uses overlap: a thread waits for a mesh that others create elsewhere."""

import functools
import threading
from typing import Any

import torch.distributed as dist

import objcomm
from tests.group.helpers import in_thread
from tests.soak.run import join
from tests.workers import here

# Long enough for the first thread to be constructing the mesh.
_HEAD_START_SECONDS = 0.02


def first_uses(*, count: int, port: int, record: str) -> None:
    """On each worker, use two new groups from two threads, in an order that differs between ranks.

    Args:
        count: number of repetitions.
        port: the port of the store.
        record: unused; no figures are recorded.
    """
    del record
    join(port)
    rank, size = dist.get_rank(), here().world_size
    for _ in range(count):
        groups: list[Any] = [dist.new_group(list(range(size))) for _ in range(2)]

        def use(group: Any, delay_seconds: float) -> None:
            threading.Event().wait(delay_seconds)
            assert objcomm.all_gather(dist.get_rank(), group=group) == list(range(size))

        early = in_thread(functools.partial(use, groups[rank % 2], 0.0))
        late = in_thread(functools.partial(use, groups[1 - rank % 2], _HEAD_START_SECONDS))
        early.join()
        late.join()
        for group in groups:
            dist.destroy_process_group(group)
