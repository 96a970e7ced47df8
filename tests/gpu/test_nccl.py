"""Objects that contain CUDA tensors, over NCCL and over Gloo; one GPU is enough for all tests."""

import copy
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, TransportError, TransportTimeout
from objcomm._algorithms.device import BackendLink
from tests.group.helpers import assert_group_works
from tests.ranks import ranks, solo
from tests.same import assert_same
from tests.waits import wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def weights() -> dict[str, Any]:
    """Return small and large tensors, on both kinds of device, tied and non-contiguous."""
    large = torch.arange(1_000_000, device="cuda")
    return {
        "small": torch.ones(3, device="cuda", dtype=torch.bfloat16),
        "large": large,
        "tied": [large],
        "column": large.view(1000, 1000)[:, 0],
        "parameter": torch.nn.Parameter(torch.ones(70_000, device="cuda")),
        "on the host": torch.arange(50_000),
        "lr": 0.1,
    }


@pytest.fixture
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _join_nccl(folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)


@solo(deadline=120)
def test_cuda_tensors_survive_the_way_through_bytes() -> None:
    for codec in ("pickle", "msgpack"):
        got = objcomm.from_tensor(objcomm.to_tensor(weights(), codec=codec))
        assert_same(got, weights(), sharing=False)
        assert got["large"].device == torch.device("cuda", torch.cuda.current_device())
        assert got["on the host"].device.type == "cpu"
        on_host = objcomm.from_tensor(objcomm.to_tensor(weights(), codec=codec), device="cpu")
        assert on_host["large"].device.type == "cpu"


@solo(deadline=120)
def test_every_operation_works_on_an_nccl_group_of_one(_folder: Path) -> None:  # noqa: PT019
    _join_nccl(_folder)
    mine = weights()
    assert objcomm.broadcast(mine) is mine
    assert objcomm.all_gather(mine)[0] is mine
    assert objcomm.broadcast(mine, device="cuda") is mine
    assert torch.equal(objcomm.all_reduce(mine["large"]), mine["large"])
    assert objcomm.metrics.all_gather_scalar(mine["large"][3]) == [mine["large"][3]]
    objcomm.barrier()
    dist.destroy_process_group()


@solo(deadline=120)
def test_plain_objects_on_an_nccl_group_take_no_device_memory(_folder: Path) -> None:  # noqa: PT019
    _join_nccl(_folder)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        objcomm.broadcast({"lr": 0.1, "data": bytes(1_000_000)})
        objcomm.barrier()
    assert torch.cuda.memory_allocated() == before
    dist.destroy_process_group()


@ranks(2, disposable=True, deadline=120)
@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
def test_a_gloo_group_carries_cuda_tensors(codec: str) -> None:
    for src in (0, 1):
        mine: Any = weights() if objcomm.rank() == src else None
        got = objcomm.broadcast(mine, src=src, codec=codec)
        assert_same(got, weights(), sharing=False)
        assert got["large"].device == torch.device("cuda", torch.cuda.current_device())
    for got in objcomm.all_gather(weights(), codec=codec):
        assert_same(got, weights(), sharing=False)
    mine = weights() if objcomm.rank() == 0 else None
    on_host = objcomm.broadcast(mine, device="cpu")
    if objcomm.rank() == 1:
        assert on_host["large"].device.type == "cpu"
    assert_group_works()


@ranks(2, disposable=True, deadline=120)
def test_a_call_sends_the_results_of_the_current_stream() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        numbers = torch.zeros(4_000_000, device="cuda")
        for _ in range(50):
            numbers += 1
        got = objcomm.all_gather(numbers)
        for each in got:
            assert float(each.sum()) == 50 * 4_000_000
    assert_group_works()


@ranks(2, disposable=True, deadline=120)
def test_cuda_tensors_are_reduced() -> None:
    got = objcomm.all_reduce(torch.full((1_000_000,), objcomm.rank() + 1, device="cuda"))
    assert got.device.type == "cuda"
    assert bool((got == 3).all())


@solo(deadline=120)
def test_nccl_takes_what_the_device_link_gives_it(_folder: Path) -> None:  # noqa: PT019  # wanted for its effect
    _join_nccl(_folder)
    link = BackendLink(lambda: dist.new_group([0]), torch.device("cuda"), [0])
    flat = torch.arange(100, dtype=torch.uint8, device="cuda")
    for transfer in (link.all_to_all, link.all_gather):
        into = torch.zeros_like(flat)
        transfer(flat, into)
        assert torch.equal(into, flat)
    dist.destroy_process_group()


def _over_nccl() -> dist.ProcessGroup:
    """Create a group of all ranks, whose CUDA tensors NCCL moves.

    NCCL refuses two ranks on one GPU of a host. If there are too few GPUs, each rank claims to be
    on a separate host, and NCCL connects them by TCP.
    """
    rank, count = objcomm.rank(), torch.cuda.device_count()
    if count < objcomm.world_size():
        os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device(rank % count)
    group: dist.ProcessGroup = dist.new_group(backend="cpu:gloo,cuda:nccl")
    return group


def _own_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _sent_nbytes(group: dist.ProcessGroup) -> int:
    """Return the bytes this rank has sent over objcomm's own connections."""
    return sum(each.sent_nbytes for each in objcomm.stats(group).values())


@ranks(2, 4, disposable=True)
def test_tensors_are_combined_on_the_device_as_on_the_host() -> None:
    group = _over_nccl()
    generator = torch.Generator().manual_seed(objcomm.rank())
    tree = {f"p{at}": torch.rand(100_000, generator=generator) for at in range(5)}
    tree["halves"] = torch.rand(100_000, generator=generator).half()
    want = objcomm.all_reduce(tree, "mean", group=group)
    before = _sent_nbytes(group)
    assert before > 100_000  # counts what went through CPU memory
    got = objcomm.all_reduce({key: each.cuda() for key, each in tree.items()}, "mean", group=group)
    assert _sent_nbytes(group) - before < 10_000
    for key, each in got.items():
        assert each.device == _own_device()
        assert torch.equal(each.cpu(), want[key])


@ranks(2, 4, disposable=True)
def test_collectives_move_tensors_from_device_to_device() -> None:
    group = _over_nccl()
    rank, size = objcomm.rank(), objcomm.world_size()
    mine: dict[str, Any] = {"rank": rank, "w": torch.full((1_000_000,), rank, device="cuda")}

    def is_of(src: int, obj: Any) -> bool:
        return (
            obj["rank"] == src
            and obj["w"].device == _own_device()
            and bool((obj["w"] == src).all())
        )

    def are_of_all(objs: list[Any]) -> bool:
        return len(objs) == size and all(map(is_of, everyone, objs))

    everyone = range(size)
    before = _sent_nbytes(group)
    for src in everyone:
        assert is_of(src, objcomm.broadcast(mine, src=src, group=group))
        gathered = objcomm.gather(mine, dst=src, group=group)
        assert (gathered is not None) == (rank == src)
        assert gathered is None or are_of_all(gathered)
        several = [{**mine, "w": mine["w"] + to} for to in everyone] if rank == src else None
        got = objcomm.scatter(several, src=src, group=group)
        assert bool((got["w"] == src + rank).all())
    assert are_of_all(objcomm.all_gather(mine, group=group))
    assert are_of_all(objcomm.all_to_all([mine] * size, group=group))
    assert are_of_all(objcomm.all_gather(mine, group=group, async_op=True).wait())
    assert _sent_nbytes(group) - before < 100_000
    staged = objcomm.broadcast(torch.arange(1_000_000), device="cuda", group=group)
    assert rank == 0 or staged.device == _own_device()
    assert torch.equal(staged.cpu(), torch.arange(1_000_000))
    assert_group_works(group)


@ranks(2, 4, disposable=True)
def test_a_model_learns_as_it_does_on_the_host() -> None:
    group = _over_nccl()
    rank, size = objcomm.rank(), objcomm.world_size()
    torch.manual_seed(rank)
    here = torch.nn.Linear(300, 200)
    there = copy.deepcopy(here).cuda()
    for model in (here, there):
        objcomm.models.broadcast_model(model, size - 1, group=group)
        for at, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, rank + at)
        before = _sent_nbytes(group)
        objcomm.models.sync_gradients(model.parameters(), group=group)
        if model is there:
            assert _sent_nbytes(group) - before < 10_000
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    for wanted, got in zip(here.parameters(), there.parameters(), strict=True):
        assert got.device == _own_device()
        assert torch.equal(got.cpu(), wanted)
    assert_group_works(group)


@ranks(2, disposable=True)
def test_messages_go_from_device_to_device_in_any_order() -> None:
    group = _over_nccl()
    other = 1 - objcomm.rank()
    numbers = range(8)
    sending = [
        objcomm.isend(torch.full((1_000_000,), each, device="cuda"), other, tag=each, group=group)
        for each in numbers
    ]
    taken = numbers if objcomm.rank() else reversed(numbers)
    receiving = {each: objcomm.irecv(other, tag=each, group=group) for each in taken}
    for each, work in receiving.items():
        got = work.wait()
        assert got.device == _own_device()
        assert bool((got == each).all())
    objcomm.wait_all(sending)
    assert _sent_nbytes(group) < 100_000
    assert_group_works(group)


@ranks(2, disposable=True)
def test_a_receive_waits_for_no_collective_that_was_queued_before_it() -> None:
    group = _over_nccl()
    total, mine = torch.ones(1_000_000, device="cuda"), torch.ones(1_000_000, device="cuda")
    dist.all_reduce(torch.ones(1, device="cuda"), group=group)  # the first one waits for all ranks
    if objcomm.rank() == 0:
        objcomm.send(mine, 1, group=group)
        dist.all_reduce(total, group=group)
    else:
        dist.all_reduce(total, group=group)  # queued, not awaited
        got = objcomm.recv(0, group=group)
        assert bool((got == 1).all())
    assert bool((total == 2).all())


@ranks(2, 4, disposable=True)
def test_what_one_rank_can_not_encode_all_raise_before_devices_move() -> None:
    group = _over_nccl()
    tree: dict[str, Any] = {"w": torch.full((1_000_000,), objcomm.rank(), device="cuda")}
    if objcomm.rank() == 1:
        tree["lock"] = threading.Lock()
    with pytest.raises(CollectiveError, match="rank 1"):
        objcomm.all_gather(tree, group=group)
    tree.pop("lock", None)
    everyone = objcomm.all_gather(tree, group=group)
    assert [int(each["w"].amax()) for each in everyone] == list(range(objcomm.world_size()))
    assert_group_works(group)


@ranks(3, disposable=True, expect_dead=[1])
def test_a_rank_that_dies_between_calls_is_named_at_once() -> None:
    group = _over_nccl()
    mine = torch.ones(1_000_000, device="cuda")
    objcomm.all_gather(mine, group=group)
    torch.cuda.synchronize()
    objcomm.barrier(group=group)
    if objcomm.rank() == 1:
        os._exit(1)
    with pytest.raises(TransportError) as caught:
        objcomm.all_gather(mine, group=group)
    assert 1 in caught.value.peers
    assert not isinstance(caught.value, TransportTimeout)
    torch.cuda.synchronize()
    survivors = objcomm.new_group([0, 2])
    assert objcomm.all_gather(objcomm.rank(), group=survivors) == [0, 2]


_GIB = 1 << 30


def _transfers(group: dist.ProcessGroup) -> dict[str, Callable[[], Any]]:
    mine = torch.full((_GIB,), objcomm.rank(), dtype=torch.uint8, device="cuda")
    return {
        "broadcast": lambda: objcomm.broadcast(mine, group=group),
        "all_gather": lambda: objcomm.all_gather(mine, group=group),
    }


@ranks(2, 3, disposable=True, expect_dead=[1], deadline=120)
@pytest.mark.parametrize("name", ["broadcast", "all_gather"])
def test_a_rank_that_dies_in_a_transfer_ends_it(name: str) -> None:
    group = _over_nccl()
    objcomm.all_gather(torch.ones(1_000_000, device="cuda"), group=group)  # connects the devices
    transfer = _transfers(group)[name]
    objcomm.barrier(group=group)
    before = torch.cuda.memory_allocated()
    if objcomm.rank() == 1:
        threading.Timer(0.1, os._exit, (1,)).start()  # 1 GiB took 0.3 s at least
    with pytest.raises(TransportError) as caught:
        _repeat(transfer)
    assert caught.value.peers == (1,)
    assert not isinstance(caught.value, TransportTimeout)
    caught.value.__traceback__ = None
    # The stream is usable, and the memory is free again.
    assert float(torch.ones(100, device="cuda").sum()) == 100
    torch.cuda.synchronize()
    wait_until(lambda: torch.cuda.memory_allocated() <= before, "the memory is free")


@ranks(2, disposable=True, deadline=120)
def test_a_limit_ends_a_transfer_that_waits_for_a_busy_device() -> None:
    group = _over_nccl()
    mine = torch.ones(1_000_000, device="cuda")
    objcomm.all_gather(mine, group=group)
    own = torch.full((5,), objcomm.rank(), device="cuda")
    dist.broadcast(own, 0, group=group)
    if objcomm.rank():
        torch.cuda._sleep(20_000_000_000)  # noqa: SLF001  # the only kernel that only takes time: about 10 s
    with pytest.raises(TransportTimeout):
        objcomm.all_gather(mine, group=group, timeout=2)
    torch.cuda.synchronize()
    dist.broadcast(own, 1, group=group)  # the group's own communicator
    assert own.tolist() == [0] * 5


@ranks(2, disposable=True, deadline=120)
def test_a_failure_leaves_a_group_that_creates_a_new_communicator() -> None:
    group = _over_nccl()
    mine = torch.full((1_000_000,), objcomm.rank(), device="cuda")
    for _ in range(2):
        got = objcomm.all_gather(mine, group=group)
        assert [int(each[0]) for each in got] == [0, 1]
        with pytest.MonkeyPatch.context() as patch:
            if objcomm.rank():
                patch.setattr(BackendLink, "broadcast", _fail)
            with pytest.raises(TransportError if objcomm.rank() else CollectiveError):
                objcomm.all_gather(mine, group=group)


def _repeat(transfer: Callable[[], Any]) -> NoReturn:
    while True:
        transfer()


def _fail(*_: object) -> None:
    raise RuntimeError("unhandled system error")
