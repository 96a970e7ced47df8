"""split, dup, node_group and leaders when something is wrong: wrong arguments, limits, deaths."""

import datetime
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, UsageError
from objcomm._calls.group import resolve
from tests.group.helpers import assert_group_works, exit_at_once, tell_all
from tests.group.membership import NOBODY, create_briefly, members
from tests.ranks import ranks
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here


@ranks(3)
@pytest.mark.parametrize("part", ["split", "dup", "node_group", "leaders"])
def test_a_rank_that_fails_before_it_comes_ends_the_wait_of_the_others(part: str) -> None:
    calls: dict[str, Any] = {
        "split": lambda: objcomm.split("new", here().rank % 2),
        "dup": objcomm.dup,
        "node_group": objcomm.node_group,
        "leaders": objcomm.leaders,
    }

    def fail() -> None:
        raise LookupError("no such shard")

    call = fail if here().rank == 1 else calls[part]
    with pytest.raises(CollectiveError) as caught, objcomm.fail_together():
        call()
    assert caught.value.failures[1].message == "no such shard"
    assert_group_works()
    found = calls[part]()
    assert found == NOBODY or here().rank in members(found)


@ranks(2)
def test_connecting_ends_before_the_limit_does() -> None:
    limits: list[float] = []

    def create(*_: Any, limit: datetime.timedelta, **__: Any) -> Any:
        limits.append(limit.total_seconds())
        raise OSError("no more sockets")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("objcomm._collectives.split.create", create)
        with pytest.raises(CollectiveError):
            objcomm.dup(timeout=PATIENCE_S)
    assert 0 < limits[0] <= PATIENCE_S / 2


@ranks(3, expect_dead=[1])
def test_a_rank_that_dies_while_the_others_connect_is_not_waited_for_longer() -> None:
    objcomm.barrier()  # or the world's first use were part of that limit
    with pytest.MonkeyPatch.context() as patch:
        if here().rank == 1:
            patch.setattr("objcomm._collectives.split.create", lambda *_, **__: exit_at_once())
        with pytest.raises(objcomm.ObjcommError):
            objcomm.split("all", timeout=6)
    assert len(dist.distributed_c10d._world.pg_map) == 1  # noqa: SLF001  # no group is left


@ranks(2)
def test_what_is_no_colour_or_key_is_refused_before_any_traffic() -> None:
    objcomm.barrier()
    before = objcomm.stats()
    color: Any
    key: Any
    for color, key in ((1.0, 0), (True, 0), ([1], 0), (b"a", 0), (0, 1.0), (0, "1"), (0, True)):
        with pytest.raises(UsageError):
            objcomm.split(color, key)
        assert objcomm.stats() == before, (color, key)
    assert_group_works()


@ranks(2, 3)
def test_colours_of_two_types_raise_one_error_on_all_ranks() -> None:
    rank, last = here().rank, here().world_size - 1
    with pytest.raises(CollectiveError) as caught:
        objcomm.split("a" if rank == last else 1)
    assert list(caught.value.failures) == [last]
    assert "str" in caught.value.failures[last].message
    assert_group_works()


@ranks(2, 3)
def test_a_rank_in_another_call_is_told_so() -> None:
    with pytest.raises(objcomm.ObjcommError):
        (objcomm.dup if here().rank else objcomm.node_group)()
    assert_group_works()


@ranks(2)
def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    group = objcomm.dup()
    objcomm.barrier(group=group)
    mesh = resolve(group)._whole.mesh  # noqa: SLF001  # nothing public has its name
    assert mesh is not None
    if here().rank == 0:
        with pytest.raises(objcomm.TransportTimeout) as caught:
            objcomm.split(0, group=group, timeout=0.3)
        assert caught.value.missing == (1,)
        assert caught.value.operation == "split"
    tell_all("given up", "")
    # A send in the moment in which its connection ends is not woken: see failures.md.
    wait_until(lambda: mesh.link and mesh.link.closed(), "the end of the connection")
    with pytest.raises(objcomm.TransportError):
        objcomm.split(0, group=group)
    dist.destroy_process_group(group)
    assert_group_works()


@ranks(3)
def test_a_rank_that_cannot_connect_fails_all_and_nobody_keeps_a_group() -> None:
    rank = here().rank
    torchs = len(dist.distributed_c10d._world.pg_map)  # noqa: SLF001

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("no more sockets")

    color = "one" if rank < 1 else "two"
    with pytest.MonkeyPatch.context() as patch:
        create = refuse if rank == 1 else create_briefly
        patch.setattr("objcomm._collectives.split.create", create)
        with pytest.raises(CollectiveError) as caught:
            objcomm.split(color, timeout=60)
    assert "no more sockets" in caught.value.failures[1].message
    assert len(dist.distributed_c10d._world.pg_map) == torchs  # noqa: SLF001
    assert_group_works(objcomm.split(color))
