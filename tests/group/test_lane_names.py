"""The lane that a call uses, and the names that two lanes may have."""

import itertools

import pytest
import torch.distributed as dist

import objcomm
from objcomm import UsageError
from objcomm._transport.link import LANE_BITS
from objcomm._wire.header import fingerprint
from tests.group.helpers import assert_group_works
from tests.ranks import ranks


@ranks(2)
def test_calls_after_a_block_are_on_the_lane_before_it() -> None:
    with objcomm.lane("outer"):
        with objcomm.lane("inner"):
            objcomm.barrier()
        objcomm.barrier()
    objcomm.barrier()
    (told,) = objcomm.recorder.dump(group=dist.group.WORLD)["groups"]
    assert [each["lane_name"] for each in told["entries"][-3:]] == ["inner", "outer", ""]


@ranks(2)
def test_two_lanes_of_one_number_are_refused() -> None:
    by_number: dict[int, str] = {}
    for name in map("lane {}".format, itertools.count()):
        other = by_number.setdefault(fingerprint(name) % (1 << LANE_BITS), name)
        if other != name:
            break
    with objcomm.lane(name):
        objcomm.barrier()
    with objcomm.lane(other), pytest.raises(UsageError, match="collide; rename one of them"):
        objcomm.barrier()
    assert_group_works()
