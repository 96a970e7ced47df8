"""The name by which ranks know that they share a host."""

import ctypes
import os
from pathlib import Path

import pytest

from objcomm._environment import machine
from tests.ranks import solo

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


def test_without_proc_the_network_card_tells_hosts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("/proc")

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr("socket.gethostname", lambda: "host")
    names = set()
    for node in (0x0242AC110002, 0x0242AC110003):
        monkeypatch.setattr("uuid.getnode", lambda node=node: node)
        names.add(machine())
    assert len(names) == 2


def test_an_invented_number_of_a_card_tells_no_hosts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise PermissionError("/proc")

    monkeypatch.setattr(Path, "read_text", missing)
    names = set()
    for node in (0x0342AC110002, 0xFFEEAC110003):  # each process invents its own
        monkeypatch.setattr("uuid.getnode", lambda node=node: node)
        names.add(machine())
    assert len(names) == 1
