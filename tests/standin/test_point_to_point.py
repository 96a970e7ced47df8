"""Messages between the devices of two ranks: the path of each, their order, and how they end."""

import os
import re
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, TransportError, TransportTimeout, WireError
from objcomm._p2p import call
from tests.group.helpers import error_in, hear, say, tell_all
from tests.standin import device
from tests.standin.backend import journal
from tests.standin.device import Stream
from tests.standin.test_faults import refuse
from tests.standin.worlds import assert_aborted, made, on_devices
from tests.waits import PATIENCE_S
from tests.workers import here

LARGE = 50_000  # elements, so that the member does not fit into the window


def filled(number: int, numel: int = LARGE) -> torch.Tensor:
    """Return a tensor on the current device."""
    return torch.full((numel,), number).to("standin")


def assert_filled(tensor: torch.Tensor, number: int, numel: int = LARGE) -> None:
    """Check that it equals ``filled`` of the other rank, on this rank's current device."""
    assert tensor.device == torch.device("standin", device.current_device())
    assert torch.equal(tensor.cpu(), torch.full((numel,), number))


def assert_arrives(number: int, **options: Any) -> None:
    """Send a tensor from rank 0 to rank 1, and check it there."""
    if here().rank == 0:
        objcomm.send(filled(number), 1, **options)
    if here().rank == 1:
        assert_filled(objcomm.recv(0, **options), number)


def send_or_recv(sender: int) -> None:
    """Send a tensor to the other of two ranks, or receive it."""
    rank = here().rank
    if rank == sender:
        objcomm.send(filled(1), 1 - rank)
    else:
        objcomm.recv(1 - rank)


def transfers() -> list[str]:
    """Return the backend's transfers on this rank, in order: ``"400000, 0 to 1"``."""
    form = re.compile(r"(?:send|recv): (\d+) of .*, (\d to \d)")
    return [f"{each[1]}, {each[2]}" for each in map(form.fullmatch, made()) if each]


@on_devices(2)
@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
def test_large_members_go_from_device_to_device_and_the_rest_beside_them(codec: str) -> None:
    rank = here().rank
    for src in (0, 1):
        for numel in (3, LARGE, 10 * LARGE):
            before = len(transfers())
            sent = objcomm.stats()["send"].sent_nbytes if "send" in objcomm.stats() else 0
            if rank == src:
                mine = {"a": filled(5, numel), "b": torch.full((LARGE,), 6), "c": bytes(100_000)}
                objcomm.send(mine, 1 - src, codec=codec)
                sent = objcomm.stats()["send"].sent_nbytes - sent
                assert 500_000 <= sent < 510_000
            else:
                got: Any = objcomm.recv(src)
                assert_filled(got["a"], 5, numel)
                assert torch.equal(got["b"], torch.full((LARGE,), 6))
                assert got["c"] == bytes(100_000)
            assert len(transfers()) - before == (numel > 3)
    if rank == 0:
        objcomm.send(filled(7), 1)
    else:
        assert torch.equal(objcomm.recv(0, device="cpu"), torch.full((LARGE,), 7))


@on_devices(2)
def test_all_received_memory_is_handed_to_the_receivers_streams() -> None:
    if here().rank == 0:
        objcomm.send([filled(1), filled(2, 5), torch.zeros(7)], 1)
    else:
        with mock.patch.object(call, "_hand_to_current", wraps=call._hand_to_current) as hand:  # noqa: SLF001  # no stand-in can show it
            objcomm.recv(0)
        (flats, _), _ = hand.call_args
        assert [flat.numel() // 4 for flat in flats] == [2 * LARGE, 2 * 5]


@on_devices(2)
def test_every_kind_of_send_and_receive_transfers_device_tensors() -> None:
    rank, other = here().rank, 1 - here().rank
    got: Any = objcomm.sendrecv(filled(rank), other, other)
    assert_filled(got, other)
    if rank == 0:
        objcomm.ssend(filled(1), 1)
        objcomm.issend(filled(2), 1).wait()
        objcomm.isend(filled(3), 1).wait()
        objcomm.send(filled(4), 1, async_op=True).wait()
        assert_filled(objcomm.irecv().wait(), 5)
    else:
        assert_filled(objcomm.irecv(0).wait(), 1)
        message = objcomm.mprobe()
        assert_filled(message.recv(), 2)
        assert_filled(objcomm.recv(), 3)
        assert_filled(objcomm.recv(0, async_op=True).wait(), 4)
        objcomm.send(filled(5), 0)
    assert len(transfers()) == 7


@on_devices(2, 3)
def test_many_in_flight_move_in_one_order_for_both_ranks() -> None:
    rank, size = here().rank, here().world_size
    others = [peer for peer in range(size) if peer != rank]
    sending = [
        objcomm.isend(filled(number, LARGE + 10 * number + rank), peer, tag=number)
        for number in range(6)
        for peer in others
    ]
    # Each rank receives them in another order than they were sent in, and than other ranks do.
    numbers = [(5 * each + rank) % 6 for each in range(6)]
    works = {
        (number, peer): objcomm.irecv(peer, tag=number) for number in numbers for peer in others
    }
    for (number, peer), work in works.items():
        assert_filled(work.wait(), number, LARGE + 10 * number + peer)
    objcomm.wait_all(sending)
    orders = objcomm.all_gather(transfers())
    assert len(orders[rank]) == 12 * (size - 1)
    for one in range(size):
        for two in range(one):
            ends = (f", {one} to {two}", f", {two} to {one}")
            of_one, of_two = (
                [each for each in orders[at] if each.endswith(ends)] for at in (one, two)
            )
            assert of_one == of_two
            assert len(of_one) == 12


@on_devices(2)
def test_waiting_behind_a_slow_transfer_is_not_a_deadlock() -> None:
    if here().rank == 0:
        hear("both are begun")
        works = [objcomm.isend(filled(number), 1, tag=number) for number in range(2)]
        works[1].wait()  # not received yet: the other transfer is in progress
        works[0].wait()
    else:
        # Long enough for two checks of the watchdog.
        journal().interrupt("recv", lambda: time.sleep(4))
        received = [objcomm.irecv(0, tag=number) for number in range(2)]
        say("both are begun")
        assert_filled(received[1].wait(), 1)
        assert_filled(received[0].wait(), 0)


@on_devices(2)
def test_two_ranks_that_send_each_other_slowly_are_not_deadlocked() -> None:
    rank, other = here().rank, 1 - here().rank
    if rank == 0:
        journal().interrupt("recv", lambda: time.sleep(4))
    receiving = objcomm.irecv(other)
    tell_all("begun", "")
    objcomm.isend(filled(rank), other).wait()
    assert_filled(receiving.wait(), other)


@on_devices(2)
def test_sends_and_receives_follow_the_current_stream() -> None:
    with Stream() as stream:
        if here().rank == 0:
            numbers = torch.zeros(LARGE, dtype=torch.int64, device="standin")
            numbers += 8
            work = objcomm.isend(numbers, 1)
            numbers_after = filled(1)  # queued later on the same stream
            work.wait()
            assert_filled(numbers_after, 1)
        else:
            # The stand-in raises if a stream uses what another one has written without waiting.
            assert_filled(objcomm.recv(0) + 1, 9)
        assert torch.accelerator.current_stream() == stream


@on_devices(3)
def test_groups_without_the_backend_use_cpu_memory() -> None:
    rank = here().rank
    plain = dist.new_group(backend="gloo")
    assert_arrives(3, group=plain)
    assert transfers() == []
    last = dist.new_group([1, 2], backend="cpu:gloo,standin:standin")
    if rank == 1:
        objcomm.send(filled(4), 2, group=last)
    if rank == 2:
        assert_filled(objcomm.recv(1, group=last), 4)
        assert [each.partition(":")[0] for each in made()] == ["recv"]
        assert transfers()[0].endswith(", 1 to 2")


@on_devices(2)
def test_signed_messages_go_through_cpu_memory() -> None:
    with objcomm.configure(key=b"0123456789abcdef", everywhere=True):
        assert_arrives(3)
    assert transfers() == []


# Failures


@on_devices(2, expect_dead=[1])
@pytest.mark.parametrize("sender", [0, 1])
def test_a_rank_that_dies_in_a_transfer_is_named_at_once(sender: int) -> None:
    rank = here().rank
    if rank == 1:
        journal().interrupt("send" if sender == 1 else "recv", lambda: os._exit(1))
    # The backend would wait for two minutes.
    error = error_in(TransportError, lambda: send_or_recv(sender))
    assert not isinstance(error, TransportTimeout)
    assert error.peers == (1,)


@on_devices(2, disposable=True)
@pytest.mark.parametrize("stalled", ["send", "recv"])
def test_a_limit_ends_a_transfer_that_stalls(stalled: str) -> None:
    is_over = threading.Event()
    journal().interrupt(stalled, lambda: is_over.wait(PATIENCE_S))
    if here().rank == 0:
        error_in(TransportTimeout, lambda: objcomm.send(filled(1), 1, timeout=1))
    else:
        error_in(TransportError, lambda: objcomm.recv(0, timeout=300))
    assert_aborted([0], of=1)
    tell_all("ended", "")
    is_over.set()


@on_devices(2)
@pytest.mark.parametrize("operation", ["send", "recv"])
def test_a_backend_that_fails_ends_the_call_on_both(operation: str) -> None:
    is_here = (operation == "send") == (here().rank == 0)
    if is_here:
        journal().interrupt(operation, refuse)
    kind = TransportError if is_here else CollectiveError
    error = error_in(kind, lambda: send_or_recv(0))
    assert "unhandled system error" in str(error)
    assert_arrives(2)  # with a new communicator
    assert_aborted([0], of=2)


@on_devices(2, expect_dead=[1])
def test_a_rank_that_dies_while_no_thread_waits_is_named_by_the_work() -> None:
    rank = here().rank
    works = [objcomm.irecv(1 - rank), objcomm.isend(filled(rank), 1 - rank)]
    if rank:
        journal().interrupt("", lambda: os._exit(1))
    for work in works:
        error = error_in(TransportError, work.wait)
        assert not isinstance(error, TransportTimeout)
        assert error.peers == (1,)


@on_devices(2)
def test_a_receiver_without_room_reports_it_before_any_transfer() -> None:
    for _ in range(2):
        if here().rank == 0:
            error = error_in(CollectiveError, lambda: objcomm.send(filled(1), 1))
            assert "no memory for a buffer of 400000 bytes" in str(error)
            say("refused")
        else:
            with device.room(device.current_device(), LARGE):
                error_in(WireError, lambda: objcomm.recv(0))
            hear("refused")
        assert transfers() == []
    assert_arrives(2)
    assert len(transfers()) == 1
    assert tell_all("done", "") == ["", ""]
