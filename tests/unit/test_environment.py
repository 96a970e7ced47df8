"""What each launcher's variables say, the error when they are wrong, and how a host is named."""

import ctypes
import os
from pathlib import Path
from unittest import mock

import pytest

from objcomm._environment import (
    Placement,
    Unjoined,
    first_host,
    has_own_core,
    machine,
    placement_in,
    unjoined_in,
)
from objcomm.errors import UsageError
from tests.ranks import solo

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node003",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "node[003-005,9]",
    "SLURM_JOB_ID": "4321",
    "SLURM_STEP_ID": "2",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
JSRUN = {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_SIZE": "2"}
#: What sbatch sets for the script itself, which is one process for the whole job.
BATCH = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "4321",
    "SLURM_JOB_NODELIST": "node[003-005,9]",
    "SLURM_SUBMIT_DIR": "/home/me",
}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node9"}
#: A shell that salloc opens on the first host: a step of one task with the job's variables.
INTERACTIVE = BATCH | STEP | {"SLURM_STEP_NUM_TASKS": "1"}
DAEMON = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
#: An allocation in which no task has begun.
ALLOCATION = {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}
#: A program that chooses its own number of ranks under SLURM, or all but the local ranks.
OWN_SIZE = {"SLURM_PROCID": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}
OWN_RANKS = {"RANK": "5", "WORLD_SIZE": "8", "SLURM_LOCALID": "1", "MASTER_ADDR": "a"}
AT_IB0 = {"MASTER_ADDR": "ib0", "MASTER_PORT": "77"}
ELSEWHERE = {"SLURM_STEP_NODELIST": "node9", "SLURM_STEP_ID": ""}

IN_SRUN = Placement("SLURM", 5, 8, 1, "node003", 15000 + 4321 + 2 * 1009)
ON_NODE9 = Placement("SLURM", 0, 1, 0, "node9", 15000 + 4321)
IN_TORCHRUN = Placement("torchrun", 3, 4, 1, "node003", 1234)

PLACES: dict[str, tuple[dict[str, str], Placement | None]] = {
    "nothing": ({}, None),
    "a world of one": ({"WORLD_SIZE": "1"}, None),
    "empty variables": ({"RANK": "", "WORLD_SIZE": " ", "LOCAL_RANK": ""}, None),
    "an allocation without a task": (ALLOCATION, None),
    "a batch script": (BATCH, None),
    "the only rank of its host": ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, None),
    "no local rank": ({"LOCAL_RANK": "-1"}, None),
    "a local rank of SLURM's": ({"SLURM_LOCALID": "1"}, None),
    "a world of Open MPI's of one": ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
    "a shell of one task in an allocation": (INTERACTIVE, ON_NODE9),
    "srun in a batch script": (
        BATCH | STEP | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"},
        ON_NODE9._replace(rank=3, world_size=4),
    ),
    "srun that keeps the allocation's variables": (
        BATCH | STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
        ON_NODE9._replace(rank=1, world_size=2),
    ),
    "torchrun in a batch script": (BATCH | TORCHRUN, IN_TORCHRUN),
    "torchrun": (TORCHRUN, IN_TORCHRUN),
    "torchrun within srun": (TORCHRUN | SLURM, IN_TORCHRUN),
    "SLURM": (SLURM, IN_SRUN),
    "SLURM with an address": (SLURM | AT_IB0, IN_SRUN._replace(host="ib0", port=77)),
    "a step elsewhere": (SLURM | ELSEWHERE, IN_SRUN._replace(host="node9", port=15000 + 4321)),
    "own size under SLURM": (OWN_SIZE, Placement("SLURM", 1, 2, None, "a", 29500)),
    "own ranks, local ranks by SLURM": (OWN_RANKS, Placement("torchrun", 5, 8, 1, "a", 29500)),
    "RANK empty under SLURM": (SLURM | {"RANK": ""}, IN_SRUN),
    "Open MPI on one host": (OPENMPI, Placement("Open MPI", 1, 2, 1, "127.0.0.1", 29500)),
    "Open MPI within SLURM": (
        OPENMPI | DAEMON | {"SLURM_NODELIST": "n[7-8]"},
        Placement("Open MPI", 1, 2, 1, "n7", 29500),
    ),
    "PMI on two hosts": (PMI, Placement("PMI", 0, 2, 0, "", 29500)),
    "jsrun": (JSRUN, Placement("jsrun", 1, 2, None, "127.0.0.1", 29500)),
    "PMI with an address": (PMI | {"MASTER_ADDR": "::1"}, Placement("PMI", 0, 2, 0, "::1", 29500)),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_launchers_variables_give_a_place(name: str) -> None:
    environ, place = PLACES[name]
    before = dict(environ)
    assert placement_in(environ) == place
    assert environ == before


MPI_SIZE = {"OMPI_COMM_WORLD_SIZE": "4"}
BROKEN: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "no rank": ({"WORLD_SIZE": "2"}, ("WORLD_SIZE=2", "set RANK")),
    "no rank of Open MPI": (MPI_SIZE, ("set OMPI_COMM_WORLD_RANK", "mpirun")),
    "no rank of PMI": ({"PMI_SIZE": "4"}, ("PMI_SIZE=4", "set PMI_RANK")),
    "no rank of jsrun": ({"JSM_NAMESPACE_SIZE": "2"}, ("set JSM_NAMESPACE_RANK",)),
    "a local rank alone": ({"LOCAL_RANK": "1"}, ("LOCAL_RANK=1 is set", "set RANK")),
    "no size": ({"RANK": "0"}, ("RANK=0", "WORLD_SIZE is not", "number of ranks")),
    "a batch script with a world size": (BATCH | {"WORLD_SIZE": "8"}, ("set RANK", "srun")),
    "no size under SLURM": ({"SLURM_PROCID": "0"}, ("SLURM_PROCID=0", "SLURM_NTASKS")),
    "a text": (TORCHRUN | {"RANK": "x"}, ("RANK='x'", "not an integer")),
    "a fraction": (TORCHRUN | {"LOCAL_RANK": "0.5"}, ("LOCAL_RANK='0.5'",)),
    "a rank outside": (TORCHRUN | {"RANK": "4"}, ("RANK=4", "WORLD_SIZE=4")),
    "a negative rank": (SLURM | {"SLURM_PROCID": "-1"}, ("SLURM_PROCID=-1", "SLURM_NTASKS=8")),
    "no port": (TORCHRUN | {"MASTER_PORT": "70000"}, ("MASTER_PORT=70000", "65535")),
    "no hosts": (SLURM | {"SLURM_NODELIST": "node[003"}, ("SLURM_NODELIST", "MASTER_ADDR")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_variable_is_named_with_what_to_set(name: str) -> None:
    environ, parts = BROKEN[name]
    with pytest.raises(UsageError) as caught:
        placement_in(environ)
    assert all(part in str(caught.value) for part in parts)


ALONE = Unjoined(0, 1, "")

UNJOINED: dict[str, tuple[dict[str, str], Unjoined]] = {
    "torchrun": (TORCHRUN, Unjoined(3, 4, "WORLD_SIZE=4")),
    "SLURM": (SLURM, Unjoined(5, 8, "SLURM_NTASKS=8")),
    "Open MPI": (OPENMPI, Unjoined(1, 2, "OMPI_COMM_WORLD_SIZE=2")),
    "Open MPI within SLURM": (OPENMPI | DAEMON, Unjoined(1, 2, "OMPI_COMM_WORLD_SIZE=2")),
    "PMI": (PMI, Unjoined(0, 2, "PMI_SIZE=2")),
    "jsrun": (JSRUN, Unjoined(1, 2, "JSM_NAMESPACE_SIZE=2")),
    "own size under SLURM": (OWN_SIZE, Unjoined(1, 2, "WORLD_SIZE=2")),
    "no rank of Open MPI": (MPI_SIZE, Unjoined(-1, 4, "OMPI_COMM_WORLD_SIZE=4")),
    "srun --ntasks=1": (DAEMON, ALONE),
    "an allocation without a task": (ALLOCATION, ALONE),
    "a shell of one task in an allocation": (INTERACTIVE, ALONE),
    "a batch script": (BATCH, ALONE),
    "nothing": ({}, ALONE),
    "a rank, but no size": ({"RANK": "3"}, ALONE),
    "a size that is not a number": ({"RANK": "0", "WORLD_SIZE": "many"}, ALONE),
    "empty variables": ({"RANK": " ", "WORLD_SIZE": ""}, ALONE),
    "no rank": ({"WORLD_SIZE": "2"}, Unjoined(-1, 2, "WORLD_SIZE=2")),
    "a rank outside": (TORCHRUN | {"RANK": "4"}, Unjoined(-1, 4, "WORLD_SIZE=4")),
    "a rank that is not a number": (TORCHRUN | {"RANK": "x"}, Unjoined(-1, 4, "WORLD_SIZE=4")),
}


@pytest.mark.parametrize("name", UNJOINED)
def test_variables_say_whether_there_are_other_ranks(name: str) -> None:
    environ, unjoined = UNJOINED[name]
    assert unjoined_in(environ) == unjoined


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[003-005,9]", "node003"),
        ("node[9,003-005],login[1-2]", "node9"),
        ("login,node[1-2]", "login"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("gpu-a[08-11].cluster", "gpu-a08.cluster"),
        ("gpu-a-7", "gpu-a-7"),
    ],
)
def test_the_first_host_of_a_compressed_list(hosts: str, first: str) -> None:
    assert first_host(hosts, "SLURM_NODELIST") == first


@pytest.mark.parametrize("hosts", ["", ",", "node[", "node]", "node[1-2", "[[1]]"])
def test_a_malformed_list_of_hosts_is_refused(hosts: str) -> None:
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        first_host(hosts, "SLURM_NODELIST")


@pytest.mark.parametrize(
    ("has_own", "ranks", "environ", "cores", "quota"),
    [
        (True, 2, {}, 2, "max 100000"),
        (True, 2, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4, "max 100000"),
        (True, 2, {"LOCAL_WORLD_SIZE": "many"}, 2, "max 100000"),
        (True, 2, {}, 64, "200000 100000"),
        (True, 2, {}, 2, ""),  # an empty file
        (False, 3, {}, 2, "max 100000"),
        (False, 2, {"LOCAL_WORLD_SIZE": "4"}, 2, "max 100000"),  # a group of some local ranks
        (False, 2, {}, 64, "150000 100000"),  # a container's share of 64 cores
    ],
)
def test_each_rank_has_a_core_or_does_not(
    ranks: int,
    environ: dict[str, str],
    cores: int,
    quota: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_own: bool,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(Path, "read_text", lambda _: quota)
    assert has_own_core(ranks, environ) is has_own


# The name by which ranks know that they share a host.

# Linux's numbers for these namespaces
_NAMESPACES = {"net": 0x40000000, "ipc": 0x08000000}


@pytest.fixture
def of_pytest() -> str:
    """Return the name that pytest's own process has for its host."""
    return machine()


@solo()
def test_two_processes_of_one_host_give_one_name(of_pytest: str) -> None:
    assert machine() == of_pytest


@solo()
@pytest.mark.parametrize("namespace", _NAMESPACES)
def test_processes_with_other_namespaces_are_on_other_hosts(namespace: str, of_pytest: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NAMESPACES[namespace]) != 0:
        pytest.skip(f"no namespaces here: {os.strerror(ctypes.get_errno())}")
    assert machine() != of_pytest


def test_another_host_name_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine()
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert machine() != here


@pytest.mark.parametrize(
    ("error", "nodes", "count"),
    [
        (FileNotFoundError, (0x0242AC110002, 0x0242AC110003), 2),
        (PermissionError, (0x0342AC110002, 0xFFEEAC110003), 1),
    ],
    ids=["of a card", "invented by each process"],
)
def test_numbers_of_network_cards_distinguish_hosts_without_proc(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError], nodes: tuple[int, ...], count: int
) -> None:
    monkeypatch.setattr(Path, "read_text", mock.Mock(side_effect=error("/proc")))
    monkeypatch.setattr("socket.gethostname", lambda: "host")
    names = set()
    for node in nodes:
        monkeypatch.setattr("uuid.getnode", lambda node=node: node)
        names.add(machine())
    assert len(names) == count
