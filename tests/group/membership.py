"""What tests of groups made of groups share."""

from typing import Any

import torch.distributed as dist

NOBODY: Any = dist.GroupMember.NON_GROUP_MEMBER


def members(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)
