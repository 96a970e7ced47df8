"""Time: how long a call takes its slowest rank, with all peers tried in turn.

Peers alternate sample by sample, so a machine that slows down slows all of them. A barrier on a
group that no peer uses precedes each sample, which is one call or some in a row. Letting the
ranks sleep to one agreed instant instead was tried: with more ranks than cores they then start no
closer together.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from bench.case import PROCESSOR_SECONDS, SECONDS

Call = Callable[[], object]


class Summary(NamedTuple):
    """What a report keeps of many samples."""

    n: int
    median: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True)
class Beside:
    """A call that is measured while something else is in flight.

    Attributes:
        begin: begins that, unmeasured, and returns what waits for its result.
        call: what is measured meanwhile.
    """

    begin: Callable[[], Call]
    call: Call

    def __call__(self) -> object:
        """All of it: what was in flight gives the result."""
        wait = self.begin()
        self.call()
        return wait()


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the JSON file: a figure of one peer in one case."""

    operation: str
    payload: str
    world: int
    peer: str
    metric: str
    n: int
    median: float
    p10: float
    p90: float
    smoke: bool = False


def summarise(samples: Sequence[float]) -> Summary:
    """Median and the tenth and ninetieth percentile of at least one sample."""
    if len(samples) == 1:
        return Summary(1, samples[0], samples[0], samples[0])
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return Summary(len(samples), statistics.median(samples), deciles[0], deciles[-1])


def slowest(durations_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Per sample, the longest duration of any rank."""
    return [max(sample) for sample in zip(*durations_by_rank, strict=True)]


def turns(peers: Sequence[str], rounds: int) -> list[str]:
    """Who is measured when: every peer once per round, each round begun by the next peer.

    Nobody always follows the same neighbour's leftovers (dirty caches, returned memory).
    """
    return [peers[(first + k) % len(peers)] for first in range(rounds) for k in range(len(peers))]


class Ruler:
    """Starts the ranks together and compares their figures, on a group that no peer uses."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._world = dist.get_world_size()

    def start_together(self) -> None:
        """Return when every rank has called."""
        dist.barrier(group=self._group)

    def of_all_ranks(self, figures: Sequence[float]) -> list[list[float]]:
        """Every rank's figures, on every rank; all give equally many."""
        mine = torch.tensor(figures, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self._world)]
        dist.all_gather(everyone, mine, group=self._group)
        return [figures.tolist() for figures in everyone]


def alternate(
    calls: Mapping[str, Call], samples: int, warm_up: int, ruler: Ruler, in_a_row: int = 1
) -> dict[str, dict[str, Summary]]:
    """Measure all calls in turn.

    Every rank must call this with the same names, in the same order.

    Args:
        calls: per peer, the operation; what it returns is freed outside the measured time.
        samples: measured samples per peer.
        warm_up: earlier samples per peer that are not counted.
        ruler: starts the ranks together.
        in_a_row: calls in one sample.

    Returns:
        Per peer, the seconds of the slowest rank per call, and where they are several in a row
        those of the processor that the busiest rank has had; the same on every rank.
    """
    taken: dict[str, dict[str, list[float]]] = {
        peer: {SECONDS: [], PROCESSOR_SECONDS: []} if in_a_row > 1 else {SECONDS: []}
        for peer in calls
    }
    gc.collect()
    gc.freeze()  # what lives now is not searched before each sample
    gc.disable()
    try:
        for peer in turns(list(calls), warm_up + samples):
            gc.collect()
            ruler.start_together()
            if in_a_row > 1:
                seconds, busy = _several_calls(calls[peer], in_a_row)
                taken[peer][PROCESSOR_SECONDS].append(busy)
            else:
                seconds = _one_call(calls[peer])
            taken[peer][SECONDS].append(seconds)
    finally:
        gc.enable()
        gc.unfreeze()
    return {
        peer: {
            metric: summarise(slowest(ruler.of_all_ranks(samples[warm_up:])))
            for metric, samples in by_metric.items()
        }
        for peer, by_metric in taken.items()
    }


def _several_calls(call: Call, count: int) -> tuple[float, float]:
    """The seconds of one of them, and those of the processor."""
    started, busy = time.perf_counter(), time.process_time()
    for _ in range(count):
        call()
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    return seconds / count, busy / count


def _one_call(call: Call) -> float:
    wait = call.begin() if isinstance(call, Beside) else None
    measured = call.call if isinstance(call, Beside) else call
    started = time.perf_counter()
    result = measured()
    seconds = time.perf_counter() - started
    if wait is not None:
        result = wait()
    del result
    return seconds
