"""The command line: ``python -m bench.model --json FILE`` counts, measures and models.

``python -m bench.model report FILE -o PAGE`` renders the output of ``--json``. ``python -m
bench.model check --ranks N --per-host N`` only compares the model with the messages of real ranks.
"""

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

from bench import machine
from bench.model import page, real
from bench.model.fit import fitted
from bench.model.link import Costs
from bench.model.meeting import meet_in_model
from bench.model.operations import OPERATIONS, run
from bench.model.real import Met
from bench.model.results import Modelled, Results
from bench.model.torch_operations import TORCH_OPERATIONS, run_torch
from bench.model.world import Machine, World

_LAYOUTS = ((8, 8), (16, 16), (64, 64), (64, 8))  # of real runs: ranks, and ranks per host
_SAMPLES = 8
_IN_A_ROW = 8
_SIZES = (8, 64, 512, 4096)
_PER_HOST = 8
# In these, every rank reads a header from every rank: millions of headers in Python.
_LARGEST = {"all_gather": 512, "all_to_all": 512}
# In a ring, each rank takes as many steps as there are ranks.
_LARGEST_OF_TORCH = {"gather": 512, "all_gather": 512}
_FREE = Costs(0.0, 0.0, 0.0, 0.0)
# Assumed: Unix sockets within a host, and TCP over a network of 25 Gbit/s between hosts.
_NETWORK = Machine(cores=0, near_seconds=10e-6, near_rate=4e9, far_seconds=30e-6, far_rate=25e9 / 8)
_STORE_SECONDS = 10e-6  # per request, also assumed
_RUNS = {"objcomm": run, "torch": run_torch}


def main(arguments: list[str]) -> int:
    """Run one command; return 1 if the model and real ranks send different messages."""
    if arguments[:1] == ["report"]:
        return page.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m bench.model", description=__doc__)
    if arguments[:1] == ["check"]:
        parser.add_argument("--ranks", type=int, required=True)
        parser.add_argument("--per-host", type=int, required=True)
        options = parser.parse_args(arguments[1:])
        found = _counted(options.ranks, options.per_host, samples=0)
    else:
        parser.add_argument("--json", type=Path, required=True, help="write the figures here")
        options = parser.parse_args(arguments)
        load = f"{os.getloadavg()[0]:.1f}"
        # Ranks are forked, so no thread of the model may be alive before the last real run.
        real_runs = [_counted(*layout, samples=_SAMPLES) for layout in _LAYOUTS]
        about = machine.about(mpi=False) | {"load": load}
        found = Results(about, real_runs[0].object_nbytes, _NETWORK)
        found.store_seconds = _STORE_SECONDS
        found.counted = [each for several in real_runs for each in several.counted]
        found.met = [met for several in real_runs for met in several.met]
        _model(found)
        found.write(options.json)
    ours = [each for each in found.counted if each.peer == "objcomm"]
    different = [
        f"{each.operation} of {each.size} ranks" for each in ours if not each.is_as_modelled
    ]
    print(f"{len(ours) - len(different)} of {len(ours)} send what the model sends", *different)
    return int(bool(different))


def _counted(size: int, per_host: int, *, samples: int) -> Results:
    """Run real ranks, and compare their messages with the model's."""
    found = Results()
    with tempfile.TemporaryDirectory() as folder:
        rows, met, sends = real.count(
            size, per_host, list(OPERATIONS), Path(folder), samples=samples, in_a_row=_IN_A_ROW
        )
    found.object_nbytes = rows[0].nbytes
    found.met.append(met)
    for row in rows:
        is_as_modelled = row.peer == "objcomm" and sends[row.operation] == (
            run(row.operation, _hosts(size, per_host), row.nbytes, _NETWORK, _FREE).sends
        )
        found.counted.append(dataclasses.replace(row, is_as_modelled=is_as_modelled))
        print(found.counted[-1], flush=True)
    return found


def _model(found: Results) -> None:
    """Run the model, with the costs of messages fitted to the real runs."""
    for peer, run_it in _RUNS.items():
        taken = [
            (
                each.processor_seconds,
                run_it(
                    each.operation, _hosts(each.size, each.per_host), each.nbytes, _NETWORK, _FREE
                ),
            )
            for each in found.counted
            if each.peer == peer
        ]
        found.fits[peer] = fitted(taken)
        here = dataclasses.replace(_NETWORK, cores=os.cpu_count() or 1)
        for size, per_host in ((size, each) for size, each in _LAYOUTS if size == each):
            for operation in TORCH_OPERATIONS if peer == "torch" else OPERATIONS:
                _add(found, peer, operation, size, per_host, here)
        largest = _LARGEST_OF_TORCH if peer == "torch" else _LARGEST
        for operation in TORCH_OPERATIONS if peer == "torch" else OPERATIONS:
            for size in _SIZES:
                if size <= largest.get(operation, size):
                    _add(found, peer, operation, size, _PER_HOST, _NETWORK)

    for size in _SIZES:
        world = World(_hosts(size, _PER_HOST), _NETWORK)
        meet_in_model(world, _STORE_SECONDS)
        seconds = max(world.clocks)
        found.met.append(Met.of(world.asked, _PER_HOST, seconds, is_real=False))
        print(found.met[-1], flush=True)


def _add(  # noqa: PLR0917  # each has a different type
    found: Results, peer: str, operation: str, size: int, per_host: int, told: Machine
) -> None:
    outcome = _RUNS[peer](
        operation, _hosts(size, per_host), found.object_nbytes, told, found.fits[peer].costs
    )
    found.modelled.append(Modelled.of(outcome, peer, operation, size, per_host, told.cores))
    print(found.modelled[-1], flush=True)


def _hosts(size: int, per_host: int) -> list[int]:
    return [rank // per_host for rank in range(size)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
