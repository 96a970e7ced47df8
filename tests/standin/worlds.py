"""Ranks that join over the backend ``standin``, each on a device of its own."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

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


def fetched(obj: Any) -> Any:
    """Containers with their tensors copied to the CPU, to look at."""
    return pytree.tree_map_only(torch.Tensor, lambda each: each.detach().cpu(), obj)


def devices_in(obj: Any) -> list[torch.device]:
    """Where the tensors in containers lie, in order."""
    return [each.device for each in pytree.tree_leaves(obj) if isinstance(each, torch.Tensor)]


def own_device() -> torch.device:
    """This rank's current device."""
    return torch.device(device.NAME, device.current_device())


def copies() -> list[str]:
    """What went to the CPU or came from it, of what was queued since this was last asked."""
    return [each.name for each in device.queued() if "cpu" in each.name]
