"""Measure how much memory one call uses beyond what the process used before.

Each measure runs in separate processes, after one call on a small object has established all
connections, and returns this rank's figures by name. Linux only: it reads ``/proc/self``.
"""

import contextlib
import ctypes
import gc
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

import objcomm
from bench.payloads import same

_PR_SET_THP_DISABLE = 41  # <linux/prctl.h>
_RESET_PEAK = "5"  # proc(5), /proc/pid/clear_refs
#: Smaller messages are headers and metadata, not the object's memory.
_BULK_FROM_NBYTES = 64 << 10
_WIRE_CALLS = (
    *("send", "recv", "recv_anysource", "broadcast", "gather", "scatter"),
    *("allgather", "alltoall", "alltoall_base", "reduce", "allreduce"),
)


class Measure(Protocol):
    """Runs the call once and returns this rank's figures."""

    def __call__(self, call: Callable[[], object], mine: Any) -> dict[str, float]:
        """``mine`` is this rank's payload: the object that it sends or expects to receive."""


def peak(call: Callable[[], object], mine: Any) -> dict[str, float]:
    """Return the peak resident memory during the call, minus the resident memory before it."""
    del mine
    gc.collect()
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = _status_nbytes("VmRSS")
    result = call()
    extra = _status_nbytes("VmHWM") - before
    del result
    return {"peak_nbytes": float(max(0, extra))}


def copies(call: Callable[[], object], mine: Any) -> dict[str, float]:
    """Return the new memory touched during the call, and the bytes moved from or to elsewhere.

    New memory is counted in page faults, with huge pages disabled for the process, so an allocation
    counts even if it was freed again. ``elsewhere`` counts bulk memory passed to Gloo that is
    neither in this rank's payload nor in its result, such as a staging buffer, even one that is
    reused. If no bulk memory was passed to Gloo, everything counts as elsewhere.
    """
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    with _watched_wire() as seen:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        result = call()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    known = [_span(mine), _span(result)]
    elsewhere = sum(end - start for start, end in seen if not _inside((start, end), known))
    return {
        "fresh_nbytes": float(faults * resource.getpagesize()),
        "elsewhere_nbytes": float(elsewhere if seen else mine.nbytes),
    }


def gained(call: Callable[[], object], mine: Any) -> dict[str, float]:
    """Return the memory that this rank has gained when all ranks have the result and have read it.

    Memory shared by several processes is divided among them, so the sum over all ranks is what the
    host has lost.
    """
    del mine
    gc.collect()
    before = _pss_nbytes()
    dist.barrier()
    result: Any = call()
    result.sum()
    dist.barrier()
    extra = _pss_nbytes() - before
    dist.barrier()
    return {"gained_nbytes": float(extra)}


def sent(call: Callable[[], object], mine: Any) -> dict[str, float]:
    """Return the bytes sent by this rank according to objcomm, and whether the result is wrong."""
    before = _sent_nbytes()
    result = call()
    return {"sent_nbytes": _sent_nbytes() - before, "mistakes": float(not same(result, mine))}


def exact(call: Callable[[], object], mine: Any) -> dict[str, float]:
    """Return 1 mistake if the result differs from the payload, else 0."""
    return {"mistakes": float(not same(call(), mine))}


def sockets() -> int:
    """Return how many sockets this process has."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the folder itself
            count += str(descriptor.readlink()).startswith("socket:")
    return count


MEASURES: dict[str, Measure] = {
    "peak": peak,
    "copies": copies,
    "gained": gained,
    "sent": sent,
    "exact": exact,
}


def _status_nbytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        label, _, amount = line.partition(":")
        if label == name:
            return int(amount.split()[0]) * 1024
    raise LookupError(f"/proc/self/status has no {name}")


def _pss_nbytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise LookupError("/proc/self/smaps_rollup has no Pss")


def _sent_nbytes() -> float:
    return float(sum(operation.sent_nbytes for operation in objcomm.stats().values()))


def _span(array: Any) -> tuple[int, int]:
    return np.lib.array_utils.byte_bounds(array)


def _inside(inner: tuple[int, int], spans: list[tuple[int, int]]) -> bool:
    return any(start <= inner[0] and inner[1] <= end for start, end in spans)


@contextlib.contextmanager
def _watched_wire() -> Iterator[list[tuple[int, int]]]:
    """Record the addresses of all bulk tensors passed to any Gloo group, in either direction."""
    seen: list[tuple[int, int]] = []
    originals = {name: getattr(dist.ProcessGroupGloo, name) for name in _WIRE_CALLS}
    for name, original in originals.items():
        setattr(dist.ProcessGroupGloo, name, _noting(original, seen))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroupGloo, name, original)


def _noting(original: Callable[..., Any], seen: list[tuple[int, int]]) -> Callable[..., Any]:
    def noted(*args: Any, **named: Any) -> Any:
        seen.extend(
            (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
            for tensor in _tensors_in([*args, *named.values()])
            if tensor.nbytes >= _BULK_FROM_NBYTES
        )
        return original(*args, **named)

    return noted


def _tensors_in(values: list[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(list(value))
