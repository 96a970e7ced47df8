"""Starts doctors as processes of one job, and gives back what each said and how it ended."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.hosts import Hosts

DOCTOR = [sys.executable, "-m", "objcomm", "doctor"]
ROOT = Path(__file__).parent.parent.parent
_LIMIT_S = 200.0
_POLL_S = 0.05
_OF_A_JOB = ("MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "GLOO_", "NCCL_", "OBJCOMM_")
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@dataclass(frozen=True)
class Said:
    """How one process ended."""

    status: int
    out: str
    err: str


def clean_environment() -> dict[str, str]:
    """This process's, without what a launcher has set; the ranks find objcomm where it does."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OF_A_JOB) and name not in _OF_A_RANK
    }
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Agent:
    """A store that is there before the ranks, as torchrun's is."""

    def __init__(self) -> None:
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )

    def place(self, rank: int, size: int, **further: str) -> dict[str, str]:
        """The variables of one rank."""
        return place(rank, size, self.store.port) | {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **further,
        }


def place(rank: int, size: int, port: int, host: str = "127.0.0.1") -> dict[str, str]:
    """The variables of one rank of a job on one host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def arrived(store: dist.Store, count: int) -> None:
    """Return when so many doctors are there."""
    mine = dist.PrefixStore("objcomm.doctor/0", store)
    until(lambda: mine.add("arrivals", 0) >= count)


def until(is_so: Callable[[], bool]) -> None:
    """Return when something is so; fail if it does not become so."""
    deadline = time.monotonic() + _LIMIT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("it has not come to be so")
        time.sleep(_POLL_S)


def start(variables: Mapping[str, str], *arguments: str) -> "subprocess.Popen[str]":
    """Start one rank."""
    return subprocess.Popen(
        [*DOCTOR, *arguments],
        env=clean_environment() | dict(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(processes: Sequence["subprocess.Popen[str]"]) -> list[Said]:
    """Wait for all of them; none outlives this."""
    try:
        told = [process.communicate(timeout=_LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [
        Said(process.returncode, *texts) for process, texts in zip(processes, told, strict=True)
    ]


def on_hosts(hosts: Hosts, variables: Sequence[Mapping[str, str]], *arguments: str) -> list[Said]:
    """One rank on each host, whose rank 0 has the store."""
    processes = []
    for rank, further in enumerate(variables):
        of_rank = place(rank, len(variables), 29500, hosts[0].address) | {"LOCAL_RANK": "0"}
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **of_rank, **further}
        processes.append(
            hosts[rank].popen(
                [*DOCTOR, *arguments],
                env=own,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return said(processes)


class Findings(dict[str, Any]):
    """The findings of a report, by name; one that is missing shows those that are there."""

    def __missing__(self, name: str) -> Any:
        raise AssertionError(f"no {name} among {[*self.values()]}")


def findings(path: Path) -> Findings:
    """The findings of a report."""
    told = json.loads(path.read_text(encoding="utf-8"))
    return Findings({each["name"]: each for each in told["findings"]})
