"""Short jobs that end as real jobs do: some traffic, perhaps an error, and the interpreter's exit.

``python -m tests.faults.exiting FOLDER TURNS [EVENT...]`` runs each kind, or those given, ``TURNS``
times and prints those that did not end silently. Its ranks are forked after the import of torch,
which takes longest, and before anything else; each exits at the end of this program, as a program's
own process does.
"""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

import objcomm
from objcomm._failures import mesh
from objcomm._world import store_of
from tests.printed import without_gloo

#: With and without destroying the process group.
ENDINGS = ["destroyed", "abandoned"]

# In these, rank 0 makes a call that no other rank makes, and the others may report it at exit.
_UNMATCHED = {"work in flight", "large work in flight"}

_LIMIT_SECONDS = 300.0  # only a hang takes this long


def _traffic(rank: int) -> None:
    for turn in range(5):
        objcomm.all_gather((rank, turn))


def _large(rank: int) -> None:
    objcomm.gather(bytes([rank]) * 3_000_000)
    objcomm.broadcast(bytes(3_000_000))


def _desync(rank: int) -> None:
    try:
        objcomm.barrier(f"here is rank {min(rank, 1)}")
        objcomm.barrier()
    except objcomm.DesyncError:
        return
    raise AssertionError("every rank must raise")


def _timeout(rank: int) -> None:
    store = store_of(dist.group.WORLD)
    if rank > 0:
        store.wait(["nobody came"])
        return
    try:
        objcomm.all_gather(1, timeout=0.3)
    except objcomm.TransportTimeout:
        store.set("nobody came", "")
        return
    raise AssertionError("nobody came")


def _lane(rank: int) -> None:
    def gather() -> None:
        with objcomm.lane("side"):
            objcomm.all_gather(rank)

    thread = threading.Thread(target=gather)
    thread.start()
    objcomm.all_gather(rank)
    thread.join()


def _works(rank: int) -> None:
    works = [objcomm.all_gather((rank, turn), async_op=True) for turn in range(5)]
    for work in reversed(works):
        work.wait()


def _work_in_flight(rank: int) -> None:
    if rank == 0:
        _wait_shortly(objcomm.all_gather(1, async_op=True))


def _large_work_in_flight(rank: int) -> None:
    if rank == 0:
        _wait_shortly(objcomm.broadcast(bytes(30_000_000), async_op=True))
    time.sleep(0.2)  # part of it is transferred before they end


class _Slow:
    """An object that keeps the lane busy where it arrives, while no rank waits for another."""

    def __setstate__(self, state: object) -> None:
        time.sleep(0.5)

    def __getstate__(self) -> object:
        return {"any": 1}


def _works_behind_a_slow_one(rank: int) -> None:
    store = store_of(dist.group.WORLD)
    slow = objcomm.broadcast(_Slow(), src=1, async_op=True)
    work = objcomm.barrier(async_op=True) if rank == 0 else slow
    if rank == 1:
        slow.wait()
        store.set("sent", "")
        time.sleep(1.0)  # outlives the other ranks
    store.wait(["sent"])
    for each in (slow, work):
        _wait_shortly(each)


def _wait_shortly(work: objcomm.Work[object]) -> None:
    with contextlib.suppress(TimeoutError, objcomm.TransportError):  # if others have ended
        work.wait(0.05)


#: The last event of each job, by its name.
EVENTS = {
    "traffic": _traffic,
    "large": _large,
    "desync": _desync,
    "timeout": _timeout,
    "lane": _lane,
    "works": _works,
    "work in flight": _work_in_flight,
    "large work in flight": _large_work_in_flight,
    "works behind a slow one": _works_behind_a_slow_one,
}


def main(folder: Path, turns: int, events: Iterable[str] = EVENTS) -> None:
    """Run a job with each event ``turns`` times, alternating the ending.

    Returns in each of the ranks, too.
    """
    count = 0
    for turn, (number, event) in itertools.product(range(turns), enumerate(events)):
        ending = ENDINGS[(turn + number) % len(ENDINGS)]
        world_size = 2 + (turn + number) % 3
        store = folder / f"store{count}"
        logs = [folder / f"{count}.{rank}" for rank in range(world_size)]
        pids = []
        for rank in range(world_size):
            if (pid := os.fork()) == 0:
                _take_part(event, ending, store, rank, logs)
                return
            pids.append(pid)
        for rank, pid in enumerate(pids):
            code, printed = _exit_code(pid), without_gloo(logs[rank].read_text(errors="replace"))
            is_reported = event in _UNMATCHED and code == 120 and "DesyncError: " in printed
            if not is_reported and (code, printed) != (0, ""):
                print(event, ending, f"rank {rank} of {world_size}:", code, printed)  # noqa: T201  # its output
        count += 1
    print(count, "jobs ended")  # noqa: T201  # its output


def _take_part(event: str, ending: str, store: Path, rank: int, logs: Sequence[Path]) -> None:
    with logs[rank].open("wb") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    torch.set_num_threads(1)
    # Late ranks are not the subject of these jobs.
    patch.object(mesh, "_REPORT_SECONDS", _LIMIT_SECONDS).start()
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store)), rank=rank, world_size=len(logs)
    )
    objcomm.barrier()
    EVENTS[event](rank)
    if ending == "destroyed":
        dist.destroy_process_group()


def _exit_code(pid: int) -> int:
    until = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or EVENTS)
