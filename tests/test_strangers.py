"""Ranks connect by streams while strangers flood them, and on unusual networks."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hosts import Host, Hosts
from tests.waits import PATIENCE_S

pytestmark = pytest.mark.long

_SIZE, _TURNS = 4, 8
# Outside the kernel's own range: flooding a port of torch's Gloo would end that process.
_PORTS = 20000, 20015
_LIMIT_S = 900.0  # only a hang takes this long


@contextmanager
def intruder(host: Host, *argv: str) -> Iterator[None]:
    """Run a stranger on that host while the block lasts."""
    process = host.popen(
        [sys.executable, "-m", "tests.intruder", *argv], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            pytest.skip("no other user here")
        yield
        assert process.poll() is None, "it has not stayed until the end"
    finally:
        with process:
            os.killpg(process.pid, signal.SIGKILL)


def work(
    hosts: Sequence[Host],
    folder: Path,
    at_once: int = 16,
    master: str = "",
    own_master: str = "",
) -> list[tuple[str, int]]:
    """Run ranks that create groups; return the transport and refused strangers of each group.

    Args:
        hosts: the hosts that the ranks run on.
        folder: where they write their results.
        at_once: how many ranks connect at the same time when they meet.
        master: the first host's address for the others, if it is not the default.
        own_master: the first host's address for itself, if it is not the default.
    """
    nodes = [f"--nnodes={len(hosts)}", f"--nproc-per-node={_SIZE // len(hosts)}"]
    masters = [own_master or hosts[0].address, *[master or hosts[0].address] * (len(hosts) - 1)]
    processes = [
        host.popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", *nodes, "--master-port=29500"),
                *(f"--master-addr={masters[number]}", f"--node-rank={number}"),
                *("-m", "tests.besieged"),
                *(str(folder), str(_TURNS), str(at_once)),
            ],
            {"OMP_NUM_THREADS": "1", "OBJCOMM_PORTS": "-".join(map(str, _PORTS))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, host in enumerate(hosts)
    ]
    printed = [process.communicate(timeout=_LIMIT_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(hosts), "\n".join(printed)
    # A failing test shows it, for example why ranks fell back to Gloo.
    sys.stdout.write("\n".join(printed))
    results = [json.loads(each.read_text()) for each in sorted(folder.glob("results.*"))]
    assert [len(each) for each in results] == [_TURNS] * _SIZE
    return [(kind, refused) for each in results for kind, refused in each]


@pytest.mark.parametrize("at_once", [16, 1])
def test_another_user_of_the_host_gets_nothing_and_forces_nothing(
    tmp_path: Path, at_once: int
) -> None:
    """Its connections must neither use up a rank's descriptors nor make ranks fall back to Gloo."""
    with Hosts(1) as hosts, intruder(hosts[0], "unix"):
        results = work(list(hosts), tmp_path, at_once)
    assert {kind for kind, _ in results} == {"Unix sockets"}
    assert sum(refused for _, refused in results) > 0


@pytest.mark.parametrize("at_once", [16, 1])
def test_another_hosts_process_gets_nothing_and_forces_nothing(
    tmp_path: Path, at_once: int
) -> None:
    with Hosts(3) as hosts:
        ranks = [hosts[0], hosts[1]]
        first, last = map(str, _PORTS)
        with (
            intruder(hosts[2], "tcp", ranks[0].address, first, last),
            intruder(hosts[2], "tcp", ranks[1].address, first, last),
        ):
            results = work(ranks, tmp_path, at_once)
    assert {kind for kind, _ in results} == {"Unix sockets and TCP"}
    assert sum(refused for _, refused in results) > 0


def test_the_first_hosts_ranks_may_know_the_store_as_localhost(tmp_path: Path) -> None:
    """No route leads from there to other networks either: its network cards reveal its address."""
    with Hosts(2) as hosts:
        results = work(list(hosts), tmp_path, own_master="127.0.0.1")
    assert {kind for kind, _ in results} == {"Unix sockets and TCP"}


def test_hosts_may_meet_over_ipv6(tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        for number, host in enumerate(hosts, 1):
            address = f"fd00::{number}/64"
            host.run("ip", "address", "add", address, "dev", host.interface, "nodad")
        results = work(list(hosts), tmp_path, master="fd00::1", own_master="::1")
    assert {kind for kind, _ in results} == {"Unix sockets and TCP"}


def test_cards_that_lead_nowhere_are_passed_over(tmp_path: Path) -> None:
    """Containers' cards, for example, have the same address on every host."""
    with Hosts(2) as hosts:
        for host in hosts:
            (address,) = host.run("hostname", "-i").split()
            host.run("ip", "address", "del", f"{address}/24", "dev", host.interface)
            host.run("ip", "address", "add", "172.17.0.1/16", "dev", host.interface)
            host.run("ip", "address", "add", f"{address}/24", "dev", host.interface)
        results = work(list(hosts), tmp_path, own_master="127.0.0.1")
    assert {kind for kind, _ in results} == {"Unix sockets and TCP"}


def test_the_intruder_reaches_listeners() -> None:
    """It finds a listener and its messages arrive: otherwise the tests above prove nothing."""
    listen = (
        "import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0objcomm/' + 'a' * 32); "
        "s.listen(99); print(*[len(s.accept()[0].recv(99)) for _ in range(20)])"
    )
    with Hosts(1) as hosts:
        door = hosts[0].popen([sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True)
        with intruder(hosts[0], "unix"):
            printed, _ = door.communicate(timeout=PATIENCE_S)
    assert {"0", "1", "36", "99"} <= set(printed.split()), printed
