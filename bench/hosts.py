"""Between hosts: ``python -m bench.hosts [--mbit 200 1000] [--json FILE]``, with or without root.

Network namespaces with rate-limited interfaces represent hosts, so the figures show how well a call
uses a slow network, but say nothing about a real one. Prints a Markdown table.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from bench import machine
from bench.case import SECONDS
from bench.measure import Ruler, alternate
from bench.payloads import MIB
from bench.peers import PEERS, Peer
from tests.hosts import Hosts

_PEERS = ("objcomm", "torch", "raw")
_SAMPLES = 5
_MORE_SAMPLES = 31  # of a call that takes less than 10 ms
_TIMEOUT = timedelta(seconds=120)
_LIMIT_S = 600.0
_COUNTERS = Path("/proc/self/net/dev")  # of this process's network namespace
_RECEIVED = 0  # the first column
_LAYOUTS = ((2, 1), (2, 2), (4, 1))  # hosts, ranks on each


class _Case(NamedTuple):
    """One call.

    Attributes:
        name: the name of the call.
        nbytes: the size of each rank's array.
        bind: creates the call for one peer.
        carried: returns how many arrays the busiest card must carry in one direction at least,
            for a number of hosts and of ranks on each.
    """

    name: str
    nbytes: int
    bind: Callable[[Peer, Any], Callable[[], object]]
    carried: Callable[[int, int], float]


def _broadcast(peer: Peer, own: Any) -> Callable[[], object]:
    return lambda: peer.broadcast(own)


def _gather(peer: Peer, own: Any) -> Callable[[], object]:
    return lambda: peer.gather(own)


def _all_gather(peer: Peer, own: Any) -> Callable[[], object]:
    return lambda: peer.all_gather(own)


def _there_and_back(peer: Peer, own: Any) -> Callable[[], object]:
    """Make a round trip between ranks 0 and 1, which may share a host; the others do nothing."""
    return lambda: peer.there_and_back(own) if dist.get_rank() < _PAIR else None


def _broadcast_file(peer: Peer, own: Any) -> Callable[[], object]:
    """Copy a file into each host's memory, which no disk slows down."""
    path: Path = own
    return lambda: peer.broadcast_file(path, Path("/dev/shm", path.name))  # noqa: S108  # each host has its own


def _all_reduce(peer: Peer, own: Any) -> Callable[[], object]:
    return lambda: peer.sum_tensors(own)


_PAIR = 2
_KB = 1000
_CASES = (
    _Case("broadcast", 16 * MIB, _broadcast, lambda *_: 1),
    _Case("gather", 4 * MIB, _gather, lambda hosts, each: (hosts - 1) * each),
    _Case("all_gather", 4 * MIB, _all_gather, lambda hosts, each: (hosts - 1) * each),
    _Case("all_reduce", 8 * MIB, _all_reduce, lambda hosts, _: 2 * (hosts - 1) / hosts),
    _Case("broadcast_file", 64 * MIB, _broadcast_file, lambda *_: 1),
    *(
        _Case(name, nbytes, call, lambda *_: 1)
        for nbytes in (100 * _KB, MIB)
        for name, call in (("broadcast", _broadcast), ("there and back", _there_and_back))
    ),
)


def main(arguments: list[str]) -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.hosts", description=__doc__)
    parser.add_argument("--mbit", type=float, nargs="+", default=[200.0, 1000.0])
    parser.add_argument("--json", type=Path, help="write the figures here, one line per call")
    options = parser.parse_args(arguments)
    rows = []
    print(f"{machine.about(mpi=False)}\n\n{_HEAD}")
    for mbit in options.mbit:
        for count, each in _LAYOUTS:
            for row in _measured(count, each, mbit):
                rows.append(row)
                print(_line(row), flush=True)
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


_HEAD = """\
| call | kB | hosts × ranks | Mbit/s | objcomm, ms | × torch | × raw | of the rate | bytes |
|---|---|---|---|---|---|---|---|---|"""


def _line(row: dict[str, Any]) -> str:
    ours, least = row["seconds"]["objcomm"], row["carried"] * row["nbytes"]
    ratios = [f"{ours / row['seconds'][peer]:.2f}" for peer in _PEERS[1:]]
    share = least * 8 / (row["mbit"] * 1e6) / ours
    crossed = " / ".join(f"{row['received'][peer] / least:.2f}" for peer in _PEERS)
    cells = [row["call"], row["nbytes"] // _KB, f"{row['hosts']} × {row['each']}"]
    cells += [f"{row['mbit']:g}", f"{ours * 1e3:.3g}", *ratios, f"{share:.0%}", crossed]
    return f"| {' | '.join(map(str, cells))} |"


def _measured(count: int, each: int, mbit: float) -> Iterator[dict[str, Any]]:
    """Run all ranks, and yield the rows that rank 0 wrote."""
    with ExitStack() as made:
        folder = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="objcomm-bench-")))
        hosts = made.enter_context(Hosts(count, mbit=mbit))
        ranks = [
            hosts[rank // each].popen(
                [sys.executable, "-m", "bench.hosts", "--rank", str(folder)],
                {"RANK": str(rank), "WORLD_SIZE": str(count * each), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(count * each)
        ]
        for process in ranks:
            if process.wait(_LIMIT_S):
                raise subprocess.CalledProcessError(process.returncode, process.args)
        for line, case in zip((folder / "rows").read_text().splitlines(), _CASES, strict=True):
            yield (
                json.loads(line)
                | {"hosts": count, "each": each, "mbit": mbit}
                | {"carried": case.carried(count, each)}
            )


def be_a_rank(folder: Path) -> None:
    """Join the other ranks, measure all cases, and write the rows on rank 0."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=size, timeout=_TIMEOUT
    )
    ruler = Ruler()
    peers = {name: PEERS[name]() for name in _PEERS}
    for case in _CASES:
        mine: Any = np.full(case.nbytes // 8, rank, dtype=np.int64)
        if case.bind is _all_reduce:
            mine = {"weights": torch.full((case.nbytes // 4,), float(rank))}
        if case.bind is _broadcast_file:
            path = folder / "file"
            if rank == 0:
                mine.tofile(path)
            ruler.start_together()
            calls = {each: case.bind(peer, path) for each, peer in peers.items()}
        else:
            calls = {each: case.bind(peer, peer.prepare(mine)) for each, peer in peers.items()}
        received = {each: _received_by(call, ruler) for each, call in calls.items()}
        samples = _SAMPLES if case.nbytes > MIB else _MORE_SAMPLES
        times = alternate(calls, samples, 0, ruler)
        row = {
            "call": case.name,
            "nbytes": case.nbytes,
            "seconds": {each: found[SECONDS].median for each, found in times.items()},
            "received": received,
        }
        if rank == 0:
            with (folder / "rows").open("a") as rows:
                rows.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


def _received_by(call: Callable[[], object], ruler: Ruler) -> float:
    """Return the bytes that the busiest card received in a call, after one that connects all."""
    call()
    ruler.start_together()
    before = _received()
    call()
    ruler.start_together()
    return max(figure for (figure,) in ruler.of_all_ranks([_received() - before]))


def _received() -> float:
    (card,) = (line for line in _COUNTERS.read_text().splitlines() if "eth0:" in line)
    return float(card.partition(":")[2].split()[_RECEIVED])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_a_rank(Path(sys.argv[2]))
    else:
        main(sys.argv[1:])
