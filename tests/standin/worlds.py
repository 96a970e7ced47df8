"""Ranks that join over the backend ``standin``, each on a device of its own."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.standin import backend, device
from tests.workers import here

BOTH = "cpu:gloo,standin:standin"


def join(backends: str = BOTH, *, timeout_s: float = 120.0) -> None:
    """Make this process the rank that the test has given it; device 1 is rank 0's current one.

    Args:
        backends: as ``dist.init_process_group`` takes them.
        timeout_s: how long the group's backends wait, which is what ends a stalled device path.
    """
    backend.set_up()
    place = here()
    device.set_device((place.rank + 1) % device.COUNT)
    dist.init_process_group(
        backends,
        store=place.store("rendezvous"),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def joined_by(group: Any = None) -> backend.Backend:
    """The backend that joins the devices of a group's ranks."""
    group = dist.group.WORLD if group is None else group
    assert isinstance(group, backend.Group)
    return group.standin
