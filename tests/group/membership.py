"""Shared by tests of groups created from groups."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from objcomm._world import create

NOBODY: Any = dist.GroupMember.NON_GROUP_MEMBER


def members(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


def create_briefly(*given: Any, **options: Any) -> Any:
    """`create` with the shortest timeout: over a FileStore torch waits for whole seconds."""
    return create(*given, **options | {"limit": timedelta(seconds=1)})
