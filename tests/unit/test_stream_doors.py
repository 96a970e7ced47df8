"""Joining over streams: ranks that reach each other's doors, together or late, and strangers."""

import errno
import gc
import itertools
import math
import socket
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

from objcomm._transport.frames import Kind
from objcomm._transport.link import LinkClosed, LinkError, payload_tag
from objcomm._transport.streams import StreamLink
from tests.open_files import open_files
from tests.unit.stream_links import (
    LIMIT,
    TAG,
    arrives,
    behind_doors,
    both_call,
    doors_of,
    filled,
    frame,
    room,
)
from tests.waits import wait_until


def receives(link: StreamLink, peer: int, flat: torch.Tensor, tag: int = TAG) -> None:
    """Check that what the peer has sent is this."""
    into = torch.zeros_like(flat)
    link.wait(link.recv(into, peer, tag), LIMIT)
    assert torch.equal(into, flat)


def test_a_rank_is_connected_only_to_ranks_with_which_it_has_communicated() -> None:
    with behind_doors(4) as links:
        gc.collect()  # links dropped by earlier tests; otherwise they may be collected in between
        before = open_files()
        for link in links:
            assert not link.closed()
            assert not link.has_lost_all()
            others = [each for each in range(4) if each != link.rank]
            assert list(link.beside([link.rank])) == others
        assert open_files() == before
        sent = filled(9)
        links[0].wait(links[0].send(sent, 2, TAG), LIMIT)
        receives(links[2], 0, sent)
        assert open_files() == before + 2
        links[2].abort()
        wait_until(lambda: links[0].is_closed(2), "its end")
        assert list(links[0].closed()) == [2]
        assert not links[0].has_lost_all()  # two are unknown to it
        assert not links[1].has_lost_all()
        with pytest.raises(LinkClosed):
            links[1].send(sent, 2, TAG)  # the door of rank 2 is closed
        assert links[1].closed_by() == [2]


@pytest.mark.parametrize("across", [False, True])
def test_two_ranks_that_call_each_other_at_the_same_time_are_connected(
    monkeypatch: pytest.MonkeyPatch, *, across: bool
) -> None:
    with behind_doors(across=across) as links:
        both_call(links, monkeypatch)
        large, tag = filled(5 << 20, 3), payload_tag(0, 2)

        def exchange(link: StreamLink) -> None:
            going = link.send(large, 1 - link.rank, tag)
            receives(link, 1 - link.rank, large, tag)
            link.wait(going, LIMIT)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(exchange, links))
        for link in links:  # the first messages
            receives(link, 1 - link.rank, filled(1, 1 - link.rank))
            assert not link.closed()
        links[1].abort()
        wait_until(lambda: links[0].is_closed(1), "its end")
        assert links[0].closed_by() == [1]


@pytest.mark.parametrize("across", [False, True])
def test_messages_sent_before_an_end_arrive_though_both_ranks_had_called(
    monkeypatch: pytest.MonkeyPatch, *, across: bool
) -> None:
    with behind_doors(across=across) as links:
        gc.collect()
        before = open_files()
        both_call(links, monkeypatch)
        for number in range(100):
            links[1].wait(links[1].send(filled(60, number), 0, payload_tag(0, 2)), LIMIT)
        links[1].abort()
        for number in range(100):
            receives(links[0], 1, filled(60, number), payload_tag(0, 2))
        with pytest.raises(LinkClosed):
            links[0].wait(links[0].recv(room(1), 1, payload_tag(0, 3)), LIMIT)
        wait_until(lambda: open_files() <= before, "no socket more than before")


def test_messages_sent_before_an_end_arrive_though_the_sender_was_not_accepted_yet() -> None:
    with behind_doors() as links:
        links[1].wait(links[1].send(filled(9), 0, TAG), LIMIT)
        links[1].abort()
        receives(links[0], 1, filled(9))
        assert links[0].is_closed(1)


@pytest.mark.parametrize("handshake", ["none", "for another rank", "zeros"])
def test_strangers_at_the_door_are_sent_away(handshake: str) -> None:
    with behind_doors(3) as links:
        doors = doors_of(links[0])  # as if a stranger had found them
        said = {
            "none": b"",
            "for another rank": doors.handshake_to(1),
            "zeros": bytes(doors.handshake_nbytes),
        }[handshake]
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0objcomm/{doors._endpoints[0].name}")  # noqa: SLF001  # likewise
            stranger.sendall(said + frame(Kind.MESSAGE, nbytes=9) + bytes(9))
            if not said:
                stranger.shutdown(socket.SHUT_WR)

            def is_sent_away() -> bool:
                links[0].move()
                stranger.settimeout(0)
                try:
                    return not stranger.recv(1)
                except BlockingIOError:
                    return False
                except ConnectionResetError:  # its bytes were not all read
                    return True

            wait_until(is_sent_away, "it to be sent away")
        assert not links[0].closed()
        links[1].wait(links[1].send(filled(1), 0, TAG), LIMIT)
        receives(links[0], 1, filled(1))


def test_a_rank_that_answers_with_a_wrong_handshake_is_refused() -> None:
    with behind_doors() as links:
        impostor, end = socket.socketpair()
        doors = doors_of(links[0])
        doors.call = lambda *_: (end, b"", "")
        with impostor:
            coming = links[0].recv(room(1), 1, TAG)
            impostor.sendall(doors.handshake_from(1)[:20])
            links[0].move()
            assert not links[0].closed()
            impostor.sendall(bytes(doors.handshake_nbytes - 20))
            with pytest.raises(LinkClosed, match="the wrong handshake"):
                links[0].wait(coming, LIMIT)


@pytest.mark.parametrize("lost_seconds", [60.0, math.inf])
def test_a_crowded_door_is_called_again(lost_seconds: float) -> None:
    with behind_doors(lost_seconds=lost_seconds) as links:
        doors, crowded = doors_of(links[0]), BlockingIOError(errno.EAGAIN, "too many others")
        outcomes = itertools.chain([crowded] * 2, itertools.repeat(mock.DEFAULT))
        doors.call = mock.Mock(wraps=doors.call, side_effect=outcomes)
        sent = links[0].send(filled(9), 1, TAG)
        assert not links[0].closed()

        def is_called_again() -> bool:
            links[0].move()
            return bool(doors.call.call_count > 2)

        wait_until(is_called_again, "another call")
        arrives(sent, links, filled(9))


def test_a_rank_without_descriptors_for_another_says_so() -> None:
    with behind_doors() as (link, _):
        full = OSError(errno.EMFILE, "Too many open files")
        doors_of(link).call = mock.Mock(side_effect=full)
        with pytest.raises(LinkError, match="this process can't connect to it"):
            link.send(filled(1), 1, TAG)
