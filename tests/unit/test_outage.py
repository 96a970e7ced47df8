"""Which connections the kernel is set to give up, and when."""

import math
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from objcomm._transport.sockets import hang_up, is_outage, notice_outages, open_sockets, other_ends
from tests.unit.stream_links import tcp_pair

Pair = tuple[socket.socket, socket.socket]
Pairs = tuple[Pair, set[int], Pair]


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    """Yield a connection, all sockets that existed after it, and a later connection."""
    with ExitStack() as ends:
        old = tcp_pair()
        before = set(open_sockets())
        new = tcp_pair()
        for each in (*old, *new):
            ends.enter_context(each)
        yield old, before, new


def is_kept(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))


def given_up_after(end: socket.socket) -> int:
    return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_only_new_connections_get_a_limit(pairs: Pairs) -> None:
    old, before, new = pairs
    notice_outages(before, 30)
    for end in new:
        assert is_kept(end)
        assert given_up_after(end) == 30_000
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 8
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 8
    assert not any(is_kept(end) or given_up_after(end) for end in old)
    new[0].sendall(b"open")  # looking at the socket has not closed it
    assert new[1].recv(4) == b"open"


def test_the_limit_can_be_for_connections_to_one_port(pairs: Pairs) -> None:
    _, before, (near, far) = pairs
    notice_outages(before, 30, near.getpeername()[1])
    assert is_kept(near)
    assert not is_kept(far)


@pytest.mark.parametrize(
    ("seconds", "milliseconds"), [(0.0001, 1), (1e9, 2_000_000_000), (math.inf, 0)]
)
def test_any_limit_is_converted_to_what_the_kernel_accepts(
    pairs: Pairs, seconds: float, milliseconds: int
) -> None:
    _, before, new = pairs
    notice_outages(before, seconds)
    assert [given_up_after(end) for end in new] == [milliseconds] * 2
    assert [is_kept(end) for end in new] == [milliseconds > 0] * 2


def test_sockets_of_other_kinds_are_left_alone() -> None:
    before = set(open_sockets())
    with (
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(type=socket.SOCK_DGRAM) as datagrams,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        assert len(set(open_sockets()) - before) == 3
        notice_outages(before, 30)
        assert not any(map(is_kept, (local, datagrams, server)))


def test_a_descriptor_that_is_not_a_socket_is_not_listed() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w"):
        assert not {reading, writing} & set(open_sockets().values())


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("Read error [10.77.0.2]:58033: Connection timed out", True),
        ("writev [10.77.0.2]:65240: No route to host", True),
        ("Connection closed by peer [10.77.0.2]:33950", False),
        ("Application timeout caused pair closure", False),
        ("Timed out waiting 2000ms for recv operation to complete", False),
    ],
)
def test_an_outage_is_recognized_by_its_text(text: str, *, is_one: bool) -> None:
    assert is_outage(text) is is_one


def test_the_other_ends_of_new_connections_to_a_port_are_found(pairs: Pairs) -> None:
    old, before, new = pairs
    port = new[1].getsockname()[1]
    assert other_ends(before, port) == {("127.0.0.1", port)}
    assert other_ends(before, old[1].getsockname()[1]) == set()
    assert other_ends(set(), old[1].getsockname()[1]) == {old[1].getsockname()}


def test_a_receive_on_a_connection_that_was_hung_up_ends(pairs: Pairs) -> None:
    old, _, new = pairs
    new[0].settimeout(30)
    hang_up({new[1].getsockname()})
    assert new[0].recv(1) == b""
    assert new[1].recv(1) == b""
    old[0].sendall(b"open")
    assert old[1].recv(4) == b"open"
