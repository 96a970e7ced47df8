"""Measure how long a call takes on its slowest rank, with alternating peers.

Peers alternate sample by sample, so if the machine slows down, all of them do. A barrier on a group
that no peer uses precedes each sample, which is one call or several in a row. Sleeping until an
agreed time was tried instead; with more ranks than cores, ranks then start no closer together.
"""

import functools
import gc
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from bench.case import PROCESSOR_SECONDS, PROCESSOR_SHARE, SECONDS

Call = Callable[[], object]

_STAMP = struct.Struct("<q")  # nanoseconds of the clock that all processes of a host share


class Summary(NamedTuple):
    """The statistics of many samples that a report shows."""

    n: int
    median: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True)
class Beside:
    """A call that is measured while an asynchronous operation is outstanding.

    Attributes:
        begin: starts that operation, unmeasured, and returns a function that waits for its result.
        call: the measured call.
    """

    begin: Callable[[], Call]
    call: Call

    def __call__(self) -> object:
        """Run both; return the result of the asynchronous operation."""
        wait = self.begin()
        self.call()
        return wait()


@dataclass(frozen=True, slots=True)
class Steps:
    """A call by which rank 0 distributes work, measured until the last rank has it.

    Attributes:
        call: the measured call.
        rounds: number of rounds in one sample. In each round, rank 0 starts when every rank has
            answered in the previous round, and makes the case's ``in_a_row`` calls.
        pause: seconds that rank 0 sleeps before each round, while the others wait for it.
    """

    call: Call
    rounds: int
    pause: float = 0.0

    def __call__(self) -> object:
        """Make the call once, to compare results."""
        return self.call()


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
    """Return the median and the tenth and ninetieth percentile of one or more samples."""
    if len(samples) == 1:
        return Summary(1, samples[0], samples[0], samples[0])
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return Summary(len(samples), statistics.median(samples), deciles[0], deciles[-1])


def slowest(durations_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return, for each sample, the longest duration of any rank."""
    return [max(sample) for sample in zip(*durations_by_rank, strict=True)]


def turns(peers: Sequence[str], rounds: int) -> list[str]:
    """Return the order of measurement: every peer once per round, each round starting one later.

    So no peer always follows the same one and its side effects (dirty caches, freed memory).
    """
    return [peers[(first + k) % len(peers)] for first in range(rounds) for k in range(len(peers))]


class Ruler:
    """Starts the ranks together and compares their figures, on a group that no peer uses."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._world = dist.get_world_size()

    def start_together(self) -> None:
        """Return when every rank has called this."""
        dist.barrier(group=self._group)

    def of_all_ranks(self, figures: Sequence[float]) -> list[list[float]]:
        """Gather every rank's figures on every rank; all pass the same number of figures."""
        mine = torch.tensor(figures, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self._world)]
        dist.all_gather(everyone, mine, group=self._group)
        return [figures.tolist() for figures in everyone]

    @functools.cached_property
    def answers(self) -> "Answers":
        """The pipe for answers to rank 0; every rank must access it, all on one host."""
        with tempfile.TemporaryDirectory(prefix="objcomm-bench-") as folder:
            box = [folder]
            dist.broadcast_object_list(box, src=0, group=self._group)
            answers = Answers(Path(box[0], "answers"), self.start_together)
            self.start_together()  # all have opened it; now it may be removed
        return answers


class Answers:
    """A pipe on which every other rank tells rank 0 when it received the object.

    Rank 0 sleeps until all have answered, so that it uses no processor time meanwhile.
    """

    def __init__(self, path: Path, start_together: Callable[[], None]) -> None:
        self._others = dist.get_world_size() - 1
        self.is_asked = dist.get_rank() == 0
        if self.is_asked:
            os.mkfifo(path)
        start_together()
        self._pipe = os.open(path, os.O_RDWR if self.is_asked else os.O_WRONLY)

    def give(self) -> None:
        """Answer with the current time."""
        os.write(self._pipe, _STAMP.pack(time.monotonic_ns()))

    def last(self) -> int:
        """Wait for the answers of all other ranks, and return the latest."""
        told = b""
        while missing := self._others * _STAMP.size - len(told):
            told += os.read(self._pipe, missing)
        stamps: list[int] = [stamp for (stamp,) in _STAMP.iter_unpack(told)]
        return max(stamps)


def alternate(
    calls: Mapping[str, Call], samples: int, warm_up: int, ruler: Ruler, in_a_row: int = 1
) -> dict[str, dict[str, Summary]]:
    """Measure all calls, alternating between peers.

    Every rank must call this with the same names, in the same order.

    Args:
        calls: the operation of each peer; its result is freed outside the measured time.
        samples: measured samples per peer.
        warm_up: earlier samples per peer that are not counted.
        ruler: starts the ranks together.
        in_a_row: calls in one sample.

    Returns:
        For each peer, the seconds of the slowest rank per call; with several calls in a row, also
        the processor seconds of the busiest rank. For ``Steps``, the seconds until the last rank
        has the object, and the processor seconds of all ranks per second. The same on every rank.
    """
    taken: dict[str, dict[str, list[float]]] = {peer: {} for peer in calls}
    gc.collect()
    gc.freeze()  # existing objects are not scanned before each sample
    gc.disable()
    try:
        for at, peer in enumerate(turns(list(calls), warm_up + samples)):
            gc.collect()
            ruler.start_together()
            figures = _sample(calls[peer], in_a_row, ruler)
            if at >= warm_up * len(calls):
                for metric, values in figures.items():
                    taken[peer].setdefault(metric, []).extend(values)
    finally:
        gc.enable()
        gc.unfreeze()
    return {
        peer: {
            metric: summarise(slowest(ruler.of_all_ranks(values)))
            for metric, values in by_metric.items()
        }
        for peer, by_metric in taken.items()
    }


def _sample(call: Call, in_a_row: int, ruler: Ruler) -> dict[str, list[float]]:
    """Take one sample; return this rank's figures."""
    if isinstance(call, Steps):
        return _steps(call, in_a_row, ruler)
    if in_a_row == 1:
        return {SECONDS: [_one_call(call)]}
    seconds, busy = _several_calls(call, in_a_row)
    return {SECONDS: [seconds], PROCESSOR_SECONDS: [busy]}


def _steps(steps: Steps, in_a_row: int, ruler: Ruler) -> dict[str, list[float]]:
    """Return each round's seconds per call, known to rank 0 only, and all ranks' processor share.

    The seconds are 0 on the other ranks.
    """
    answers = ruler.answers

    def one_round(calls: int) -> float:
        if steps.pause and answers.is_asked:
            time.sleep(steps.pause)
        started = time.monotonic_ns()
        for _ in range(calls):
            steps.call()
        if answers.is_asked:
            return (answers.last() - started) / 1e9 / calls
        answers.give()
        return 0.0

    one_round(1)  # ranks may leave the preceding barrier at very different times
    began, busy = time.monotonic_ns(), time.process_time()
    taken = [one_round(in_a_row) for _ in range(steps.rounds)]
    seconds, busy = (time.monotonic_ns() - began) / 1e9, time.process_time() - busy
    everyone = ruler.of_all_ranks([busy / seconds])
    return {SECONDS: taken, PROCESSOR_SHARE: [sum(share for (share,) in everyone)]}


def _several_calls(call: Call, count: int) -> tuple[float, float]:
    """Return the seconds and the processor seconds per call."""
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
