"""Time: how long a call takes its slowest rank, with all peers tried in turn.

Peers alternate sample by sample, so a machine that slows down slows all of them. A barrier on a
group that no peer uses precedes each sample, which is one call or some in a row. Letting the
ranks sleep to one agreed instant instead was tried: with more ranks than cores they then start no
closer together.
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
class Steps:
    """A call by which rank 0 hands out work, measured until the last rank has it.

    Attributes:
        call: what is measured.
        rounds: how many one sample has. In each, rank 0 begins once every rank has answered in the
            round before, and calls as often as the case says in ``in_a_row``.
        pause: seconds that rank 0 sleeps before each round, while the others wait for it.
    """

    call: Call
    rounds: int
    pause: float = 0.0

    def __call__(self) -> object:
        """The call itself, by which results are compared."""
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

    @functools.cached_property
    def answers(self) -> "Answers":
        """What the ranks tell rank 0 with; every rank must ask for it, on one host."""
        with tempfile.TemporaryDirectory(prefix="objcomm-bench-") as folder:
            box = [folder]
            dist.broadcast_object_list(box, src=0, group=self._group)
            answers = Answers(Path(box[0], "answers"), self.start_together)
            self.start_together()  # all have opened it before it is removed
        return answers


class Answers:
    """A pipe on which every other rank tells rank 0 when it had what it waited for.

    Rank 0 sleeps until they have told it, so that it takes no processor from them meanwhile.
    """

    def __init__(self, path: Path, start_together: Callable[[], None]) -> None:
        self._others = dist.get_world_size() - 1
        self.is_asked = dist.get_rank() == 0
        if self.is_asked:
            os.mkfifo(path)
        start_together()
        self._pipe = os.open(path, os.O_RDWR if self.is_asked else os.O_WRONLY)

    def give(self) -> None:
        """Say that it is now."""
        os.write(self._pipe, _STAMP.pack(time.monotonic_ns()))

    def last(self) -> int:
        """The latest of all other ranks' answers, once they are there."""
        told = b""
        while missing := self._others * _STAMP.size - len(told):
            told += os.read(self._pipe, missing)
        stamps: list[int] = [stamp for (stamp,) in _STAMP.iter_unpack(told)]
        return max(stamps)


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
        those of the processor that the busiest rank has had. Of ``Steps`` the seconds until the
        last rank has the object, and the processor seconds of all ranks in each second. The same
        on every rank.
    """
    taken: dict[str, dict[str, list[float]]] = {peer: {} for peer in calls}
    gc.collect()
    gc.freeze()  # what lives now is not searched before each sample
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
    """This rank's figures of one sample."""
    if isinstance(call, Steps):
        return _steps(call, in_a_row, ruler)
    if in_a_row == 1:
        return {SECONDS: [_one_call(call)]}
    seconds, busy = _several_calls(call, in_a_row)
    return {SECONDS: [seconds], PROCESSOR_SECONDS: [busy]}


def _steps(steps: Steps, in_a_row: int, ruler: Ruler) -> dict[str, list[float]]:
    """Each round's seconds for a call, which rank 0 alone knows, and all ranks' processor share."""
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

    one_round(1)  # the ranks come from a barrier, some much earlier than others
    began, busy = time.monotonic_ns(), time.process_time()
    taken = [one_round(in_a_row) for _ in range(steps.rounds)]
    seconds, busy = (time.monotonic_ns() - began) / 1e9, time.process_time() - busy
    everyone = ruler.of_all_ranks([busy / seconds])
    return {SECONDS: taken, PROCESSOR_SHARE: [sum(share for (share,) in everyone)]}


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
