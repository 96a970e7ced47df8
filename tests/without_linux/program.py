"""A program that runs alone and uses everything; its argument is a folder for its output."""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import objcomm
from objcomm.compat import torch as dist_objects
from tests.group.flashy_program import use_documented
from tests.group.operations import OPERATIONS

# The result of each named operator for a 2 on one rank.
_NAMED: dict[Any, float] = {
    "sum": 2,
    "prod": 2,
    "min": 2,
    "max": 2,
    "mean": 2.0,
    "any": True,
    "all": True,
}
_LIMIT_SECONDS = 100.0  # only a hang takes this long


def use_operations() -> None:
    """Use every collective, synchronous and asynchronous, and every named operator."""
    for name, call in OPERATIONS.items():
        now = call(3)
        assert now in (3, [3], None), name
        assert call(3, async_op=True).wait(_LIMIT_SECONDS) == now, name
    for op, expected in _NAMED.items():
        assert objcomm.reduce(2, op) == objcomm.all_reduce(2, op) == expected
        assert objcomm.scan(2, op) == objcomm.reduce_scatter([2], op) == expected
        assert objcomm.exscan(2, op) is None
    assert objcomm.all_reduce([1], "concat") == [1]
    big = {"w": torch.arange(1 << 20)}
    for codec in ("pickle", "msgpack"):
        assert torch.equal(objcomm.broadcast(big, codec=codec)["w"], big["w"])


def use_messages() -> None:
    """Send messages to this rank itself, in each way."""
    objcomm.send("first", 0)
    assert objcomm.probe(0).tag == 0
    assert objcomm.recv(0) == "first"
    later = objcomm.irecv(0, tag=2)
    assert objcomm.iprobe(0, tag=2) is None
    objcomm.isend("second", 0, tag=2).wait(_LIMIT_SECONDS)
    assert later.wait(_LIMIT_SECONDS) == "second"
    objcomm.send("third", 0)
    assert objcomm.mprobe(0).recv() == "third"
    assert objcomm.sendrecv("fourth", 0, 0) == "fourth"
    with pytest.raises(objcomm.UsageError):
        objcomm.recv(0, timeout=0.1)


def use_groups() -> None:
    """Check that functions that create groups return the world of one."""
    for group in (objcomm.split(0), objcomm.dup(), objcomm.new_group([0]), objcomm.node_group()):
        assert objcomm.world_size(group) == 1
        assert objcomm.all_gather("x", group=group) == ["x"]
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    assert objcomm.split(None) is outside


def use_lanes() -> None:
    """Use two threads, each with a lane."""
    found = []

    def evaluate(name: str) -> None:
        with objcomm.lane(name):
            found.append(objcomm.all_gather(name))

    threads = [threading.Thread(target=evaluate, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [["a"], ["b"]]


def use_training() -> None:
    """Use models, metrics, and functions that one rank runs for all."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    objcomm.models.broadcast_model(model)
    model(torch.ones(3, 2)).sum().backward()
    objcomm.models.sync_model(model)
    objcomm.models.average_tensors(model.buffers())
    assert objcomm.models.wrap(model) is model
    assert objcomm.metrics.average_metrics({"loss": 2}, 3) == {"loss": 2.0}
    assert sum(len(batch) for batch in objcomm.loader(torch.rand(9, 2), batch_size=4)) == 9

    @objcomm.once_per_node
    def prepared() -> str:
        return "on this host"

    assert prepared() == objcomm.run_on_main(lambda: "on this host")
    with objcomm.main_first(), objcomm.node_first():
        assert objcomm.is_main()
        assert objcomm.is_main(scope="node")
    with pytest.raises(objcomm.CollectiveError, match="no data"), objcomm.fail_together():
        raise OSError("no data")


def use_patch() -> None:
    """Use torch's own names."""
    box = [None]
    with dist_objects.patch():
        dist.all_gather_object(box, "mine")
    assert box == ["mine"]


def use_diagnoses(folder: Path) -> None:
    """Use counters, their exporters, and the recorder's file, which ``inspect`` reads."""
    assert objcomm.stats()["all_gather"].calls > 0
    assert "objcomm_calls" in objcomm.exporters.stats_to_prometheus()
    dumped = objcomm.recorder.dump(folder / "rank0.json")
    assert "all_gather" in str(dumped)


def main(folder: Path) -> None:
    """Do everything between ``init`` and ``shutdown``."""
    start = objcomm.init()
    assert (start.launcher, start.world_size, start.backend) == ("", 1, "")
    use_operations()
    use_messages()
    use_groups()
    use_lanes()
    use_training()
    use_documented(0, 1)
    use_patch()
    objcomm.barrier("at the end")
    use_diagnoses(folder)
    objcomm.shutdown()
    assert objcomm.broadcast("still alone") == "still alone"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
