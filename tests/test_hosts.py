"""Ranks on several hosts, started by torchrun: transfers work, and a lost host is noticed."""

import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from objcomm import BrokenGroupError, CollectiveError, TransportError, TransportTimeout
from objcomm._transport.link import HOST_LOST
from tests.across import AWAY_S, DEADLINE_S, FIRST_USE_S, LARGE_NBYTES, LOST_AFTER_S
from tests.hosts import Hosts, environment_of_no_job
from tests.once import once
from tests.waits import wait_until

pytestmark = pytest.mark.long

_PAUSE_S = 0.01
_PORT = 29400  # each network of hosts has all ports
_REACH_S = 1.0
# Slow enough to leave time to pull a cable.
_MBIT, _SLOW_MBIT = 400.0, 40.0


class Job:
    """One running scenario of ``tests/across.py`` on all hosts.

    Attributes:
        hosts: the hosts that it runs on.
        size: number of ranks.
    """

    def __init__(self, hosts: Hosts, scenario: str, nproc: int, folder: Path) -> None:
        self.hosts = hosts
        self.size = len(hosts) * nproc
        self._folder = folder
        self._until = time.monotonic() + DEADLINE_S + 10
        address = f"{hosts[0].address}:{_PORT}"
        nodes = [f"--nnodes={len(hosts)}", f"--nproc-per-node={nproc}", "--rdzv-id=hosts"]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *nodes, *meeting]
        self._processes: list[subprocess.Popen[bytes]] = []
        for number, host in enumerate(hosts):
            with (folder / f"host{number}.log").open("wb") as log:
                started = host.popen(
                    [*torchrun, "-m", "tests.across", scenario, str(folder)],
                    {"OMP_NUM_THREADS": "1"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self._processes.append(started)

    def reached(self, point: str) -> None:
        """Wait until every rank has reached a point."""
        marks = [self._folder / f"{point}.{rank}" for rank in range(self.size)]
        self.wait(lambda: all(mark.exists() for mark in marks), point)

    def at(self, point: str, change: Callable[..., None], *arguments: float) -> None:
        """Change something while every rank waits at a point."""
        self.reached(point)
        change(*arguments)
        self.go(point)

    def go(self, point: str) -> None:
        """Let all ranks continue from there."""
        (self._folder / point).touch()

    def results(self) -> tuple[dict[str, Any], ...]:
        """Return what each step of each rank gave, once all have ended."""
        self.wait(lambda: all(each.poll() is not None for each in self._processes), "the end")
        return self._kept()

    def _kept(self) -> tuple[dict[str, Any], ...]:
        files = sorted(self._folder.glob("result.*"))
        return tuple(pickle.loads(each.read_bytes()) for each in files)  # noqa: S301  # our own

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for something that must happen; if it does not, show the ranks' output."""
        while not is_so():
            if time.monotonic() > self._until:
                self._fail(f"not all ranks came to {what}")
            if any(each.poll() for each in self._processes):
                self._fail(f"a launcher has failed before {what}")
            time.sleep(_PAUSE_S)

    def _fail(self, why: str) -> None:
        logs = [f"--- {each.name}\n{each.read_text()}" for each in self._folder.glob("*.log")]
        kept = [f"--- rank {rank}: {given}" for rank, given in enumerate(self._kept())]
        pytest.fail("\n".join([why, *logs, *kept]), pytrace=False)


class Finished(NamedTuple):
    """A scenario that has ended.

    Attributes:
        names: the names of its hosts.
        ranks: what each step of each rank returned or raised.
        carried: bytes that the hosts' network cards sent and received during steps.
    """

    names: list[str]
    ranks: tuple[dict[str, Any], ...]
    carried: dict[str, list[tuple[int, int]]]

    def all_gave(self, step: str) -> list[Any]:
        return [given[step] for given in self.ranks]


def _carried(job: Job, first: str, last: str) -> list[tuple[int, int]]:
    """Return the bytes that each card sent and received between two points."""
    job.reached(first)
    before = [host.carried_nbytes() for host in job.hosts]
    job.go(first)
    job.reached(last)
    after = [host.carried_nbytes() for host in job.hosts]
    job.go(last)
    return [(a[0] - b[0], a[1] - b[1]) for a, b in zip(after, before, strict=True)]


def _pass(job: Job, point: str) -> None:
    job.reached(point)
    job.go(point)


def _calls(job: Job) -> dict[str, list[tuple[int, int]]]:
    carried = {"array": _carried(job, "array", "gather")}
    job.at("slow", job.hosts.limit, 1, _SLOW_MBIT)
    job.at("fast", job.hosts.limit, 1, _MBIT)
    return carried


def _two(folder: Path) -> Finished:
    with Hosts(2, mbit=_MBIT) as hosts:
        job = Job(hosts, "two", 2, folder)
        carried = _calls(job)

        job.at("first use", hosts.unplug, 1)
        job.at("first used", hosts.plug_in, 1)

        job.at("waiting", hosts.unplug, 1)
        job.at("waited", hosts.plug_in, 1)

        job.at("idle", hosts.unplug, 1)
        job.reached("was idle")
        time.sleep(2 * LOST_AFTER_S)
        hosts.plug_in(1)
        job.go("was idle")

        job.at("computing", hosts.unplug, 1)
        job.at("computed", hosts.plug_in, 1)

        _unplug_under_way(job, "sending")
        job.at("sent", hosts.plug_in, 1)

        _unplug_under_way(job, "restored")
        time.sleep(AWAY_S)
        hosts.plug_in(1)

        _pass(job, "end")
        return Finished([host.name for host in hosts], job.results(), carried)


def _four(folder: Path) -> Finished:
    with Hosts(4, mbit=_MBIT) as hosts:
        job = Job(hosts, "four", 1, folder)
        carried = _calls(job)
        job.at("parted", hosts.part, 1, 2)
        job.at("joined", hosts.join, 1, 2)
        job.at("refused", hosts.refuse, 2, 1)
        job.at("allowed", hosts.allow, 2, 1)
        job.at("dropped", hosts.part, 1, 2)
        job.at("carried", hosts.join, 1, 2)
        _pass(job, "end")
        return Finished([host.name for host in hosts], job.results(), carried)


def _unplug_under_way(job: Job, point: str) -> None:
    """Pull the cable once a tenth of a large payload has left the first host."""
    job.reached(point)
    job.hosts.limit(1, _SLOW_MBIT)
    before, _ = job.hosts[0].carried_nbytes()
    job.go(point)
    tenth = before + LARGE_NBYTES // 10
    job.wait(lambda: job.hosts[0].carried_nbytes()[0] > tenth, f"a tenth of what is {point}")
    job.hosts.unplug(1)
    job.hosts.limit(1, _MBIT)


@pytest.fixture
def two(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Run on two hosts with two ranks each."""
    return once(tmp_path_factory, "two-hosts", _two)


@pytest.fixture
def four(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Run on four hosts with one rank each."""
    return once(tmp_path_factory, "four-hosts", _four)


@pytest.fixture(params=["two", "four"])
def finished(request: pytest.FixtureRequest) -> Finished:
    """Return the results for each number of hosts."""
    found: Finished = request.getfixturevalue(request.param)
    return found


def test_objects_of_any_kind_reach_ranks_on_other_hosts(finished: Finished) -> None:
    assert finished.all_gave("config") == [{"lr": 0.1}] * 4
    assert finished.all_gave("array") == [True] * 4
    texts = ["x" * 10 ** (2 * rank) for rank in range(4)]
    assert finished.all_gave("gather") == [None, None, None, texts]
    assert finished.all_gave("all_reduce") == [[0, 1, 2, 3]] * 4
    assert finished.all_gave("sums") == [[True] * 4] * 4
    assert finished.all_gave("ring") == [f"from {rank}" for rank in (3, 0, 1, 2)]
    assert finished.all_gave("run_on_main") == [finished.names[0]] * 4
    first, *others = finished.all_gave("model")
    assert len(first) == 4
    assert others == [first] * 3


def test_hosts_are_distinguished(finished: Finished) -> None:
    names = [name for name in finished.names for _ in range(4 // len(finished.names))]
    firsts = [names.index(name) for name in names]
    assert finished.all_gave("host") == [names] * 4
    assert finished.all_gave("once") == list(zip(firsts, names, strict=True))
    assert finished.all_gave("node") == [
        [peer for peer in range(4) if names[peer] == name] for name in names
    ]
    is_first = [rank == first for rank, first in enumerate(firsts)]
    assert finished.all_gave("is_main") == is_first
    assert finished.all_gave("order") == [not each for each in is_first]  # others find the mark


def test_a_broadcast_crosses_to_each_host_once(finished: Finished) -> None:
    sent, received = zip(*finished.carried["array"], strict=True)
    last = len(finished.names) - 1
    for number in range(last + 1):
        assert sent[number] < LARGE_NBYTES * (1.2 if number < last else 0.2)
        assert received[number] < LARGE_NBYTES * (1.2 if number > 0 else 0.2)
    assert min(received[1:]) > LARGE_NBYTES


def test_a_slow_host_only_delays_a_call(finished: Finished) -> None:
    assert finished.all_gave("slow") == [LARGE_NBYTES // 16] * 4


def test_an_error_on_another_host_is_raised_on_every_rank(finished: Finished) -> None:
    for error in finished.all_gave("together"):
        assert isinstance(error, CollectiveError)
        assert error.failures.keys() == {3}
        assert error.failures[3].message == "no such shard"
    assert finished.all_gave("after") == [None] * 4


def _lost(error: object, peers: tuple[int, ...]) -> bool:
    """Return whether an error names the ranks of a lost host."""
    if not isinstance(error, TransportError) or isinstance(error, TransportTimeout):
        return False
    return error.peers == peers and HOST_LOST in str(error)


def test_a_lost_host_is_named_on_every_rank_that_waits(two: Finished) -> None:
    assert two.all_gave("waiting: before") == [[0, 1, 2, 3]] * 4
    for error in two.all_gave("waiting")[:2]:
        assert _lost(error, (2, 3)), error
    # There the store is also unreachable, so each error reports what its rank's own connections
    # show.
    for rank, error in enumerate(two.all_gave("waiting")[2:], 2):
        assert isinstance(error, TransportError)
        assert {0, 1} <= set(error.peers) <= {0, 1, 2, 3} - {rank}, error
        assert "store: no answer" in str(error)
    assert all(isinstance(each, BrokenGroupError) for each in two.all_gave("waiting: after"))


def test_an_outage_while_no_call_waits_does_no_harm(two: Finished) -> None:
    assert two.all_gave("idle: before") == [[0, 1, 2, 3]] * 4
    assert two.all_gave("idle") == [[0, 1, 2, 3]] * 4


def test_a_lost_host_is_named_while_the_awaited_rank_computes(two: Finished) -> None:
    """Rank 0 waits for rank 1 on the same host, which makes its call after rank 0 has raised."""
    assert two.all_gave("computing: before") == [[0, 1, 2, 3]] * 4
    for error in two.all_gave("computing")[:2]:
        assert _lost(error, (2, 3)), error


def test_a_host_that_is_lost_during_a_transfer_is_named(two: Finished) -> None:
    for error in two.all_gave("sending")[:2]:
        assert _lost(error, (2, 3)), error
    for error in two.all_gave("sending")[2:]:
        assert isinstance(error, TransportError)
        assert {0, 1} <= set(error.peers)


def test_a_network_that_is_back_soon_was_only_slow(two: Finished) -> None:
    assert two.all_gave("restored: before") == [[0, 1, 2, 3]] * 4
    assert two.all_gave("restored") == [True] * 4
    assert two.all_gave("restored: after") == [None] * 4


def test_before_the_first_use_a_time_limit_names_a_lost_host(two: Finished) -> None:
    for error in two.all_gave("first use"):
        assert isinstance(error, TransportTimeout)
        assert error.seconds == FIRST_USE_S
    for error in two.all_gave("first use")[:2]:
        assert error.missing == error.silent == (2, 3)
    for error in two.all_gave("first use")[2:]:
        assert error.missing == (0,)
        assert error.is_store_silent
    assert two.all_gave("first use: again") == [[0, 1, 2, 3]] * 4


def test_hosts_that_cannot_reach_each_other_are_named_on_all(four: Finished) -> None:
    assert four.all_gave("parted: before") == [[0, 1, 2, 3]] * 4
    errors = four.all_gave("parted")
    lost = 1 if _lost(errors[0], (1,)) else 2
    there = [error for rank, error in enumerate(errors) if rank != lost]
    assert all(_lost(error, (lost,)) for error in there), errors
    assert len({str(error) for error in there}) == 1
    assert _lost(errors[lost], tuple(rank for rank in range(4) if rank != lost))  # not itself
    assert all(isinstance(each, BrokenGroupError) for each in four.all_gave("parted: after"))
    assert four.all_gave("joined") == [[0, 1, 2, 3]] * 4


def test_a_refused_connection_is_reported_on_all_ranks(four: Finished) -> None:
    errors = four.all_gave("refused")
    assert all(isinstance(error, TransportError) for error in errors), errors
    assert [sorted(error.peers) for error in errors] == [[1, 2], [2], [1], [1, 2]]
    pair = f"ranks 1 and 2 (hosts {four.names[1]} and {four.names[2]}) can't connect to each other"
    assert all(f"{pair} (" in error.reason for error in errors), errors
    assert all(isinstance(each, BrokenGroupError) for each in four.all_gave("refused: after"))
    assert four.all_gave("allowed") == [[0, 1, 2, 3]] * 4


def test_two_ranks_whose_packets_are_dropped_are_named_on_all(four: Finished) -> None:
    errors = four.all_gave("dropped")
    pair = f"ranks 1 and 2 (hosts {four.names[1]} and {four.names[2]}) can't connect to each other"
    assert all(f"{pair} (no answer" in str(error) for error in errors), errors
    assert four.all_gave("carried") == [[0, 1, 2, 3]] * 4


def test_the_guides_commands_work(tmp_path: Path) -> None:
    """Runs in separate namespaces, so that those of the guide are visible nowhere else."""
    guide = Path(__file__).parents[1] / "docs" / "guide" / "multi-host.md"
    text = guide.read_text()
    (script,) = re.findall(r"^```bash \{hosts\}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (shown,) = re.findall(r"^```text\n(rank 0 of 4.*?)^```$", text, re.DOTALL | re.MULTILINE)
    with Hosts(1) as hosts:  # skips if namespaces are unavailable; a host can create its own
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        process = hosts[0].popen(
            ["sh", "-ec", "mount -t tmpfs none /run\n" + script],
            {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        printed, errors = process.communicate(timeout=DEADLINE_S)
    # torchrun's ranks write a line and its end separately, so two lines may be joined.
    lines = re.findall(r"rank \d of \d, \d on this host", printed)
    assert sorted(lines) == shown.splitlines(), errors


def test_a_launchers_variables_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "SLURM_PROCID", "OBJCOMM_TRANSPORT", "RANKING"):
        monkeypatch.setenv(name, "1")
    kept = environment_of_no_job()
    assert kept.pop("RANKING") == "1"
    assert not {"RANK", "MASTER_ADDR", "SLURM_PROCID", "OBJCOMM_TRANSPORT"} & kept.keys()


REACH = "import socket; print(socket.create_connection(('{}', {}), timeout={}) and 'reached')"


def test_hosts_reach_each_other_as_their_cables_and_rules_allow() -> None:
    """Check the hosts themselves: which reaches which."""

    def reached() -> list[tuple[int, int]]:
        pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
        tries = [
            hosts[a].popen(
                [sys.executable, "-c", REACH.format(hosts[b].name, _PORT, _REACH_S)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for a, b in pairs
        ]
        outputs = [each.communicate(timeout=300)[0] for each in tries]
        return [pair for pair, text in zip(pairs, outputs, strict=True) if text]

    everybody = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    server = f"import socket, time; s = socket.create_server(('', {_PORT})); time.sleep(600)"
    with Hosts(3, mbit=100) as hosts:
        for host in hosts:
            host.popen([sys.executable, "-c", server])
        wait_until(lambda: reached() == everybody, "all servers")
        hosts.part(1, 2)
        assert reached() == [(0, 1), (0, 2), (1, 0), (2, 0)]
        hosts.join(1, 2)
        hosts.unplug(0)
        assert reached() == [(1, 2), (2, 1)]
        hosts.plug_in(0)
        wait_until(lambda: reached() == everybody, "all cables")
        assert hosts[0].run("hostname").strip() == hosts[0].name != socket.gethostname()
        stays = ["setsid", "sh", "-c", "echo here && exec sleep 600"]
        ended = [host.popen(stays, stdout=subprocess.PIPE) for host in hosts]
        assert [each.stdout and each.stdout.readline() for each in ended] == [b"here\n"] * 3
    for each in ended:
        with each:
            assert each.wait(300) == -9
