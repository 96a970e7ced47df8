"""Groups whose first uses overlap: each thread waits for a mesh that the others make elsewhere."""

import functools
import threading
from typing import Any

import torch.distributed as dist

import objcomm
from tests.group.helpers import in_thread
from tests.soak.run import join
from tests.workers import here

# Long enough for the first thread to be inside of the mesh's construction.
_HEAD_START_SECONDS = 0.02


def first_uses(*, count: int, port: int, record: str) -> None:
    """The order that each worker gets: two threads use two new groups, in no common order.

    Args:
        count: how often.
        port: of the store.
        record: not used; no figures are taken.
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
