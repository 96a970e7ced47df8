"""Torch's own object collectives, called as ``plan`` calls objcomm's."""

from typing import Any

import torch.distributed as dist

_VICTIM = 1


def broadcast(obj: Any) -> Any:
    """The victim's object on every rank."""
    box = [obj]
    dist.broadcast_object_list(box, src=_VICTIM)
    return box[0]


def gather(obj: Any) -> Any:
    """Every rank's object on rank 0."""
    boxes = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(obj, boxes)
    return boxes


def all_gather(obj: Any) -> Any:
    """Every rank's object on every rank."""
    boxes = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, obj)
    return boxes


def scatter(obj: Any) -> Any:
    """One of the victim's objects on each rank."""
    box = [None]
    is_source = dist.get_rank() == _VICTIM
    dist.scatter_object_list(box, [obj] * dist.get_world_size() if is_source else None, src=_VICTIM)
    return box[0]


def barrier(_: Any) -> None:
    """Wait for every rank."""
    dist.barrier()
