"""What only streams between hosts do: prove the sender, deliver before an end, call again."""

import errno
import itertools
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast

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


def test_nothing_but_a_word_goes_to_who_has_not_proved_who_it_is() -> None:
    with behind_doors(across=True) as links:
        impostor, end = tcp_pair()
        doors = doors_of(links[0])
        doors.call = lambda *_: (end, doors.handshake_to(1), "")
        with impostor:
            sent = links[0].send(filled(9), 1, HEAD)
            large = links[0].send(filled(1 << 20), 1, TAG)
            links[0].move()
            impostor.settimeout(PATIENCE_S)
            assert impostor.recv(1 << 16) == doors.handshake_to(1)
            impostor.sendall(bytes(doors.handshake_nbytes))
            for pending in (sent, large):
                with pytest.raises(LinkClosed, match="the wrong handshake"):
                    links[0].wait(pending, LIMIT)
            with suppress(ConnectionResetError):
                assert impostor.recv(1) == b""


def test_what_has_waited_for_a_proof_goes_out_then() -> None:
    with behind_doors(across=True) as links:
        arrives(links[0].send(filled(9), 1, HEAD), links, filled(9), HEAD)


@pytest.mark.parametrize("is_near", [False, True])
def test_a_rank_of_this_host_comes_by_a_unix_socket_and_one_of_another_does_not(
    *, is_near: bool
) -> None:
    with behind_doors(across=not is_near) as links:
        doors = doors_of(links[0])
        endpoint = doors._endpoints[0]  # noqa: SLF001  # there is no public way
        family, door = socket.AF_UNIX, cast("Any", f"\0objcomm/{endpoint.name}")
        if is_near:
            family, door = socket.AF_INET, (endpoint.addresses[0], endpoint.port)
        with socket.socket(family) as stranger, suppress(ConnectionRefusedError):
            stranger.connect(door)
            assert doors.caller(stranger, doors.handshake_from(1)) is None


def test_what_was_sent_is_delivered_before_an_end_though_something_lies_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
            word = room(_HEAD_NBYTES)
            links[0].wait(links[0].recv(word, 1, HEAD), LIMIT)
            assert torch.equal(word, filled(_HEAD_NBYTES, number))
        ended.result(PATIENCE_S)


def moved(link: StreamLink, is_so: Any) -> bool:
    if not is_so():
        link.move()
    return bool(is_so())


def test_who_waits_is_woken_where_a_host_has_become_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with joined(3, across=True) as links, ThreadPoolExecutor(1) as thread:
        coming = links[0].recv(room(9), 1, TAG)
        waited = thread.submit(links[0].wait, coming, LIMIT)
        wait_until(lambda: links[0]._loop.leader_wait is not None, "it to sleep")  # noqa: SLF001  # no other sign
        silence = links[0]._connections[1].silence  # noqa: SLF001  # as the kernel would report it
        assert silence is not None
        monkeypatch.setattr(silence, "is_too_long", lambda: True)
        links[0].move()
        with pytest.raises(LinkClosed, match=HOST_LOST):
            waited.result(PATIENCE_S)
        assert links[0].is_out_of_reach(1)
        assert not links[0].is_out_of_reach(2)
        assert list(links[0].closed()) == [1]


@pytest.mark.parametrize("kind", [Kind.SHARE, Kind.HELD])
def test_no_memory_is_handed_over_between_hosts(kind: Kind) -> None:
    with joined(across=True) as links:
        assert links[0].sharing_with(1) is None
        stranger = links[1]._connections[0].socket  # noqa: SLF001  # sends what no link sends
        coming = links[0].recv(room(9), 1, TAG)
        stranger.sendall(frame(kind, nbytes=9))
        with pytest.raises(LinkClosed, match="which objcomm never does"):
            links[0].wait(coming, LIMIT)


def test_what_is_on_its_way_arrives_though_the_other_stream_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ranks had called; their two streams end in any order."""
    with behind_doors(across=True) as links:
        both_call(links, monkeypatch)
        theirs = links[1]._connections[0]  # noqa: SLF001  # as if its process ended
        assert theirs.inlet is not None
        theirs.inlet.shutdown(socket.SHUT_RDWR)
        ours = links[0]._connections[1]  # noqa: SLF001  # as above
        word, late = room(1), links[0].recv(room(9), 1, payload_tag(0, 3))
        links[0].wait(links[0].recv(word, 1, TAG), LIMIT)
        wait_until(lambda: moved(links[0], lambda: ours.inlet is None), "one end to come")
        theirs.socket.settimeout(PATIENCE_S)
        theirs.socket.sendall(frame(Kind.MESSAGE, payload_tag(0, 3), 9) + b"the last!")
        theirs.socket.shutdown(socket.SHUT_RDWR)
        links[0].wait(late, LIMIT)
        with pytest.raises(LinkClosed):
            links[0].wait(links[0].recv(word, 1, TAG), LIMIT)
        assert links[0].closed_by() == [1]


def test_a_call_that_fails_by_an_outage_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with behind_doors(across=True, lost_seconds=PATIENCE_S) as links:
        failing(monkeypatch, links[0], errno.ENETUNREACH, times=3)
        sent = links[0].send(filled(9), 1, TAG)
        assert not links[0].closed()
        wait_until(lambda: moved(links[0], lambda: not links[0]._connections[1].is_to_call), "it")  # noqa: SLF001  # nothing else shows it
        arrives(sent, links, filled(9))


def failing(monkeypatch: pytest.MonkeyPatch, link: StreamLink, number: int, times: int) -> None:
    """Make a link's first calls fail."""
    doors = doors_of(link)
    call, left = doors.call, itertools.count(times, -1)

    def call_or_fail(peer: int, _: int = 0) -> Any:
        if next(left) > 0:
            raise OSError(number, "as the system says")  # a new one: a kept one would keep the link
        return call(peer)

    monkeypatch.setattr(doors, "call", call_or_fail)


@pytest.mark.parametrize("is_over_at_once", [False, True])
def test_an_outage_that_lasts_is_a_lost_host(
    monkeypatch: pytest.MonkeyPatch, *, is_over_at_once: bool
) -> None:
    def send(link: StreamLink) -> None:
        sent = link.send(filled(9), 1, TAG)  # raises if the time is already over
        wait_until(lambda: moved(link, lambda: link.is_out_of_reach(1)), "it to be lost")
        link.wait(sent, LIMIT)

    with behind_doors(across=True, lost_seconds=0.01) as links:
        failing(monkeypatch, links[0], errno.EHOSTUNREACH, times=1_000_000)
        if is_over_at_once:
            monkeypatch.setattr(links[0]._calling, "_is_given_up", lambda _: True)  # noqa: SLF001  # as if its clock said so
        with pytest.raises(LinkClosed, match=HOST_LOST):
            send(links[0])
        assert links[0].is_out_of_reach(1)


def test_a_call_that_does_not_get_through_gives_way_to_the_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        behind_doors(across=True) as links,
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
    ):
        fillers = [socket.socket() for _ in range(3)]  # the system lets one or two wait there
        for each in fillers:
            each.settimeout(0)
            each.connect_ex(full.getsockname())
        doors = doors_of(links[0])

        def call(peer: int, _: int = 0) -> Any:
            end = socket.socket()
            end.settimeout(0)
            end.connect_ex(full.getsockname())
            return end, doors.handshake_to(peer), ""

        monkeypatch.setattr(doors, "call", call)
        arrives(links[0].send(filled(9), 1, TAG), links, filled(9))
        for each in fillers:
            each.close()


def test_a_stranger_that_resets_its_connection_is_sent_away() -> None:
    with behind_doors(across=True) as links:
        doors = doors_of(links[0])
        for _ in range(3):
            endpoint = doors._endpoints[0]  # noqa: SLF001  # likewise
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


def test_a_call_that_the_system_gives_up_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then its socket reports an end, which does not come from the other rank."""
    with behind_doors(across=True, lost_seconds=PATIENCE_S) as links:
        doors = doors_of(links[0])
        call, calls = doors.call, []

        def call_in_vain(peer: int, _: int = 0) -> Any:
            calls.append(peer)
            if len(calls) > 1:
                return call(peer)
            end = _Unreachable()
            end.settimeout(0)
            end.connect_ex(("127.0.0.1", 1))  # refused, so it reports an end
            return end, doors.handshake_to(peer), ""

        monkeypatch.setattr(doors, "call", call_in_vain)
        sent = links[0].send(filled(9), 1, TAG)
        links[0].move()
        assert not links[0].closed()
        wait_until(lambda: moved(links[0], lambda: len(calls) > 1), "another call")
        arrives(sent, links, filled(9))


@pytest.mark.parametrize(
    "addresses", [(), ("10.0.0.7",), ("fd00::7", "10.0.0.7", "169.254.1.2")], ids=str
)
@pytest.mark.parametrize("name", ["", "5e" * 16])
@pytest.mark.parametrize("lacks", ["", "no ports, 100 % of them / none", "größer"])
def test_where_a_rank_can_be_reached_is_one_word(
    name: str, addresses: tuple[str, ...], lacks: str
) -> None:
    endpoint = Endpoint("auto", "host-7", name, 29500 if addresses else 0, lacks, addresses)
    assert Endpoint.of(endpoint.text()) == endpoint
    assert not set(endpoint.text()) & {" ", "/"}


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "-",
        "5e" * 16,
        f"auto,host,{'5e' * 16},,",
        f"auto,host,{'5e' * 16},65536,,10.0.0.7",
        f"auto,host,{'5e' * 16},-1,,10.0.0.7",
        f"auto,host,{'5e' * 16},29500,,a.name",
        f"auto,host,{'5e' * 16},29500,",
        f"auto,host,{'5e' * 16},0,,10.0.0.7",
        f"auto,host,{'5g' * 16},29500,,10.0.0.7",
        f"any,host,{'5e' * 16},29500,,10.0.0.7",
    ],
)
def test_an_endpoint_that_no_rank_sent_is_refused(sent: str) -> None:
    with pytest.raises(WireError, match="holds data that objcomm did not write"):
        Endpoint.of(sent)
