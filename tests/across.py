"""What a rank does in ``tests/test_hosts.py``: ``python -m tests.across SCENARIO FOLDER``.

Ranks and the test synchronize through a folder that all hosts share: a rank reports that it has
reached a point, and waits until the test lets it continue. The result or error of each step is
pickled there.
"""

import faulthandler
import functools
import pickle
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import objcomm

#: Seconds after which a rank dumps its stacks and exits.
DEADLINE_S = 900.0
#: How long a host may be unreachable.
LOST_AFTER_S = 8.0
#: Timeout of a first use that some ranks can't join. They learn of it within another second, so the
#: cable is back before the world's connections end, even on a busy machine.
FIRST_USE_S = 3.0
#: Timeout of a call between two hosts whose packets are lost: half of it is for connecting.
DROPPED_S = 20.0
#: How long a host that soon returns is away; may be longer for the same reason.
AWAY_S = 1.0
LARGE_NBYTES = 32 << 20
_PAUSE_S = 0.01


def array() -> np.ndarray[Any, Any]:
    """Return the array that is broadcast."""
    return np.arange(LARGE_NBYTES // 8, dtype=np.int64)


def same(found: Any) -> bool:
    """Return whether the array arrived unchanged."""
    return bool((found == array()).all())


class Steps:
    """The steps of one rank in a scenario.

    Attributes:
        given: what each step returned or raised.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.given: dict[str, Any] = {}

    def reach(self, point: str) -> None:
        """Wait until the test lets all ranks continue."""
        (self._folder / f"{point}.{objcomm.rank()}").touch()
        while not (self._folder / point).exists():
            time.sleep(_PAUSE_S)

    def await_step_of(self, rank: int, name: str) -> None:
        """Wait until another rank of this host has finished a step."""
        place = self._folder / f"result.{rank}"
        while name not in pickle.loads(place.read_bytes()):  # noqa: S301  # our own
            time.sleep(_PAUSE_S)

    def step(self, name: str, call: Callable[[], Any]) -> None:
        """Record the result of a call."""
        try:
            self.given[name] = call()
        except Exception as error:  # noqa: BLE001  # the test checks which one
            self.given[name] = error
        place = self._folder / f"result.{objcomm.rank()}"
        partial = self._folder / f"partial.{objcomm.rank()}"
        partial.write_bytes(pickle.dumps(self.given))
        partial.replace(place)


def calls(steps: Steps) -> None:
    """Make each kind of call while every rank can reach every other."""
    rank, size, step = objcomm.rank(), objcomm.world_size(), steps.step
    step("host", lambda: objcomm.all_gather(platform.node()))
    step("config", lambda: objcomm.broadcast({"lr": 0.1} if rank == 0 else None))
    steps.reach("array")
    step("array", lambda: same(objcomm.broadcast(array() if rank == 0 else None)))
    step("confirmed", objcomm.barrier)
    steps.reach("gather")
    step("gather", lambda: objcomm.gather("x" * 10 ** (2 * rank), dst=size - 1))
    steps.reach("slow")
    step("slow", lambda: len(objcomm.broadcast(bytes(LARGE_NBYTES // 16 * (rank == 0)))))
    steps.reach("fast")
    step("all_reduce", lambda: objcomm.all_reduce([rank], op=lambda a, b: a + b))
    step("sums", lambda: _summed(rank, size))
    left, right = (rank - 1) % size, (rank + 1) % size
    step("ring", lambda: objcomm.sendrecv(f"from {rank}", dst=right, src=left))
    step("run_on_main", lambda: objcomm.run_on_main(platform.node))
    step("once", lambda: objcomm.run_once_per_node(lambda: (rank, platform.node())))
    step("node", lambda: dist.get_process_group_ranks(objcomm.node_group()))
    step("is_main", lambda: objcomm.is_main(scope="node"))
    step("order", lambda: _in_order(steps))
    step("model", lambda: _synced(rank))
    step("together", _fail_on_the_last)
    step("after", objcomm.barrier)


def _in_order(steps: Steps) -> bool:
    """Return whether the first rank of this host got here before this one."""
    mark = steps._folder / f"unpacked-{platform.node()}"  # noqa: SLF001  # a folder for all
    with objcomm.node_first():
        was_there = mark.exists()
        mark.touch()
    return was_there


def _summed(rank: int, size: int) -> list[bool]:
    """Return whether sums are exactly what one rank would compute from all operands in order."""
    drawn = [torch.Generator().manual_seed(peer) for peer in range(size)]
    operands = [torch.randn(1_000_000, generator=each) for each in drawn]
    sums = functools.reduce(torch.add, operands)
    mine = {"weights": operands[rank].clone()}
    found = [torch.equal(objcomm.all_reduce(mine)["weights"], sums)]
    for root in (1, size - 1):
        reduced = objcomm.reduce(mine, dst=root)
        found.append(reduced is None if rank != root else torch.equal(reduced["weights"], sums))
    parameter = torch.nn.Parameter(torch.zeros(1_000_000))
    parameter.grad = mine["weights"]
    objcomm.models.sync_gradients([parameter])
    share = 1 / size
    means = functools.reduce(lambda a, b: a.add(b, alpha=share), operands[1:], operands[0] * share)
    return [*found, torch.equal(parameter.grad, means)]


def _synced(rank: int) -> list[float]:
    torch.manual_seed(rank)
    model = torch.nn.Linear(64, 64)
    objcomm.models.broadcast_model(model)
    model(torch.full((1, 64), float(rank))).sum().backward()
    objcomm.models.sync_model(model)
    return [float(each.detach().double().sum()) for each in model.parameters()] + [
        float(each.grad.double().sum()) for each in model.parameters() if each.grad is not None
    ]


def _fail_on_the_last() -> None:
    with objcomm.fail_together():
        if objcomm.rank() == objcomm.world_size() - 1:
            raise LookupError("no such shard")
        objcomm.barrier()


def _met(steps: Steps, point: str) -> dist.ProcessGroup:
    """Wait at a point with a new group that has been used once."""
    group: dist.ProcessGroup = dist.new_group()
    steps.step(f"{point}: before", lambda: objcomm.all_gather(objcomm.rank(), group=group))
    steps.reach(point)
    return group


def outages(steps: Steps) -> None:
    """Record what the ranks see when a host's cable is pulled, at different moments."""
    is_first, step = objcomm.is_main(), steps.step
    large = array() if is_first else None

    group = dist.new_group()
    steps.reach("first use")
    step("first use", lambda: objcomm.all_gather("a", group=group, timeout=FIRST_USE_S))
    steps.reach("first used")
    step("first use: again", lambda: objcomm.all_gather(objcomm.rank(), group=group))

    group = _met(steps, "waiting")
    step("waiting", lambda: objcomm.all_gather(objcomm.rank(), group=group))
    step("waiting: after", lambda: objcomm.barrier(group=group))
    steps.reach("waited")

    group = _met(steps, "idle")
    steps.reach("was idle")
    step("idle", lambda: objcomm.all_gather(objcomm.rank(), group=group))

    group = _met(steps, "computing")
    if objcomm.rank() == 1:  # it computes until rank 0 has raised
        steps.await_step_of(0, "computing")
    step("computing", lambda: objcomm.barrier(group=group))
    steps.reach("computed")

    group = _met(steps, "sending")
    step("sending", lambda: type(objcomm.broadcast(large, group=group, confirm=True)))
    steps.reach("sent")

    # Not the default of a minute: the system retries less and less often, so on a busy machine,
    # where the cable is unplugged for some seconds longer, a limit of 6 s may pass without a retry.
    objcomm.configure(lost_after=60.0, everywhere=True)
    group = _met(steps, "restored")
    step("restored", lambda: same(objcomm.broadcast(large, group=group)))
    step("restored: after", lambda: objcomm.barrier(group=group))
    steps.reach("end")


def parted(steps: Steps) -> None:
    """Record what happens while two hosts can't reach each other, though both reach all others."""
    step = steps.step
    group = _met(steps, "parted")
    step("parted", lambda: objcomm.all_gather(bytes(LARGE_NBYTES // 8), group=group))
    step("parted: after", lambda: objcomm.barrier(group=group))
    steps.reach("joined")
    group = dist.new_group()
    step("joined", lambda: objcomm.all_gather(objcomm.rank(), group=group))

    group = dist.new_group()
    steps.reach("refused")
    step("refused", lambda: objcomm.all_gather(objcomm.rank(), group=group))
    step("refused: after", lambda: objcomm.barrier(group=group))
    steps.reach("allowed")
    group = dist.new_group()
    step("allowed", lambda: objcomm.all_gather(objcomm.rank(), group=group))

    group = dist.new_group()
    steps.reach("dropped")
    with objcomm.configure(transport="streams"):  # Gloo would try for the same time again
        step("dropped", lambda: objcomm.all_gather(1, group=group, timeout=DROPPED_S))
    steps.reach("carried")
    group = dist.new_group()
    step("carried", lambda: objcomm.all_gather(objcomm.rank(), group=group))
    steps.reach("end")


SCENARIOS: dict[str, tuple[Callable[[Steps], None], ...]] = {
    "two": (calls, outages),
    "four": (calls, parted),
}


def main(scenario: str, folder: Path) -> None:
    """Run a scenario on this rank."""
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    torch.set_num_threads(1)
    objcomm.configure(lost_after=LOST_AFTER_S, everywhere=True)
    objcomm.init(timeout=DEADLINE_S)
    steps = Steps(folder)
    for part in SCENARIOS[scenario]:
        part(steps)
    objcomm.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
