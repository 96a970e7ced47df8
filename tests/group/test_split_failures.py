"""Failures of split, dup, node_group and leaders: wrong arguments, timeouts and deaths."""

import contextlib
import datetime
import os
import resource
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, UsageError
from objcomm._calls.group import resolve
from objcomm._transport.threads import are_workers_busy
from tests.group.helpers import assert_group_works, exit_at_once, hear, say, tell_all
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
    objcomm.barrier()  # or the timeout would include the world's first use
    with pytest.MonkeyPatch.context() as patch:
        if here().rank == 1:
            patch.setattr("objcomm._collectives.split.create", lambda *_, **__: exit_at_once())
        with pytest.raises(objcomm.ObjcommError):
            objcomm.split("all", timeout=6)
    assert len(dist.distributed_c10d._world.pg_map) == 1  # noqa: SLF001  # no group is left


@ranks(3, disposable=True)
def test_a_rank_without_descriptors_is_named_before_any_rank_connects() -> None:
    objcomm.barrier()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    if here().rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
    try:
        with pytest.raises(CollectiveError) as caught:
            objcomm.split(0, timeout=PATIENCE_S)
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert list(caught.value.failures) == [1]
    assert "Too many open files" in caught.value.failures[1].message
    assert_group_works(objcomm.split(0))


@ranks(2, disposable=True)
def test_torch_is_left_behind_when_it_exceeds_the_limit() -> None:
    objcomm.barrier()
    torchs = len(dist.distributed_c10d._world.pg_map)  # noqa: SLF001
    is_over = threading.Event()

    def late(*given: Any, **options: Any) -> Any:
        assert is_over.wait(PATIENCE_S)
        return create_briefly(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        if here().rank == 1:
            patch.setattr("objcomm._collectives.split.create", late)
        began = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            objcomm.split(0, timeout=4)
        assert time.monotonic() - began < PATIENCE_S / 2
        assert "longer than" in caught.value.failures[1].message
        is_over.set()
    wait_until(lambda: not are_workers_busy(), "the thread that was left behind")
    assert len(dist.distributed_c10d._world.pg_map) == torchs  # noqa: SLF001
    assert_group_works(objcomm.split(0))


@ranks(2, disposable=True)
def test_the_others_are_told_that_a_rank_is_in_split_while_it_connects() -> None:
    objcomm.barrier()

    def create(*_: Any, **__: Any) -> Any:
        if here().rank == 1:
            hear("the limit has passed")
        raise OSError("no more sockets")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("objcomm._collectives.split.create", create)
        patch.setattr("objcomm._collectives.split._LONGER", PATIENCE_S)
        with pytest.raises(objcomm.TransportTimeout) as caught:
            objcomm.split(0, timeout=2)
    if here().rank == 0:
        say("the limit has passed")
    position = caught.value.positions[1]
    assert position.operation == "split"
    assert not position.is_over
    assert_group_works(dist.new_group())


@ranks(2)
def test_invalid_colors_and_keys_are_refused_before_any_traffic() -> None:
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
    mesh = resolve(group)._whole.mesh  # noqa: SLF001  # nothing public names it
    assert mesh is not None
    if here().rank == 0:
        with pytest.raises(objcomm.TransportTimeout) as caught:
            objcomm.split(0, group=group, timeout=0.3)
        assert caught.value.missing == (1,)
        assert caught.value.operation == "split"
    tell_all("given up", "")
    # A send is not woken if its connection ends at that moment: see failures.md.
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
