"""Shared by tests of point-to-point messages."""

from typing import Any

import torch.distributed as dist

import objcomm
from tests.workers import here

LARGE = bytes(3_000_000)
LARGE_NBYTES = 300_000
OBJECTS = ["small", LARGE]
IDS = ["small", "large"]


def left() -> int:
    return (here().rank - 1) % here().world_size


def right() -> int:
    return (here().rank + 1) % here().world_size


def swap(obj: Any, **options: Any) -> Any:
    """Between ranks 0 and 1; the others do nothing."""
    if here().rank < 2:
        return objcomm.sendrecv(obj, 1 - here().rank, 1 - here().rank, **options)
    return None


def assert_pair_works(group: dist.ProcessGroup | None = None) -> None:
    """Check that ranks 0 and 1 can exchange small and large messages."""
    if here().rank < 2:
        other = 1 - here().rank
        for obj in (here().rank, bytes([here().rank]) * 200_000):
            got = objcomm.sendrecv(obj, other, other, tag=77, group=group)
            assert len(str(got)) == len(str(obj))
