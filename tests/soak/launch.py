"""Start the ranks of a soak from one process, and judge the figures that they recorded."""

import contextlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from objcomm._transport.store import loopback_store
from tests.soak import measure
from tests.soak.measure import MEBIBYTE, Figures
from tests.workers import Order, Pool, Report

# For starting the ranks, completing a round, and settling.
_SPARE_SECONDS = 60.0

#: The criteria, by the name of the figure.
JUDGED = ("resident_nbytes", "blocks", "threads", "descriptors", "keys")


class Outcome(NamedTuple):
    """The result of a run.

    Attributes:
        failures: reports of ranks that did not pass.
        figures: per rank, in order of time.
    """

    failures: list[Report]
    figures: list[list[Figures]]


def run_on_ranks(
    world_size: int,
    function: str,
    arguments: Mapping[str, object],
    *,
    seconds: float,
    watch: Callable[[list[list[Figures]]], None] = lambda _: None,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Call a function of this package on every rank; this process hosts the store.

    Args:
        world_size: number of ranks.
        function: what to call, as ``module.function`` of this package; besides its own arguments it
            gets ``port``, the store's port, and ``record``, the folder for its figures.
        arguments: the function's own arguments.
        seconds: its expected duration; the deadline is later.
        watch: called with the figures so far, about every second.
        environment: variables to set for the ranks.
    """
    # The master's own socket must outlive the ranks.
    store = loopback_store()
    module, _, name = function.partition(".")
    pool = Pool(world_size, joined=False, environment=environment)
    with tempfile.TemporaryDirectory(prefix="objcomm-soak-") as folder, _watching(folder, watch):
        placed = {"port": store.port, "record": folder, **arguments}
        try:
            order = Order(f"{__package__}.{module}", name, placed)
            reports = pool.run(order, seconds + _SPARE_SECONDS)
        finally:
            pool.close()
        figures = list(figures_in(Path(folder)))
    return Outcome([report for report in reports if report.outcome != "passed"], figures)


def figures_in(folder: Path) -> Iterator[list[Figures]]:
    """Yield the figures that each rank has written so far."""
    for record in sorted(folder.glob("rank*.jsonl")):
        # The last line may be incomplete.
        whole = record.read_text().rpartition("\n")[0]
        yield [Figures(**json.loads(line)) for line in whole.splitlines()]


@contextlib.contextmanager
def _watching(folder: str, watch: Callable[[list[list[Figures]]], None]) -> Iterator[None]:
    """Let a thread watch the figures as they are written."""
    over = threading.Event()

    def look() -> None:
        watch(list(figures_in(Path(folder))))

    def look_until_over() -> None:
        while not over.wait(1.0):
            look()

    thread = threading.Thread(target=look_until_over, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()


def complaints(name: str, figures: list[list[Figures]], warm_up: int) -> list[str]:
    """List what grew on any rank.

    Args:
        name: one of ``JUDGED``.
        figures: per rank.
        warm_up: number of each rank's first figures to ignore.
    """
    found = []
    for rank, of_rank in enumerate(figures):
        counted = of_rank[warm_up:]
        values = [getattr(each, name) for each in counted]
        if name in _LIMITS:
            grew = measure.trend(values)
            limit = _LIMITS[name](counted[-1].groups - counted[0].groups)
        else:
            grew, limit = max(values) - min(values), 0
        if grew > limit:
            found.append(f"{name} of rank {rank} grew by {grew:.0f}, {limit} allowed: {values}")
    return found


#: How much the medians of the first and the last third may differ, by the number of groups that
#: were created and destroyed. Keys may not differ at all. A rank keeps up to two idle connections
#: to the store, and may have none at the start. One left by each group would be some sixty.
_LIMITS: dict[str, Callable[[int], int]] = {
    "resident_nbytes": lambda _: 4 * MEBIBYTE,
    # torch 2.13 itself keeps 2.2 objects for each group that it created and destroyed.
    "blocks": lambda groups: 500 + 3 * groups,
    "threads": lambda _: 1,  # 0 in 72 samples beside four busy loops, without idle threads
    "descriptors": lambda _: 2,
}
