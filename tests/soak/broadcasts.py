"""Many small broadcasts, one after the other, on one rank."""

import statistics
import time
from pathlib import Path

import objcomm
from tests.soak import measure
from tests.soak.run import join, write
from tests.workers import here

WINDOWS = 10


def broadcasts(*, count: int, port: int, record: str) -> None:
    """Broadcast on each worker, and record figures after each tenth.

    Args:
        count: number of broadcasts.
        port: the port of the store.
        record: the folder for the figures.
    """
    measure.steady_allocator()
    measure.no_idle_threads()
    place, store = here(), join(port)
    mine = Path(record) / f"rank{place.rank}.jsonl"
    began = time.monotonic()
    for window in range(WINDOWS):
        took = []
        for at in range(window * count // WINDOWS, (window + 1) * count // WINDOWS):
            src = at % place.world_size
            started = time.perf_counter()
            got = objcomm.broadcast({"step": at} if place.rank == src else None, src=src)
            took.append(time.perf_counter() - started)
            assert got == {"step": at}
        objcomm.barrier()
        seconds = round(time.monotonic() - began, 1)
        done = (window + 1) * count // WINDOWS
        held = measure.held()
        microseconds = round(statistics.median(took) * 1e6, 1)
        keys = measure.keys_in(store, place.world_size)
        write(mine, measure.Figures(seconds, done, 0, 0, *held, keys, microseconds))
        objcomm.barrier()
