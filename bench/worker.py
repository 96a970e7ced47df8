"""One rank: join the others, measure what the plan says, and write the rows on rank 0.

``bench.launch`` runs this as ``python -m bench.worker PLAN``; do not run it by hand. With many
ranks, this process forks them.
"""

import dataclasses
import faulthandler
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import bench.suites  # noqa: F401  # declares the cases
from bench import measure
from bench.case import CASES, FIRST_CALL, SECONDS, Case, chosen
from bench.fork import run_forked
from bench.launch import DEADLINE_SECONDS, RANK_VARIABLE, ROWS, Plan
from bench.payloads import PAYLOADS, same
from bench.peers import PEERS, Peer

_SMOKE_SHRINK = 64
_SMOKE_SAMPLES = 3
_SMOKE_PAYLOADS = 2  # at most, of each case
_TIMEOUT = timedelta(seconds=120)
_LAST_WORDS_SECONDS = 10  # how long before the deadline a rank that hangs prints its stack


def main(plan_file: Path) -> None:
    """Run the rank or ranks that the plan assigns to this process."""
    fields = json.loads(plan_file.read_text())
    single = fields.pop("single")
    plan = Plan(**fields, single=tuple(single) if single else None)
    rows = plan_file.with_name(ROWS)
    if plan.is_forked:
        run_forked(plan.world, functools.partial(_be_a_rank, plan, rows), _TIMEOUT)
    else:
        _be_a_rank(plan, rows, int(os.environ.get(RANK_VARIABLE, "0")))


def _be_a_rank(plan: Plan, rows_file: Path, rank: int, store: dist.Store | None = None) -> None:
    """Join, measure, write, leave."""
    faulthandler.dump_traceback_later(DEADLINE_SECONDS - _LAST_WORDS_SECONDS)
    _join(plan, rows_file.with_name("rendezvous"), rank, store)
    ruler = measure.Ruler()
    with rows_file.open("a", buffering=1) as rows:
        for row in _in_own_processes(plan, ruler) if plan.single else _timed(plan, ruler):
            if dist.get_rank() == 0:
                rows.write(json.dumps(row) + "\n")
    dist.destroy_process_group()
    if plan.mpi:
        from mpi4py import MPI  # noqa: PLC0415  # as in ``_join``

        # Ranks wait for each other in this call. Otherwise it would run after the interpreter has
        # finalized, and a thread that returns from C++ after that aborts the process.
        MPI.Finalize()


def _join(plan: Plan, meeting: Path, rank: int, store: dist.Store | None) -> None:
    # Undoes pinning: some MPI launchers pin each rank, with its Gloo threads, to one core.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch.set_num_threads(1)
    if plan.mpi:
        from mpi4py import MPI  # noqa: PLC0415  # starts MPI

        rank = MPI.COMM_WORLD.rank
    dist.init_process_group(
        "gloo",
        init_method=None if store else f"file://{meeting}",
        store=store,
        rank=rank,
        world_size=plan.world,
        timeout=_TIMEOUT,
    )


def _timed(plan: Plan, ruler: measure.Ruler) -> Iterator[dict[str, Any]]:
    peers = {name: PEERS[name]() for name in plan.peers}
    for case in chosen(plan.operation, plan.world, timed=True):
        for payload in case.payloads[:_SMOKE_PAYLOADS] if plan.smoke else case.payloads:
            present = {name: peers[name] for name in case.peers if name in peers}
            for record in _time_case(case, payload, present, plan, ruler):
                yield dataclasses.asdict(record)


def _time_case(
    case: Case, payload: str, peers: dict[str, Peer], plan: Plan, ruler: measure.Ruler
) -> list[measure.Record]:
    mine = PAYLOADS[payload](dist.get_rank(), _shrink(plan))
    calls = {name: case.bind(peer, peer.prepare(mine)) for name, peer in peers.items()}
    _check_agreement(calls, peers)
    samples = _SMOKE_SAMPLES if plan.smoke else case.samples
    summaries = measure.alternate(
        calls, samples, warm_up=1 + samples // 10, ruler=ruler, in_a_row=case.in_a_row
    )
    return [
        measure.Record(
            case.operation, payload, plan.world, name, metric, *summary, smoke=plan.smoke
        )
        for name, by_metric in summaries.items()
        for metric, summary in by_metric.items()
    ]


def _check_agreement(calls: dict[str, Callable[[], object]], peers: dict[str, Peer]) -> None:
    """Call every peer once, and check that all peers that send objects return the same result."""
    expected: list[Any] = []
    for name, call in calls.items():
        result = call()
        if not peers[name].sends_objects:
            continue
        if expected and not same(result, expected[0]):
            raise RuntimeError(f"{name} gave another result than the peers before it")
        expected = expected or [result]


def _in_own_processes(plan: Plan, ruler: measure.Ruler) -> Iterator[dict[str, float]]:
    from bench.memory import MEASURES, sockets  # noqa: PLC0415  # Linux only

    if plan.single is None:
        raise ValueError("the plan names no single case")
    position, payload, name = plan.single
    case, peer = CASES[position], PEERS[name]()
    if case.measure == FIRST_CALL:
        call = case.bind(peer, None)
        ruler.start_together()
        before, began = sockets(), time.perf_counter()
        call()
        seconds, more = time.perf_counter() - began, sockets() - before
        first, *others = everyone = ruler.of_all_ranks([seconds, more])
        yield {
            SECONDS: max(rank[0] for rank in everyone),
            "root sockets": first[1],
            "others sockets": max(rank[1] for rank in others),
        }
        return
    small = PAYLOADS["small dict"](peer.rank, 1)
    case.bind(peer, peer.prepare(small))()  # for connections, imports and permanent allocations
    mine = PAYLOADS[payload](peer.rank, _shrink(plan))
    call = case.bind(peer, peer.prepare(mine))
    ruler.start_together()
    figures = MEASURES[case.measure](call, mine)
    everyone = ruler.of_all_ranks(list(figures.values()))
    yield (
        {f"root {metric}": everyone[0][at] for at, metric in enumerate(figures)}
        | {
            f"others {metric}": max(rank[at] for rank in everyone[1:])
            for at, metric in enumerate(figures)
        }
        | {
            f"host {metric}": sum(rank[at] for rank in everyone)
            for at, metric in enumerate(figures)
            if case.measure == "gained"
        }
    )


def _shrink(plan: Plan) -> int:
    return _SMOKE_SHRINK if plan.smoke else 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
