"""The command line: ``python -m bench OPERATION --world N [--json FILE]``.

``OPERATION`` is one of the declared operations, ``memory`` for all measurements other than time, or
``all`` for everything, at every world size. ``python -m bench report FILES… -o PAGE`` renders the
output of ``--json``.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench.suites  # noqa: F401  # declares the cases
from bench import machine, report
from bench.case import CASES, JUDGED_WORLD, MANY_RANKS, Case, chosen
from bench.launch import Plan, RanksFailedError, mpi_works, run_ranks
from bench.measure import Record, summarise, turns
from bench.peers import PEERS, needs_mpi
from bench.results import Results
from bench.startup import import_seconds

_WORLDS = (1, 2, 4, 8, *MANY_RANKS)


def main(arguments: list[str]) -> int:
    """Run one command and return its exit status: 1 if some ranks failed."""
    if arguments[:1] == ["report"]:
        return report.main(arguments[1:])
    options = _options(arguments)
    peers = tuple(name for name in options.peers if mpi_works() or not needs_mpi(name))
    rows: list[dict[str, Any]] = [{"about": machine.about(mpi=any(map(needs_mpi, peers)))}]
    failures: list[RanksFailedError] = []
    for job in _jobs(options, peers):
        try:
            for record in job:
                rows.append(dataclasses.asdict(record))
                print(report.one_line(record), flush=True)
        except RanksFailedError as error:
            failures.append(error)
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print("\n".join(report.judgements(Results.of(rows))))
    for failure in failures:
        print(failure, file=sys.stderr)
    return int(bool(failures))


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    operations = list(dict.fromkeys(case.operation for case in CASES))
    parser.add_argument("operation", choices=[*operations, "memory", "all"])
    parser.add_argument(
        "--world", type=int, choices=_WORLDS, help="how many ranks; 4, or with `all` every number"
    )
    parser.add_argument("--json", type=Path, help="write the figures here, one per line")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument(
        "--smoke", action="store_true", help="small payloads, few samples: does it run at all?"
    )
    return parser.parse_args(arguments)


def _jobs(options: argparse.Namespace, peers: tuple[str, ...]) -> Iterator[Iterator[Record]]:
    """Yield the measurements in parts, each of which may fail on its own."""
    by_default = _WORLDS if options.operation == "all" else (JUDGED_WORLD,)
    for world in [options.world] if options.world else by_default:
        if timed := list(chosen(options.operation, world, timed=True)):
            taking_part = tuple(name for name in peers if any(name in case.peers for case in timed))
            mpi = any(map(needs_mpi, taking_part))
            yield _timed(Plan(options.operation, world, taking_part, mpi, options.smoke))
        for case in chosen(options.operation, world, timed=False):
            if case.measure == "import":
                yield _startup(case, smoke=options.smoke)
                continue
            for payload in case.payloads:
                of_case = [name for name in case.peers if name in peers]
                yield _in_own_processes(case, payload, of_case, world, smoke=options.smoke)


def _timed(plan: Plan) -> Iterator[Record]:
    for row in run_ranks(plan):
        yield Record(**row)


def _startup(case: Case, *, smoke: bool) -> Iterator[Record]:
    for peer, seconds in import_seconds(1 if smoke else case.samples).items():
        summary = summarise(seconds)
        yield Record(
            case.operation, case.payloads[0], 1, peer, "import_seconds", *summary, smoke=smoke
        )


def _in_own_processes(
    case: Case, payload: str, peers: list[str], world: int, *, smoke: bool
) -> Iterator[Record]:
    figures: dict[tuple[str, str], list[float]] = {}
    for peer in turns(peers, 1 if smoke else case.samples):
        single = (CASES.index(case), payload, peer)
        (row,) = run_ranks(Plan(case.operation, world, (peer,), needs_mpi(peer), smoke, single))
        for metric, figure in row.items():
            figures.setdefault((peer, metric), []).append(figure)
    for (peer, metric), samples in figures.items():
        summary = summarise(samples)
        yield Record(case.operation, payload, world, peer, metric, *summary, smoke=smoke)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
