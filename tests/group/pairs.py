"""Shared by tests of point-to-point messages."""

import os
import signal
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

import objcomm
from tests.group.helpers import assert_group_works
from tests.waits import wait_until
from tests.workers import here

LARGE = bytes(3_000_000)

each_size = pytest.mark.parametrize("obj", ["small", LARGE], ids=["small", "large"])


def left() -> int:
    return (here().rank - 1) % here().world_size


def right() -> int:
    return (here().rank + 1) % here().world_size


def swap(obj: Any, **options: Any) -> Any:
    """Exchange objects between ranks 0 and 1; in a world of one, rank 0 receives its own."""
    other = (1 - here().rank) % here().world_size
    return objcomm.sendrecv(obj, other, other, **options) if here().rank < 2 else None


def improbed(src: int | None = None, **options: Any) -> objcomm.Message:
    """Call ``improbe`` until it finds a message."""
    found = wait_until(lambda: objcomm.improbe(src, **options), "a message")
    assert found is not None
    return found


def assert_pair_works(group: dist.ProcessGroup | None = None) -> None:
    """Check that ranks 0 and 1 can exchange small and large messages."""
    own, size = here().rank, here().world_size
    for nbytes in (1, 200_000):
        want = bytes([(1 - own) % size]) * nbytes if own < 2 else None
        assert swap(bytes([own]) * nbytes, tag=77, group=group) == want


def assert_all_works(group: dist.ProcessGroup | None = None) -> None:
    """Check messages between ranks 0 and 1, and collectives of all ranks."""
    assert_pair_works(group)
    assert_group_works(group)


def under_way(group: dist.ProcessGroup | None = None) -> list[str]:
    """The operations that this rank has started and not ended, on one group or on all."""
    groups = objcomm.recorder.dump(group=group)["groups"]
    entries = [entry for each in groups for entry in each["entries"]]
    return [entry["operation"] for entry in entries if entry["outcome"] == "under way"]


def die() -> NoReturn:
    """End this process without running any of its code."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
