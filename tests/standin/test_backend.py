"""The stand-in backend is as strict as NCCL, and raises where NCCL would hang."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.group.helpers import hear, say
from tests.standin import device
from tests.standin.backend import journal
from tests.standin.device import Stream
from tests.standin.worlds import joined_by, made, on_devices


@on_devices(1, 2, 4)
def test_tensors_on_devices_use_the_backend_and_others_use_gloo() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    assert group._get_backend(torch.device("standin")).name() == "standin"
    assert group._get_backend(torch.device("cpu")).name() == "gloo"
    assert dist.new_group(backend="standin")._device_types == [torch.device("standin")]
    mine = torch.full((4,), float(rank)).to("standin")
    group.broadcast(mine, size - 1).wait()
    assert mine.cpu().tolist() == [size - 1] * 4
    dist.broadcast(mine, 0)
    numbers = torch.arange(2 * size) + 10 * rank
    into = torch.empty_like(numbers).to("standin")
    group.alltoall_base(into, numbers.to("standin"), [], []).wait()
    assert into[::2].cpu().tolist() == [2 * rank + 10 * peer for peer in range(size)]
    gathered = torch.empty(size * 2 * size, dtype=torch.int64, device="standin")
    group._allgather_base(gathered, numbers.to("standin")).wait()
    assert gathered[:: 2 * size].cpu().tolist() == [10 * peer for peer in range(size)]
    if rank < 2 <= size:
        message = torch.tensor([7.0]).to("standin")
        if rank:
            message.zero_()
            group.recv([message], 0, 0).wait()
        else:
            group.send([message], 1, 0).wait()
        assert message.cpu().tolist() == [7]
    total = torch.tensor(rank)
    dist.all_reduce(total)
    assert total == sum(range(size))
    assert len(made()) == (5 if rank < 2 <= size else 4)


@on_devices(2)
def test_it_insists_on_its_device_its_stream_and_the_same_order() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    backend = joined_by()
    mine = torch.ones(4, 4).to("standin")
    backend.broadcast(mine, 0).wait()
    with pytest.raises(RuntimeError, match="a tensor on cpu"):
        backend.broadcast(torch.ones(3), 0)
    with pytest.raises(RuntimeError, match=r"a tensor on standin:0, not standin:\d"):
        backend.broadcast(torch.ones(3).to("standin:0"), 0)
    torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match="contiguous"):
        backend.broadcast(mine.t(), 0)
    mine.add_(1)
    with Stream(), pytest.raises(RuntimeError, match="has not waited for it"):
        backend._allgather_base(torch.empty(32, device="standin"), mine)
    # None of these transferred anything, so the ranks are still in step.
    work = backend.broadcast(mine, 0)
    with pytest.raises(
        RuntimeError, match=r"copy from standin to cpu on stream 0 .* has not waited for it"
    ):
        mine.cpu()
    work.wait()
    assert mine.cpu().sum() == 32
    with pytest.raises(RuntimeError, match=r"different calls: .*from 0.*from 1"):
        backend.broadcast(mine, rank)
    with pytest.raises(RuntimeError, match=r"different calls: .*: 16 of .*: 8 of"):
        backend.recv(mine[:2], 0, 0) if rank else backend.send(mine, 1, 0)
    backend.broadcast(mine, 0).wait()


@on_devices(2)
def test_it_fails_and_stalls_on_demand() -> None:
    rank, backend = dist.get_rank(), joined_by()
    mine = torch.ones(4).to("standin")

    def fail() -> None:
        raise RuntimeError("unhandled system error")

    for at_wait in (True, False):
        journal().interrupt("broadcast", fail, at_wait=at_wait)
        with pytest.raises(RuntimeError, match="unhandled system error"):
            backend.broadcast(mine, 0).wait()
        torch.accelerator.synchronize()
        backend.broadcast(mine, 0).wait()  # only once
    # A stalled rank blocks the other until the group's timeout.
    if rank:
        backend.set_timeout(timedelta(seconds=1))
        with pytest.raises(RuntimeError, match="timed out"):
            backend.broadcast(mine, 0)
        backend.abort()
        with pytest.raises(RuntimeError, match="aborted"):
            backend.broadcast(mine, 0)
    if rank:
        say("given up")
    else:
        hear("given up")
    # A rank that comes later does not wait in Gloo for one that has given up.
    for said in ("timed out", "aborted") if rank == 0 else ():
        with pytest.raises(RuntimeError, match=said):
            backend.broadcast(mine, 0)
    assert device.memory_allocated(device.current_device()) == 16
