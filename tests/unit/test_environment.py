"""What each launcher's variables say, and the error when they are wrong."""

import os
from pathlib import Path

import pytest

from objcomm._environment import (
    Placement,
    Unjoined,
    first_host,
    has_own_core,
    placement_in,
    unjoined_in,
)
from objcomm.errors import UsageError

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
#: What sbatch gives the script itself, which is one process for the whole job.
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

PLACES: dict[str, tuple[dict[str, str], Placement | None]] = {
    "nothing": ({}, None),
    "a world of one": ({"WORLD_SIZE": "1"}, None),
    "empty variables": ({"RANK": "", "WORLD_SIZE": " ", "LOCAL_RANK": ""}, None),
    "an allocation without a task": ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, None),
    "a batch script": (BATCH, None),
    "the only rank of its host": ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, None),
    "no local rank": ({"LOCAL_RANK": "-1"}, None),
    "a local rank of SLURM's": ({"SLURM_LOCALID": "1"}, None),
    "a world of Open MPI's of one": ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
    "a shell of one task in an allocation": (
        INTERACTIVE,
        Placement("SLURM", 0, 1, 0, "node9", 15000 + 4321),
    ),
    "srun in a batch script": (
        BATCH | STEP | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"},
        Placement("SLURM", 3, 4, 0, "node9", 15000 + 4321),
    ),
    "srun that keeps the allocation's variables": (
        BATCH | STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
        Placement("SLURM", 1, 2, 0, "node9", 15000 + 4321),
    ),
    "torchrun in a batch script": (
        BATCH | TORCHRUN,
        placement_in(TORCHRUN | {"SLURM_JOB_ID": "4321"}),
    ),
    "torchrun": (TORCHRUN, Placement("torchrun", 3, 4, 1, "node003", 1234)),
    "torchrun within srun": (TORCHRUN | SLURM, Placement("torchrun", 3, 4, 1, "node003", 1234)),
    "SLURM": (SLURM, Placement("SLURM", 5, 8, 1, "node003", 15000 + 4321 + 2 * 1009)),
    "SLURM with an address": (
        SLURM | {"MASTER_ADDR": "ib0", "MASTER_PORT": "77"},
        Placement("SLURM", 5, 8, 1, "ib0", 77),
    ),
    "a step on other hosts": (
        SLURM | {"SLURM_STEP_NODELIST": "node9", "SLURM_STEP_ID": ""},
        Placement("SLURM", 5, 8, 1, "node9", 15000 + 4321),
    ),
    "a batch script that exports WORLD_SIZE": (
        {"SLURM_PROCID": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
        Placement("SLURM", 1, 2, None, "a", 29500),
    ),
    "ranks by hand, local ranks by SLURM": (
        {"RANK": "5", "WORLD_SIZE": "8", "SLURM_LOCALID": "1", "MASTER_ADDR": "a"},
        Placement("torchrun", 5, 8, 1, "a", 29500),
    ),
    "RANK empty under SLURM": (SLURM | {"RANK": ""}, placement_in(SLURM)),
    "Open MPI on one host": (OPENMPI, Placement("Open MPI", 1, 2, 1, "127.0.0.1", 29500)),
    "Open MPI within SLURM": (
        OPENMPI | DAEMON | {"SLURM_NODELIST": "n[7-8]"},
        Placement("Open MPI", 1, 2, 1, "n7", 29500),
    ),
    "PMI on two hosts": (PMI, Placement("PMI", 0, 2, 0, "", 29500)),
    "jsrun": (
        {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_SIZE": "2"},
        Placement("jsrun", 1, 2, None, "127.0.0.1", 29500),
    ),
    "PMI with an address": (PMI | {"MASTER_ADDR": "::1"}, Placement("PMI", 0, 2, 0, "::1", 29500)),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_launchers_variables_give_a_place(name: str) -> None:
    environ, place = PLACES[name]
    before = dict(environ)
    assert placement_in(environ) == place
    assert environ == before


BROKEN: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "no rank": ({"WORLD_SIZE": "2"}, ("WORLD_SIZE=2", "set RANK")),
    "no rank of Open MPI": ({"OMPI_COMM_WORLD_SIZE": "4"}, ("set OMPI_COMM_WORLD_RANK", "mpirun")),
    "no rank of PMI": ({"PMI_SIZE": "4"}, ("PMI_SIZE=4", "set PMI_RANK")),
    "no rank of jsrun": ({"JSM_NAMESPACE_SIZE": "2"}, ("set JSM_NAMESPACE_RANK",)),
    "a local rank alone": ({"LOCAL_RANK": "1"}, ("LOCAL_RANK=1 is set", "set RANK")),
    "no size": ({"RANK": "0"}, ("RANK=0", "WORLD_SIZE is not", "number of ranks")),
    "a batch script that promises ranks": (BATCH | {"WORLD_SIZE": "8"}, ("set RANK", "srun")),
    "no size under SLURM": ({"SLURM_PROCID": "0"}, ("SLURM_PROCID=0", "SLURM_NTASKS")),
    "no number": (TORCHRUN | {"RANK": "x"}, ("RANK='x'", "not an integer")),
    "no whole number": (TORCHRUN | {"LOCAL_RANK": "0.5"}, ("LOCAL_RANK='0.5'",)),
    "a rank outside": (TORCHRUN | {"RANK": "4"}, ("RANK=4", "WORLD_SIZE=4")),
    "a negative rank": (SLURM | {"SLURM_PROCID": "-1"}, ("SLURM_PROCID=-1", "SLURM_NTASKS=8")),
    "no port": (TORCHRUN | {"MASTER_PORT": "70000"}, ("MASTER_PORT=70000", "65535")),
    "no hosts": (SLURM | {"SLURM_NODELIST": "node[003"}, ("SLURM_NODELIST", "MASTER_ADDR")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_variable_is_named_with_what_to_set(name: str) -> None:
    environ, told = BROKEN[name]
    with pytest.raises(UsageError) as caught:
        placement_in(environ)
    for each in told:
        assert each in str(caught.value)


NOBODY_ELSE = Unjoined(0, 1, "")

STANDINGS: dict[str, tuple[dict[str, str], Unjoined]] = {
    "torchrun": (TORCHRUN, Unjoined(3, 4, "WORLD_SIZE=4")),
    "SLURM": (SLURM, Unjoined(5, 8, "SLURM_NTASKS=8")),
    "Open MPI": (OPENMPI, Unjoined(1, 2, "OMPI_COMM_WORLD_SIZE=2")),
    "Open MPI within SLURM": (OPENMPI | DAEMON, Unjoined(1, 2, "OMPI_COMM_WORLD_SIZE=2")),
    "PMI": (PMI, Unjoined(0, 2, "PMI_SIZE=2")),
    "jsrun": (
        {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"},
        Unjoined(1, 2, "JSM_NAMESPACE_SIZE=2"),
    ),
    "a size of the program's own": (
        {"SLURM_PROCID": "1", "WORLD_SIZE": "2"},
        Unjoined(1, 2, "WORLD_SIZE=2"),
    ),
    "no rank of Open MPI": (
        {"OMPI_COMM_WORLD_SIZE": "4"},
        Unjoined(-1, 4, "OMPI_COMM_WORLD_SIZE=4"),
    ),
    "srun --ntasks=1": (DAEMON, NOBODY_ELSE),
    "an allocation without a task": ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, NOBODY_ELSE),
    "a shell of one task in an allocation": (INTERACTIVE, NOBODY_ELSE),
    "a batch script": (BATCH, NOBODY_ELSE),
    "nothing": ({}, NOBODY_ELSE),
    "a rank, but no size": ({"RANK": "3"}, NOBODY_ELSE),
    "no number": ({"RANK": "0", "WORLD_SIZE": "many"}, NOBODY_ELSE),
    "empty variables": ({"RANK": " ", "WORLD_SIZE": ""}, NOBODY_ELSE),
    "no rank": ({"WORLD_SIZE": "2"}, Unjoined(-1, 2, "WORLD_SIZE=2")),
    "a rank outside": (TORCHRUN | {"RANK": "4"}, Unjoined(-1, 4, "WORLD_SIZE=4")),
    "a rank that is no number": (TORCHRUN | {"RANK": "x"}, Unjoined(-1, 4, "WORLD_SIZE=4")),
}


@pytest.mark.parametrize("name", STANDINGS)
def test_whether_other_ranks_are_promised(name: str) -> None:
    environ, standing = STANDINGS[name]
    assert unjoined_in(environ) == standing


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
def test_the_first_host_of_a_short_form(hosts: str, first: str) -> None:
    assert first_host(hosts, "SLURM_NODELIST") == first


@pytest.mark.parametrize("hosts", ["", ",", "node[", "node]", "node[1-2", "[[1]]"])
def test_what_is_no_list_of_hosts_is_refused(hosts: str) -> None:
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
def test_whether_each_rank_has_a_core(
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
