"""Where a rank listens, which addresses and ports it announces, and which callers it accepts."""

import errno
import os
import select
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest

from objcomm._transport import doors
from objcomm._transport.doors import Door, Handshakes, OtherKeyError, own_addresses
from tests.hosts import free_port
from tests.waits import wait_until

_STORE_PORT = 29500
_SESSION = "5e" * 32


@pytest.mark.parametrize(
    ("variable", "towards", "announced"),
    [
        ("", set(), ["10.0.0.7", "192.168.4.1", "fd00::7", "169.254.1.2"]),
        ("", {"192.168.4.1"}, ["192.168.4.1", "10.0.0.7", "fd00::7", "169.254.1.2"]),
        ("", {"127.0.0.1"}, ["10.0.0.7", "192.168.4.1", "fd00::7", "169.254.1.2"]),
        ("eth1", {"10.0.0.7"}, ["192.168.4.1"]),
        ("ib0", set(), ["169.254.1.2"]),
        ("lo", set(), ["127.0.0.1"]),
        ("eth9", set(), []),
    ],
)
def test_a_host_announces_the_addresses_that_lead_to_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, towards: set[str], announced: list[str]
) -> None:
    interfaces = {
        "lo": ["127.0.0.1", "::1"],
        "eth0": ["10.0.0.7", "fd00::7", "fe80::7"],
        "ib0": ["169.254.1.2", "fe80::8"],
        "eth1": ["192.168.4.1"],
    }
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", variable)
    monkeypatch.setattr(doors, "interface_addresses", lambda: interfaces)
    monkeypatch.setattr(doors, "addresses_towards", lambda _: towards)
    assert own_addresses(_STORE_PORT) == announced


def test_a_machine_without_a_card_announces_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(doors, "interface_addresses", lambda: {"lo": ["127.0.0.1", "::1"]})
    monkeypatch.setattr(doors, "addresses_towards", lambda _: {"127.0.0.1"})
    assert own_addresses(_STORE_PORT) == ["127.0.0.1"]


def _opened(addresses: Sequence[str] = ("127.0.0.1",), ports: range = range(0)) -> Door:
    return Door.opened("auto", addresses, ports)


def _is_called(door: Door) -> bool:
    """Return whether a caller has introduced itself, and can be accepted."""
    watched = select.poll()
    watched.register(door.listeners[1], select.POLLIN)
    return bool(watched.poll(60e3))


def _is_heard_at(door: Door, address: str) -> bool:
    """Return whether a caller that introduces itself there can be accepted."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as end:
        if end.connect_ex((address, door.endpoint.port)):
            return False
        end.send(b"!")
        if not _is_called(door):
            return False
        door.listeners[1].accept()[0].close()
        return True


def test_a_door_with_one_address_is_open_only_there() -> None:
    with _opened() as door:
        assert door.listeners[1].getsockname()[0] == "127.0.0.1"
        assert not _is_heard_at(door, "127.0.0.2")


@pytest.mark.parametrize("addresses", [("127.0.0.1", "127.0.0.2"), ("127.0.0.1", "::1")], ids=str)
def test_a_door_is_open_at_all_of_its_addresses(addresses: tuple[str, ...]) -> None:
    with _opened(addresses) as door:
        assert door.endpoint.addresses == addresses
        assert all(_is_heard_at(door, each) for each in addresses)


def test_each_door_gets_a_port_of_the_range_and_one_more_reports_that_none_is_free() -> None:
    first = free_port()
    ports = range(first, first + 2)
    with ExitStack() as opened:
        endpoints = [opened.enter_context(_opened(ports=ports)).endpoint for _ in range(3)]
    *others, endpoint = endpoints
    assert sorted(each.port for each in others) == list(ports)
    assert endpoint.port == 0
    assert endpoint.lacks == f"none of the ports {first}-{first + 1} is free (OBJCOMM_PORTS)"
    assert endpoint.transport == "streams"  # so that no rank falls back to Gloo


def test_a_port_can_be_used_again_though_its_connections_have_not_ended() -> None:
    port = free_port()
    with ExitStack() as ends:
        with _opened(ports=range(port, port + 1)) as door:
            caller = ends.enter_context(socket.create_connection(("127.0.0.1", port)))
            caller.send(b"!")
            assert _is_called(door)
            ends.enter_context(door.listeners[1].accept()[0])
        with _opened(ports=range(port, port + 1)) as again:
            assert again.endpoint.port == port


@pytest.mark.parametrize(
    ("error", "transport"),
    [(errno.EMFILE, "streams"), (errno.ENOBUFS, "streams"), (errno.EPERM, "auto")],
)
def test_a_process_without_resources_does_not_fall_back_to_another_transport(
    monkeypatch: pytest.MonkeyPatch, error: int, transport: str
) -> None:
    refusal = OSError(error, os.strerror(error))
    monkeypatch.setattr(doors, "_listener", mock.Mock(side_effect=refusal))
    with _opened() as door:
        assert door.endpoint.transport == transport
        assert door.endpoint.lacks == os.strerror(error)


def test_a_rank_that_chose_gloo_opens_no_door() -> None:
    with Door.opened("gloo", ["127.0.0.1"]) as door:
        assert not door.listeners
        assert not door.endpoint.lacks


def _doors(door: Door, rank: int, *options: Any) -> doors.Doors:
    """What one of two ranks of this host knows, both of which have this door."""
    endpoints, handshakes = dict.fromkeys(range(2), door.endpoint), Handshakes(_SESSION, None)
    return doors.Doors(door, endpoints, {0: 0, 1: 0}, rank, handshakes, *options)


def test_a_process_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    with _opened() as door:
        ours = _doors(door, 0, refused.append)
        end = _doors(door, 1).call(0).socket
        with end, monkeypatch.context() as patch:
            patch.setattr(doors, "_uid_of", lambda _: os.geteuid() + 1)
            assert not list(ours.accept(ours.listeners[0]))
            end.settimeout(60.0)
            with pytest.raises(ConnectionResetError):  # its handshake was never read
                end.recv(1)
        assert refused == [f"a process of user {os.geteuid() + 1}"]


def test_a_handshake_proves_the_session_and_the_key() -> None:
    ours, without = Handshakes(_SESSION, b"a secret"), Handshakes(_SESSION, None)
    assert len(ours.of(1, 0)) == Handshakes.nbytes
    assert ours.check(Handshakes(_SESSION, b"a secret").of(1, 0), 1, 0)
    assert not ours.check(ours.of(0, 1), 1, 0)
    assert not ours.check(Handshakes("5f" * 32, b"a secret").of(1, 0), 1, 0)
    assert not ours.check(bytes(Handshakes.nbytes), 1, 0)
    assert not ours.check(ours.of(1, 0, "10.0.0.7 29500"), 1, 0, "10.0.0.8 29500")
    assert not ours.check(without.of(1, 0, "10.0.0.7 29500"), 1, 0, "10.0.0.8 29500")
    for other in (without, Handshakes(_SESSION, b"another")):
        with pytest.raises(OtherKeyError) as caught:
            ours.check(other.of(1, 0), 1, 0)
        assert caught.value.peer == 1


@pytest.mark.parametrize(
    ("own", "theirs", "ways"),
    [
        (("10.0.0.7", "172.17.0.1"), ("172.17.0.1", "10.0.0.8"), 1),
        (("10.0.0.7",), ("172.17.0.1", "10.0.0.8"), 2),
        (("10.0.0.7",), ("10.0.0.7",), 1),
    ],
)
def test_an_address_of_this_host_does_not_lead_to_another_one(
    monkeypatch: pytest.MonkeyPatch, own: tuple[str, ...], theirs: tuple[str, ...], ways: int
) -> None:
    """Any process of this host may listen there, but ranks on one machine may have no other one."""
    monkeypatch.setattr(doors, "interface_addresses", lambda: {"eth0": list(own)})
    with _opened() as door:
        other = door.endpoint._replace(addresses=theirs, port=free_port())
        endpoints, handshakes = {0: door.endpoint, 1: other}, Handshakes(_SESSION, None)
        found = doors.Doors(door, endpoints, {0: 0, 1: 1}, 0, handshakes)
        assert found.ways_to(1) == ways
        if own != theirs and ways == 1:
            assert found._ways[1] == ["10.0.0.8"]  # noqa: SLF001  # no network here could show it


def test_a_full_backlog_is_reported_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a caller would wait in the kernel while others occupy the backlog."""
    monkeypatch.setattr(socket, "SOMAXCONN", 1)
    with _opened() as door, ExitStack() as ends:
        caller = _doors(door, 1)

        def is_full() -> bool:
            try:
                ends.enter_context(caller.call(0).socket)
            except BlockingIOError:
                return True
            return False

        wait_until(is_full, "a full backlog")
