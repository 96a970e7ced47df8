"""Objects mostly handed over between ranks of one host, and calls that carry them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import objcomm
from tests.workers import here

MIB = 1 << 20


def table(owner: int) -> dict[str, Any]:
    """An object with members of every kind, all handed over but one that is too small."""
    return {
        "tensor": torch.full((500_000,), float(owner)),
        "strided": torch.arange(600_000).view(2, -1).t() + owner,
        "array": np.arange(300_000.0) + owner,
        "bytes": bytes([owner]) * (2 * MIB),
        "bytearray": bytearray([owner]) * (2 * MIB),
        "small": torch.full((50_000,), owner),
        "name": f"of rank {owner}",
    }


def tables(count: int, first: int = 0) -> list[Any]:
    return [table(first + each) for each in range(count)]


def at_root(obj: Any) -> Any:
    return obj if here().rank == 0 else None


CALLS: dict[str, Callable[[int, int], tuple[Any, Any]]] = {
    # The result of a call on this rank, and the expected one.
    "broadcast": lambda _, size: (objcomm.broadcast(table(9), src=size - 1), table(9)),
    "scatter": lambda rank, size: (objcomm.scatter(at_root(tables(size))), table(rank)),
    "gather": lambda rank, size: (objcomm.gather(table(rank)), at_root(tables(size))),
    "all_gather": lambda rank, size: (objcomm.all_gather(table(rank)), tables(size)),
    "all_to_all": lambda rank, size: (objcomm.all_to_all(tables(size, rank)), tables(size, rank)),
    "sendrecv": lambda rank, size: (
        objcomm.sendrecv(table(rank), (rank + 1) % size, (rank - 1) % size),
        table((rank - 1) % size),
    ),
}


def pss_nbytes() -> int:
    """This process's memory, counting a fraction of shared pages.

    Without the pages of files: of torch's it counts more whenever another process ends.
    """
    text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    found = re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB", text, re.MULTILINE)
    if not found:  # an older kernel only reports the sum
        found = re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    assert found
    return sum(map(int, found)) << 10
