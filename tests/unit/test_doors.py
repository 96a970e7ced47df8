"""Where a rank listens, which addresses and ports it announces, and whom it lets in."""

import errno
import os
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from objcomm._transport import doors
from objcomm._transport.doors import Door, Handshakes, OtherKeyError, own_addresses
from tests.hosts import free_port
from tests.waits import wait_until

_STORE_PORT = 29500
_SESSION = "5e" * 32


@pytest.mark.parametrize(
    ("variable", "towards", "told"),
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
def test_a_host_tells_the_addresses_that_lead_to_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, towards: set[str], told: list[str]
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
    assert own_addresses(_STORE_PORT) == told


def test_a_machine_without_a_card_tells_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(doors, "interface_addresses", lambda: {"lo": ["127.0.0.1", "::1"]})
    monkeypatch.setattr(doors, "addresses_towards", lambda _: {"127.0.0.1"})
    assert own_addresses(_STORE_PORT) == ["127.0.0.1"]


@contextmanager
def _opened(*addresses: str, ports: range = range(0)) -> Iterator[Door]:
    with Door.opened("auto", addresses, ports) as door:
        yield door


def _is_heard_at(door: Door, address: str) -> bool:
    """Return whether a caller that introduces itself there can be let in."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as end:
        if end.connect_ex((address, door.endpoint.port)):
            return False
        end.send(b"!")
        watched = select.poll()
        watched.register(door.listeners[1], select.POLLIN)
        if not watched.poll(60e3):
            return False
        door.listeners[1].accept()[0].close()
        return True


def test_a_door_with_one_address_is_open_there_alone() -> None:
    with _opened("127.0.0.1") as door:
        assert door.listeners[1].getsockname()[0] == "127.0.0.1"
        assert not _is_heard_at(door, "127.0.0.2")


@pytest.mark.parametrize("addresses", [("127.0.0.1", "127.0.0.2"), ("127.0.0.1", "::1")], ids=str)
def test_a_door_is_open_at_all_of_its_addresses(addresses: tuple[str, ...]) -> None:
    with _opened(*addresses) as door:
        assert door.endpoint.addresses == addresses
        assert all(_is_heard_at(door, each) for each in addresses)


def test_each_door_has_a_port_of_the_range_and_one_more_says_that_none_is_free() -> None:
    first = free_port()
    ports = range(first, first + 2)
    with ExitStack() as opened:
        endpoints = [
            opened.enter_context(_opened("127.0.0.1", ports=ports)).endpoint for _ in ports
        ]
        assert sorted(each.port for each in endpoints) == list(ports)
        endpoint = opened.enter_context(_opened("127.0.0.1", ports=ports)).endpoint
    assert endpoint.port == 0
    assert endpoint.lacks == f"none of the ports {first}-{first + 1} is free (OBJCOMM_PORTS)"
    assert endpoint.transport == "streams"  # so that no rank falls back to Gloo


def test_a_port_can_be_used_again_though_its_connections_have_not_ended() -> None:
    port = free_port()
    with ExitStack() as ends:
        with _opened("127.0.0.1", ports=range(port, port + 1)) as door:
            caller = ends.enter_context(socket.create_connection(("127.0.0.1", port)))
            caller.send(b"!")
            watched = select.poll()
            watched.register(door.listeners[1], select.POLLIN)
            assert watched.poll(60e3)
            ends.enter_context(door.listeners[1].accept()[0])
        with _opened("127.0.0.1", ports=range(port, port + 1)) as again:
            assert again.endpoint.port == port


@pytest.mark.parametrize(
    ("error", "transport"),
    [(errno.EMFILE, "streams"), (errno.ENOBUFS, "streams"), (errno.EPERM, "auto")],
)
def test_a_process_without_room_is_no_reason_for_another_transport(
    monkeypatch: pytest.MonkeyPatch, error: int, transport: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(doors, "_listener", refuse)
    with _opened("127.0.0.1") as door:
        assert door.endpoint.transport == transport
        assert door.endpoint.lacks == os.strerror(error)


def test_a_rank_that_chose_gloo_opens_no_door() -> None:
    with Door.opened("gloo", ["127.0.0.1"]) as door:
        assert not door.listeners
        assert not door.endpoint.lacks


def test_another_users_process_is_sent_away_before_it_says_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[str] = []
    with _opened("127.0.0.1") as door:
        handshakes = Handshakes(_SESSION, None)
        endpoints = {0: door.endpoint, 1: door.endpoint}
        ours = doors.Doors(door, endpoints, {0: 0, 1: 0}, 0, handshakes, refused.append)
        end = doors.Doors(door, endpoints, {0: 0, 1: 0}, 1, handshakes).call(0).socket
        with end, monkeypatch.context() as patch:
            patch.setattr(doors, "_uid_of", lambda _: os.geteuid() + 1)
            assert not list(ours.accept(ours.listeners[0]))
            end.settimeout(60.0)
            with pytest.raises(ConnectionResetError):  # its handshake was never read
                end.recv(1)
        assert refused == [f"a process of user {os.geteuid() + 1}"]


def test_a_word_proves_the_session_and_the_key() -> None:
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
def test_an_address_of_the_own_host_is_no_way_to_another_one(
    monkeypatch: pytest.MonkeyPatch, own: tuple[str, ...], theirs: tuple[str, ...], ways: int
) -> None:
    """Any process of this host may listen there, but ranks on one machine may have no other one."""
    monkeypatch.setattr(doors, "interface_addresses", lambda: {"eth0": list(own)})
    with _opened("127.0.0.1") as door:
        endpoints = {
            0: door.endpoint,
            1: door.endpoint._replace(addresses=theirs, port=free_port()),
        }
        found = doors.Doors(door, endpoints, {0: 0, 1: 1}, 0, Handshakes(_SESSION, None))
        assert found.ways_to(1) == ways
        if own != theirs and ways == 1:
            assert found._ways[1] == ["10.0.0.8"]  # noqa: SLF001  # no network here could show it


def test_a_door_where_too_many_wait_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a caller would wait in the kernel while strangers occupy the backlog."""
    monkeypatch.setattr(socket, "SOMAXCONN", 1)
    with Door.opened("auto", ["127.0.0.1"]) as door, ExitStack() as ends:
        handshakes, endpoints = Handshakes(_SESSION, None), {0: door.endpoint, 1: door.endpoint}
        caller = doors.Doors(door, endpoints, {0: 0, 1: 0}, 1, handshakes)

        def is_full() -> bool:
            try:
                ends.enter_context(caller.call(0).socket)
            except BlockingIOError:
                return True
            return False

        wait_until(is_full, "a full backlog")
