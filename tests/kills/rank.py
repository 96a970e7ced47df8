"""One process of a trial: join, make the call, report how it ended, and join a new group."""

import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import objcomm
from tests.kills.plan import CALLS, FAR_SECONDS, FIRST_USE, WORLD, Trial
from tests.ranks import OVER_GLOO
from tests.waits import PATIENCE_S

_PACKAGE = str(Path(objcomm.__file__).parent)

#: Timeout of the survivors' new group, which the slowest of them must reach.
_ANEW_SECONDS = 15.0


class Seen(NamedTuple):
    """How one call ended.

    Attributes:
        error: the type's name; empty if the call returned.
        peers: the ranks of the world that the error names as lost.
        began: when the call started, in seconds of a clock that all processes share.
        ended: when it ended, by the same clock.
        text: the error's text.
    """

    error: str
    peers: tuple[int, ...]
    began: float
    ended: float
    text: str = ""


def take_part(trial: Trial, number: int, pipe: Connection, log: Path) -> None:
    """Run one process of a trial.

    Args:
        trial: the trial.
        number: the process's rank in the world.
        pipe: receives the parent's orders, and sends their results.
        log: file for the output.
    """
    with log.open("wb") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if trial.is_over_gloo:
        os.environ.update(OVER_GLOO)
    torch.set_num_threads(1)
    offset = trial.world_size - trial.size  # the rank in no group is the world's first
    killer = _Killer(trial)
    if number == trial.victim + offset:
        killer.listen()
    store = dist.TCPStore("127.0.0.1", pipe.recv(), None, is_master=False)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=number,
        world_size=trial.world_size,
        timeout=timedelta(seconds=4 * FAR_SECONDS),
    )
    objcomm.barrier()
    group: Any = None
    if trial.where != WORLD:
        group = dist.new_group(list(range(offset, trial.world_size)))
        if trial.where != FIRST_USE and number >= offset:
            objcomm.barrier(group=group)
    process = _Process(trial, number - offset, offset, group)
    pipe.send("ready")
    for order in iter(pipe.recv, None):
        if number == trial.victim + offset:
            process.die(pipe, killer)
        pipe.send(getattr(process, order)())
    sys.stdout.flush()
    os._exit(0)  # exiting an interpreter with a broken world is tested elsewhere


class _Process:
    def __init__(self, trial: Trial, rank: int, offset: int, group: Any) -> None:
        self._trial = trial
        self._rank = rank
        self._offset = offset
        self._group = group
        self._lost: tuple[int, ...] = ()

    def call(self) -> Seen:
        """Make the operation's call."""
        trial = self._trial
        call, obj = CALLS[trial.operation], ("of", self._rank)
        if trial.operation.startswith(("gather_scalar", "all_gather_scalar")):
            return self._seen(lambda: call(0.5, timeout=trial.limit, group=self._group))
        if trial.operation == "agree":
            obj = ("of", 0)
        return self._seen(lambda: call(obj, timeout=trial.limit, group=self._group))

    def call_again(self) -> Seen:
        """Make the next call, in which all ranks wait for all."""
        return self._seen(lambda: objcomm.barrier(timeout=FAR_SECONDS, group=self._group))

    def call_on_the_world(self) -> Seen:
        """Make the next call of a rank that is not in the group."""
        self._offset, self._group = 0, None
        return self.call_again()

    def begin_anew(self) -> object:
        """Recover as documented, using the ranks that this rank's own error names."""
        ranks = [rank for rank in range(objcomm.world_size()) if rank not in self._lost]
        try:
            group: Any = objcomm.new_group(ranks, timeout=_ANEW_SECONDS)
            gathered = objcomm.all_gather(objcomm.rank(), group=group, timeout=_ANEW_SECONDS)
            large = objcomm.broadcast(
                bytes(100_000), group_src=len(ranks) - 1, group=group, timeout=_ANEW_SECONDS
            )
        except Exception as error:  # noqa: BLE001  # reported to the parent
            return f"{ranks}: {type(error).__name__}: {error}"
        return gathered if len(large) == 100_000 else "wrong"

    def die(self, pipe: Connection, killer: "_Killer") -> None:
        """Make the call, unless this process is to be killed before it, and wait for the end."""
        if self._trial.at == 0:
            killer.strike()
        killer.arm()
        seen = self.call()
        killer.disarm()
        pipe.send(seen)
        time.sleep(PATIENCE_S)  # the parent ends it

    def _seen(self, call: Callable[[], object]) -> Seen:
        began = time.monotonic()
        try:
            call()
        except Exception as error:  # noqa: BLE001  # reported to the parent
            ended = time.monotonic()
            named = getattr(error, "missing", getattr(error, "peers", ()))
            self._lost = tuple(each + self._offset for each in named)
            return Seen(type(error).__name__, self._lost, began, ended, str(error))
        return Seen("", (), began, time.monotonic())


class _Killer:
    """Count the calls of the package's own functions, and kill this process at one of them."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._counted = itertools.count(1)
        self._is_armed = False

    def listen(self) -> None:
        """Start counting the calls of all threads that start from now on."""
        if self._trial.all_threads:
            threading.setprofile(self._count)

    def arm(self) -> None:
        self._is_armed = True
        sys.setprofile(self._count)

    def disarm(self) -> None:
        sys.setprofile(None)
        self._is_armed = False

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self._is_armed:
            return
        if frame.f_code.co_filename.startswith(_PACKAGE) and next(self._counted) == self._trial.at:
            self.strike()
