"""Tensors in objects go from device to device, and arrive on the receiver's current one."""

from typing import Any

import torch
import torch.distributed as dist

import objcomm
from tests.cases import case
from tests.group.helpers import assert_group_works
from tests.group.operations import MESSAGES, OBJECT_OPERATIONS, OPERATIONS
from tests.same import assert_same
from tests.standin import device
from tests.standin.worlds import (
    assert_is_free,
    copies,
    devices_in,
    fetched,
    made,
    on_devices,
    own_device,
    sent_nbytes,
)
from tests.tensor_samples import Labelled
from tests.workers import here

LARGE = 100_000  # elements, so that the member does not fit into the window
WITH_FUNCTION = {"reduce", "all_reduce", "reduce_scatter", "scan", "exscan"}


def weights(at: torch.device | str, seed: int = 0) -> dict[str, Any]:
    """Return small and large tensors, on both kinds of device, tied and non-contiguous."""
    large = torch.arange(LARGE).to(at) + seed
    return {
        "small": torch.full((3,), seed, dtype=torch.bfloat16).to(at),
        "large": large,
        "tied": [large[:]],
        "column": large.view(100, -1)[:, 0],
        "transposed": large.view(100, -1).t(),
        "parameter": torch.nn.Parameter(torch.ones(70_000).to(at)),
        "empty": torch.empty(0, 3).to(at),
        "on the host": torch.arange(50_000) + seed,
        "lr": 0.1,
    }


def assert_arrived(got: Any, seed: int) -> None:
    """Check that it equals ``weights`` of another rank, with each tensor on its device type."""
    assert_same(fetched(got), fetched(weights("cpu", seed)), sharing=False)
    on_device = [each for name, each in got.items() if name not in {"on the host", "lr"}]
    assert set(devices_in(on_device)) == {own_device()}
    assert got["on the host"].device.type == "cpu"
    assert got["tied"][0].data_ptr() == got["large"].data_ptr()
    assert isinstance(got["parameter"], torch.nn.Parameter)
    assert got["transposed"].stride() == (1, LARGE // 100)


@on_devices(2)
def test_a_subclass_arrives_on_the_receivers_device_or_where_it_asks_for_it() -> None:
    for numel in (3, LARGE):
        mine = torch.arange(numel).to(own_device()).as_subclass(Labelled)
        mine.label = "from rank 1"
        for where in (None, "cpu"):
            got: Any = objcomm.broadcast(mine if here().rank == 1 else None, 1, device=where)
            if here().rank == 0:
                assert type(got) is Labelled
                assert got.label == "from rank 1"
                assert got.device == torch.device(where or own_device())
                assert torch.equal(got.as_subclass(torch.Tensor).cpu(), torch.arange(numel))


@on_devices(1, 2, 3, 4)
def test_members_go_from_device_to_device() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    mine = weights(own_device(), rank)
    for codec in ("pickle", "msgpack"):
        for root in range(size):
            got: Any = objcomm.broadcast(mine if rank == root else None, root, codec=codec)
            assert_arrived(got, root)
            gathered = objcomm.gather(mine, root, codec=codec)
            assert (gathered is not None) == (rank == root)
            for sender, each in enumerate(gathered or []):
                assert_arrived(each, sender)
            parts = [weights(own_device(), 10 + peer) for peer in range(size)]
            part = objcomm.scatter(parts if rank == root else None, root, codec=codec)
            assert_arrived(part, 10 + rank)
        for sender, each in enumerate(objcomm.all_gather(mine, codec=codec)):
            assert_arrived(each, sender)
        parts = [weights(own_device(), 10 * rank + peer) for peer in range(size)]
        for sender, each in enumerate(objcomm.all_to_all(parts, codec=codec)):
            assert_arrived(each, 10 * sender + rank)
        objcomm.send(mine, rank, codec=codec)
        assert_arrived(objcomm.recv(rank), rank)
    assert bool(made()) == (size > 1)


@on_devices(2, 3)
def test_no_large_member_touches_the_cpu() -> None:
    mine = torch.full((LARGE,), objcomm.rank()).to("standin")
    objcomm.barrier()
    for name in OBJECT_OPERATIONS:
        device.queued()
        calls, sent = len(made()), sent_nbytes()
        with case(name):
            got = OPERATIONS[name](mine)
            # A function may change its operands, so it gets copies, which the codec creates in CPU
            # memory.
            assert copies() == [] or name in WITH_FUNCTION
            assert any(objcomm.all_gather(len(made()) > calls))
            assert sent_nbytes() - sent < 10_000
            for each in got if isinstance(got, list) else [got]:
                assert each is None or each.device == own_device()
            assert_group_works()


@on_devices(2, 3)
def test_a_thousand_small_tensors_take_one_copy_or_few_transfers() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    state = {f"w{at}": torch.full((1_024,), float(at + rank)).to("standin") for at in range(1_000)}
    objcomm.barrier()
    device.queued()
    got: Any = objcomm.broadcast(state if rank == 0 else None)
    assert len(copies()) == 1
    assert made() == []
    assert_same(fetched(got), {f"w{at}": torch.full((1_024,), float(at)) for at in range(1_000)})
    total = objcomm.all_reduce(state, "sum")
    assert [each.partition(":")[0] for each in made()] == ["alltoall_base", "_allgather_base"]
    assert float(total["w9"][0].cpu()) == 9 * size + sum(range(size))
    objcomm.models.broadcast_tensors(state.items(), size - 1)
    assert [each.partition(":")[0] for each in made()[2:]] == ["broadcast"]
    assert float(state["w9"][0].cpu()) == 9 + size - 1


def isend_and_recv(obj: Any, **options: Any) -> Any:
    """Send to the next rank and receive from the one before."""
    rank, size = objcomm.rank(), objcomm.world_size()
    work = objcomm.isend(obj, (rank + 1) % size, **options)
    got = objcomm.recv((rank - 1) % size)
    work.wait()
    return got


#: Every operation that moves device tensors from rank to rank.
ALL_OPERATIONS = {
    **{name: OPERATIONS[name] for name in OBJECT_OPERATIONS},
    "sendrecv": MESSAGES["sendrecv"],
    "isend and recv": isend_and_recv,
}


@on_devices(2, 3)
def test_small_tensors_take_one_copy_for_each_message_of_every_operation() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    state = {f"w{at}": torch.full((3,), float(at + rank)).to("standin") for at in range(40)}
    objcomm.barrier()
    for name, call in ALL_OPERATIONS.items():
        for codec in ("pickle", "msgpack"):
            device.queued()
            with case(name, codec):
                got = call(state, codec=codec)
                # At most one message to and one from each rank, itself included. A function gets
                # copies, which the codec creates in CPU memory.
                assert len(copies()) <= 2 * size or name in WITH_FUNCTION
                for each in got if isinstance(got, list) else [got]:
                    if each is not None:
                        assert set(devices_in(each)) == {own_device()}
                        assert float(each["w9"][0].cpu()) in range(9, 9 + size)
    assert made() == []


@on_devices(2, 3)
def test_a_call_on_one_stream_leaves_the_others_alone() -> None:
    rank = objcomm.rank()
    mine = {
        "large": torch.full((LARGE,), float(rank)).to("standin"),
        "small": torch.full((3,), float(rank)).to("standin"),
        "on the host": torch.full((LARGE,), rank),
    }
    calls: dict[str, Any] = {
        **ALL_OPERATIONS,
        "all_reduce of a tree": lambda obj: objcomm.all_reduce(obj, "sum"),
        "broadcast_tensors": lambda obj: objcomm.models.broadcast_tensors(obj.items()),
        "in the background": lambda obj: objcomm.all_gather(obj, async_op=True).wait(),
        "from the CPU": lambda obj: objcomm.broadcast(obj["on the host"], device="standin"),
    }
    default, side = torch.accelerator.current_stream(), device.Stream()
    side.wait_stream(default)
    objcomm.barrier()
    with side, device.left_alone(default):
        for name, call in calls.items():
            with case(name):
                call(mine)
                assert torch.accelerator.current_stream() == side
    assert made()


@on_devices(2, 3)
def test_point_to_point_messages_carry_device_tensors() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    mine = weights(own_device(), rank)
    for name, call in MESSAGES.items():
        with case(name):
            got = call(mine)
            assert_arrived(got, (rank - 1) % size if name == "sendrecv" else rank)
    for src in range(size):
        for dst in set(range(size)) - {src}:
            if rank == src:
                objcomm.send(mine, dst)
            if rank == dst:
                assert_arrived(objcomm.recv(src), src)
    # Not in the order in which they were sent, and from any rank.
    after, before = (rank + 1) % size, (rank - 1) % size
    works = [objcomm.isend(weights(own_device(), tag), after, tag=tag) for tag in (1, 2, 3)]
    for tag in (3, 1, 2):
        assert_arrived(objcomm.recv(before if tag == 1 else None, tag=tag), tag)
    for work in works:
        work.wait()


@on_devices(2, 3)
def test_a_member_on_another_than_the_current_device_arrives_on_the_current_one() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    elsewhere = torch.device("standin", (device.current_device() + 1) % device.COUNT)
    mine = {"a": torch.full((LARGE,), rank).to(elsewhere), "b": torch.ones(3).to(elsewhere)}
    for name in OBJECT_OPERATIONS:
        with case(name):
            got = OPERATIONS[name](mine)
            for each in got if isinstance(got, list) else [got]:
                assert each is None or each["a"].shape == (LARGE,)
            assert_group_works()
    for root in range(size):
        got = objcomm.broadcast(mine if rank == root else None, root)
        assert int(got["a"][-1].cpu()) == root
        assert set(devices_in(got)) == {elsewhere if rank == root else own_device()}
    for sender, each in enumerate(objcomm.all_gather(mine)):
        assert int(each["a"][-1].cpu()) == sender
        assert set(devices_in(each)) == {elsewhere if rank == sender else own_device()}


@on_devices(2, 3)
def test_device_moves_members_to_the_cpu_or_between_devices() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    mine = weights(own_device(), rank)
    for root in range(size):
        # Only one of the receivers wants the CPU.
        wants = rank == (root + 1) % size
        got: Any = objcomm.broadcast(
            mine if rank == root else None, root, device="cpu" if wants else None
        )
        where = {each.type for each in devices_in(got)}
        assert where == ({"cpu"} if wants else {"cpu", "standin"})
    on_host: dict[str, Any] = {"w": torch.full((LARGE,), rank), "raw": bytes([rank]) * LARGE}
    calls = len(made())
    got = objcomm.broadcast(on_host if objcomm.is_main() else None)
    assert got["w"].device.type == "cpu"
    assert len(made()) == calls  # no rank asked for it
    got = objcomm.broadcast(on_host if objcomm.is_main() else None, device="standin")
    assert len(made()) == calls + 2
    assert rank == 0 or got["w"].device == own_device()
    assert int(got["w"][-1].cpu()) == 0
    assert got["raw"] == bytes(LARGE)
    for sender, each in enumerate(objcomm.all_gather(on_host, device="standin")):
        assert rank == sender or each["w"].device == own_device()
        assert int(each["w"][-1].cpu()) == sender
        assert each["raw"] == bytes([sender]) * LARGE


@on_devices(2, 3)
def test_groups_with_and_without_a_backend_for_the_device() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    mine = weights(own_device(), rank)
    last_two = [size - 2, size - 1]
    groups = {
        "gloo": (dist.new_group(backend="gloo"), list(range(size))),
        "both": (dist.new_group(), list(range(size))),
        "standin": (dist.new_group(backend="standin"), list(range(size))),
        "some": (dist.new_group(last_two), last_two),
        "some over gloo": (dist.new_group(last_two, backend="gloo"), last_two),
    }
    for name, (group, members) in groups.items():
        if rank not in members:
            continue
        calls = len(made())
        with case(name):
            for sender, each in zip(members, objcomm.all_gather(mine, group=group), strict=True):
                assert_arrived(each, sender)
            got = objcomm.broadcast(mine, group_src=1, group=group)
            assert_arrived(got, members[1])
            assert (len(made()) > calls) == ("gloo" not in name)
            assert_group_works(group)
    # A group that objcomm creates has its parent's backends.
    part, calls = objcomm.split(0), len(made())
    assert_arrived(objcomm.broadcast(mine, group_src=1, group=part), 1)
    assert len(made()) > calls


@on_devices(2, backends="gloo")
def test_a_world_of_gloo_moves_device_tensors_through_the_cpu() -> None:
    mine = weights(own_device(), objcomm.rank())
    for sender, each in enumerate(objcomm.all_gather(mine)):
        assert_arrived(each, sender)
    got = objcomm.all_reduce({"a": torch.ones(LARGE).to("standin")}, "sum")
    assert got["a"].device == own_device()
    assert bool((got["a"].cpu() == 2).all())
    assert made() == []


@on_devices(2)
def test_a_program_without_devices_creates_no_context() -> None:
    assert_group_works()
    got = objcomm.all_gather({"lr": 0.1, "w": torch.ones(LARGE), "raw": bytes(LARGE)})
    assert len(got) == 2
    objcomm.all_reduce({"w": torch.ones(LARGE), "loss": 0.5}, "mean")
    objcomm.all_gather({"w": torch.ones(LARGE)}, async_op=True).wait()
    objcomm.sendrecv(torch.ones(LARGE), 1 - objcomm.rank(), 1 - objcomm.rank())
    model = torch.nn.Linear(300, 300)
    objcomm.models.broadcast_model(model)
    objcomm.barrier()
    assert device.contexts() == set()
    # The first tensor on a device creates a context.
    objcomm.broadcast(torch.ones(LARGE).to("standin") if objcomm.is_main() else None)
    assert device.contexts() == {device.current_device()}


@on_devices(2, 3)
def test_device_memory_is_freed() -> None:
    at = device.current_device()
    mine = torch.full((LARGE,), objcomm.rank()).to("standin")
    before = device.memory_allocated(at)
    for name in OBJECT_OPERATIONS:
        with case(name):
            got = OPERATIONS[name]({"w": mine})
            assert got is None or got
            del got
            assert_is_free(at, before)
    objcomm.all_reduce({"w": mine}, "sum")
    assert_is_free(at, before)
    # Tensors on the CPU take no device memory.
    pieces = device.allocations(at)
    objcomm.all_gather({"w": torch.ones(LARGE), "raw": bytes(LARGE)})
    objcomm.broadcast({"w": torch.ones(LARGE)}, objcomm.world_size() - 1)
    assert device.allocations(at) == pieces


@on_devices(2, 3)
def test_a_call_sends_the_results_of_the_current_stream() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    mine = torch.zeros(LARGE).to("standin")
    side = device.Stream()
    side.wait_stream(torch.accelerator.current_stream())
    device.queued()
    with side:
        mine.add_(rank)
        got = objcomm.all_gather(mine)
        assert [int(each[-1].cpu()) for each in got] == list(range(size))
        total = objcomm.all_reduce(mine, "sum")
        work = objcomm.all_gather({"w": mine}, async_op=True)
        later = work.wait()
        assert [int(each["w"][-1].cpu()) for each in later] == list(range(size))
        assert int(total[0].cpu()) == sum(range(size))
    # The call's thread continued on the caller's device and stream.
    own = device.current_device()
    on = {(each.device, each.stream) for each in device.queued() if "standin::" in each.name}
    assert (own, side.stream_id) in on
    assert (own, 0) not in on
    assert {index for index, _ in on} == {own}
    # Several concurrent calls, each from a separate stream.
    group = dist.new_group()
    streams = [device.Stream() for _ in range(2)]
    works = []
    for number, (stream, where) in enumerate(zip(streams, (None, group), strict=True)):
        stream.wait_stream(side)
        with stream:
            works.append(objcomm.all_gather(mine + number, group=where, async_op=True))
    for number, (stream, each) in enumerate(zip(streams, works, strict=True)):
        with stream:
            arrived = each.wait()
            assert [int(part[0].cpu()) for part in arrived] == [r + number for r in range(size)]
