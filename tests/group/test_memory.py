"""What a call costs in bytes, exchanges and memory, and what memory its results share."""

import contextlib
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import objcomm
from tests.group.helpers import assert_group_works
from tests.group.operations import OPERATIONS
from tests.ranks import ranks

MEGABYTE = 1_000_000


def cost_of(operation: str, *given: Any, **options: Any) -> objcomm.OperationStats:
    """This rank's counters of one call."""
    objcomm.barrier()
    objcomm.reset_stats()
    getattr(objcomm, operation)(*given, **options)
    (stats,) = objcomm.stats().values()
    return stats


def nbytes_of(cost: objcomm.OperationStats) -> int:
    return cost.sent_nbytes + cost.received_nbytes


@ranks(2, 3)
def test_a_small_dict_costs_one_exchange() -> None:
    config = {"lr": 1e-3, "layers": [64, 64], "name": "x" * 500}
    for operation in ("broadcast", "gather", "ddp_broadcast"):
        cost = cost_of(operation, config)
        assert [*objcomm.stats()] == [operation.removeprefix("ddp_")]
        assert (cost.calls, cost.exchanges) == (1, 1)
        assert nbytes_of(cost) < 5_000 * objcomm.world_size()
    cost = cost_of("scatter", [config] * objcomm.world_size())
    assert (cost.calls, cost.exchanges) == (1, 1)


@ranks(2, 3)
def test_fifty_small_tensors_cost_at_most_two_exchanges() -> None:
    state = {f"layer{i}": torch.full((16, 4), i) for i in range(50)}
    assert cost_of("broadcast", state).exchanges <= 2


@ranks(1, 2)
def test_a_scalar_costs_one_exchange() -> None:
    cost = cost_of("gather_scalar", 0.5)
    assert (cost.calls, cost.exchanges) == (1, objcomm.world_size() - 1)
    assert cost.sent_nbytes < 1024


@ranks(2)
def test_a_view_sends_its_elements_and_not_its_storage() -> None:
    huge = torch.empty(250_000_000)  # 1 GB, of which no page is ever touched
    assert nbytes_of(cost_of("broadcast", huge[7:8])) < 4096
    rows = torch.empty(1000, 1000)
    cost = cost_of("broadcast", [rows[i] for i in (1, 300, 500, 999)])
    assert 16_000 < nbytes_of(cost) < 20_000
    assert nbytes_of(cost_of("broadcast", torch.zeros(()).expand(5000, 5000))) < 4096


@ranks(2)
@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
def test_memory_that_members_share_is_sent_once(codec: str) -> None:
    x = torch.arange(MEGABYTE, dtype=torch.float32)
    for same in ([x, x], [x, x[:]], {"a": x, "b": [x.view(1000, 1000)]}):
        assert 4_000_000 <= nbytes_of(cost_of("broadcast", same, codec=codec)) < 4_100_000


@ranks(2)
def test_nothing_is_padded_to_the_largest_rank() -> None:
    cost = cost_of("gather", bytes(5 * MEGABYTE if objcomm.rank() == 1 else 10))
    costs = (cost.sent_nbytes, cost.received_nbytes)
    large, none = costs if objcomm.rank() == 1 else costs[::-1]
    assert 5 * MEGABYTE <= large < 5.01 * MEGABYTE
    assert none == 0


@ranks(3)
def test_what_one_rank_counts_as_sent_the_others_count_as_received() -> None:
    objcomm.barrier()
    objcomm.reset_stats()
    objcomm.all_gather(bytes(100_000 * objcomm.rank()))
    objcomm.broadcast(bytes(70_000), src=1)
    objcomm.gather("x", dst=2)
    stats = objcomm.stats()
    for name in ("all_gather", "broadcast", "gather"):
        sums = objcomm.all_gather((stats[name].sent_nbytes, stats[name].received_nbytes))
        assert sum(sent for sent, _ in sums) == sum(received for _, received in sums) > 0
        assert stats[name].calls == 1
        assert stats[name].seconds > 0


@ranks(1, 2)
def test_counters_are_a_frozen_snapshot_that_can_be_reset() -> None:
    objcomm.reset_stats()
    assert objcomm.stats() == {}
    objcomm.all_gather(1)
    before = objcomm.stats()
    objcomm.all_gather(1)
    assert before["all_gather"].calls == 1
    assert objcomm.stats()["all_gather"].calls == 2
    with pytest.raises(AttributeError):
        before["all_gather"].calls = 5  # type: ignore[misc]  # that it is frozen is the point
    objcomm.reset_stats()
    assert objcomm.stats() == {}


@ranks(2)
@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
@pytest.mark.parametrize("numel", [1, 100, 10_000, 100_000, 2_000_000])
def test_what_arrives_is_writable_aligned_and_independent(numel: int, codec: str) -> None:
    mine: dict[str, Any] = {
        "tensor": torch.arange(numel, dtype=torch.float64),
        "byte tensor": torch.arange(numel).to(torch.uint8),
        "array": np.arange(numel, dtype=np.int32),
        "matrix": np.asfortranarray(np.ones((numel, 2), np.float32)),
        "bytearray": bytearray(numel),
        "list": [[1]],
    }
    got = objcomm.all_gather(mine, codec=codec)[1 - objcomm.rank()]
    for name in ("tensor", "byte tensor"):
        assert got[name].data_ptr() % 64 == 0
        got[name].fill_(1)
    for name in ("array", "matrix"):
        assert got[name].flags.writeable
        is_small = got[name].nbytes <= 32 * 1024  # aligned as numpy's own
        assert got[name].ctypes.data % (16 if is_small else 64) == 0
        got[name][...] = 0
    got["bytearray"][:] = b"\1" * numel
    got["list"][0].append(2)
    assert got["array"].sum() == got["matrix"].sum() == 0
    assert got["tensor"].sum() == got["byte tensor"].sum(dtype=torch.int64) == numel
    objcomm.barrier()
    assert torch.equal(mine["tensor"], torch.arange(numel, dtype=torch.float64))
    assert mine["array"].sum() == np.arange(numel).sum()
    assert mine["list"] == [[1]]
    assert mine["bytearray"] == bytearray(numel)


@ranks(2, 3)
@pytest.mark.parametrize("name", ["broadcast", "all_gather", "gather", "scatter"])
def test_the_sender_may_overwrite_its_object_as_soon_as_the_call_returns(name: str) -> None:
    for turn in range(5):
        mine, small = torch.full((300_000,), turn, dtype=torch.int32), [turn]
        got = OPERATIONS[name]((mine, small))
        mine.fill_(-1)
        small[0] = -1
        for tensor, numbers in filter(None, got if isinstance(got, list) else [got]):
            assert tensor is mine or bool((tensor == turn).all())
            assert numbers is small or numbers == [turn]


@ranks(2)
def test_a_small_member_does_not_keep_a_large_one_alive() -> None:
    got = objcomm.broadcast(
        {"huge": torch.zeros(50 * MEGABYTE, dtype=torch.uint8), "tiny": torch.zeros(1)}
    )
    if objcomm.rank() == 1:
        assert got["tiny"].untyped_storage().nbytes() < 4096
        assert not got["huge"].any()  # pages that were never touched are not counted
        before = resident_nbytes("VmRSS")
        del got["huge"]
        gc.collect()
        assert before - resident_nbytes("VmRSS") > 40 * MEGABYTE


def resident_nbytes(field: str) -> int:
    """``VmRSS`` or its peak ``VmHWM``, from Linux."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def peak_of(call: Callable[[Any], Any], mine: object) -> tuple[int, Any]:
    """The rise of memory during the call, and the call's result."""
    call(bytes(5 * MEGABYTE))  # connections and pools are up
    before = resident_nbytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    result = call(mine)
    return resident_nbytes("VmHWM") - before, result


@ranks(2, disposable=True)
def test_a_large_array_is_not_copied_on_the_sender_and_allocated_once_on_the_receiver() -> None:
    nbytes = 100 * MEGABYTE
    mine = {"w": np.ones(nbytes, np.uint8)} if objcomm.rank() == 0 else None
    rise, got = peak_of(objcomm.broadcast, mine)
    assert rise < (0.1 if objcomm.rank() == 0 else 1.1) * nbytes
    assert got["w"].nbytes == nbytes


@ranks(2, disposable=True)
@pytest.mark.parametrize("kind", ["bytes", "tensor", "bytearray"])
def test_a_gather_costs_the_destination_what_arrives_and_the_others_nothing(kind: str) -> None:
    nbytes = 64 * MEGABYTE
    make: dict[str, Callable[[], Any]] = {
        "bytes": lambda: b"\1" * nbytes,
        "tensor": lambda: torch.ones(nbytes, dtype=torch.uint8),
        "bytearray": lambda: bytearray(b"\1") * nbytes,
    }
    rise, got = peak_of(objcomm.gather, make[kind]() if objcomm.rank() == 1 else b"x" * 1024)
    assert rise < (1.1 if objcomm.rank() == 0 else 0.1) * nbytes
    assert (got is None) == (objcomm.rank() == 1)


@ranks(4, disposable=True)
def test_an_uneven_all_gather_costs_each_rank_the_sum() -> None:
    nbytes = 64 * MEGABYTE
    mine = torch.ones(nbytes if objcomm.rank() == 0 else 10, dtype=torch.uint8)
    rise, got = peak_of(objcomm.all_gather, mine)
    assert rise < (1.3 if objcomm.rank() else 0.3) * nbytes
    assert [len(tensor) for tensor in got] == [nbytes, 10, 10, 10]


@pytest.mark.long  # in each of two processes more than 2 GiB
@ranks(2, disposable=True)
@pytest.mark.parametrize("kind", ["bytes", "tensor"])
def test_more_than_two_gibibytes_arrive_whole(kind: str) -> None:
    nbytes = 2**31 + 1
    mine: Any = None
    if objcomm.rank() == 0:
        mine = bytearray(nbytes) if kind == "bytes" else torch.zeros(nbytes, dtype=torch.uint8)
        mine[-1] = 7
    got = objcomm.broadcast(mine)
    assert len(got) == nbytes
    assert (got[0], got[-2], got[-1]) == (0, 0, 7)
    del mine, got
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
def test_a_call_leaves_nothing_for_the_garbage_collector(codec: str) -> None:
    mine = {"rank": objcomm.rank(), "weights": torch.ones(100_000)}
    everyone = [mine] * objcomm.world_size()
    calls: list[Callable[[], object]] = [
        lambda: objcomm.broadcast(mine, codec=codec),
        lambda: objcomm.gather(mine, codec=codec, confirm=True),
        lambda: objcomm.all_gather(mine, codec=codec),
        lambda: objcomm.scatter(everyone, codec=codec),
        lambda: objcomm.all_reduce(torch.ones(3), codec=codec),
        lambda: objcomm.all_reduce(torch.ones(100_000), codec=codec),
        lambda: objcomm.metrics.all_gather_scalar(0.5),
        objcomm.barrier,
    ]
    for call in calls:
        call()  # the first builds caches
    with collector_at_rest():
        for call in calls:
            call()
            assert gc.collect() == 0


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Collect garbage only when asked, and skip existing objects."""
    gc.collect()
    gc.freeze()  # with many imports, scanning all objects takes a second
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
