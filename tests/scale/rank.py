"""One rank of ``tests.scale``; it writes its results to a folder that all hosts share."""

import contextlib
import functools
import os
import pickle
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import objcomm

#: Timeout of the call in which one rank is stopped; all others must enter it within this time.
STOPPED_LIMIT_S = 10.0
#: Timeout of all other calls, which none should need.
_LIMIT_S = 900.0
_PAUSE_S = 0.02
_SIZES = (10, 40_000, 1_200_000)


class Heard(NamedTuple):
    """What one rank noticed of a fault.

    Attributes:
        kind: the error's class; empty if there was none.
        ranks: the ranks that the error names.
        text: the error's text.
        seconds: since the fault, or since the call if there is no such moment.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    seconds: float


class Seen(NamedTuple):
    """The results of one rank.

    Attributes:
        first_seconds: duration of ``init`` and the first barrier.
        wrong: the operations that returned a wrong result.
        more: the sockets, open files, threads and private bytes of memory since objcomm's first
            call.
        heard: what it noticed of each fault.
    """

    first_seconds: float
    wrong: tuple[str, ...]
    more: dict[str, int]
    heard: dict[str, Heard]


def faulty(size: int) -> dict[str, int]:
    """Return which rank is at fault in each fault."""
    return {"other call": 37 % size, "stopped": (size // 2) + 1, "killed": size - 3}


def join(left: bytes, right: bytes) -> bytes:
    """Concatenate: an operator that is associative but not commutative."""
    return left + right


def wrong_operations(rank: int, size: int) -> list[str]:
    """Run every operation with little and with much data; list those with a wrong result."""
    found: dict[str, bool] = {}
    roots = sorted({0, 1, 37 % size, size - 1})
    letter = bytes([rank % 251])
    for nbytes in _SIZES:
        each = [bytes([peer % 251]) * nbytes for peer in range(size)]
        mine = each[rank]
        for root in roots:
            about = f"of {nbytes} bytes, root {root}"
            found[f"broadcast {about}"] = objcomm.broadcast(mine, src=root) == each[root]
            if nbytes < _SIZES[-1]:
                gathered = objcomm.gather(mine, dst=root)
                found[f"gather {about}"] = gathered == (each if rank == root else None)
                chunks = each if rank == root else None
                found[f"scatter {about}"] = objcomm.scatter(chunks, src=root) == mine
                joined = objcomm.reduce(letter, join, dst=root)
                wanted = bytes(peer % 251 for peer in range(size))
                found[f"reduce {about}"] = joined == (wanted if rank == root else None)
    small = _SIZES[0]
    found["all_gather"] = objcomm.all_gather((rank, letter * small)) == [
        (peer, bytes([peer % 251]) * small) for peer in range(size)
    ]
    much = objcomm.all_gather(torch.full((10_000,), rank))
    found["all_gather of tensors"] = all(
        torch.equal(one, torch.full((10_000,), at)) for at, one in enumerate(much)
    )
    found["all_reduce"] = objcomm.all_reduce(letter, join) == bytes(i % 251 for i in range(size))
    total: dict[str, Any] = objcomm.all_reduce({"w": torch.full((20_000,), float(rank)), "n": rank})
    wanted_sum = size * (size - 1) // 2
    found["all_reduce of tensors"] = torch.equal(
        total["w"], torch.full((20_000,), float(wanted_sum))
    )
    found["all_reduce of numbers"] = total["n"] == wanted_sum
    found["all_to_all"] = objcomm.all_to_all([(rank, peer) for peer in range(size)]) == [
        (peer, rank) for peer in range(size)
    ]
    found["scan"] = objcomm.scan(letter, join) == bytes(i % 251 for i in range(rank + 1))
    found["agree"] = objcomm.agree(rank < size)
    objcomm.barrier("done")
    return [name for name, is_right in found.items() if not is_right]


def heard_in(call: Callable[[], object], since: Callable[[], float]) -> Heard:
    """Return what a call raises, and how long after a moment that is known only afterwards."""
    try:
        call()
    except objcomm.ObjcommError as error:
        ended = time.monotonic()
        ranks = getattr(error, "missing", ()) or getattr(error, "peers", ())
        if isinstance(error, objcomm.DesyncError):
            ranks = tuple(error.positions)
        return Heard(type(error).__name__, tuple(ranks), str(error), ended - since())
    return Heard("", (), "", time.monotonic() - since())


def held() -> dict[str, int]:
    """Count what this process holds of the system."""
    names = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing
            names.append(str(each.readlink()))
    memory = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return {
        "sockets": sum(name.startswith("socket:") for name in names),
        "descriptors": len(names),
        "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
        "private_nbytes": sum(
            int(each.split()[1]) << 10 for each in memory if each.startswith("Private_Dirty")
        ),
    }


class _Place:
    """A channel between ranks besides objcomm, which a fault of one of them breaks."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder, self.rank, self.size = folder, rank, size

    def come(self, point: str) -> None:
        """Wait until all ranks have got here."""
        (self.folder / f"{point}.{self.rank}").touch()
        while sum(1 for _ in self.folder.glob(f"{point}.*")) < self.size:
            time.sleep(_PAUSE_S)

    def mark(self, name: str) -> None:
        """Write the current time."""
        partial = self.folder / f"partial {name}"
        partial.write_text(repr(time.monotonic()), encoding="ascii")
        partial.replace(self.folder / name)

    def time_of(self, name: str) -> float:
        """Wait for the time to be written, and return it."""
        while not (self.folder / name).exists():
            time.sleep(_PAUSE_S)
        return float((self.folder / name).read_text(encoding="ascii"))


def faults(place: _Place) -> dict[str, Heard]:
    """Cause each fault; return what this rank noticed of each."""
    at_fault, heard = faulty(place.size), {}
    is_it = {name: place.rank == rank for name, rank in at_fault.items()}
    began = time.monotonic()

    def call() -> None:
        if is_it["other call"]:  # as a sender it need not wait in it
            objcomm.gather(0, timeout=_LIMIT_S)
        objcomm.barrier(timeout=_LIMIT_S)

    heard["other call"] = heard_in(call, lambda: began)
    objcomm.barrier(timeout=_LIMIT_S)  # all ranks survive it

    group = objcomm.dup(timeout=_LIMIT_S)
    objcomm.barrier(group=group)
    place.come("stopping")
    began = time.monotonic()
    if is_it["stopped"]:
        # It resumes once all others have noticed.
        wait = f'while [ "$(ls "{place.folder}" | grep -c "^stopped.")" -lt {place.size - 1} ]'
        script = f"{wait}; do sleep .1; done; kill -CONT {os.getpid()}"
        goes_on = subprocess.Popen(["/bin/sh", "-c", script])
        os.kill(os.getpid(), signal.SIGSTOP)
        goes_on.wait()
    limit = STOPPED_LIMIT_S
    in_it = functools.partial(objcomm.barrier, group=group, timeout=limit)
    heard["stopped"] = heard_in(in_it, lambda: began)
    place.come("stopped")
    objcomm.barrier(timeout=_LIMIT_S)  # another group is not affected

    if is_it["killed"]:
        place.come("killing")
        place.mark("killed at")
        os.kill(os.getpid(), signal.SIGKILL)
    (place.folder / f"killing.{place.rank}").touch()
    last = functools.partial(objcomm.barrier, timeout=_LIMIT_S)
    heard["killed"] = heard_in(last, lambda: place.time_of("killed at"))
    return heard


def _store(host: str, port: int, *, is_host: bool) -> dist.TCPStore:
    """Create a store that looks up no client's name: torch's default does, and may take 5 s."""
    if not is_host:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    with socket.create_server((host, port)) as listening:
        listener = listening.detach()
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener
        )


def run(folder: Path, rank: int, size: int) -> None:
    """Run one rank from start to end."""
    torch.set_num_threads(1)
    store = _store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_host=rank == 0)
    limit = timedelta(seconds=_LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    dist.barrier()
    before = held()
    began = time.monotonic()
    objcomm.init()
    objcomm.barrier(timeout=_LIMIT_S)
    first_seconds = time.monotonic() - began
    wrong = wrong_operations(rank, size)
    more = {name: count - before[name] for name, count in held().items()}
    heard = faults(_Place(folder, rank, size))
    seen = Seen(first_seconds, tuple(wrong), more, heard)
    partial = folder / f"partial seen {rank}"
    partial.write_bytes(pickle.dumps(seen))
    partial.replace(folder / f"seen.{rank}")
    if rank == 0:  # it hosts the store
        while sum(1 for _ in folder.glob("seen.*")) < size - 1:
            time.sleep(_PAUSE_S)
