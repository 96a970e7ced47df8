"""Failures of calls that create groups: wrong arguments, timeouts and deaths."""

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, TransportError, TransportTimeout, UsageError
from objcomm._calls.group import resolve
from objcomm._transport.threads import are_workers_busy
from tests.group.helpers import assert_group_works, error_in, exit_at_once, hear, say, tell_all
from tests.group.membership import NOBODY, create_briefly, members
from tests.ranks import ranks
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here

#: The function that connects a new group.
CREATE = "objcomm._collectives.split.create"

CALLS: dict[str, Callable[[], Any]] = {
    "split": lambda: objcomm.split("new", here().rank % 2),
    "dup": objcomm.dup,
    "node_group": objcomm.node_group,
    "leaders": objcomm.leaders,
    "new_group": lambda: objcomm.new_group([0, 1, 2]),
}


def torchs_groups() -> int:
    """How many groups torch has in this process."""
    return len(dist.distributed_c10d._world.pg_map)  # noqa: SLF001  # torch exposes it nowhere else


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise OSError("no more sockets")


@ranks(3)
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_fails_before_its_call_ends_the_wait_of_the_others(name: str) -> None:
    def call() -> None:
        with objcomm.fail_together():
            if here().rank == 1:
                raise LookupError("no such shard")
            CALLS[name]()

    assert error_in(CollectiveError, call).failures[1].message == "no such shard"
    assert_group_works()
    found = CALLS[name]()
    assert found == NOBODY or here().rank in members(found)


@ranks(2)
def test_connecting_ends_before_the_limit_does() -> None:
    create = mock.Mock(side_effect=refuse)
    with mock.patch(CREATE, create), pytest.raises(CollectiveError):
        objcomm.dup(timeout=PATIENCE_S)
    assert 0 < create.call_args.kwargs["limit"].total_seconds() <= PATIENCE_S / 2


@ranks(3, expect_dead=[1])
@pytest.mark.parametrize("name", sorted({*CALLS} - {"leaders"}))  # those with rank 1
def test_a_death_while_torch_connects_ends_the_wait_of_the_others(name: str) -> None:
    """Torch's wait, which is in C++, goes on."""
    objcomm.barrier()
    is_over = threading.Event()

    def create(*given: Any, **options: Any) -> Any:
        if here().rank == 1:
            exit_at_once()
        assert is_over.wait(PATIENCE_S)
        return create_briefly(*given, **options)

    with mock.patch(CREATE, create):
        error = error_in(TransportError, CALLS[name])
        assert error.peers == (1,)
        assert error.__suppress_context__  # how the wait ended is not shown
        is_over.set()
        wait_until(lambda: not are_workers_busy(), "the thread that was left behind")
    assert torchs_groups() == 1
    assert_group_works(objcomm.survivors(timeout=PATIENCE_S))


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
        error = error_in(CollectiveError, lambda: objcomm.split(0, timeout=PATIENCE_S))
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert list(error.failures) == [1]
    assert "Too many open files" in error.failures[1].message
    assert_group_works(objcomm.split(0))


@ranks(2, disposable=True)
def test_torch_is_left_behind_when_it_exceeds_the_limit() -> None:
    objcomm.barrier()
    before = torchs_groups()
    is_over = threading.Event()

    def create_late(*given: Any, **options: Any) -> Any:
        assert is_over.wait(PATIENCE_S)
        return create_briefly(*given, **options)

    with mock.patch(CREATE, create_late) if here().rank == 1 else contextlib.nullcontext():
        began = time.monotonic()
        error = error_in(CollectiveError, lambda: objcomm.split(0, timeout=4))
        assert time.monotonic() - began < PATIENCE_S / 2
        assert "longer than" in error.failures[1].message
        is_over.set()
    wait_until(lambda: not are_workers_busy(), "the thread that was left behind")
    assert torchs_groups() == before
    assert_group_works(objcomm.split(0))


@ranks(2, disposable=True)
def test_a_timeout_reports_that_a_rank_is_in_split_while_it_connects() -> None:
    objcomm.barrier()

    def create(*_: Any, **__: Any) -> NoReturn:
        if here().rank == 1:
            hear("the limit has passed")
        refuse()

    longer = mock.patch("objcomm._collectives.split._LONGER", PATIENCE_S)
    with mock.patch(CREATE, create), longer:
        error = error_in(TransportTimeout, lambda: objcomm.split(0, timeout=2))
    if here().rank == 0:
        say("the limit has passed")
    position = error.positions[1]
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
def test_colors_of_two_types_raise_one_error_on_all_ranks() -> None:
    last = here().world_size - 1
    error = error_in(CollectiveError, lambda: objcomm.split("a" if here().rank == last else 1))
    assert list(error.failures) == [last]
    assert "str" in error.failures[last].message
    assert_group_works()


@ranks(2, 3)
def test_ranks_in_different_calls_raise() -> None:
    with pytest.raises(objcomm.ObjcommError):
        (objcomm.dup if here().rank else objcomm.node_group)()
    assert_group_works()


@ranks(2)
def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    group = objcomm.dup()
    objcomm.barrier(group=group)
    mesh: Any = resolve(group)._whole.mesh  # noqa: SLF001  # nothing public names it
    if here().rank == 0:
        error = error_in(TransportTimeout, lambda: objcomm.split(0, group=group, timeout=0.3))
        assert (error.missing, error.operation) == ((1,), "split")
    tell_all("given up", "")
    # A send is not woken if its connection ends at that moment: see failures.md.
    wait_until(lambda: mesh.link and mesh.link.closed(), "the end of the connection")
    error_in(objcomm.TransportError, lambda: objcomm.split(0, group=group))
    dist.destroy_process_group(group)
    assert_group_works()


@ranks(3)
@pytest.mark.parametrize("name", ["split", "new_group"])
def test_where_one_rank_cannot_connect_all_fail_and_keep_no_group(name: str) -> None:
    rank, before = here().rank, torchs_groups()
    make: Any = partial(objcomm.split, min(rank, 1))  # rank 0, and ranks 1 and 2
    callers, failing = [0, 1, 2], 1
    if name == "new_group":
        make, callers, failing = partial(objcomm.new_group, [2, 1]), [2, 1], 2
    if rank in callers:
        with mock.patch(CREATE, refuse if rank == failing else create_briefly):
            error = error_in(CollectiveError, lambda: make(timeout=60))
        assert "no more sockets" in error.failures[callers.index(failing)].message
        assert torchs_groups() == before
        assert_group_works(make())
    assert_group_works()
