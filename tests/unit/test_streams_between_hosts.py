"""What only streams between hosts do: prove the sender, deliver before an end, call again."""

import errno
import itertools
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast
from unittest.mock import DEFAULT, Mock

import pytest
import torch

from objcomm._transport import connection
from objcomm._transport.doors import Endpoint
from objcomm._transport.frames import Kind
from objcomm._transport.link import HOST_LOST, LinkClosed, payload_tag
from objcomm._transport.streams import StreamLink
from objcomm.errors import WireError
from tests.unit.stream_links import (
    HEAD,
    LIMIT,
    TAG,
    arrives,
    behind_doors,
    both_call,
    doors_of,
    filled,
    frame,
    joined,
    room,
    tcp_pair,
)
from tests.waits import PATIENCE_S, wait_until

_HEAD_NBYTES = 60_000


def test_a_peer_that_has_not_proved_its_rank_gets_only_a_handshake() -> None:
    with behind_doors(across=True) as (link, _):
        impostor, end = tcp_pair()
        doors = doors_of(link)
        doors.call = lambda *_: (end, doors.handshake_to(1), "")
        with impostor:
            pending = link.send(filled(9), 1, HEAD), link.send(filled(1 << 20), 1, TAG)
            link.move()
            impostor.settimeout(PATIENCE_S)
            assert impostor.recv(1 << 16) == doors.handshake_to(1)
            impostor.sendall(bytes(doors.handshake_nbytes))
            for each in pending:
                with pytest.raises(LinkClosed, match="the wrong handshake"):
                    link.wait(each, LIMIT)
            with suppress(ConnectionResetError):
                assert impostor.recv(1) == b""


def test_messages_that_wait_for_a_proof_are_sent_after_it() -> None:
    with behind_doors(across=True) as links:
        arrives(links[0].send(filled(9), 1, HEAD), links, filled(9), HEAD)


@pytest.mark.parametrize("is_near", [False, True])
def test_only_ranks_of_this_host_may_use_its_unix_socket(*, is_near: bool) -> None:
    with behind_doors(across=not is_near) as links:
        doors = doors_of(links[0])
        endpoint = doors._endpoints[0]  # noqa: SLF001  # there is no public way
        family, door = socket.AF_UNIX, cast("Any", f"\0objcomm/{endpoint.name}")
        if is_near:
            family, door = socket.AF_INET, (endpoint.addresses[0], endpoint.port)
        with socket.socket(family) as stranger, suppress(ConnectionRefusedError):
            stranger.connect(door)
            assert doors.caller(stranger, doors.handshake_from(1)) is None


def test_sent_messages_are_delivered_before_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_DELIVERY_SECONDS", PATIENCE_S)
    with joined(across=True) as links, ThreadPoolExecutor(1) as thread:
        for each in (link._connections[1 - link.rank] for link in links):  # noqa: SLF001  # so small that bytes stay in transit
            each.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sent = [links[1].send(filled(_HEAD_NBYTES, each), 0, HEAD) for each in range(4)]
        links[0].wait(links[0].send(filled(60), 1, TAG), LIMIT)  # never read

        def wait_for_all() -> None:
            for each in sent:
                links[1].wait(each, LIMIT)

        waited = thread.submit(wait_for_all)
        wait_until(lambda: moved(links[0], waited.done), "all to be sent")
        ended = thread.submit(links[1].abort)
        for number in range(4):
            into = room(_HEAD_NBYTES)
            links[0].wait(links[0].recv(into, 1, HEAD), LIMIT)
            assert torch.equal(into, filled(_HEAD_NBYTES, number))
        ended.result(PATIENCE_S)


def moved(link: StreamLink, is_so: Any) -> bool:
    if not is_so():
        link.move()
    return bool(is_so())


def test_a_wait_ends_when_a_host_has_become_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    with joined(3, across=True) as (link, *_), ThreadPoolExecutor(1) as thread:
        waited = thread.submit(link.wait, link.recv(room(9), 1, TAG), LIMIT)
        wait_until(lambda: link._loop.leader_wait is not None, "it to sleep")  # noqa: SLF001  # no other sign
        silence = link._connections[1].silence  # noqa: SLF001  # as the kernel would report it
        monkeypatch.setattr(silence, "is_too_long", lambda: True)
        link.move()
        with pytest.raises(LinkClosed, match=HOST_LOST):
            waited.result(PATIENCE_S)
        assert link.is_out_of_reach(1)
        assert not link.is_out_of_reach(2)
        assert list(link.closed()) == [1]


@pytest.mark.parametrize("kind", [Kind.SHARE, Kind.HELD])
def test_no_memory_is_handed_over_between_hosts(kind: Kind) -> None:
    with joined(across=True) as (link, other):
        assert link.sharing_with(1) is None
        coming = link.recv(room(9), 1, TAG)
        other._connections[0].socket.sendall(frame(kind, nbytes=9))  # noqa: SLF001  # no link sends this
        with pytest.raises(LinkClosed, match="which objcomm never does"):
            link.wait(coming, LIMIT)


def test_a_message_arrives_though_the_other_stream_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks had called; their two streams end in any order."""
    with behind_doors(across=True) as links:
        both_call(links, monkeypatch)
        theirs = links[1]._connections[0]  # noqa: SLF001  # as if its process ended
        assert theirs.inlet is not None
        theirs.inlet.shutdown(socket.SHUT_RDWR)
        ours = links[0]._connections[1]  # noqa: SLF001  # as above
        into, late = room(1), links[0].recv(room(9), 1, payload_tag(0, 3))
        links[0].wait(links[0].recv(into, 1, TAG), LIMIT)
        wait_until(lambda: moved(links[0], lambda: ours.inlet is None), "one end to come")
        theirs.socket.settimeout(PATIENCE_S)
        theirs.socket.sendall(frame(Kind.MESSAGE, payload_tag(0, 3), 9) + b"the last!")
        theirs.socket.shutdown(socket.SHUT_RDWR)
        links[0].wait(late, LIMIT)
        with pytest.raises(LinkClosed):
            links[0].wait(links[0].recv(into, 1, TAG), LIMIT)
        assert links[0].closed_by() == [1]


def test_a_call_that_fails_in_an_outage_is_made_again() -> None:
    with behind_doors(across=True, lost_seconds=PATIENCE_S) as links:
        make_calls_fail(links[0], errno.ENETUNREACH, times=3)
        sent = links[0].send(filled(9), 1, TAG)
        assert not links[0].closed()
        wait_until(lambda: moved(links[0], lambda: not links[0]._connections[1].is_to_call), "it")  # noqa: SLF001  # nothing else shows it
        arrives(sent, links, filled(9))


def make_calls_fail(link: StreamLink, number: int, times: int) -> None:
    """Make a link's first calls fail."""
    doors = doors_of(link)
    call, left = doors.call, itertools.count(times, -1)

    def call_or_fail(peer: int, _: int = 0) -> Any:
        if next(left) > 0:
            raise OSError(number, "as the system says")  # a new one: a kept one would keep the link
        return call(peer)

    doors.call = call_or_fail


@pytest.mark.parametrize("is_over", [False, True])
def test_a_lasting_outage_is_a_lost_host(monkeypatch: pytest.MonkeyPatch, *, is_over: bool) -> None:
    def send(link: StreamLink) -> None:
        sent = link.send(filled(9), 1, TAG)  # raises if the time is already over
        wait_until(lambda: moved(link, lambda: link.is_out_of_reach(1)), "it to be lost")
        link.wait(sent, LIMIT)

    with behind_doors(across=True, lost_seconds=0.01) as (link, _):
        make_calls_fail(link, errno.EHOSTUNREACH, times=1_000_000)
        if is_over:
            monkeypatch.setattr(link._calling, "_is_given_up", lambda _: True)  # noqa: SLF001  # as if its clock said so
        with pytest.raises(LinkClosed, match=HOST_LOST):
            send(link)
        assert link.is_out_of_reach(1)


def connecting_to(address: Any, kind: type[socket.socket] = socket.socket) -> socket.socket:
    """Return a socket that has begun to connect."""
    end = kind()
    end.settimeout(0)
    end.connect_ex(address)
    return end


def test_a_call_that_is_not_answered_yields_to_a_call_of_the_other_rank() -> None:
    with (
        behind_doors(across=True) as links,
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
    ):
        address = full.getsockname()
        waiting = [connecting_to(address) for _ in range(3)]  # the system lets one or two wait
        doors = doors_of(links[0])
        doors.call = lambda peer, _=0: (connecting_to(address), doors.handshake_to(peer), "")
        arrives(links[0].send(filled(9), 1, TAG), links, filled(9))
        for each in waiting:
            each.close()


def test_a_stranger_that_resets_its_connection_is_sent_away() -> None:
    with behind_doors(across=True) as links:
        endpoint = doors_of(links[0])._endpoints[0]  # noqa: SLF001  # there is no public way
        for _ in range(3):
            stranger = socket.create_connection((endpoint.addresses[0], endpoint.port))
            stranger.sendall(b"a")  # otherwise it is not let in
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.close()
            links[0].move()
        arrives(links[1].send(filled(9), 0, TAG), links[::-1], filled(9))


class _Unreachable(socket.socket):
    """A call that the system gives up after a while."""

    def send(self, *_: Any) -> int:
        raise OSError(errno.EHOSTUNREACH, "as the system says")


def test_a_call_that_the_system_gives_up_is_made_again() -> None:
    """By then its socket reports an end, which does not come from the other rank."""
    with behind_doors(across=True, lost_seconds=PATIENCE_S) as links:
        doors = doors_of(links[0])
        end = connecting_to(("127.0.0.1", 1), _Unreachable)  # refused, so it reports an end
        outcomes = itertools.chain([(end, doors.handshake_to(1), "")], itertools.repeat(DEFAULT))
        doors.call = Mock(wraps=doors.call, side_effect=outcomes)
        sent = links[0].send(filled(9), 1, TAG)
        links[0].move()
        assert not links[0].closed()
        wait_until(lambda: moved(links[0], lambda: doors.call.call_count > 1), "another call")
        arrives(sent, links, filled(9))


@pytest.mark.parametrize(
    "addresses", [(), ("10.0.0.7",), ("fd00::7", "10.0.0.7", "169.254.1.2")], ids=str
)
@pytest.mark.parametrize("name", ["", "5e" * 16])
@pytest.mark.parametrize("lacks", ["", "no ports, 100 % of them / none", "größer"])
def test_an_endpoint_fits_into_one_word(name: str, addresses: tuple[str, ...], lacks: str) -> None:
    endpoint = Endpoint("auto", "host-7", name, 29500 if addresses else 0, lacks, addresses)
    assert Endpoint.of(endpoint.text()) == endpoint
    assert not set(endpoint.text()) & {" ", "/"}


_NAMED = f"auto,host,{'5e' * 16}"


@pytest.mark.parametrize(
    "sent",
    [
        *("", "-", "5e" * 16),
        *(f"{_NAMED},,", f"{_NAMED},29500,", f"{_NAMED},29500,,a.name"),
        *(f"{_NAMED},{port},,10.0.0.7" for port in (65536, -1, 0)),
        f"auto,host,{'5g' * 16},29500,,10.0.0.7",
        f"any,host,{'5e' * 16},29500,,10.0.0.7",
    ],
)
def test_an_endpoint_that_no_rank_sent_is_refused(sent: str) -> None:
    with pytest.raises(WireError, match="holds data that objcomm did not write"):
        Endpoint.of(sent)
