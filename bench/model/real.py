"""Run the same operations on real ranks on this machine, and count their messages and time.

The ranks are forked from this process. For layouts with several hosts, the ranks are told that they
are on different hosts and use TCP between them; the network is the loopback device.
"""

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import objcomm
from bench.fork import run_forked
from bench.measure import turns
from bench.memory import sockets
from bench.model.meeting import CountingStore, bare_stores, meet
from objcomm._transport import rendezvous
from objcomm._transport.gloo import GlooLink
from objcomm._transport.streams import StreamLink
from objcomm._wire.header import HEADER_NBYTES

_TIMEOUT = timedelta(minutes=5)
#: The object that every rank sends; the rows and the model use its encoded size.
OBJECT = {"rank": "any", "correct": 1797, "loss": 0.25, "split": "test", "notes": "x" * 150}

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Counted:
    """One operation on real ranks, after the first call.

    Attributes:
        peer: ``"objcomm"`` or ``"torch"``.
        operation: its name.
        size: number of ranks.
        per_host: number of ranks per host.
        nbytes: the encoded size of each rank's object.
        seconds: time of the slowest rank per call, with several calls in a row; the median.
        processor_seconds: processor time of a rank per call; the mean over all ranks.
        messages: messages that the busiest rank sent and received; 0 for torch, where they are not
            counted.
        sent_nbytes: bytes sent by all ranks together; likewise.
        connections: the most ranks with which any rank exchanged messages; likewise.
        sockets: sockets that rank 0 opened in its first call; likewise.
        is_as_modelled: whether each rank sent exactly the messages that it sends in the model.
    """

    peer: str
    operation: str
    size: int
    per_host: int
    nbytes: int
    seconds: float
    processor_seconds: float
    messages: int = 0
    sent_nbytes: int = 0
    connections: int = 0
    sockets: int = 0
    is_as_modelled: bool = False


@dataclass(frozen=True, slots=True)
class Met:
    """A meeting of all ranks in a store, before they connect.

    Attributes:
        size: number of ranks.
        per_host: number of ranks per host.
        is_real: False in the model.
        seconds: time until the last rank had met the others.
        first_asked: requests of rank 0.
        others_asked: the most requests of any other rank.
        all_asked: requests of all ranks together.
    """

    size: int
    per_host: int
    is_real: bool
    seconds: float
    first_asked: int
    others_asked: int
    all_asked: int

    @classmethod
    def of(cls, asked: list[int], per_host: int, seconds: float, *, is_real: bool) -> "Met":
        """Summarize the number of requests of each rank."""
        first, *others = asked
        return cls(len(asked), per_host, is_real, seconds, first, max(others), sum(asked))


#: For each rank, its messages in order: destination and size in bytes.
Sends = list[list[tuple[int, int]]]


def count(
    size: int, per_host: int, operations: list[str], folder: Path, *, samples: int, in_a_row: int
) -> tuple[list[Counted], Met, dict[str, Sends]]:
    """Run operations on new ranks. Call this before this process has threads.

    Args:
        size: number of ranks.
        per_host: number of ranks on each host.
        operations: names of operations, including ``"gather"``.
        folder: a folder for the files of the ranks.
        samples: samples of each time; 0 for none.
        in_a_row: calls in a sample.

    Returns:
        The counts, a meeting of the ranks, and all messages of each of objcomm's operations.
    """
    file = folder / "counted.json"

    def body(rank: int, store: dist.Store) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
        dist.barrier()
        host = f"host{rank // per_host}"
        with mock.patch.object(rendezvous, "machine", return_value=host):
            before = sockets()
            objcomm.barrier()
            more_sockets = sockets() - before
        met = _meeting(rank, size, per_host, store)
        sends = {each: _counted(_objcomm_calls(size)[each], size) for each in operations}
        nbytes = sends["gather"][-1][0][1] - HEADER_NBYTES  # the last rank forwards nothing
        rows = []
        for operation in operations:
            calls = {"objcomm": _objcomm_calls(size)[operation]}
            if theirs := _torch_calls(rank, size).get(operation):
                calls["torch"] = theirs
            for peer, times in _timed(calls, size, samples, in_a_row).items():
                row = asdict(Counted(peer, operation, size, per_host, nbytes, *times))
                if peer == "objcomm":
                    row |= _figures(sends[operation]) | {"sockets": more_sockets}
                rows.append(row)
        dist.barrier()
        objcomm.shutdown()
        if rank == 0:
            file.write_text(json.dumps([rows, asdict(met), sends]))

    run_forked(size, body, _TIMEOUT)
    found, met, by_operation = json.loads(file.read_text())
    sends = {
        operation: [[(peer, nbytes) for peer, nbytes in each] for each in by_rank]
        for operation, by_rank in by_operation.items()
    }
    return [Counted(**row) for row in found], Met(**met), sends


def _meeting(rank: int, size: int, per_host: int, store: dist.Store) -> Met:
    """Make all ranks meet once more, and count the requests."""
    counting = CountingStore(dist.PrefixStore("counted", store))
    dist.barrier()
    began = time.perf_counter()
    with bare_stores():
        meet(counting, rank, size)
    everyone = _of_all_ranks((counting.asked, time.perf_counter() - began), size)
    asked, seconds = zip(*everyone, strict=True)
    return Met.of(list(asked), per_host, max(seconds), is_real=True)


def _counted(call: Call, size: int) -> Sends:
    """Return the messages that all ranks send in a call after the first."""
    call()
    dist.barrier()
    with _watched_links() as sent:
        call()
    return _of_all_ranks(sent, size)


def _objcomm_calls(size: int) -> dict[str, Call]:
    return {
        "barrier": objcomm.barrier,
        "broadcast": lambda: objcomm.broadcast(OBJECT),
        "gather": lambda: objcomm.gather(OBJECT),
        "scatter": lambda: objcomm.scatter([OBJECT] * size if objcomm.rank() == 0 else None),
        "all_gather": lambda: objcomm.all_gather(OBJECT),
        "all_to_all": lambda: objcomm.all_to_all([OBJECT] * size),
        "reduce": lambda: objcomm.reduce(OBJECT, _first),
        "all_reduce": lambda: objcomm.all_reduce(OBJECT, _first),
    }


def _first(left: Any, _right: Any) -> Any:
    """Combine two objects into one of the same length."""
    return left


def _torch_calls(rank: int, size: int) -> dict[str, Call]:
    return {
        "barrier": dist.barrier,
        "broadcast": lambda: dist.broadcast_object_list([None if rank else OBJECT]),
        "gather": lambda: dist.gather_object(OBJECT, None if rank else [None] * size),
        "all_gather": lambda: dist.all_gather_object([None] * size, OBJECT),
    }


@contextlib.contextmanager
def _watched_links() -> Iterator[list[tuple[int, int]]]:
    """Record destination and size of each message that this rank sends."""
    sent: list[tuple[int, int]] = []
    with contextlib.ExitStack() as patched:
        for kind in (StreamLink, GlooLink):
            watched = _noting(kind.send, sent)
            patched.enter_context(mock.patch.object(kind, "send", watched))
        yield sent


def _noting(original: Callable[..., Any], sent: list[tuple[int, int]]) -> Callable[..., Any]:
    def send(link: Any, flat: Any, peer: int, tag: int) -> Any:
        nbytes = sum(map(len, flat)) if isinstance(flat, list) else len(flat)
        sent.append((peer, nbytes))
        return original(link, flat, peer, tag)

    return send


def _of_all_ranks(mine: Any, size: int) -> list[Any]:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mine)
    return everyone


def _timed(
    calls: dict[str, Call], size: int, samples: int, in_a_row: int
) -> dict[str, tuple[float, float]]:
    """Return, by peer, the seconds of the slowest rank and the processor seconds, per call."""
    taken: dict[str, list[tuple[float, float]]] = {peer: [] for peer in calls}
    for peer in [*calls, *turns(list(calls), samples)]:  # each peer's first sample is not counted
        dist.barrier()
        began, ran = time.perf_counter(), time.process_time()
        for _ in range(in_a_row):
            calls[peer]()
        dist.barrier()  # in some calls only the root waits for the others
        mine = (time.perf_counter() - began, time.process_time() - ran)
        seconds, busy = zip(*_of_all_ranks(mine, size), strict=True)
        taken[peer].append((max(seconds) / in_a_row, statistics.fmean(busy) / in_a_row))
    medians = {}
    for peer, several in taken.items():
        slowest, spent = zip(*(several[1:] or [(0.0, 0.0)]), strict=True)
        medians[peer] = (statistics.median(slowest), statistics.median(spent))
    return medians


def _figures(sends: Sends) -> dict[str, int]:
    """Summarize all messages, for the busiest rank and in total."""
    messages = [len(each) for each in sends]
    peers: list[set[int]] = [{peer for peer, _ in each} for each in sends]
    for rank, each in enumerate(sends):
        for peer, _ in each:
            messages[peer] += 1
            peers[peer].add(rank)
    return {
        "messages": max(messages),
        "sent_nbytes": sum(nbytes for each in sends for _, nbytes in each),
        "connections": max(map(len, peers)),
    }
