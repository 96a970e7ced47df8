"""Which interface Gloo and NCCL take: their rules on made-up hosts, and Gloo's on this one."""

import contextlib
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from objcomm._bootstrap.doctor.facts import Interface
from objcomm._bootstrap.doctor.host import (
    examine,
    gloo_choice,
    interface_of,
    interfaces,
    nccl_choice,
    own_address,
)
from tests.ranks import solo

LO = Interface("lo", ("127.0.0.1", "::1"))
ETH0 = Interface("eth0", ("10.0.0.1", "fd00::1"))
ETH1 = Interface("eth1", ("10.1.0.1",))
IB0 = Interface("ib0", ("10.2.0.1",))
DOCKER = Interface("docker0", ("172.17.0.1",))
DOWN = Interface("eth2", ("10.3.0.1",), is_up=False)
BARE = Interface("eth3")
NEW = Interface("eth4", ("fd00::4",))
HOST = (LO, DOCKER, ETH0, ETH1, DOWN, BARE, NEW)


@pytest.mark.parametrize(
    ("wanted", "interface", "address"),
    [
        ("eth1", "eth1", "10.1.0.1"),
        ("eth1,eth0", "eth1,eth0", "10.1.0.1"),
        ("eth4", "eth4", "fd00::4"),
        ("", "eth0", "10.0.0.1"),
        ("x", "eth0", "10.0.0.1"),  # torch takes no name of one letter for a name
    ],
)
def test_gloo_takes_what_it_is_told_or_the_hosts_own_address(
    wanted: str, interface: str, address: str
) -> None:
    found = gloo_choice({"GLOO_SOCKET_IFNAME": wanted}, HOST, "10.0.0.1")
    assert (found.interface, found.address, found.problem) == (interface, address, "")


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("eth9", "there is no interface 'eth9'"),
        ("eth0,eth9", "there is no interface 'eth9'"),
        ("eth2", "interface 'eth2' is down or has no cable"),
        ("eth3", "interface 'eth3' has no address"),
    ],
)
def test_gloo_cannot_take_every_interface(wanted: str, problem: str) -> None:
    assert gloo_choice({"GLOO_SOCKET_IFNAME": wanted}, HOST, "10.0.0.1").problem == problem


def test_gloo_falls_back_to_loopback() -> None:
    found = gloo_choice({}, HOST, "")
    assert (found.interface, found.address) == ("lo", "127.0.0.1")
    assert "no address of this host" in found.why


@pytest.mark.parametrize(
    ("environ", "there", "interface"),
    [
        ({}, (*HOST, IB0), "ib0"),
        ({}, HOST, "eth0,eth1,eth4"),
        ({}, (LO, DOCKER), "docker0"),
        ({}, (LO,), "lo"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, HOST, "eth0,eth1,eth4"),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, HOST, "eth1"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, HOST, ""),
        ({"NCCL_SOCKET_IFNAME": "^eth,lo"}, HOST, "docker0"),
        ({"NCCL_SOCKET_IFNAME": "^=eth0,lo"}, HOST, "docker0,eth1,eth4"),
        ({"NCCL_SOCKET_IFNAME": "eth2"}, HOST, ""),  # down
        ({"NCCL_SOCKET_FAMILY": "AF_INET6"}, HOST, "eth0,eth4"),
        ({"NCCL_SOCKET_FAMILY": "AF_INET"}, HOST, "eth0,eth1"),
    ],
)
def test_nccl_takes_prefixes(
    environ: Mapping[str, str], there: tuple[Interface, ...], interface: str
) -> None:
    found = nccl_choice(environ, there)
    assert found.interface == interface
    assert bool(found.problem) == (not interface)


def test_this_host_has_loopback_and_it_is_known_as_such() -> None:
    there = {each.name: each for each in interfaces()}
    assert there["lo"].is_loopback
    assert "127.0.0.1" in there["lo"].addresses
    assert interface_of("127.0.1.1", tuple(there.values())) == "lo"
    assert interface_of("203.0.113.7", tuple(there.values())) == ""


def test_every_address_is_one_that_this_host_has() -> None:
    own = {
        own_address(address)
        for each in interfaces()
        for address in each.addresses
        if not address.startswith("fe80")  # means nothing without its interface
    }
    assert own
    assert "" not in own


def listening_addresses() -> set[str]:
    """The IPv4 addresses at which this process listens."""
    mine = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one by which we look
            mine.add(str(entry.readlink()))
    found = set()
    for line in Path("/proc/self/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
            raw = bytes.fromhex(fields[1].partition(":")[0])
            found.add(".".join(map(str, reversed(raw))))
    return found


def check_gloo_listens_where_we_say() -> None:
    report, _ = examine(os.environ)
    assert not report.gloo.problem
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    assert listening_addresses() == {report.gloo.address}
    del group


@solo(environment={"GLOO_SOCKET_IFNAME": ""})
def test_gloo_listens_where_its_rule_says() -> None:
    check_gloo_listens_where_we_say()


@solo(environment={"GLOO_SOCKET_IFNAME": "lo"})
def test_gloo_listens_at_the_interface_that_it_is_told() -> None:
    check_gloo_listens_where_we_say()


@solo(environment={"GLOO_SOCKET_IFNAME": "nowhere0"})
def test_gloo_refuses_what_we_say_it_cannot_use() -> None:
    report, _ = examine(os.environ)
    assert report.gloo.problem
    with pytest.raises(RuntimeError, match="nowhere0"):
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
