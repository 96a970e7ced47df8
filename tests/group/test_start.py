"""init, shutdown and ddp_init_group, with and without each launcher's variables."""

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import StartError, TransportError, TransportTimeout, UsageError
from objcomm._bootstrap import init
from objcomm._calls.group import resolve
from objcomm._observe.log import log
from objcomm._transport import rendezvous
from objcomm._transport.rendezvous import await_all
from objcomm._transport.store import loopback_store
from tests.cases import case
from tests.group.helpers import (
    assert_group_works,
    error_in,
    hear,
    in_thread,
    say,
    shared_port,
    tell_all,
)
from tests.group.logs import collected
from tests.ranks import ranks, solo
from tests.waits import PATIENCE_S
from tests.workers import here

_ROOT = Path(__file__).parents[2]


#: The variables that each launcher sets.
LAUNCHERS = {
    "torchrun": (
        "RANK={rank} WORLD_SIZE={size} LOCAL_RANK={rank} LOCAL_WORLD_SIZE={size} "
        "MASTER_ADDR=127.0.0.1"
    ),
    "SLURM": (
        "SLURM_PROCID={rank} SLURM_NTASKS={size} SLURM_LOCALID={rank} "
        "SLURM_NODELIST=localhost SLURM_JOB_ID=77"
    ),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE={size} "
        "OMPI_COMM_WORLD_LOCAL_RANK={rank} OMPI_COMM_WORLD_LOCAL_SIZE={size}"
    ),
    "PMI": "PMI_RANK={rank} PMI_SIZE={size} MPI_LOCALRANKID={rank} MPI_LOCALNRANKS={size}",
}


def variables(text: str) -> dict[str, str]:
    return dict(each.split("=") for each in text.split())


def start_as(rank: int, size: int, launcher: str = "torchrun", port: int | None = None) -> None:
    """Set the variables that a launcher would set for this rank."""
    os.environ.update(variables(LAUNCHERS[launcher].format(rank=rank, size=size)))
    os.environ["MASTER_PORT"] = str(port or shared_port())


@ranks(2, joined=False)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_join_by_a_launchers_variables(launcher: str) -> None:
    rank = here().rank
    start_as(rank, 2, launcher)
    before = dict(os.environ)
    with collected(logging.INFO) as handler:
        chosen = objcomm.init(timeout=PATIENCE_S)
    assert (chosen.launcher, chosen.rank, chosen.world_size) == (launcher, rank, 2)
    assert (chosen.local_rank, chosen.backend) == (rank, "gloo")
    assert chosen.device == torch.device("cpu")
    assert chosen.address.endswith(f":{before['MASTER_PORT']}")
    reports = [each.getMessage() for each in handler.records if each.levelno == logging.INFO]
    assert reports == [str(chosen)]
    assert f"rank {rank} of 2 (local rank {rank}) by {launcher}, backend gloo" in str(chosen)
    assert dict(os.environ) == before
    assert (objcomm.rank(), objcomm.world_size()) == (rank, 2)
    assert_group_works()

    again = objcomm.init("gloo", timeout=PATIENCE_S, device="cpu")
    assert (again.launcher, again.rank, again.world_size) == ("program", rank, 2)
    assert again.local_rank == rank
    with pytest.raises(UsageError, match="initialized with 'cpu:gloo,cuda:gloo'"):
        objcomm.init("cpu:mpi")
    with pytest.raises(UsageError, match=f"timeout=5 s, but .* initialized with {PATIENCE_S:g} s"):
        objcomm.init(timeout=5)
    with pytest.raises(UsageError, match="the current device is 'cpu'"):
        objcomm.init(device="cuda:1")
    assert_group_works()
    tell_all("done", "")
    objcomm.shutdown()
    objcomm.shutdown()
    assert not objcomm.is_initialized()
    os.environ["MASTER_PORT"] = str(shared_port("second port"))
    assert init.ddp_init_group({"distributed_backend": "gloo", "device": "cpu"}).rank == rank
    assert_group_works()


@ranks(2, joined=False)
def test_ranks_of_torchruns_store_may_join_again_and_again() -> None:
    rank = here().rank
    agent = loopback_store() if rank == 0 else None  # torchrun's store has its own process
    start_as(rank, 2, port=int(tell_all("port", str(agent.port) if agent else "")[0]))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for turn in range(3):
        time.sleep(0.2 * rank)  # the first rank finds what the last turn left
        objcomm.init("gloo")
        assert objcomm.all_gather((turn, rank)) == [(turn, 0), (turn, 1)]
        objcomm.shutdown()
    tell_all("done", "")  # the store ends with rank 0


@ranks(3, joined=False)
def test_no_rank_leaves_before_all_have_joined() -> None:
    """Gloo connects each rank to all others, and fails if one of them has already left."""
    rank, join = here().rank, dist.init_process_group
    marks = here().store("marks")

    def slowly(*args: Any, **options: Any) -> None:
        join(*args, **options)
        if rank == 1:
            time.sleep(0.5)  # long enough for the others to leave if they did not wait
            marks.set("late", "")

    start_as(rank, 3)
    with mock.patch.object(dist, "init_process_group", slowly):
        objcomm.init()
    assert marks.check(["late"])
    assert_group_works()


@ranks(3, joined=False, expect_dead=[1])
def test_a_death_before_the_first_call_is_noticed() -> None:
    rank = here().rank
    start_as(rank, 3)
    objcomm.init()
    unused = dist.new_group([0, 1, 2])
    tell_all("joined", "")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = error_in(TransportError, lambda: objcomm.all_gather(rank, group=unused))
    assert not isinstance(error, TransportTimeout)
    assert error.peers == (1,)
    with pytest.raises(TransportError):
        objcomm.barrier()


@ranks(2, disposable=True)
def test_a_rank_that_lost_its_connections_may_still_arrive() -> None:
    rank = here().rank
    objcomm.barrier()
    group = dist.new_group()
    if rank == 1:
        mesh = resolve(None)._whole.mesh  # noqa: SLF001  # nothing public drops a connection
        assert mesh is not None
        mesh.connections_for("barrier").abort()
        time.sleep(2.5)  # a little longer than it takes to presume it dead
    assert objcomm.all_gather(rank, group=group) == [0, 1]


@ranks(2, joined=False)
def test_any_thread_may_make_the_first_call_after_init() -> None:
    start_as(here().rank, 2)
    joined, leave = threading.Event(), threading.Event()

    def join_and_stay() -> None:
        objcomm.init()
        joined.set()
        leave.wait(PATIENCE_S)

    thread = in_thread(join_and_stay)
    assert joined.wait(PATIENCE_S)
    try:
        assert_group_works()
    finally:
        leave.set()
        thread.join()


@ranks(2)
def test_ranks_wait_for_each_other_each_time() -> None:
    """Even in a store that they have used before, such as torchrun's."""
    rank, store = here().rank, here().store("waits")
    for turn in range(3):
        if rank == turn % 2:
            store.set(f"late {turn}", "")
        await_all(store, 2)
        assert store.check([f"late {turn}"])
    if rank == 0:
        store.set_timeout(timedelta(seconds=1))
        with pytest.raises(TimeoutError, match="1 of 2 ranks have not arrived"):
            await_all(store, 2)


@solo()
def test_without_a_launcher_nothing_is_initialized() -> None:
    options = {"distributed_backend": "nccl", "device": "cuda:0"}
    for chosen in (objcomm.init(), objcomm.init("nccl"), init.ddp_init_group(options)):
        assert (chosen.launcher, chosen.rank, chosen.world_size) == ("", 0, 1)
        assert "uninitialized; to start several ranks: torchrun --nproc-per-node=4" in str(chosen)
    assert not dist.is_initialized()
    assert objcomm.all_gather(3) == [3]
    objcomm.shutdown()


@pytest.mark.parametrize("is_read", [True, False])
def test_a_script_at_a_terminal_shows_how_to_start_ranks(tmp_path: Path, *, is_read: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text("import objcomm\nobjcomm.init()\nassert objcomm.all_gather(1) == [1]\n")
    ours, its = os.openpty() if is_read else os.pipe()
    program = subprocess.Popen([sys.executable, script], stderr=its, cwd=_ROOT)
    os.close(its)
    said = b""
    with contextlib.suppress(OSError):  # how reading from a terminal ends
        while piece := os.read(ours, 4096):
            said += piece
    os.close(ours)
    assert program.wait() == 0
    hint = "no launcher: a world of one, .*torchrun --nproc-per-node=4 train.py\r?\n"
    assert re.fullmatch(hint if is_read else "", said.decode())


@solo()
def test_a_launchers_world_of_one_is_initialized() -> None:
    start_as(0, 1, "SLURM")
    assert objcomm.init().launcher == "SLURM"
    assert dist.get_world_size() == 1
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    objcomm.shutdown()
    assert not dist.is_initialized()


@solo()
def test_what_prevents_the_start_is_an_error_before_any_wait() -> None:
    torchrun = LAUNCHERS["torchrun"].format(rank=0, size=2)
    without_address = [
        ("PMI", "PMI_RANK=0 PMI_SIZE=2", "mpirun -genv MASTER_ADD"),
        ("SLURM", "SLURM_PROCID=0 SLURM_NTASKS=2", "MASTER_ADDR=HOST srun"),
        ("Open MPI", "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2", "mpirun -x MASTER_ADDR=HOST"),
        ("jsrun", "JSM_NAMESPACE_RANK=0 JSM_NAMESPACE_SIZE=2", "jsrun -E MASTER_ADDR=HOST"),
        ("WORLD_SIZE", "RANK=0 WORLD_SIZE=2", "torchrun --nproc-per-"),
    ]
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("RANK=0", {}, "WORLD_SIZE is not.* let a launcher set both: torchrun --nproc-per-"),
        ("WORLD_SIZE=2", {}, r"srun or mpirun \(torchrun --nproc-per-node=4 train.py\), or set"),
        (torchrun, {"timeout": 0}, "timeout=0 must be a positive number"),
        (torchrun, {"backend": "smoke"}, "there is no 'smoke'"),
        (torchrun, {"backend": "mpi"}, "built without mpi"),
    ]
    for source, given, command in without_address:
        text = f"^init: {source} names 2 ranks, but MASTER_ADDR is not set.*: {command}"
        wrong.append((given, {}, text))
    for given, options, text in wrong:
        with case(given, options), mock.patch.dict(os.environ, variables(given)):
            error_in(UsageError, partial(objcomm.init, **options), text)
    assert not dist.is_initialized()


@solo()
def test_ranks_that_do_not_arrive_are_an_error_with_the_address() -> None:
    port = shared_port()
    start_as(1, 2, port=port)
    error = error_in(StartError, lambda: objcomm.init(timeout=1))
    assert (error.rank, error.world_size, error.address) == (1, 2, f"127.0.0.1:{port}")
    assert "MASTER_PORT" in str(error)
    assert "nothing answers there: Connection refused" in str(error)
    assert not dist.is_initialized()


@solo()
def test_an_unknown_host_name_is_an_error_and_the_wait_for_it_is_logged() -> None:
    os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="no.such.host.invalid")
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    with (
        mock.patch.object(socket, "create_connection", side_effect=unknown),
        mock.patch.object(init, "REPORTED_AFTER_SECONDS", 0.0),
        mock.patch.object(log, "warning") as warning,
        pytest.raises(StartError, match=r"the name 'no.such.host.invalid' can't be resolved: Name"),
    ):
        objcomm.init(timeout=0.3)
    warning.assert_called_once()
    assert warning.call_args.args[1:4] == (1, "no.such.host.invalid", 29500)


@pytest.mark.parametrize("is_agents", [False, True], ids=["rank 0's", "torchrun's"])
@solo()
def test_a_silent_program_at_the_stores_address_is_an_error(*, is_agents: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        start_as(1, 2, port=port)
        if is_agents:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        error = error_in(StartError, lambda: objcomm.init(timeout=1))
    assert (error.rank, error.world_size) == (1, 2)
    assert error.missing == (() if is_agents else (0,))
    assert f"127.0.0.1:{port}" in str(error)
    assert not dist.is_initialized()


@contextlib.contextmanager
def coming_together(those: set[int]) -> Iterator[None]:
    """Start no meeting's timeout before all of these have come; rank 0 opens its store first."""
    open_store, append, rank = init._store, rendezvous._append, here().rank  # noqa: SLF001  # nothing public marks the time

    def open_store_in_turn(*given: Any, **named: Any) -> Any:
        if rank and 0 in those:
            hear("rank 0 has its store")
        store = open_store(*given, **named)
        if not rank:
            say("rank 0 has its store")
        return store

    def append_together(*given: Any) -> None:
        append(*given)
        say(f"rank {rank} has come")
        for each in those:
            hear(f"rank {each} has come")

    with (
        mock.patch.object(init, "_store", open_store_in_turn),
        mock.patch.object(rendezvous, "_append", append_together),
    ):
        yield


@ranks(3, joined=False)
@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("is_agents", [False, True], ids=["own store", "torchrun's store"])
def test_ranks_that_have_arrived_name_the_missing_one(missing: int, *, is_agents: bool) -> None:
    rank = here().rank
    agent = loopback_store() if rank == missing and is_agents else None
    agent_port = tell_all("the agent's port", str(agent.port) if agent else "")[missing]
    start_as(rank, 3, port=int(agent_port) if is_agents else None)
    if is_agents:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if rank != missing:
        with coming_together({0, 1, 2} - {missing}):
            error = error_in(StartError, lambda: objcomm.init(timeout=2))
        assert (error.rank, error.world_size, error.missing) == (rank, 3, (missing,))
        arrived = {0: "1-2", 1: "0, 2", 2: "0-1"}[missing]
        expected = f"rank {missing} has not arrived within 2 s, ranks {arrived} have; "
        if missing == 0 and not is_agents:
            expected = "rank 0, where all ranks meet, has not started or can't be reached ("
        assert expected in str(error)
        assert not objcomm.is_initialized()
    tell_all("all know", "")
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    os.environ["MASTER_PORT"] = str(shared_port("second port"))
    objcomm.init(timeout=PATIENCE_S)
    assert_group_works()
