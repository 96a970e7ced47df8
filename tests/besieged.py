"""What ranks do in ``tests/test_strangers.py``: ``python -m tests.besieged FOLDER TURNS AT_ONCE``.

They create groups, use each, and record which transport connected them and how many strangers they
refused. With a small ``AT_ONCE`` their listeners stay open while they use a group.
"""

import json
import resource
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist

import objcomm
from objcomm._transport import connect
from tests.group.helpers import kind_of
from tests.waits import wait_until

_FILES_MAX = 256


def _turn(*, is_open: bool) -> tuple[str, int]:
    """Return which transport connected a new group, and how many connections it has refused.

    Args:
        is_open: whether its listeners stay open, so that the rank can wait for strangers.
    """
    group = dist.new_group()
    try:
        objcomm.barrier(group=group)
        if is_open:
            wait_until(lambda: "refused" in objcomm.stats(group), "a stranger")
        for root in range(objcomm.world_size()):
            found = objcomm.broadcast(
                root if objcomm.rank() == root else None, src=root, group=group
            )
            assert found == root
        size = objcomm.world_size()
        assert objcomm.all_gather(objcomm.rank(), group=group) == list(range(size))
        refused = objcomm.stats(group).get("refused")
        return kind_of(group), 0 if refused is None else refused.calls
    finally:
        dist.destroy_process_group(group)


def main() -> None:
    folder, turns, at_once = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES_MAX, most))
    with mock.patch.object(connect, "_AT_ONCE_MAX", at_once):
        objcomm.init()
        (folder / f"joined.{objcomm.rank()}").touch()
        is_open = at_once < objcomm.world_size()
        results = [_turn(is_open=is_open) for _ in range(turns)]
    (folder / f"results.{objcomm.rank()}").write_text(json.dumps(results))
    objcomm.shutdown()


if __name__ == "__main__":
    main()
