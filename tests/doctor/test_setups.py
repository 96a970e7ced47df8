"""`python -m objcomm doctor` on working and broken setups, with real processes."""

import json
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.doctor.job import (
    DOCTOR,
    Agent,
    Said,
    arrived,
    by_command,
    findings,
    on_hosts,
    place,
    said,
    start,
)
from tests.hosts import Hosts, free_port
from tests.printed import without_look_ups
from tests.waits import PATIENCE_S, wait_until

pytestmark = pytest.mark.long

# A test with a missing rank takes as long as the first of these. Nothing else depends on it: ranks
# that are there have arrived before the limit starts, or are looked for at its end.
SHORT, LONG = "--timeout=2", "--timeout=600"

# Findings that are correct on a busy machine, or on one with little memory or a slow resolver.
OF_THE_MACHINE = {"slow-link", "late-link", "slow-names", "shared-memory", "open-files"}


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "doctor.json"


def is_there(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def test_alone_it_checks_this_host(written: Path) -> None:
    only = by_command([*DOCTOR, f"--json={written}"])
    assert set(findings(written)) <= OF_THE_MACHINE, only.out
    assert only.status == int(bool(findings(written)))
    assert only.out.startswith("objcomm doctor: rank 0 of 1 on 1 host, no launcher\n")
    assert not only.err


def assert_every_link_was_measured(written: Path, size: int) -> None:
    report = json.loads(written.read_text())
    links = {(link["src"], link["dst"]) for link in report["links"]}
    assert links == {(src, dst) for src in range(size) for dst in range(size) if src != dst}
    assert all(link["latency_seconds"] > 0 for link in report["links"])
    assert all(each["problem"] == "" for made in report["contacts"].values() for each in made)


def test_ranks_of_its_own_reach_one_another_and_measure_every_link(
    written: Path, tmp_path: Path
) -> None:
    png = tmp_path / "links.png"
    (only,) = said([start({}, "--nproc=2", LONG, f"--json={written}", f"--png={png}")])
    assert set(findings(written)) <= OF_THE_MACHINE, only.out
    assert_every_link_was_measured(written, 2)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "bandwidth, MB/s" in only.out


def test_ranks_that_a_launcher_has_started_meet_in_its_store(agent: Agent, written: Path) -> None:
    every = said([start(agent.place(rank, 3), LONG, f"--json={written}") for rank in range(3)])
    assert set(findings(written)) <= OF_THE_MACHINE, every[0].out
    assert "ranks 0-2 of 3 on 1 host" in every[0].out
    assert_every_link_was_measured(written, 3)


def torchrun(*arguments: str, **variables: str) -> Said:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    return by_command([*command, *DOCTOR[1:], LONG, *arguments], variables)


def test_under_torchrun_the_ranks_meet_in_its_store(written: Path) -> None:
    done = torchrun(f"--json={written}")
    assert set(findings(written)) <= OF_THE_MACHINE, done.out
    assert "ranks 0-1 of 2 on 1 host" in done.out
    assert_every_link_was_measured(written, 2)


def test_torchruns_own_report_ends_with_the_findings() -> None:
    done = torchrun(GLOO_SOCKET_IFNAME="nowhere0")
    assert done.status == 1
    assert "ERROR gloo-interface: ranks 0-1 on" in done.out
    cause = " ".join(done.err.partition("Root Cause")[2].split())  # torchrun wraps lines
    assert "Unable to find address for: nowhere0" in cause
    assert "-> set GLOO_SOCKET_IFNAME=" in cause or "-> unset GLOO_SOCKET_IFNAME" in cause


def test_a_wrong_interface_is_named(agent: Agent, written: Path) -> None:
    wrong = agent.place(1, 3, GLOO_SOCKET_IFNAME="nowhere0")
    places = [agent.place(0, 3), wrong, agent.place(2, 3)]
    every = said([start(each, LONG, f"--json={written}") for each in places])
    found = findings(written)
    assert found["gloo-interface"]["ranks"] == [1]
    assert "GLOO_SOCKET_IFNAME=nowhere0, but Gloo can't listen" in found["gloo-interface"]["what"]
    assert "GLOO_SOCKET_IFNAME" in found["gloo-interface"]["remedy"]
    assert [each.status for each in every] == [1, 1, 1]
    assert "unreachable" not in found  # the interface explains it


def test_the_ranks_with_a_wrong_port_or_name_report_it(written: Path) -> None:
    port, other = free_port(), 1  # nobody listens on it
    places = [place(0, 3, port), place(1, 3, other), place(2, 3, port, "nobody.invalid")]
    zero, one, two = said([start(each, SHORT, f"--json={written}") for each in places])
    assert findings(written)["missing-ranks"]["ranks"] == [1, 2]
    assert f"127.0.0.1:{other} can't be reached: connection refused" in one.err
    assert "MASTER_PORT is the same on every rank" in " ".join(one.err.split())
    assert f"nobody.invalid:{port} can't be reached: " in " ".join(two.err.split())
    assert "other host knows it by this MASTER_ADDR" in " ".join(two.err.split())
    assert [zero.status, one.status, two.status] == [1, 1, 1]
    assert not one.out
    assert not two.out


def test_one_rank_fewer_is_named(agent: Agent, written: Path) -> None:
    other = start(agent.place(1, 3), LONG)
    arrived(agent.store, 1)
    zero, one = said([start(agent.place(0, 3), SHORT, f"--json={written}"), other])
    assert findings(written)["missing-ranks"]["ranks"] == [2]
    assert "rank 2: did not arrive within 2 s; ranks 0-1 did" in zero.out
    assert [zero.status, one.status] == [1, 1]
    assert not without_look_ups(one.err)  # rank 0 has reported it


def test_without_rank_0_each_rank_speaks_for_itself(agent: Agent) -> None:
    (one,) = said([start(agent.place(1, 3), SHORT)])
    assert one.status == 1
    assert "rank 1 (pid" in one.err
    assert "ranks 0, 2: did not arrive within 2 s; rank 1 did" in one.err


def test_a_rank_that_exists_twice_is_found(agent: Agent, written: Path) -> None:
    others = [start(agent.place(1, 3), LONG) for _ in range(2)]
    arrived(agent.store, 2)
    zero, *_ = said([start(agent.place(0, 3), SHORT, f"--json={written}"), *others])
    found = findings(written)
    assert found["duplicate-rank"]["ranks"] == [1]
    assert all(f"pid {other.pid} on" in found["duplicate-rank"]["what"] for other in others)
    assert found["missing-ranks"]["ranks"] == [2]
    assert "another's rank" in found["missing-ranks"]["remedy"]
    assert zero.status == 1


def test_a_second_rank_0_finds_the_first_ones_port_and_is_named(written: Path) -> None:
    port = free_port()
    first = start(place(0, 2, port), LONG, f"--json={written}")
    wait_until(lambda: is_there(port), "rank 0's store")
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    arrived(store, 1)  # the first to arrive reports
    second = start(place(0, 2, port), LONG)
    arrived(store, 2)
    every = said([first, second, start(place(1, 2, port), LONG)])
    assert findings(written)["duplicate-rank"]["ranks"] == [0]
    assert [each.status for each in every] == [1, 1, 1]
    assert not every[1].out


def test_a_program_that_listens_and_is_silent_does_not_block_a_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        (one,) = said([start(place(1, 2, port), SHORT)])
    assert one.status == 1
    assert f"127.0.0.1:{port} accepts connections, but no doctor's" in " ".join(one.err.split())
    assert "set MASTER_PORT" in one.err


def test_another_jobs_store_is_recognized(agent: Agent) -> None:
    (zero,) = said([start(place(0, 2, agent.store.port), SHORT)])
    assert zero.status == 1
    assert "accepts connections, but no doctor's rank 0" in " ".join(zero.out.split())


def test_an_impossible_rank_is_rejected() -> None:
    (odd,) = said([start(place(2, 2, 29500), SHORT)])
    assert odd.status == 1
    assert "RANK=2 is not between 0 and WORLD_SIZE=2 - 1" in " ".join(odd.err.split())


def test_two_hosts_that_reach_the_first_but_not_each_other(written: Path) -> None:
    with Hosts(3) as hosts:
        hosts.part(1, 2)
        zero, *others = on_hosts(hosts, [{}, {}, {}], LONG, f"--json={written}")
        names = [hosts[1].name, hosts[2].name]
    found = findings(written)
    assert found["unreachable"]["ranks"] == [1, 2]
    assert found["unreachable"]["hosts"] == names
    assert "can't reach each other" in found["unreachable"]["what"]
    assert "reachability" in zero.out
    assert [each.status for each in (zero, *others)] == [1, 1, 1]


def test_a_network_that_loses_large_packets(written: Path) -> None:
    with Hosts(3) as hosts:
        for host in (hosts[1], hosts[2]):  # their switch ports have an MTU of 1500 bytes
            link = ("ip", "link", "set", "dev", host.interface)
            host.run(*link, "mtu", "9000", "gso_max_segs", "1", "gso_max_size", "2000")
        on_hosts(hosts, [{}, {}, {}], "--timeout=15", f"--json={written}")
    found = findings(written)["unreachable"]
    assert found["ranks"] == [1, 2]
    assert "small packets arrive and large ones are lost" in found["what"]


def test_a_host_that_listens_on_loopback_only(written: Path) -> None:
    with Hosts(2) as hosts:
        on_hosts(hosts, [{}, {"GLOO_SOCKET_IFNAME": "lo"}], LONG, f"--json={written}")
        interface = hosts[1].interface
    found = findings(written)
    assert found["gloo-loopback"]["ranks"] == [1]
    assert f"set GLOO_SOCKET_IFNAME={interface}" in found["gloo-loopback"]["remedy"]
    assert "unreachable" not in found


# A name server that receives queries and answers none.
_MUTE = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mute:
    mute.bind(("127.0.0.1", 53))
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_names_that_the_stores_host_waits_for_and_the_lines_that_help(written: Path) -> None:
    with (
        Hosts(2) as hosts,
        hosts[0].popen(
            [sys.executable, "-c", _MUTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as mute,
    ):
        assert mute.stdout is not None
        assert mute.stdout.readline() == b"ready\n"
        # Longer than most of the doctor's own waits; without it a lookup would take 10 s.
        slow = {"RES_OPTIONS": "timeout:3 attempts:2"}
        zero, one = on_hosts(hosts, [slow, slow], LONG, "--quick", f"--json={written}")
        found = findings(written)["slow-names"]
        lines = [f"::ffff:{host.address} {host.name}" for host in hosts]
        hosts[0].run("sh", "-c", f"printf '%s\\n' '{lines[0]}' '{lines[1]}' >> /etc/hosts")
        on_hosts(hosts, [{}, {}], LONG, "--quick", f"--json={written}")
    assert found["ranks"] == [0, 1]
    assert f"on {hosts[0].name} the name of ::ffff:" in found["what"]
    assert all(f"'{line}'" in found["remedy"] for line in lines)
    assert [zero.status, one.status] == [1, 1]
    assert "slow-names" not in findings(written)


@pytest.mark.timed
def test_a_slow_host_is_named_and_others_are_not(written: Path) -> None:
    with Hosts(
        3, mbit=200
    ) as hosts:  # the network cards are the bottleneck, whatever else runs here
        hosts.limit(2, 10)
        zero, *_ = on_hosts(hosts, [{}, {}, {}], LONG, f"--json={written}")
    slow = findings(written)["slow-link"]
    slow_pairs = [(0, 2), (2, 0), (1, 2), (2, 1)]
    assert slow["ranks"] == [2]
    assert all(f"rank {one} to rank {other} (" in slow["what"] for one, other in slow_pairs)
    report = json.loads(written.read_text())
    rates = {(each["src"], each["dst"]): each["nbytes_per_second"] for each in report["links"]}
    assert max(rates[0, 2], rates[2, 1]) < 20e6 / 8 < min(rates[0, 1], rates[1, 0])
    assert zero.status == 1


def test_rank_0_that_is_not_where_the_others_look_for_it(written: Path) -> None:
    with Hosts(2) as hosts:
        elsewhere = {"MASTER_ADDR": hosts[1].address}
        zero, one = on_hosts(hosts, [elsewhere, elsewhere], SHORT, f"--json={written}")
        address = hosts[0].address
    found = findings(written)
    assert "does not lead to rank 0's store on its own host" in found["rendezvous"]["what"]
    assert f"set MASTER_ADDR={address}" in found["rendezvous"]["remedy"]
    assert "can't be reached" in one.err
    assert [zero.status, one.status] == [1, 1]
