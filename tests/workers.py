"""Processes that act as ranks, and the messages that control them.

Knows pipes, deadlines and how to join a process group; does not know pytest's collection, nor
objcomm, except what it may leave behind and how long it waits for the store.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from objcomm._failures.noticeboard import BoardThread
from tests import leftovers
from tests.forked import EXIT_UNKNOWN, FORKED
from tests.waits import PATIENCE_S

# Variables that launchers set; a worker has only those that its test asks for.
_LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
    "MASTER_PORT", "TORCHELASTIC_RUN_ID",
)  # fmt: skip
_LAUNCHER_PREFIXES = ("OMPI_", "PMI_", "MPI_LOCAL", "SLURM_", "JSM_")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# One key per store: how often ranks were asked for their positions. One per rank: its process.
_STAYS = re.compile(r"objcomm/(asked|process/\d+)$")


@dataclass(frozen=True)
class Place:
    """A worker's position in its pool, and its environment.

    Attributes:
        folder: a folder that all workers of the pool share, and that is empty for each order: what
            one test wrote for its ranks must not reach the next.
        joined: whether the worker joined a process group before its first order.
        environment: variables to set.
    """

    rank: int
    world_size: int
    folder: Path
    joined: bool
    environment: Mapping[str, str]

    def store(self, name: str) -> dist.FileStore:
        """Return a store that all workers reach under ``name`` during one order."""
        # Without a number of workers: given one, a store deletes its file after that many objects
        # died.
        return dist.FileStore(str(self.folder / name))


@dataclass(frozen=True)
class Order:
    """A function to call: ``function`` of ``module``, or its ``body``.

    Attributes:
        is_last: whether the ranks end after it, so that what it leaves affects no other order.
    """

    module: str
    function: str
    arguments: Mapping[str, object]
    is_last: bool = False


@dataclass(frozen=True)
class Report:
    """An order's result on one rank: ``passed``, ``skipped``, ``failed``, ``died`` or ``hung``."""

    rank: int
    outcome: str
    text: str = ""


_place: Place | None = None


def here() -> Place:
    """Return the place of the worker that runs this."""
    if _place is None:
        raise RuntimeError("this runs in no worker")
    return _place


class Worker:
    """The parent's end of one process."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.orders, orders = FORKED.Pipe()
        self._stacks, stacks = FORKED.Pipe(duplex=False)
        self._log = place.folder / f"rank{place.rank}.log"
        self._process = FORKED.Process(
            target=_work, args=(place, orders, stacks, self._log), daemon=True
        )
        self._process.start()
        # With our copies closed, the death of a worker closes its pipe.
        orders.close()
        stacks.close()

    def report(self) -> Report:
        """Read the report that is ready, or report that the worker has died."""
        try:
            received = self.orders.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(PATIENCE_S)
            text = f"exit code {self._process.exitcode}\n{self._written(wait_s=0.0)}"
            return Report(self.place.rank, "died", text)
        if not isinstance(received, Report):
            raise TypeError(f"rank {self.place.rank} sent {received!r}")
        if received.outcome == "failed":
            return Report(received.rank, "failed", received.text + self._written(wait_s=0.0))
        return received

    def hung(self, why: str) -> Report:
        """Ask a worker that has not reported for its stacks."""
        # The process may end between the deadline and this point.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        return Report(self.place.rank, "hung", f"{why}\n{self._written()}")

    @property
    def pid(self) -> int:
        """Return the process id."""
        if self._process.pid is None:
            raise RuntimeError("the worker was not started")
        return self._process.pid

    def rest(self) -> None:
        """Stop the process between orders.

        Its open connections then cost nothing: the threads of idle Gloo connections wake 100 times
        a second, and took a third of the processor while the suite ran.
        """
        os.kill(self.pid, signal.SIGSTOP)

    def wake(self) -> None:
        """Let the process continue, if it still exists."""
        if self._process.exitcode is None:
            os.kill(self.pid, signal.SIGCONT)

    def end(self, *, kindly: bool) -> bool:
        """End the process, and return whether it ended when asked ``kindly``."""
        if kindly:
            with contextlib.suppress(BrokenPipeError):
                self.orders.send(None)
            self._process.join(PATIENCE_S)
        ended = self._process.exitcode in {0, EXIT_UNKNOWN}
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self.orders.close()
        self._stacks.close()
        return ended

    def _written(self, wait_s: float = PATIENCE_S) -> str:
        """Return what faulthandler wrote to its pipe, and the end of the worker's output."""
        stacks = b""
        while self._stacks.poll(0.5 if stacks else wait_s):
            chunk = os.read(self._stacks.fileno(), 65536)
            if not chunk:
                break
            stacks += chunk
        return stacks.decode(errors="replace") + self._log.read_text(errors="replace")[-4000:]


class Pool:
    """The ranks of one world, ready for orders."""

    def __init__(
        self,
        world_size: int,
        *,
        joined: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="objcomm-ranks-"))
        self._workers = [
            Worker(Place(rank, world_size, self._folder, joined, environment or {}))
            for rank in range(world_size)
        ]
        self.ruined = False

    def run(self, order: Order, deadline: float) -> list[Report]:
        """Send an order to every rank and return the reports, in rank order."""
        for worker in self._workers:
            worker.wake()
            worker.orders.send(order)
        waiting: dict[object, Worker] = {worker.orders: worker for worker in self._workers}
        reports: list[Report] = []
        expires = time.monotonic() + deadline
        while waiting:
            left = max(0.0, expires - time.monotonic())
            ready = connection.wait([worker.orders for worker in waiting.values()], left)
            arrived = [waiting.pop(pipe).report() for pipe in ready]
            if not ready:
                why = (
                    "another rank failed, this one waits" if self.ruined else "missed the deadline"
                )
                arrived = [worker.hung(why) for worker in waiting.values()]
                waiting.clear()
            reports += arrived
            if any(report.outcome not in {"passed", "skipped"} for report in arrived):
                self.ruined = True  # the others may wait for that rank
                expires = min(expires, time.monotonic() + PATIENCE_S)
        if not self.ruined:
            for worker in self._workers:
                worker.rest()
        return sorted(reports, key=lambda report: report.rank)

    def close(self) -> list[int]:
        """End all workers; return the ranks that had to be killed."""
        kindly = not self.ruined
        for worker in self._workers:
            worker.wake()
        stubborn = [w.place.rank for w in self._workers if not w.end(kindly=kindly) and kindly]
        shutil.rmtree(self._folder)
        return stubborn


def _work(place: Place, orders: Connection, stacks: Connection, log: Path) -> None:
    global _place  # noqa: PLW0603  # the worker's only global state
    _place = place
    for name in list(os.environ):
        if name in _LAUNCHER_VARIABLES or name.startswith(_LAUNCHER_PREFIXES):
            del os.environ[name]
    os.environ.update(place.environment)
    with log.open("wb") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    faulthandler.enable(stacks.fileno())
    # A stopped worker can't see that its pipe has closed: it ends with the fork server, which ends
    # with pytest.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A shell starts its background jobs with SIGINT ignored, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1, stacks.fileno(), all_threads=True)
    torch.set_num_threads(1)
    # On a busy machine it may take half a second until the store has a rank's error, and by then
    # the others would raise a different one. ``hastily`` restores the default.
    BoardThread.call.__defaults__ = (PATIENCE_S,)
    gc.freeze()  # torch's own objects: tests that collect garbage would scan them each time
    if place.joined:
        join(place, "rendezvous")
    for number, order in enumerate(iter(orders.recv, None)):
        _place = replace(place, folder=place.folder / f"order{number}")
        _place.folder.mkdir(exist_ok=True)
        if leftovers.VARIABLE in os.environ and place.joined and not order.is_last:
            report = _carry_out_and_look(order, _place)
        else:
            _destroy_subgroups()
            report = _carry_out(order, place.rank)
        orders.send(report)
    if dist.is_initialized():
        dist.destroy_process_group()
    # multiprocessing ends a process without its exit handlers. A thread that is cut off while it
    # writes to the file of a FileStore leaves half a record, which torch 2.13 reads without end.
    for thread in threading.enumerate():
        if thread.name == "objcomm-board":
            thread.join(10)  # it looks three times a second whether its world is gone


def join(place: Place, store: str) -> None:
    """Initialize torch.distributed over Gloo; all workers of the pool meet in ``store``.

    Returns once all are connected. Gloo lets the first worker return earlier, and if a test then
    ends it immediately, the others could not connect.
    """
    dist.init_process_group(
        "gloo", store=place.store(store), rank=place.rank, world_size=place.world_size
    )
    joined = place.store(f"{store} joined")
    turn, place_in_turn = divmod(joined.add("joined", 1) - 1, place.world_size)
    if place_in_turn == place.world_size - 1:
        joined.set(f"all {turn}", "")
    joined.wait([f"all {turn}"])


def _destroy_subgroups() -> None:
    """Destroy what the last order left; no rank uses it any more.

    A Gloo connection's threads wake 100 times a second: those of 50 groups in each of ten workers
    take half of a small machine.
    """
    if dist.is_initialized():
        for group in set(c10d._world.pg_map) - {dist.group.WORLD}:  # noqa: SLF001  # no public way
            dist.destroy_process_group(group)


def _carry_out(order: Order, rank: int) -> Report:
    try:
        function = getattr(importlib.import_module(order.module), order.function)
        getattr(function, "body", function)(**order.arguments)
    except pytest.skip.Exception as skipped:
        return Report(rank, "skipped", str(skipped))
    except BaseException:  # noqa: BLE001  # any exception of a test is its report
        return Report(rank, "failed", traceback.format_exc())
    finally:
        sys.stdout.flush()
    return Report(rank, "passed")


def _carry_out_and_look(order: Order, place: Place) -> Report:
    """Run an order in a new world, and fail if it leaves anything behind."""
    if dist.is_initialized():
        dist.destroy_process_group()
    orders = [("second", order)]
    if not leftovers.profile_once.cache_info().currsize:
        # Objects that exist once per process, such as the watchdog's thread, appear with the first
        # group; a barrier in a world of one creates none.
        leftovers.profile_once()
        orders.insert(0, ("first", Order("objcomm", "split", {"color": 0})))
    for name, wanted in orders:
        before = leftovers.Leftovers()
        join(place, f"{name} world")
        report = _carry_out(wanted, place.rank)
        if report.outcome != "passed":
            return report
        store = place.store(f"{name} world")
        _meet(store, "carried out", place.world_size)  # others may use these groups until then
        if dist.is_initialized():
            dist.destroy_process_group()
        found = before.find()
    _meet(store, "destroyed", place.world_size)
    keys = [key for key in store.list_keys() if "objcomm" in key and not _STAYS.search(key)]
    found += [f"key: {key}" for key in keys]
    if found:
        return Report(place.rank, "failed", "\n".join(["this was left:", *found]))
    return report


def _meet(store: dist.Store, what: str, count: int) -> None:
    store.add(what, 1)
    while store.add(what, 0) < count:
        time.sleep(0.01)
