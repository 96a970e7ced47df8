"""Faults on devices end as docs/guide/failures.md says: every waiting rank raises.

A wait on a device ends at the backend's own timeout, or when its watchdog aborts it: here as soon
as another rank has announced its failure.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import BrokenGroupError, CollectiveError, TransportError, WireError
from tests.cases import case
from tests.group.helpers import assert_group_works, hear, say, tell_all
from tests.group.operations import OPERATIONS
from tests.ranks import ranks
from tests.standin import device
from tests.standin.backend import Backend
from tests.standin.worlds import join, joined_by, own_device
from tests.waits import PATIENCE_S, wait_until

LARGE = 100_000  # elements, so that the member does not fit into the window
METHODS = ("broadcast", "send", "recv", "alltoall_base", "_allgather_base")

#: One call for each way in which tensors are transferred between devices.
CALLS: dict[str, Callable[..., Any]] = {
    **{name: OPERATIONS[name] for name in ("broadcast", "gather", "all_gather", "all_to_all")},
    "all_reduce": lambda obj, **options: objcomm.all_reduce(obj, "sum", **options),
    "broadcast_tensors": lambda obj, **options: objcomm.models.broadcast_tensors([obj], **options),
}


def group_that_has_met() -> tuple[Any, Backend]:
    """Return a new group of all ranks that has connected, and its backend."""
    group = dist.new_group()
    objcomm.barrier(group=group)
    return group, joined_by(group)


def abort_when(topic: str, backend: Backend) -> threading.Thread:
    """Abort as a watchdog does, once a rank has announced ``topic``."""

    def watch() -> None:
        hear(topic)
        backend.abort()

    watchdog = threading.Thread(target=watch)
    watchdog.start()
    return watchdog


def assert_next_group_works() -> None:
    """Check groups with tensors on the devices and without."""
    assert_group_works()
    group = dist.new_group()
    got = objcomm.all_gather(torch.full((LARGE,), objcomm.rank()).to("standin"), group=group)
    assert [int(each[0].cpu()) for each in got] == list(range(objcomm.world_size()))
    assert {each.device for each in got} == {own_device()}


def fail_in(name: str, who: int, fault: str) -> None:
    """Make one call on a new group, in which the backend fails or stalls on one rank."""
    rank, topic = objcomm.rank(), f"{name} {who}"
    group, backend = group_that_has_met()
    acted = []

    def act() -> None:
        acted.append(fault)
        if fault != "stalls":
            raise RuntimeError("unhandled system error")
        say(f"{topic} acted")
        for other in set(range(objcomm.world_size())) - {who}:
            hear(f"{topic} ended on {other}")  # until then this one stalls

    if rank == who:
        for method in METHODS:
            backend.interrupt(method, act, at_wait=fault == "fails later")
    watchdog = abort_when(f"{topic} acted", backend)
    error: TransportError | None = None
    try:
        CALLS[name](torch.full((LARGE,), rank).to("standin"), group=group)
    except TransportError as raised:
        error = raised
    if rank == who and fault != "stalls":
        say(f"{topic} acted")  # only now, so that its own error came first
    say(f"{topic} ended on {rank}")
    watchdog.join(PATIENCE_S)
    if rank == who:
        assert acted == [fault]
        assert error
        assert fault == "stalls" or "unhandled system error" in str(error)
    # A rank that has not waited raises in its next call; for one that has raised, the group is
    # broken.
    with pytest.raises(BrokenGroupError if error else TransportError):
        objcomm.barrier(group=group)
    tell_all(f"{topic} over", "")  # no rank destroys its group before all have called


@ranks(2, 3, joined=False)
@pytest.mark.parametrize("fault", ["fails", "fails later", "stalls"])
def test_a_backend_that_fails_or_stalls(fault: str) -> None:
    join()
    for who in (0, objcomm.world_size() - 1):
        for name in CALLS:
            with case(name, who):
                fail_in(name, who, fault)
    assert_next_group_works()


@ranks(2, joined=False)
def test_a_call_in_the_background_fails_as_any_other() -> None:
    join()
    group, backend = group_that_has_met()

    def act() -> None:
        say("acted")
        raise RuntimeError("unhandled system error")

    if objcomm.is_main():
        backend.interrupt("broadcast", act)
    watchdog = abort_when("acted", backend)
    mine = torch.full((LARGE,), objcomm.rank()).to("standin")
    work = objcomm.all_gather(mine, group=group, async_op=True)
    with pytest.raises(TransportError):
        work.wait()
    watchdog.join(PATIENCE_S)
    assert_next_group_works()


@ranks(2, joined=False)
def test_a_backend_that_is_asked_in_another_order() -> None:
    join()
    group, backend = group_that_has_met()
    mine = torch.full((LARGE,), objcomm.rank()).to("standin")
    own = torch.ones(5).to("standin")
    errors: list[str] = []
    if objcomm.is_main():
        with pytest.raises(TransportError, match="different calls"):
            objcomm.broadcast(mine, group=group)
        say("ended")
    else:

        def interfere() -> None:
            """Make a call of the program that the other rank does not make."""
            with pytest.raises(RuntimeError, match="different calls") as caught:
                dist.broadcast(own, 0, group=group)
            errors.append(str(caught.value))

        other = threading.Thread(target=interfere)
        other.start()
        wait_until(lambda: backend.made, "the other thread's call")
        watchdog = abort_when("ended", backend)
        with pytest.raises(TransportError):
            objcomm.broadcast(None, group=group)
        watchdog.join(PATIENCE_S)
        other.join(PATIENCE_S)
        assert len(errors) == 1
    with pytest.raises(BrokenGroupError):
        objcomm.barrier(group=group)
    assert_next_group_works()


@ranks(3, joined=False, expect_dead={1})
def test_a_rank_that_dies_in_the_middle() -> None:
    join()
    group, backend = group_that_has_met()

    def die() -> None:
        say("dies")
        os._exit(1)

    if objcomm.rank() == 1:
        for method in METHODS:
            backend.interrupt(method, die)
    watchdog = abort_when("dies", backend)
    with pytest.raises(TransportError) as caught:
        objcomm.all_reduce(torch.ones(LARGE).to("standin"), "sum", group=group)
    watchdog.join(PATIENCE_S)
    assert 1 in caught.value.peers or "aborted" in str(caught.value)
    survivors = objcomm.new_group([0, 2])
    assert objcomm.all_gather(objcomm.rank(), group=survivors) == [0, 2]


@ranks(2, 3, joined=False)
def test_what_fails_before_the_devices_move_leaves_them_in_step() -> None:
    join()
    rank, last = objcomm.rank(), objcomm.world_size() - 1
    mine = torch.full((LARGE,), rank).to("standin")
    objcomm.barrier()
    for name in ("gather", "all_gather", "all_to_all"):
        with case(name):
            calls = len(joined_by().made)
            given = (mine, (each for each in [1])) if rank == last else mine  # cannot be pickled
            if rank in {0, last} or name != "gather":
                with pytest.raises(CollectiveError) as caught:
                    OPERATIONS[name](given)
                assert list(caught.value.failures) == [last]
            else:
                assert OPERATIONS[name](given) is None
            assert len(joined_by().made) == calls or name == "gather"  # others have transferred
            assert [int(each[0].cpu()) for each in objcomm.all_gather(mine)] == [*range(last + 1)]
    assert_group_works()


@ranks(2, 3, joined=False)
def test_a_receiver_without_room_on_its_device() -> None:
    join()
    rank, last = objcomm.rank(), objcomm.world_size() - 1
    mine = torch.full((LARGE,), rank).to("standin")
    objcomm.barrier()
    for name in ("broadcast", "scatter", "gather", "all_gather", "all_to_all"):
        at = 0 if name == "gather" else last
        call = functools.partial(OPERATIONS[name], mine)
        with case(name), device.room(device.current_device(), 9 if rank == at else 1 << 30):
            calls = len(joined_by().made)
            with pytest.raises(WireError if rank == at else CollectiveError, match="no memory"):
                call()
            assert len(joined_by().made) == calls
        with case(name, "once more"):
            call()
    assert_group_works()


@ranks(2, 3, joined=False)
def test_a_model_that_can_not_be_packed_on_one_rank() -> None:
    join()
    rank, last = objcomm.rank(), objcomm.world_size() - 1
    # Smaller allocations are assumed to succeed.
    tensors = [torch.full((4 * LARGE,), float(rank)).to("standin") for _ in range(2)]
    objcomm.barrier()
    for call in (objcomm.models.broadcast_tensors, objcomm.models.average_tensors):
        with case(call.__name__):
            calls = len(joined_by().made)
            with device.room(device.current_device(), 9 if rank == last else 1 << 30):
                error = torch.OutOfMemoryError if rank == last else CollectiveError
                with pytest.raises(error, match="no room"):
                    call(tensors)
            assert len(joined_by().made) == calls
            call(tensors)
            assert len({float(each[-1].cpu()) for each in tensors}) == 1
            assert len(joined_by().made) > calls
    assert_group_works()
