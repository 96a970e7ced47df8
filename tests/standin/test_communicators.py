"""objcomm's own communicators between devices: what ends them, and what they leave behind."""

import gc
import threading
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, TransportError, TransportTimeout
from objcomm._world import communicator
from tests.cases import case
from tests.group.helpers import error_in, hear, in_thread, say, tell_all
from tests.standin import device
from tests.standin.backend import Backend, journal
from tests.standin.test_faults import assert_next_call_works, group_that_has_met, mine, refuse
from tests.standin.worlds import assert_aborted, assert_is_free, on_devices
from tests.waits import PATIENCE_S, wait_until


@on_devices(2, disposable=True)
def test_a_limit_that_passes_while_a_communicator_is_created() -> None:
    group, given, rank = group_that_has_met(), mine(), objcomm.rank()
    at, before = device.current_device(), device.memory_allocated(device.current_device())
    is_over = threading.Event()

    def slowly(*args: Any, **options: Any) -> Any:
        assert is_over.wait(PATIENCE_S)
        return communicator(*args, **options)

    with mock.patch("objcomm._calls.group.communicator", slowly if rank else communicator):
        kind = TransportTimeout if rank else TransportError
        error_in(kind, lambda: objcomm.all_gather(given, group=group, timeout=1 if rank else 300))
        tell_all("raised", "")
        is_over.set()
        # The one that has come too late is of no use.
        assert_aborted([0], of=1)
    gc.collect()  # pytest's record of the error is a cycle
    assert_is_free(at, before)
    assert_next_call_works(group_that_has_met())


@on_devices(2, disposable=True)
def test_a_limit_ends_a_transfer_on_the_callers_own_thread() -> None:
    group, given = group_that_has_met(), mine()
    if objcomm.rank():
        journal().interrupt("", lambda: hear("raised"))
        error_in(TransportError, lambda: objcomm.all_gather(given, group=group))
        return
    refused = RuntimeError("can't start new thread")
    with mock.patch("objcomm._transport.threads._Worker.start", side_effect=refused):
        error_in(TransportTimeout, lambda: objcomm.all_gather(given, group=group, timeout=1))
    say("raised")


@on_devices(2)
def test_a_backend_that_can_not_be_aborted_is_left() -> None:
    group = group_that_has_met()
    abort = Backend.abort
    ended: list[Any] = []
    with mock.patch.object(threading, "excepthook", ended.append):
        for error in (RuntimeError("no"), NotImplementedError("no"), AttributeError("no")):

            def refuse_to(self: Backend, error: Exception = error) -> None:
                abort(self)
                raise error

            with case(type(error).__name__), mock.patch.object(Backend, "abort", refuse_to):
                if objcomm.is_main():
                    journal().interrupt("", refuse)
                kind = TransportError if objcomm.is_main() else CollectiveError
                error_in(kind, lambda: objcomm.all_gather(mine(), group=group))
                wait_until(lambda: journal().communicators[-1].is_aborted, "the abort")
                assert_next_call_works(group)
    assert not ended


@on_devices(2, 3)
def test_failures_leave_no_threads_and_no_memory() -> None:
    group, given, size = group_that_has_met(), mine(), objcomm.world_size()
    at = device.current_device()
    before = device.memory_allocated(at)
    for turn in range(3 * size):
        if objcomm.rank() == turn % size:
            journal().interrupt("", refuse)
        with pytest.raises((TransportError, CollectiveError)):
            objcomm.all_gather(given, group=group)
        assert objcomm.all_gather(turn, group=group) == [turn] * size
        objcomm.all_gather(given, group=group)
    gc.collect()
    assert_is_free(at, before)
    # Of the threads for transfers, one waits for the next transfer of the last communicator.
    pools = [each for each in threading.enumerate() if each.name == "objcomm-pool"]
    wait_until(lambda: sum(each.is_alive() for each in pools) <= 1, "the threads")
    assert len(journal().communicators) == 3 * size + 1


@on_devices(2, disposable=True)
def test_a_group_that_is_destroyed_during_a_transfer_ends_it_on_all_ranks() -> None:
    group, given, rank = group_that_has_met(), mine(), objcomm.rank()
    threads = []

    def destroy() -> None:
        threads.append(in_thread(lambda: dist.destroy_process_group(group)))
        hear("raised on rank 0")

    if rank:
        journal().interrupt("broadcast", destroy)
    error = error_in(TransportError, lambda: objcomm.all_gather(given, group=group))
    assert error.peers == (1,)
    assert not isinstance(error, TransportTimeout)
    say(f"raised on rank {rank}")
    for each in threads:
        each.join(PATIENCE_S)
    assert_aborted([0], of=1)


@on_devices(2)
def test_a_failure_of_one_group_leaves_the_transfer_of_another() -> None:
    one, two = group_that_has_met(), group_that_has_met()
    rank, given, at = objcomm.rank(), mine(), device.current_device()
    has_begun, is_over = threading.Event(), threading.Event()
    got: list[int] = []

    def hold() -> None:
        has_begun.set()
        assert is_over.wait(PATIENCE_S)

    def on_two() -> None:
        device.set_device(at)
        with objcomm.lane("b"):
            got.extend(int(each[0].cpu()) for each in objcomm.all_gather(given, group=two))

    journal().interrupt("broadcast", hold)
    thread = in_thread(on_two)
    assert has_begun.wait(PATIENCE_S)
    if rank:
        journal().interrupt("broadcast", refuse)
    kind = TransportError if rank else CollectiveError
    error_in(kind, lambda: objcomm.all_gather(given, group=one))
    assert_aborted([1], of=2)
    is_over.set()
    thread.join(PATIENCE_S)
    assert got == [0, 1]
