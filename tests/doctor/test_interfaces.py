"""The interface that Gloo listens on, as Gloo itself reports it."""

import contextlib
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from objcomm._bootstrap.doctor.host import examine
from tests.ranks import solo


def test_this_host_has_loopback() -> None:
    report, _ = examine({})
    assert ("lo", "127.0.0.1") in report.interfaces
    assert report.interface_at("127.0.0.1") == "lo"
    assert report.interface_at("203.0.113.7") == ""  # in no network, RFC 5737


def listening_addresses() -> set[str]:
    """Return the IPv4 addresses on which this process listens."""
    mine = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            mine.add(str(entry.readlink()))
    found = set()
    for line in Path("/proc/self/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
            raw = bytes.fromhex(fields[1].partition(":")[0])
            found.add(".".join(map(str, reversed(raw))))
    return found


def check_gloo_listens_at_the_reported_address() -> None:
    report, _ = examine(os.environ)
    assert not report.gloo_problem
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    assert listening_addresses() == {report.address}
    del group
    assert listening_addresses() == set()  # the doctor leaves no listener either


@solo(environment={"GLOO_SOCKET_IFNAME": ""})
def test_gloo_listens_at_the_reported_address_by_default() -> None:
    check_gloo_listens_at_the_reported_address()


@solo(environment={"GLOO_SOCKET_IFNAME": "lo"})
def test_gloo_listens_at_the_interface_that_the_variable_names() -> None:
    check_gloo_listens_at_the_reported_address()


@solo(environment={"GLOO_SOCKET_IFNAME": "nowhere0"})
def test_gloo_refuses_an_interface_that_is_reported_as_unusable() -> None:
    report, _ = examine(os.environ)
    assert report.gloo_problem == "Unable to find address for: nowhere0"
    assert report.address == ""
    with pytest.raises(RuntimeError, match="nowhere0"):
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
