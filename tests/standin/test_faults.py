"""Faults on devices end as docs/guide/failures.md says: every waiting rank raises.

Nothing but a verdict ends a wait of the stand-in: its communicators have no limit of their own, and
the groups' limit is longer than that of the tests.
"""

import functools
import itertools
import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import BrokenGroupError, CollectiveError, TransportError, TransportTimeout, WireError
from tests.cases import case
from tests.group.helpers import error_in, hear, in_thread, say, tell_all
from tests.group.operations import OBJECT_OPERATIONS, OPERATIONS
from tests.standin import device
from tests.standin.backend import journal
from tests.standin.worlds import (
    assert_aborted,
    assert_is_free,
    joined_by,
    made,
    on_devices,
    own_device,
)
from tests.waits import PATIENCE_S, wait_until, within

LARGE = 100_000  # elements, so that the member does not fit into the window

#: Every operation that transfers tensors between devices.
CALLS: dict[str, Callable[..., Any]] = {
    **{name: OPERATIONS[name] for name in OBJECT_OPERATIONS},
    "all_reduce of a tree": lambda obj, **options: objcomm.all_reduce(obj, "sum", **options),
    "broadcast_tensors": lambda obj, **options: objcomm.models.broadcast_tensors([obj], **options),
}


def group_that_has_met() -> Any:
    """Return a new group of all ranks that has connected."""
    group = dist.new_group()
    objcomm.barrier(group=group)
    return group


def mine() -> torch.Tensor:
    """Return a large tensor on this rank's device."""
    return torch.full((LARGE,), objcomm.rank()).to("standin")


def assert_next_call_works(group: Any) -> None:
    """Check that tensors still go from device to device, and that the streams can be used."""
    calls, communicators = len(made()), len(journal().communicators)
    torch.accelerator.synchronize()
    got = objcomm.all_gather(mine(), group=group)
    numbers = [int((each + 1)[0].cpu()) for each in got]
    assert numbers == [*range(1, 1 + objcomm.world_size())]
    assert {each.device for each in got} == {own_device()}
    assert len(made()) > calls
    assert len(journal().communicators) == communicators + 1
    assert_aborted(range(communicators), of=communicators + 1)
    # The program's own communicator is not touched.
    own = torch.ones(3).to("standin")
    dist.broadcast(own, 0, group=group)
    assert not joined_by(group).is_aborted


def refuse() -> None:
    raise RuntimeError("unhandled system error")


def interfere() -> None:
    """Make another call than the other ranks do."""
    into, flat = torch.empty(12).to("standin"), torch.ones(12).to("standin")
    journal().communicators[-1].alltoall_base(into, flat, [], [])


#: What a backend does on one rank, whether when its work is awaited, and in which calls.
FAULTS = {
    "fails": (refuse, False, list(CALLS)),
    "fails later": (refuse, True, list(CALLS)),
    # All ranks make the other calls of a backend in pairs, and would wait for their limit.
    "other order": (interfere, False, ["broadcast", "all_gather", "broadcast_tensors"]),
}


@on_devices(2, 3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_backend_that_fails_on_one_rank(fault: str) -> None:
    act, at_wait, names = FAULTS[fault]
    said = "different calls" if fault == "other order" else "unhandled system error"
    group = group_that_has_met()
    rank = objcomm.rank()
    given = mine()
    at = device.current_device()
    for name, culprit in itertools.product(names, (0, objcomm.world_size() - 1)):
        with case(name, culprit):
            before = device.memory_allocated(at)
            objcomm.barrier(group=group)
            if rank == culprit:
                journal().interrupt("", act, at_wait=at_wait)
            error: TransportError | CollectiveError | None = None
            try:
                CALLS[name](given, group=group)
            except (TransportError, CollectiveError) as raised:
                error = raised.with_traceback(None)
            # The others raise in this call, or in the next one if this has not waited.
            if error is None:
                error = error_in(CollectiveError, lambda: objcomm.barrier(group=group))
            assert said in str(error)
            if fault != "other order":  # there, the first rank to notice has failed
                assert isinstance(error, TransportError) == (rank == culprit)
            assert not isinstance(error, TransportError) or error.peers == ()
            assert_next_call_works(group)
            error = None
            assert_is_free(at, before)


@on_devices(2, 3, disposable=True)
@pytest.mark.parametrize("at_wait", [False, True], ids=["in the call", "in its wait"])
def test_a_limit_ends_a_call_whose_backend_stalls(*, at_wait: bool) -> None:
    rank, last = objcomm.rank(), objcomm.world_size() - 1
    is_over, given = threading.Event(), mine()
    at = device.current_device()
    before = device.memory_allocated(at)
    for name, call in CALLS.items():
        with case(name):
            group = group_that_has_met()
            if rank == last:
                journal().interrupt("", is_over.wait, at_wait=at_wait)
            error = None
            try:
                call(given, group=group, timeout=1)
            except TransportTimeout as raised:
                error = raised.with_traceback(None)
            assert error is not None or rank != last
            with pytest.raises(BrokenGroupError if error else TransportError):
                objcomm.barrier(group=group)
            tell_all(f"{name} over", "")  # no rank destroys its group before all have called
            error = None
    # A call raises even if the abort takes longer.
    count = len(journal().communicators)
    assert_aborted(range(count), of=count)
    torch.accelerator.synchronize()
    assert_next_call_works(group_that_has_met())
    is_over.set()
    assert_is_free(at, before)


@on_devices(3, expect_dead={1})
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_dies_in_the_middle(name: str) -> None:
    group = group_that_has_met()
    given = mine()
    if objcomm.rank() == 1:
        journal().interrupt("", lambda: os._exit(1))
    error = None
    try:
        CALLS[name](given, group=group)
    except TransportError as raised:
        error = raised
    if error is None:  # this rank did not need the other
        error = error_in(TransportError, lambda: objcomm.barrier(group=group))
    assert error.peers == (1,)
    assert not isinstance(error, TransportTimeout)
    torch.accelerator.synchronize()
    count = len(journal().communicators)
    assert_aborted(range(count), of=count)
    assert not joined_by(group).is_aborted
    survivors = objcomm.new_group([0, 2])
    got = objcomm.all_gather(given, group=survivors)
    assert [int(each[0].cpu()) for each in got] == [0, 2]


@pytest.mark.timed
@on_devices(2, expect_dead={1})
@pytest.mark.parametrize("name", ["broadcast", "all_gather", "all_reduce of a tree"])
def test_a_death_in_a_transfer_is_raised_within_two_seconds(name: str) -> None:
    group, given = group_that_has_met(), mine()
    if objcomm.rank():
        journal().interrupt("", lambda: os._exit(1))
        CALLS[name](given, group=group)
    with within(2.0):  # the other rank dies after this began
        error = error_in(TransportError, lambda: CALLS[name](given, group=group))
    assert error.peers == (1,)


@on_devices(2, expect_dead={1})
def test_a_death_that_the_backend_notices_first() -> None:
    group = group_that_has_met()
    given = mine()
    other = os.pidfd_open(objcomm.all_gather(os.getpid())[1])

    def notice() -> None:
        assert select.select([other], [], [], PATIENCE_S)[0]
        raise RuntimeError("remote process exited")

    journal().interrupt("", functools.partial(os._exit, 1) if objcomm.rank() else notice)
    error = error_in(TransportError, lambda: objcomm.all_gather(given, group=group))
    assert error.peers == (1,)


@on_devices(2)
def test_an_asynchronous_call_fails_like_any_other() -> None:
    group = group_that_has_met()
    if objcomm.is_main():
        journal().interrupt("broadcast", refuse)
    work = objcomm.all_gather(mine(), group=group, async_op=True)
    error_in(TransportError if objcomm.is_main() else CollectiveError, work.wait)
    assert_next_call_works(group)


@on_devices(2)
def test_lanes_and_the_programs_own_calls_need_no_common_order() -> None:
    group = group_that_has_met()
    rank, at, given = objcomm.rank(), device.current_device(), mine()
    own = torch.full((5,), rank).to("standin")
    has_begun, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        has_begun.set()
        assert is_over.wait(PATIENCE_S)

    def on_lane(name: str) -> list[int]:
        with objcomm.lane(name):
            return [int(each[0].cpu()) for each in objcomm.all_gather(given, group=group)]

    def on_lane_a() -> None:
        device.set_device(at)
        got.extend(on_lane("a"))

    got: list[int] = []
    if rank:  # its transfer on lane a begins last, and that of the other rank first
        journal().interrupt("broadcast", hold)
    thread = in_thread(on_lane_a)
    if rank:
        assert has_begun.wait(PATIENCE_S)
    else:
        wait_until(made, "the transfer on lane a")
    dist.broadcast(own, 0, group=group)
    assert own.cpu().tolist() == [0] * 5
    assert on_lane("b") == [0, 1]
    is_over.set()
    thread.join(PATIENCE_S)
    assert got == [0, 1]
    assert len(journal().communicators) == 2


@on_devices(2, disposable=True)
def test_ctrl_c_ends_a_wait_on_the_device() -> None:
    group, given = group_that_has_met(), mine()
    if objcomm.rank():
        journal().interrupt("broadcast", lambda: hear("interrupted"))
        error = error_in(TransportError, lambda: objcomm.broadcast(None, group=group))
        assert error.peers == (0,)
        return

    def interrupt() -> None:
        wait_until(made, "the transfer")
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        objcomm.broadcast(given, group=group)
    thread.join(PATIENCE_S)
    # Until it is aborted, the transfer can still succeed on the other rank.
    assert_aborted([0], of=1)
    say("interrupted")


@on_devices(2, 3)
def test_a_failure_before_any_transfer_leaves_the_devices_in_step() -> None:
    rank, last = objcomm.rank(), objcomm.world_size() - 1
    mine = torch.full((LARGE,), rank).to("standin")
    objcomm.barrier()
    for name in ("gather", "all_gather", "all_to_all"):
        with case(name):
            calls = len(made())
            given = (mine, (each for each in [1])) if rank == last else mine  # cannot be pickled
            if rank in {0, last} or name != "gather":
                with pytest.raises(CollectiveError) as caught:
                    OPERATIONS[name](given)
                assert list(caught.value.failures) == [last]
            else:
                assert OPERATIONS[name](given) is None
            assert len(made()) == calls or name == "gather"  # others have transferred
            assert [int(each[0].cpu()) for each in objcomm.all_gather(mine)] == [*range(last + 1)]


#: What allocates memory on the device, the error of a rank that has none left, and its text.
ALLOCATING: dict[str, tuple[Callable[[list[torch.Tensor]], object], type[Exception], str]] = {
    "all_reduce": (lambda objs: objcomm.all_reduce(objs, "sum"), torch.OutOfMemoryError, "room"),
    "broadcast_tensors": (objcomm.models.broadcast_tensors, torch.OutOfMemoryError, "room"),
    "average_tensors": (objcomm.models.average_tensors, torch.OutOfMemoryError, "room"),
    **{
        name: (OPERATIONS[name], WireError, "memory")
        for name in ("broadcast", "scatter", "gather", "all_gather", "all_to_all")
    },
}


@on_devices(2, 3)
def test_a_rank_without_room_on_its_device_fails_before_any_transfer() -> None:
    rank, last, at = objcomm.rank(), objcomm.world_size() - 1, device.current_device()
    objcomm.barrier()
    for name, (call, kind, text) in ALLOCATING.items():
        tensors = [torch.full((20 * LARGE,), rank + 1.0).to("standin") for _ in range(2)]
        calls = len(made())
        lacks_room = rank == (0 if name == "gather" else last)
        # Smaller allocations than this are assumed to succeed.
        with case(name), device.room(at, LARGE if lacks_room else 1 << 30):
            with pytest.raises(kind if lacks_room else CollectiveError, match=f"no {text}"):
                call(tensors)
            assert len(made()) == calls
        with case(name, "once more"):
            call(tensors)
            assert any(objcomm.all_gather(len(made()) > calls))
            assert len({float(each[-1].cpu()) for each in tensors}) == 1
    total = objcomm.all_reduce(mine(), "sum")
    assert int(total[-1].cpu()) == sum(range(last + 1))
