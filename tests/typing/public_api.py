"""What mypy infers for the public API; checked by `mypy`, never run."""

import collections
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, assert_type

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

import objcomm
from objcomm._bootstrap import init
from objcomm._codecs.base import Codec
from objcomm._collectives.reduction.operators import Extreme
from objcomm._training import once
from objcomm.compat import torch as dist_objects


@dataclass
class Config:
    """A user's class."""

    lr: float

    def merge(self, other: "Config") -> "Config":
        """An operator for reduce."""
        return Config(self.lr + other.lr)


class ShuffledLoader(DataLoader[int]):
    """A user's loader class."""


def collectives(config: Config, configs: list[Config]) -> None:
    """Take values, and return values of the same type."""
    assert_type(objcomm.broadcast(config), Config)
    assert_type(objcomm.broadcast(config, 1), Config)
    assert_type(objcomm.broadcast({"lr": 0.1}, group_src=1), dict[str, float])
    assert_type(objcomm.gather(config), list[Config] | Any)
    assert_type(objcomm.gather(config, dst=1, timeout=3), list[Config] | Any)
    assert_type(objcomm.all_gather(config), list[Config])
    assert_type(objcomm.scatter(configs), Config)
    assert_type(objcomm.scatter(tuple(configs)), Config)
    assert_type(objcomm.reduce(config, Config.merge), Config | Any)
    assert_type(objcomm.all_reduce(config, lambda a, b: a.merge(b)), Config)
    assert_type(objcomm.all_reduce(torch.ones(3), "max"), torch.Tensor)
    assert_type(objcomm.all_reduce({"loss": 0.5}, "mean", missing="skip"), dict[str, float])
    assert_type(objcomm.all_reduce([torch.ones(3)], dtype=torch.float64), list[torch.Tensor])
    assert_type(objcomm.all_reduce(0.5, "argmax"), Extreme)
    assert_type(objcomm.reduce(0.5, "argmin", 1), Extreme | Any)
    assert_type(objcomm.all_reduce(["cat"], "counter"), collections.Counter[Any])
    merge = objcomm.Op(Config.merge, commutative=True, identity=config, slow=True)
    assert_type(merge, objcomm.Op[Config])
    assert_type(objcomm.all_reduce(config, merge), Config)
    assert_type(objcomm.reduce(config, merge, dst=1), Config | Any)
    assert_type(objcomm.all_to_all(configs), list[Config])
    assert_type(objcomm.all_to_all(tuple(configs), async_op=True), objcomm.Work[list[Config]])
    assert_type(objcomm.scan(config, Config.merge), Config)
    assert_type(objcomm.scan(1, async_op=True), objcomm.Work[int])
    assert_type(objcomm.exscan(config, Config.merge), Config | None)
    assert_type(objcomm.exscan(1, "max", async_op=True), objcomm.Work[int | None])
    assert_type(objcomm.reduce_scatter(configs, Config.merge), Config)
    assert_type(objcomm.reduce_scatter([0.5], "mean", async_op=True), objcomm.Work[float])
    objcomm.barrier("name", timeout=timedelta(seconds=3))


def names(config: Config, configs: list[Config], *, async_op: bool) -> None:
    """Every call takes a name, which does not change its type."""
    assert_type(objcomm.broadcast(config, name="a"), Config)
    assert_type(objcomm.gather(config, name="a"), list[Config] | Any)
    assert_type(objcomm.all_gather(config, name="a", async_op=True), objcomm.Work[list[Config]])
    assert_type(objcomm.scatter(configs, name="a"), Config)
    assert_type(objcomm.all_to_all(configs, name="a"), list[Config])
    assert_type(objcomm.reduce_scatter(configs, Config.merge, name="a"), Config)
    assert_type(objcomm.reduce(1, "mean", name="a"), float | Any)
    assert_type(objcomm.all_reduce(config, Config.merge, name="a"), Config)
    assert_type(objcomm.scan(config, Config.merge, name="a"), Config)
    assert_type(objcomm.exscan(config, Config.merge, name="a"), Config | None)
    assert_type(objcomm.agree(config, name="a"), Config)
    assert_type(objcomm.shared_seed(name="a"), int)
    assert_type(objcomm.gather_scalar(1, name="a"), list[int] | Any)
    assert_type(
        objcomm.metrics.all_gather_scalar(1, name="a", async_op=async_op),
        list[int] | objcomm.Work[list[int]],
    )
    assert_type(objcomm.reduce_and_broadcast(lambda: 1, str, name="a"), str)
    assert_type(objcomm.run_on_main(str, name="a"), str)
    objcomm.barrier(name="a")
    objcomm.configure(check="lines")
    objcomm.broadcast(config, name=1)  # type: ignore[call-overload]  # wrong on purpose
    objcomm.configure(check="line")  # type: ignore[arg-type]  # wrong on purpose


def what_only_some_ranks_have(config: Config, rank: int) -> None:
    """None marks a rank with nothing to contribute or receive, and is not part of the type."""
    assert_type(objcomm.broadcast(config if rank == 0 else None), Config)
    assert_type(objcomm.broadcast({"lr": 0.1} if rank == 0 else None)["lr"], float)
    assert_type(objcomm.broadcast(config if rank == 0 else None, async_op=True).wait(), Config)
    assert_type(objcomm.broadcast(None), Any)
    assert_type(objcomm.broadcast(None, async_op=True), objcomm.Work[Any])
    assert_type(objcomm.ddp_broadcast(config if rank == 0 else None), Config)
    assert_type(objcomm.scatter([config] if rank == 0 else None), Config)
    if objcomm.is_main():
        for each in objcomm.gather(config):
            assert_type(each, Config | Any)
        objcomm.reduce(config, Config.merge).merge(config)
        for number in objcomm.gather_scalar(1):
            assert_type(number, int | Any)


def named_operators() -> None:
    """An operator's name is a literal; the mean of integers is a float."""
    assert_type(objcomm.all_reduce(1, "sum"), int)
    assert_type(objcomm.all_reduce(1, "mean"), float)
    assert_type(objcomm.all_reduce(1, "mean", async_op=True), objcomm.Work[float])
    assert_type(objcomm.all_reduce(0.5, "mean"), float)
    assert_type(objcomm.reduce(1, "mean"), float | Any)
    assert_type(objcomm.scan(1, "mean"), float)
    assert_type(objcomm.exscan(1, "mean"), float | None)
    assert_type(objcomm.reduce_scatter([1], "mean"), float)
    assert_type(objcomm.all_reduce(torch.ones(3), "mean"), torch.Tensor)
    objcomm.all_reduce(1, "average")  # type: ignore[call-overload]  # wrong on purpose
    objcomm.all_gather(1, group="gloo")  # type: ignore[call-overload]  # wrong on purpose
    objcomm.barrier(group=[0, 1])  # type: ignore[call-overload]  # wrong on purpose


def metrics(config: Config) -> None:
    """A function's result type becomes the list's, and a value keeps its type."""
    assert_type(objcomm.metrics.average_metrics({"loss": 0.5}, 64), dict[str, float])
    assert_type(objcomm.metrics.gather_from_all_ranks(lambda: config), list[Config] | Any)
    assert_type(objcomm.agree(config), Config)
    assert_type(objcomm.any_rank(flag=True), bool)
    assert_type(objcomm.all_ranks([config]), bool)
    assert_type(objcomm.shared_seed(), int)


async def streams(config: Config, configs: list[Config]) -> None:
    """An iterator over objects of the iterable's type."""
    rank = objcomm.rank()
    assert_type(objcomm.stream(configs), objcomm.Stream[Config])
    assert_type(objcomm.stream(configs if rank == 0 else None, 1), objcomm.Stream[Config])
    assert_type(objcomm.stream(), objcomm.Stream[Any])
    assert_type(objcomm.stream(None, group_src=1, scatter=True, depth=2), objcomm.Stream[Any])
    for each in objcomm.stream(iter([config]), batch=2):
        assert_type(each, Config)
    async for line in objcomm.stream("text"):
        assert_type(line, str)


def _rows_of(table: str, limit: int) -> list[Config]:
    raise NotImplementedError((table, limit))


def start() -> None:
    """The list has the function's result type, and its arguments are checked."""
    assert_type(objcomm.init(timeout=timedelta(seconds=3)), objcomm.Start)
    assert_type(objcomm.launch(_rows_of, 2, "train", 10, timeout=60), list[list[Config]])
    assert_type(objcomm.launch(lambda: 1, 2), list[int])
    assert_type(init.ddp_init_group({"distributed_backend": "gloo"}), objcomm.Start)
    objcomm.shutdown()
    objcomm.launch(_rows_of, 2, "train", "10")  # type: ignore[arg-type]  # wrong on purpose
    objcomm.launch(_rows_of, 2, "train")  # type: ignore[arg-type]  # wrong on purpose


def in_flight(config: Config, configs: list[Config]) -> None:
    """With ``async_op=True`` the result is a work of the same type, otherwise the value."""
    assert_type(objcomm.broadcast(config, async_op=True), objcomm.Work[Config])
    assert_type(objcomm.broadcast(config, 1, async_op=False), Config)
    assert_type(objcomm.gather(config, async_op=True), objcomm.Work[list[Config] | Any])
    assert_type(objcomm.gather(config, async_op=False), list[Config] | Any)
    assert_type(objcomm.all_gather(config, timeout=3, async_op=True), objcomm.Work[list[Config]])
    assert_type(objcomm.all_gather(config, async_op=False), list[Config])
    assert_type(objcomm.scatter(configs, async_op=True), objcomm.Work[Config])
    assert_type(objcomm.scatter(configs, async_op=False), Config)
    assert_type(objcomm.reduce(config, Config.merge, async_op=True), objcomm.Work[Config | Any])
    assert_type(objcomm.reduce(config, Config.merge, async_op=False), Config | Any)
    assert_type(objcomm.all_reduce(config, Config.merge, async_op=True), objcomm.Work[Config])
    assert_type(objcomm.all_reduce(config, Config.merge, async_op=False), Config)
    assert_type(objcomm.all_reduce(0.5, "argmax", async_op=True), objcomm.Work[Extreme])
    assert_type(objcomm.barrier("name", async_op=True), objcomm.Work[None])
    assert_type(objcomm.gather_scalar(1, async_op=True), objcomm.Work[list[int] | Any])
    assert_type(objcomm.metrics.all_gather_scalar(1, async_op=True), objcomm.Work[list[int]])
    assert_type(objcomm.metrics.all_gather_scalar(1, async_op=False), list[int])
    assert_type(objcomm.reduce_and_broadcast(lambda: 1, str, async_op=True), objcomm.Work[str])


def in_flight_perhaps(config: Config, configs: list[Config], *, async_op: bool) -> None:
    """With a flag of the program the result is either; one flag may serve all operations."""
    assert_type(objcomm.broadcast(config, async_op=async_op), Config | objcomm.Work[Config])
    assert_type(
        objcomm.gather(config, async_op=async_op),
        list[Config] | objcomm.Work[list[Config] | Any] | Any,
    )
    assert_type(
        objcomm.all_gather(config, async_op=async_op), list[Config] | objcomm.Work[list[Config]]
    )
    assert_type(objcomm.scatter(configs, async_op=async_op), Config | objcomm.Work[Config])
    assert_type(
        objcomm.all_to_all(configs, async_op=async_op), list[Config] | objcomm.Work[list[Config]]
    )
    assert_type(
        objcomm.reduce_scatter(configs, Config.merge, async_op=async_op),
        Config | objcomm.Work[Config],
    )
    assert_type(
        objcomm.reduce(config, Config.merge, async_op=async_op),
        Config | objcomm.Work[Config | Any] | Any,
    )
    assert_type(
        objcomm.all_reduce(config, Config.merge, async_op=async_op), Config | objcomm.Work[Config]
    )
    assert_type(
        objcomm.scan(config, Config.merge, async_op=async_op), Config | objcomm.Work[Config]
    )
    assert_type(
        objcomm.exscan(config, Config.merge, async_op=async_op),
        Config | objcomm.Work[Config | None] | None,
    )
    assert_type(objcomm.barrier(async_op=async_op), objcomm.Work[None] | None)
    assert_type(
        objcomm.gather_scalar(1, async_op=async_op),
        list[int] | objcomm.Work[list[int] | Any] | Any,
    )
    assert_type(
        objcomm.metrics.all_gather_scalar(1, async_op=async_op), list[int] | objcomm.Work[list[int]]
    )
    assert_type(
        objcomm.reduce_and_broadcast(lambda: 1, str, async_op=async_op), str | objcomm.Work[str]
    )
    assert_type(objcomm.send(config, 1, async_op=async_op), objcomm.Work[None] | None)
    assert_type(objcomm.recv(1, tag=None, async_op=async_op), Any | objcomm.Work[Any])
    objcomm.recv(1, tag="a", async_op=async_op)  # type: ignore[call-overload]  # wrong on purpose


def messages(config: Config, group: dist.ProcessGroup) -> None:
    """The type of a received message is unknown; a work knows the type of its result."""
    assert_type(
        objcomm.send(config, group_dst=1, tag=2, group=group, async_op=True), objcomm.Work[None]
    )
    assert_type(objcomm.isend(config, 1, timeout=3, codec="msgpack"), objcomm.Work[None])
    assert_type(objcomm.issend(config, group_dst=1, tag=2), objcomm.Work[None])
    objcomm.ssend(config, 1, timeout=3, group=group)
    assert_type(objcomm.recv(), Any)
    assert_type(objcomm.recv(tag=None, with_envelope=True), tuple[Any, objcomm.Envelope])
    assert_type(objcomm.recv(1, with_envelope=True, async_op=True), objcomm.Work[Any])
    assert_type(objcomm.irecv(tag=None).envelope, objcomm.Envelope)
    assert_type(objcomm.irecv(tag=None).cancel(), bool)
    assert_type(objcomm.sendrecv(config, 1, recv_tag=None, with_envelope=True), Any)
    assert_type(
        objcomm.recv(1, tag=None, device="cpu", allow=[Config], async_op=True), objcomm.Work[Any]
    )
    assert_type(objcomm.irecv(group_src=0, accept={"pickle"}), objcomm.Work[Any])
    assert_type(objcomm.sendrecv(config, 1, 0, recv_tag=3), Any)
    assert_type(objcomm.probe(tag=None), objcomm.Envelope)
    assert_type(objcomm.iprobe(1), objcomm.Envelope | None)
    assert_type(objcomm.probe().nbytes, int)
    assert_type(objcomm.mprobe(tag=None, timeout=3), objcomm.Message)
    assert_type(objcomm.improbe(1, group=group), objcomm.Message | None)
    found = objcomm.mprobe(group_src=1, tag=2)
    assert_type(found.envelope, objcomm.Envelope)
    assert_type(found.recv(timeout=3, device="cpu", allow=[Config]), Any)
    assert_type(found.irecv(accept={"pickle"}), objcomm.Work[Any])


async def works(works: list[objcomm.Work[Config]]) -> None:
    """Return a work's result in each way; works of several types can be combined."""
    assert_type(works[0].wait(), Config)
    assert_type(works[0].wait(timedelta(seconds=3)), Config)
    assert_type(works[0].result(), Config)
    assert_type(works[0].exception(), BaseException | None)
    assert_type(works[0].done(), bool)
    assert_type(await works[0], Config)
    assert_type(objcomm.wait_all(works), list[Config])
    assert_type(next(objcomm.as_completed(works)), objcomm.Work[Config])
    several: list[objcomm.Work[list[int] | None]]
    several = [objcomm.all_gather(1, async_op=True), objcomm.barrier(async_op=True)]
    assert_type(objcomm.wait_all(several), list[list[int] | None])


def helpers(config: Config) -> None:
    """Use the high-level functions."""
    assert_type(objcomm.ddp_broadcast(config, 1), Config)
    assert_type(objcomm.gather_scalar(0.5), list[float] | Any)
    assert_type(objcomm.metrics.all_gather_scalar(0.5), list[float])
    assert_type(objcomm.reduce_and_broadcast(lambda: 1, lambda parts: str(sum(parts))), str)

    def total(parts: list[Config]) -> float:
        return sum(part.lr for part in parts)

    assert_type(objcomm.reduce_and_broadcast(lambda: config, total), float)

    def count_lines() -> int:
        return 3

    def ratio() -> float:
        return 0.5

    lines: int = objcomm.reduce_and_broadcast(count_lines, sum)
    share: float = objcomm.reduce_and_broadcast(ratio, sum)
    later: objcomm.Work[int] = objcomm.reduce_and_broadcast(count_lines, sum, async_op=True)
    assert lines == later.wait() == share


def control(config: Config, group: dist.ProcessGroup) -> None:
    """Results have the function's type, and decorators keep its parameters."""
    assert_type(objcomm.run_on_main(Config, [0.1]), Config)
    assert_type(objcomm.run_on_main(config.merge, (config,), post_func=print, group=group), Config)
    assert_type(objcomm.run_once_per_node(lambda: 1, timeout=3), int)
    assert_type(objcomm.compute_and_broadcast(lambda: config, 1, group=group), Config)
    assert_type(objcomm.compute_and_broadcast(lambda: "a", group_src=1, codec="msgpack"), str)

    assert_type(objcomm.broadcast_file("a", "b", group=group), Path)
    assert_type(objcomm.broadcast_file(Path("a")), Any)
    assert_type(objcomm.run_on_main(lambda: "a", rank=1), str)
    assert_type(objcomm.main_process_only(group_rank=1, group=group)(len)("abc"), int)
    objcomm.run_on_main(len, ["a"], rank="1")  # type: ignore[arg-type]  # wrong on purpose

    @objcomm.main_process_only
    def on_main(path: str, *, lr: float = 0.1) -> Config:
        return Config(lr * len(path))

    @objcomm.once_per_node(group=group, timeout=timedelta(hours=1))
    def on_node(path: str, *, lr: float = 0.1) -> Config:
        return on_main(path, lr=lr)

    assert_type(on_main("a", lr=0.2), Config)
    assert_type(on_node("a", lr=0.2), Config)
    on_main(1)  # type: ignore[arg-type]  # checked like the function's own parameters
    on_node("a", rate=1)  # type: ignore[call-arg]  # likewise
    with (
        objcomm.main_first(rank=1, timeout=3),
        once.zero_first(group=group),
        objcomm.node_first(),
    ):
        assert_type(objcomm.is_main(scope="node"), bool)
    with (
        once.zero_only() as is_zero,
        once.MainProcessContext(group=group) as nothing,
    ):
        assert_type(is_zero, bool)
        assert_type(nothing, None)
    assert_type(objcomm.rank_prefixed_message("text", group=group), str)


def torchs_names(config: Config, group: dist.ProcessGroup) -> None:
    """Lists of any type can be filled; ``patch`` is a context manager."""
    configs: list[Config | None] = [config, None]
    dist_objects.broadcast_object_list(configs, 0, group, torch.device("cpu"))
    dist_objects.all_gather_object(configs, config)
    dist_objects.gather_object(config, configs if dist.get_rank() == 0 else None, group_dst=0)
    dist_objects.scatter_object_list(configs, [config], src=0)
    dist_objects.send_object_list((config,), dst=1)
    assert_type(dist_objects.recv_object_list(configs, group_src=1, group=group), int)
    with dist_objects.patch() as patched:
        patched.undo()


class Scalars:
    """The methods of a TensorBoard writer."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Record a value."""


def groups(
    group: dist.ProcessGroup, mesh: DeviceMesh, device: torch.device, writer: Scalars
) -> None:
    """Use every form of a group and a device."""
    assert_type(objcomm.rank(), int)
    assert_type(objcomm.rank(group), int)
    assert_type(objcomm.world_size(mesh), int)
    assert_type(objcomm.is_main(group), bool)
    assert_type(objcomm.is_initialized(), bool)
    assert_type(objcomm.all_gather(1, group=mesh, device=device, codec="msgpack"), list[int])
    assert_type(objcomm.all_gather(1, group=group, device="cpu", confirm=True), list[int])
    assert_type(objcomm.stats(group), dict[str, objcomm.OperationStats])
    assert_type(objcomm.exporters.stats_to_prometheus({"job": "train"}), str)
    for activity in objcomm.monitor(interval=timedelta(seconds=3)):
        assert_type(activity, objcomm.Activity)
        assert_type(objcomm.exporters.activity_to_prometheus(activity), str)
        assert_type(activity.ranks[0].calls_per_second, float | None)
    objcomm.exporters.stats_to_tensorboard(writer, 100, group=group)
    objcomm.reset_stats(mesh)
    with objcomm.lane("eval"), objcomm.check():
        assert_type(objcomm.stats()["gather"].sent_nbytes, int)
        assert_type(objcomm.recorder.dump(), dict[str, Any])


def subgroups(group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
    """Members get torch's own type."""
    assert_type(objcomm.split(0), dist.ProcessGroup)
    assert_type(objcomm.split("eval", key=-1, group=mesh["dp"], timeout=5), dist.ProcessGroup)
    assert_type(objcomm.split(None), dist.ProcessGroup)
    assert_type(objcomm.dup(group=group), dist.ProcessGroup)
    assert_type(objcomm.new_group(range(2), group=group, timeout=5), dist.ProcessGroup)
    objcomm.new_group("01")  # type: ignore[arg-type]  # wrong on purpose
    assert_type(objcomm.survivors(mesh["dp"], timeout=5), dist.ProcessGroup)
    assert_type(objcomm.node_group(timeout=timedelta(seconds=3)), dist.ProcessGroup)
    assert_type(objcomm.all_gather(1, group=objcomm.leaders(group=mesh)), list[int])


def bytes_of_objects(config: Config) -> None:
    """Use the serialization layer alone; the type of decoded bytes is unknown."""
    assert_type(objcomm.to_tensor(config), torch.Tensor)
    assert_type(objcomm.to_tensor(config, codec="msgpack"), torch.Tensor)
    assert_type(objcomm.from_tensor(torch.empty(0), device="cpu"), Any)


def what_comes_in(config: Config, codec: Codec) -> None:
    """Name codecs; pass classes and functions as objects or names, and a key as str or bytes."""
    assert_type(objcomm.broadcast(config, accept={"pickle"}, allow=[Config, "shop.Order"]), Config)
    assert_type(objcomm.all_gather(config, allow=[Config, Config.merge]), list[Config])
    assert_type(objcomm.from_tensor(torch.empty(0), accept="msgpack", allow=()), Any)
    objcomm.codecs.register_codec(codec)
    with objcomm.configure(key=b"0123456789abcdef", max_operation_nbytes=1 << 30, max_depth=50):
        objcomm.configure(key="0123456789abcdef", accept=["msgpack"], everywhere=True)


assert_type(objcomm.register(Config), type[Config])


@objcomm.register
class Registered:
    """The decorator keeps the type of the class."""


assert_type(Registered(), Registered)


def models(model: torch.nn.Module) -> None:
    """Pass tensors with and without names; blocks are contexts; a wrapped model is a module."""
    objcomm.models.broadcast_tensors(model.parameters(), 1)
    objcomm.models.average_tensors([torch.ones(1)])
    objcomm.models.sync_gradients(model.named_parameters())
    objcomm.models.sync_gradients(model.parameters(), timeout=3)
    objcomm.models.sync_buffers(model.buffers(), average=False)
    objcomm.models.sync_buffers(model.named_buffers())
    objcomm.models.sync_model(model, sync_buffers=False)
    objcomm.models.broadcast_model(model, group_src=1)
    with objcomm.models.eager_sync_gradients(model.parameters()) as no_value:
        assert_type(no_value, None)
    with objcomm.models.eager_sync_model(model) as nothing:
        assert_type(nothing, None)
    assert_type(objcomm.models.wrap(model, find_unused_parameters=True), torch.nn.Module)
    assert_type(list(objcomm.Shard(3)), list[int])
    usual: DataLoader[Any] = objcomm.loader([1, 2], batch_size=2, shuffle=True)
    objcomm.loader([1, 2], shuffle=True).sampler.set_epoch(1)
    assert len(usual) == 1
    assert_type(objcomm.loader([1, 2], klass=ShuffledLoader), ShuffledLoader)


def failures(error: objcomm.CollectiveError) -> None:
    """Errors keep facts as attributes."""
    assert_type(error.failures, dict[int, objcomm.RankFailure])
    assert_type(error.failures[0].traceback, str)


operation: Callable[[Config, Config], Config] = Config.merge
