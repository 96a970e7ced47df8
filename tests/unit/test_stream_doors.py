"""Joining over streams: ranks that reach each other's doors, together or late, and strangers."""

import errno
import gc
import math
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

from objcomm._transport.doors import Doors
from objcomm._transport.frames import Kind
from objcomm._transport.link import LinkClosed, LinkError, payload_tag
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


def test_a_rank_is_connected_to_those_with_whom_something_was_begun() -> None:
    with behind_doors(4) as links:
        gc.collect()  # links dropped by earlier tests; otherwise they may be collected in between
        before = open_files()
        for link in links:
            assert not link.closed()
            assert not link.has_lost_all()
            assert list(link.beside([link.rank])) == [
                each for each in range(4) if each != link.rank
            ]
        assert open_files() == before
        sent, rooms = filled(9), room(9)
        coming = links[2].recv(rooms, 0, TAG)
        links[0].wait(links[0].send(sent, 2, TAG), LIMIT)
        links[2].wait(coming, LIMIT)
        assert torch.equal(rooms, sent)
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
def test_two_ranks_that_call_each_other_at_once_are_joined(
    monkeypatch: pytest.MonkeyPatch,
    *,
    across: bool,
) -> None:
    with behind_doors(across=across) as links:
        both_call(links, monkeypatch)
        large, tag = filled(5 << 20, 3), payload_tag(0, 2)
        rooms = [room(5 << 20) for _ in links]
        coming = [link.recv(rooms[link.rank], 1 - link.rank, tag) for link in links]
        going = [link.send(large, 1 - link.rank, tag) for link in links]

        def finish(rank: int) -> None:
            links[rank].wait(coming[rank], LIMIT)
            links[rank].wait(going[rank], LIMIT)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(finish, range(2)))
        assert all(torch.equal(each, large) for each in rooms)
        for link in links:  # the first messages
            word = room(1)
            link.wait(link.recv(word, 1 - link.rank, TAG), LIMIT)
            assert word.item() == 1 - link.rank
            assert not link.closed()
        links[1].abort()
        wait_until(lambda: links[0].is_closed(1), "its end")
        assert links[0].closed_by() == [1]


@pytest.mark.parametrize("across", [False, True])
def test_what_a_rank_has_sent_before_its_end_arrives_though_both_had_called(
    monkeypatch: pytest.MonkeyPatch,
    *,
    across: bool,
) -> None:
    with behind_doors(across=across) as links:
        gc.collect()
        before = open_files()
        both_call(links, monkeypatch)
        for number in range(100):
            links[1].wait(links[1].send(filled(60, number), 0, payload_tag(0, 2)), LIMIT)
        links[1].abort()
        for number in range(100):
            word = room(60)
            links[0].wait(links[0].recv(word, 1, payload_tag(0, 2)), LIMIT)
            assert word[0] == number
        with pytest.raises(LinkClosed):
            links[0].wait(links[0].recv(room(1), 1, payload_tag(0, 3)), LIMIT)
        wait_until(lambda: open_files() <= before, "no socket more than before")


def test_what_a_rank_sends_before_it_ends_arrives_at_who_had_not_let_it_in() -> None:
    with behind_doors() as links:
        links[1].wait(links[1].send(filled(9), 0, TAG), LIMIT)
        links[1].abort()
        word = room(9)
        links[0].wait(links[0].recv(word, 1, TAG), LIMIT)
        assert torch.equal(word, filled(9))
        assert links[0].is_closed(1)


@pytest.mark.parametrize("said", ["nothing", "another rank's word", "no word"])
def test_strangers_at_the_door_are_sent_away(said: str) -> None:
    with behind_doors(3) as links:
        doors = doors_of(links[0])  # as if a stranger had found them
        words = {
            "nothing": b"",
            "another rank's word": doors.handshake_to(1),
            "no word": bytes(doors.handshake_nbytes),
        }
        address = f"\0objcomm/{doors._endpoints[0].name}"  # noqa: SLF001  # likewise
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(address)
            stranger.sendall(words[said] + frame(Kind.MESSAGE, nbytes=9) + bytes(9))
            if said == "nothing":
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
        word = room(1)
        links[1].wait(links[1].send(filled(1), 0, TAG), LIMIT)
        links[0].wait(links[0].recv(word, 1, TAG), LIMIT)


def test_who_answers_with_another_word_is_no_rank() -> None:
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
def test_a_door_where_too_many_wait_is_called_again(
    monkeypatch: pytest.MonkeyPatch, lost_seconds: float
) -> None:
    with behind_doors(lost_seconds=lost_seconds) as links:
        call, calls = Doors.call, []

        def crowded(doors: Doors, peer: int, way: int = 0) -> Any:
            calls.append(peer)
            if len(calls) < 3:
                raise BlockingIOError(errno.EAGAIN, "too many others")
            return call(doors, peer, way)

        monkeypatch.setattr(Doors, "call", crowded)
        sent = links[0].send(filled(9), 1, TAG)
        assert not links[0].closed()

        def is_called_again() -> bool:
            links[0].move()
            return len(calls) > 2

        wait_until(is_called_again, "another call")
        arrives(sent, links, filled(9))


def test_a_rank_without_descriptors_for_another_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with behind_doors() as links:
        full = OSError(errno.EMFILE, "Too many open files")
        monkeypatch.setattr(Doors, "call", mock.Mock(side_effect=full))
        with pytest.raises(LinkError, match="this process can't connect to it"):
            links[0].send(filled(1), 1, TAG)
