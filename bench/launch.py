"""Start one rank per process, wait for all of them, and leave none behind.

If ``mpiexec`` and mpi4py work together, the ranks are MPI's, and torch.distributed joins the same
processes through a file, so that one run can measure all peers. Otherwise they are plain processes
without mpi4py. Many ranks are forked from one process; see ``bench.fork``.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.case import MANY_RANKS

ROWS = "rows.jsonl"  # beside the plan
RANK_VARIABLE = "OBJCOMM_BENCH_RANK"
DEADLINE_SECONDS = 900.0  # for one set of ranks
_POLL_SECONDS = 0.05
_GOODBYE_SECONDS = 5.0
_PROBE = "from mpi4py import MPI; assert MPI.COMM_WORLD.size == 2"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a set of ranks should measure.

    Attributes:
        operation: a name on the command line: one operation, ``"all"`` or ``"memory"``.
        world: number of ranks.
        peers: the peers to measure.
        mpi: whether ``mpiexec`` starts the ranks.
        smoke: whether to shrink large payloads and take few samples.
        single: for a measure in separate processes, the case's index in ``CASES``, the payload and
            the peer; None for all timed cases of the operation.
    """

    operation: str
    world: int
    peers: tuple[str, ...]
    mpi: bool
    smoke: bool
    single: tuple[int, str, str] | None = None

    @property
    def is_forked(self) -> bool:
        """Whether the ranks are forked from a single process."""
        return self.world in MANY_RANKS


class RanksFailedError(RuntimeError):
    """A rank failed or was too late; the others have been ended."""


def run_ranks(plan: Plan) -> Iterator[dict[str, Any]]:
    """Run the plan in new processes, and yield the rows that rank 0 writes as they arrive.

    Raises:
        RanksFailedError: a rank failed, or the deadline passed. Raised after the last row.
    """
    with tempfile.TemporaryDirectory() as scratch:
        plan_file = Path(scratch, "plan.json")
        plan_file.write_text(json.dumps(asdict(plan)))
        rows = Path(scratch, ROWS)
        rows.touch()
        processes = _start(plan, plan_file)
        try:
            with rows.open() as written:
                for failed in _watch(processes):
                    yield from map(json.loads, written)
                    if failed:
                        raise RanksFailedError(f"world {plan.world}: {failed}")
        finally:
            _end(processes)


@functools.cache
def mpi_works() -> bool:
    """Whether ``mpiexec`` starts ranks that mpi4py sees as one world."""
    if _mpiexec() is None:
        return False
    command = [str(_mpiexec()), "-n", "2", sys.executable, "-c", _PROBE]
    try:
        probe = subprocess.run(command, check=False, capture_output=True, timeout=60)  # noqa: S603
    except subprocess.TimeoutExpired:
        return False
    return probe.returncode == 0


def _mpiexec() -> str | None:
    # MPI from a wheel is beside the interpreter, even if no environment is activated.
    beside = str(Path(sys.executable).parent)
    return shutil.which("mpiexec", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


def _start(plan: Plan, plan_file: Path) -> list[subprocess.Popen[bytes]]:
    worker = [sys.executable, "-m", "bench.worker", str(plan_file)]
    # Like torchrun: one computing thread per rank, so that ranks do not compete for the cores.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if plan.mpi:
        command = [str(_mpiexec()), "-n", str(plan.world), *worker]
        return [subprocess.Popen(command, env=environment, start_new_session=True)]  # noqa: S603
    if plan.is_forked:
        return [subprocess.Popen(worker, env=environment, start_new_session=True)]  # noqa: S603
    return [
        subprocess.Popen(  # noqa: S603
            worker, env=environment | {RANK_VARIABLE: str(rank)}, start_new_session=True
        )
        for rank in range(plan.world)
    ]


def _watch(processes: list[subprocess.Popen[bytes]]) -> Iterator[str]:
    """Yield repeatedly while the ranks run, and once after: an empty string, or the problem."""
    until = time.monotonic() + DEADLINE_SECONDS
    while (codes := [process.poll() for process in processes]) and None in codes and not any(codes):
        if time.monotonic() > until:
            yield f"the ranks did not finish within {DEADLINE_SECONDS:.0f} s"
        yield ""
        time.sleep(_POLL_SECONDS)
    yield f"a rank failed; exit statuses {codes}" if any(codes) else ""


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()  # gives mpiexec time to end its ranks
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GOODBYE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
