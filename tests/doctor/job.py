"""Start doctors as the processes of one job, and return what each printed and how it ended.

They are forks of the server that has imported torch, like the tests' ranks, because the import
takes a second or two of processor time. ``test_setups`` starts some by their command.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from objcomm.__main__ import main
from objcomm._transport.store import loopback_store
from tests.forked import FORKED
from tests.hosts import Host, Hosts, environment_of_no_job
from tests.waits import wait_until

DOCTOR = [sys.executable, "-m", "objcomm", "doctor"]
ROOT = Path(__file__).parent.parent.parent
# Only a hang takes this long. Beside 16 other busy processes, seven processes that import torch and
# scikit-learn took 329 s on two cores; with heavy disk reads, six that import torch took 180 s.
LIMIT_S = 900.0
_NAMESPACES = ("user", "net", "uts", "ipc", "mnt", "pid")


@dataclass(frozen=True)
class Said:
    """How one process ended."""

    status: int
    out: str
    err: str


def clean_environment() -> dict[str, str]:
    """Return this process's variables without a launcher's, with the path to this objcomm."""
    return environment_of_no_job() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def by_command(
    command: Sequence[str],
    variables: Mapping[str, str] = MappingProxyType({}),
    *,
    cwd: Path | None = None,
    stdin: str | None = None,
) -> Said:
    """Run a command line until it ends, in this process's environment without a launcher's."""
    done = subprocess.run(
        command,
        env=clean_environment() | dict(variables),
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return Said(done.returncode, done.stdout, done.stderr)


class Agent:
    """A store that exists before the ranks, like torchrun's."""

    def __init__(self) -> None:
        self.store = loopback_store()

    def place(self, rank: int, size: int, **further: str) -> dict[str, str]:
        """Return the variables of one rank."""
        return place(rank, size, self.store.port) | {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **further,
        }


def place(rank: int, size: int, port: int, host: str = "127.0.0.1") -> dict[str, str]:
    """Return the variables of one rank of a job on one host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def arrived(store: dist.Store, count: int) -> None:
    """Return once ``count`` doctors have arrived."""
    mine = dist.PrefixStore("objcomm.doctor/0", store)
    wait_until(lambda: mine.add("arrivals", 0) >= count, f"{count} doctors", LIMIT_S)


class Doctor:
    """One rank's process.

    Attributes:
        pid: its process id; on another host, that of the process that waits for it.
    """

    def __init__(
        self, variables: Mapping[str, str], arguments: Sequence[str], host: Host | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="objcomm-doctor-")
        self._written = [Path(self._folder.name) / name for name in ("out", "err")]
        inside = None if host is None else host._room.pid  # noqa: SLF001  # popen would start a new interpreter
        environ = clean_environment() | dict(variables)
        self._process = FORKED.Process(
            target=_consult, args=(environ, list(arguments), self._written, inside), daemon=True
        )
        self._process.start()
        self.pid = self._process.pid

    def said(self) -> Said:
        """Wait until it ends."""
        self._process.join(LIMIT_S)
        out, err = (path.read_text(encoding="utf-8") for path in self._written)
        assert self._process.exitcode is not None, f"still there after {LIMIT_S:g} s: {out}{err}"
        return Said(self._process.exitcode, out, err)

    def close(self) -> None:
        """Kill it and delete its files."""
        self._process.kill()
        self._process.join()
        self._folder.cleanup()


def _consult(
    environ: Mapping[str, str],
    arguments: Sequence[str],
    written: Sequence[Path],
    inside: int | None,
) -> None:
    """Run one doctor in a process that was forked for it."""
    for number, path in enumerate(written, start=1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(1)
    if inside is not None:
        _enter(inside)
    os.chdir(ROOT)
    sys.exit(main(["doctor", *arguments]))


def _enter(pid: int) -> None:
    """Continue as a child process that is in all namespaces of process ``pid``."""
    spaces = []
    for name in _NAMESPACES:
        theirs, ours = Path(f"/proc/{pid}/ns/{name}"), Path(f"/proc/self/ns/{name}")
        if not theirs.samefile(ours):
            spaces.append(os.open(theirs, os.O_RDONLY))
    libc = ctypes.CDLL(None, use_errno=True)
    for space in spaces:
        if libc.setns(space, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)
    if child := os.fork():  # setns moves only children into a PID namespace
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)


def start(variables: Mapping[str, str], *arguments: str) -> Doctor:
    """Start one rank."""
    return Doctor(variables, arguments)


def said(doctors: Sequence[Doctor]) -> list[Said]:
    """Wait for all doctors, and kill those that are left."""
    try:
        return [doctor.said() for doctor in doctors]
    finally:
        for doctor in doctors:
            doctor.close()


def on_hosts(hosts: Hosts, variables: Sequence[Mapping[str, str]], *arguments: str) -> list[Said]:
    """Run one rank on each host; rank 0 hosts the store."""
    doctors = []
    for rank, further in enumerate(variables):
        of_rank = place(rank, len(variables), 29500, hosts[0].address) | {"LOCAL_RANK": "0"}
        doctors.append(Doctor(of_rank | dict(further), arguments, hosts[rank]))
    return said(doctors)


class Findings(dict[str, Any]):
    """The findings of a report by name; a missing name shows the names that exist."""

    def __missing__(self, name: str) -> Any:
        raise AssertionError(f"no {name} among {[*self.values()]}")


def findings(path: Path) -> Findings:
    """Return the findings of a report."""
    report = json.loads(path.read_text(encoding="utf-8"))
    return Findings({each["name"]: each for each in report["findings"]})
