"""The link over streams between threads of this process, and against a peer that is none."""

import errno
import fcntl
import gc
import math
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, cast
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objcomm._transport.doors import Door, Doors
from objcomm._transport.link import LinkClosed, LinkError, LinkTimeout, head_tag, payload_tag
from objcomm._transport.rendezvous import MeetingState
from objcomm._transport.share import Share, places
from objcomm._transport.streams import (
    AHEAD_MAX,
    LENT_FILES_MAX,
    UNASKED_MAX_NBYTES,
    Kind,
    StreamLink,
)
from tests.contracts import check_link
from tests.open_files import open_files
from tests.scripts import run_python
from tests.waits import wait_until

_LIMIT = timedelta(seconds=60)
_SOON = timedelta(milliseconds=50)
_HEADER = struct.Struct("<IIQQ")
_TAG = payload_tag(0, 1)
_HEAD = head_tag(3)


@contextmanager
def joined(size: int = 2, *, across: bool = False) -> Iterator[list[StreamLink]]:
    """Links of as many ranks, all in this process; as if each had a host of its own, or not."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for rank in range(size):
        for peer in range(rank):
            sockets[rank][peer], sockets[peer][rank] = tcp_pair() if across else socket.socketpair()
    hosts = {rank: rank * across for rank in range(size)}
    links = [
        StreamLink(rank, dict(sorted(each.items())), hosts) for rank, each in enumerate(sockets)
    ]
    try:
        yield links
    finally:
        for each in links:
            each.abort()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection as between hosts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@contextmanager
def behind_doors(
    size: int = 2, *, across: bool = False, lost_seconds: float = math.inf
) -> Iterator[list[StreamLink]]:
    """The same, of which none are connected yet."""
    opened = [Door.opened(size, "127.0.0.1") for _ in range(size)]
    doors = {rank: door for rank, door in enumerate(opened) if door is not None}
    places = {rank: door.place for rank, door in doors.items()}
    hosts = {rank: rank * across for rank in doors}
    progress = MeetingState(0, tuple(doors))
    progress.session = "5e" * 32
    links = []
    for rank, door in doors.items():
        theirs = Doors(door, places, hosts, rank, progress)
        links.append(
            StreamLink(
                rank, {}, hosts, doors=theirs, listeners=door.listeners, lost_seconds=lost_seconds
            )
        )
    try:
        yield links
    finally:
        for each in links:
            each.abort()


@contextmanager
def facing() -> Iterator[tuple[StreamLink, socket.socket]]:
    """Rank 0's link, and the other end of its one stream."""
    mine, other = socket.socketpair()
    link = StreamLink(0, {1: mine})
    with other:
        yield link, other
    link.abort()


def room(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def filled(nbytes: int, value: int = 7) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def frame(kind: int, tag: int = _TAG, nbytes: int = 0, number: int = 0) -> bytes:
    return _HEADER.pack(kind, tag, nbytes, number)


def check_links(*groups: Sequence[StreamLink]) -> None:
    """Hold links between three threads to their contract, which uses up several groups of them."""
    links = list(zip(*groups, strict=True))

    def check(rank: int) -> None:
        left = list(links[rank])
        check_link(lambda _: left.pop(0), rank, 3)

    with ThreadPoolExecutor(3) as ranks:
        for each in [ranks.submit(check, rank) for rank in range(3)]:
            each.result()


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("make", [joined, behind_doors])
def test_threads_keep_the_contract_of_links(
    make: Callable[..., AbstractContextManager[list[StreamLink]]], *, across: bool
) -> None:
    with ExitStack() as stack:
        check_links(*(stack.enter_context(make(3, across=across)) for _ in range(3)))


def test_a_rank_is_connected_to_those_with_whom_something_was_begun() -> None:
    with behind_doors(4) as links:
        before = open_files()
        for link in links:
            assert not link.closed()
            assert not link.has_lost_all()
            assert list(link.beside([link.rank])) == [
                each for each in range(4) if each != link.rank
            ]
        assert open_files() == before
        sent, rooms = filled(9), room(9)
        coming = links[2].recv(rooms, 0, _TAG)
        links[0].wait(links[0].send(sent, 2, _TAG), _LIMIT)
        links[2].wait(coming, _LIMIT)
        assert torch.equal(rooms, sent)
        assert open_files() == before + 2
        links[2].abort()
        wait_until(lambda: links[0].is_closed(2), "its end")
        assert list(links[0].closed()) == [2]
        assert not links[0].has_lost_all()  # two it does not know
        assert not links[1].has_lost_all()
        with pytest.raises(LinkClosed):
            links[1].send(sent, 2, _TAG)  # its door is closed
        assert links[1].closed_by() == [2]


def both_call(links: list[StreamLink], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each of two ranks call the other before it listens."""
    with monkeypatch.context() as deaf:
        deaf.setattr(StreamLink, "_let_in", lambda *_: None)
        begun = [link.send(filled(1, link.rank), 1 - link.rank, _TAG) for link in links]
    with ThreadPoolExecutor(2) as threads:  # between hosts each waits for the other's word
        list(threads.map(lambda link, each: link.wait(each, _LIMIT), links, begun))


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
            links[rank].wait(coming[rank], _LIMIT)
            links[rank].wait(going[rank], _LIMIT)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(finish, range(2)))
        assert all(torch.equal(each, large) for each in rooms)
        for link in links:  # what was sent first
            word = room(1)
            link.wait(link.recv(word, 1 - link.rank, _TAG), _LIMIT)
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
        before = open_files()
        both_call(links, monkeypatch)
        for number in range(100):
            links[1].wait(links[1].send(filled(60, number), 0, payload_tag(0, 2)), _LIMIT)
        links[1].abort()
        for number in range(100):
            word = room(60)
            links[0].wait(links[0].recv(word, 1, payload_tag(0, 2)), _LIMIT)
            assert word[0] == number
        with pytest.raises(LinkClosed):
            links[0].wait(links[0].recv(room(1), 1, payload_tag(0, 3)), _LIMIT)
        wait_until(lambda: open_files() <= before, "no socket more than before")


def test_what_a_rank_sends_before_it_ends_arrives_at_who_had_not_let_it_in() -> None:
    with behind_doors() as links:
        links[1].wait(links[1].send(filled(9), 0, _TAG), _LIMIT)
        links[1].abort()
        word = room(9)
        links[0].wait(links[0].recv(word, 1, _TAG), _LIMIT)
        assert torch.equal(word, filled(9))
        assert links[0].is_closed(1)


@pytest.mark.parametrize("said", ["nothing", "another rank's word", "no word"])
def test_strangers_at_the_door_are_sent_away(said: str) -> None:
    with behind_doors(3) as links:
        doors = links[0]._doors  # noqa: SLF001  # as a stranger that has found it
        other = links[2]._doors  # noqa: SLF001  # likewise
        assert doors is not None
        assert other is not None
        words = {
            "nothing": b"",
            "another rank's word": doors.word_to(1),
            "no word": bytes(doors.word_nbytes),
        }
        address = f"\0objcomm/{cast('Any', doors)._places[0].name}"  # noqa: SLF001  # likewise
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
                except ConnectionResetError:  # what it said was not read whole
                    return True

            wait_until(is_sent_away, "it to be sent away")
        assert not links[0].closed()
        word = room(1)
        links[1].wait(links[1].send(filled(1), 0, _TAG), _LIMIT)
        links[0].wait(links[0].recv(word, 1, _TAG), _LIMIT)


def test_who_answers_with_another_word_is_no_rank() -> None:
    with behind_doors() as links:
        impostor, end = socket.socketpair()
        doors = cast("Any", links[0]._doors)  # noqa: SLF001  # whom it calls
        doors.call = lambda *_: (end, b"")
        with impostor:
            coming = links[0].recv(room(1), 1, _TAG)
            impostor.sendall(doors.word_from(1)[:20])
            links[0].move()
            assert not links[0].closed()
            impostor.sendall(bytes(doors.word_nbytes - 20))
            with pytest.raises(LinkClosed, match="another word than its own"):
                links[0].wait(coming, _LIMIT)


def test_a_rank_without_descriptors_for_another_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with behind_doors() as links:
        full = OSError(errno.EMFILE, "Too many open files")
        monkeypatch.setattr(Doors, "call", mock.Mock(side_effect=full))
        with pytest.raises(LinkError, match="this process can't connect to it"):
            links[0].send(filled(1), 1, _TAG)


@pytest.mark.parametrize(
    "said",
    [
        frame(0),
        frame(99),
        b"\xff" * _HEADER.size,
        frame(Kind.MESSAGE, nbytes=UNASKED_MAX_NBYTES + 1),
        frame(Kind.MESSAGE, nbytes=1 << 63),
        frame(Kind.MESSAGE, nbytes=9) + bytes(9),
        frame(Kind.OFFER, nbytes=1 << 63, number=1),
        frame(Kind.OFFER, nbytes=9, number=1),
        frame(Kind.TAKE, number=1),
        frame(Kind.CONTENT, number=1),
        frame(Kind.HELD, number=1),
        frame(Kind.SHARE, nbytes=8, number=1),
        frame(Kind.CREDIT, _HEAD, number=1),
        frame(Kind.MESSAGE, _HEAD, number=1),
        frame(Kind.CREDIT, _HEAD, number=1 << 63),
        b"".join(frame(Kind.MESSAGE, head_tag(5)) for _ in range(AHEAD_MAX + 1)),
    ],
    ids=[
        "no kind",
        "an unknown kind",
        "no frame",
        "too much unasked",
        "endless",
        "more than there is room for",
        "an endless offer",
        "an offer of more than there is room for",
        "a question for nothing",
        "an answer to no question",
        "thanks for nothing",
        "memory without a descriptor",
        "credit for nothing",
        "a message with credit for nothing",
        "endless credit",
        "too many first messages",
    ],
)
def test_what_no_link_sends_ends_the_connection_and_says_so(said: bytes) -> None:
    with facing() as (link, other):
        pending = link.recv(room(8), 1, _TAG)
        other.sendall(said)
        with pytest.raises(LinkClosed, match="which no link of objcomm does"):
            link.wait(pending, _LIMIT)
        assert link.is_closed(1)
        with pytest.raises(LinkClosed):
            link.send(filled(1), 1, _TAG)


def test_content_that_was_offered_may_not_come_twice() -> None:
    with facing() as (link, other):
        first, second = [link.recv(room(8), 1, _TAG) for _ in range(2)]
        other.sendall(frame(Kind.OFFER, nbytes=8, number=5))
        other.sendall(2 * (frame(Kind.CONTENT, number=5) + bytes(8)))
        link.wait(first, _LIMIT)
        with pytest.raises(LinkClosed, match="what nobody has asked for"):
            link.wait(second, _LIMIT)


@pytest.mark.parametrize("kept", range(0, _HEADER.size + 8, 5))
def test_a_stream_that_ends_within_a_frame_ends_the_connection(kept: int) -> None:
    with facing() as (link, other):
        into = room(8)
        pending = link.recv(into, 1, _TAG)
        other.sendall((frame(Kind.MESSAGE, nbytes=8) + b"abcdefgh")[:kept])
        other.close()
        with pytest.raises(LinkClosed, match="died, exited or lost its network"):
            link.wait(pending, _LIMIT)
        assert list(link.closed_by()) == [1]


def test_what_came_before_the_end_is_given_out() -> None:
    with facing() as (link, other):
        for value in b"abc":
            other.sendall(frame(Kind.MESSAGE, nbytes=1) + bytes([value]))
        other.close()
        into = [room(1) for _ in range(4)]
        posted = [link.recv(each, 1, _TAG) for each in into[:2]]
        assert link.is_closed(1)
        posted.append(link.recv(into[2], 1, _TAG))
        for each in posted:
            link.wait(each, _LIMIT)
        assert [int(each) for each in into] == [*b"abc", 0]
        with pytest.raises(LinkClosed):
            link.recv(into[3], 1, _TAG)


def test_what_nobody_has_moved_is_unread_and_the_end_of_all_is_not() -> None:
    with facing() as (link, other):
        assert not link.has_unread(1)
        other.sendall(frame(Kind.MESSAGE, nbytes=1) + b"a")
        assert link.has_unread(1)
        link.move()
        assert not link.has_unread(1)
        other.sendall(frame(Kind.MESSAGE, nbytes=1) + b"b")
        other.close()
        assert link.has_unread(1)
        assert link.is_closed(1)  # it moves first
        assert not link.has_unread(1)
        into = room(1), room(1)
        for each in into:
            link.wait(link.recv(each, 1, _TAG), _LIMIT)
        assert [int(each) for each in into] == [*b"ab"]


def test_a_sender_is_a_few_first_messages_ahead_and_no_more() -> None:
    with joined() as (sender, receiver):
        sent = [sender.send(filled(1, value), 1, _HEAD) for value in range(AHEAD_MAX + 2)]
        elsewhere = sender.send(filled(1), 1, head_tag(4))
        assert [sender.is_done(each) for each in sent] == [True] * AHEAD_MAX + [False] * 2
        assert sender.is_done(elsewhere)
        with pytest.raises(LinkTimeout):
            sender.wait(sent[-1], _SOON)
        into = [room(1) for _ in sent]
        for each in into[:2]:
            receiver.wait(receiver.recv(each, 0, _HEAD), _LIMIT)
        sender.wait(sent[-1], _LIMIT)
        for each in into[2:]:
            receiver.wait(receiver.recv(each, 0, _HEAD), _LIMIT)
        assert [int(each) for each in into] == list(range(AHEAD_MAX + 2))


def test_what_was_held_back_and_cannot_go_any_more_says_so() -> None:
    with joined() as (sender, receiver):
        sent = [sender.send(filled(1), 1, _HEAD) for _ in range(AHEAD_MAX + 1)]
        (connection,) = sender._connections.values()  # noqa: SLF001  # nobody else has its socket
        connection.socket = cast("socket.socket", Refusing(connection.socket, errno.ENOMEM))
        for _ in range(AHEAD_MAX):
            receiver.wait(receiver.recv(room(1), 0, _HEAD), _LIMIT)
        with pytest.raises(LinkClosed, match="Cannot allocate memory"):
            sender.wait(sent[-1], _LIMIT)
        assert not sender.is_done(sent[-1])
        assert all(map(sender.is_done, sent[:-1]))


def test_an_answer_says_what_was_taken() -> None:
    """So that its receiver, who may wait for it, is not woken once more."""
    with facing() as (link, other):
        other.sendall(frame(Kind.MESSAGE, _HEAD, 1) + b"a")
        link.wait(link.recv(room(1), 1, _HEAD), _LIMIT)
        link.wait(link.send(filled(1), 1, _HEAD), _LIMIT)
        assert other.recv(1 << 10) == frame(Kind.MESSAGE, _HEAD, 1, 1) + b"\7"


def test_what_nobody_takes_needs_little_memory_there() -> None:
    """A thousand pieces of one message are only offered, and its first part has come."""
    piece = filled(1000)
    with facing() as (link, other):
        sent = [link.send(filled(30_000), 1, _HEAD)]
        sent += [link.send(piece, 1, _TAG) for _ in range(1000)]
        link.abort()
        assert [link.is_done(each) for each in sent] == [True] + [False] * 1000
        came = b"".join(iter(lambda: other.recv(1 << 20), b""))
    messages, at = 0, 0
    while at < len(came):
        kind, _, nbytes, _ = _HEADER.unpack_from(came, at)
        at += _HEADER.size + nbytes * (kind == Kind.MESSAGE)
        messages += kind == Kind.MESSAGE
    assert messages == 1


def test_each_of_many_threads_gets_its_own() -> None:
    """One of them moves for all; when it has its own, another one does."""
    with joined() as (link, other), ThreadPoolExecutor(8) as threads:
        into = {tag: room(1) for tag in range(_TAG, _TAG + 8)}

        def take(tag: int) -> None:
            link.wait(link.recv(into[tag], 1, tag), _LIMIT)

        for order in (1, -1):
            taken = [threads.submit(take, tag) for tag in into]
            for tag in list(into)[::order]:
                other.send(filled(1, tag % 200), 0, tag)
                wait_until(lambda: sum(each.done() for each in taken), "one more")  # noqa: B023
            for each in taken:
                each.result()
            assert all(int(each) == tag % 200 for tag, each in into.items())


def test_who_waits_goes_on_when_the_one_who_moved_gave_up() -> None:
    with joined() as (link, other), ThreadPoolExecutor(2) as threads:
        never = link.recv(room(1), 1, _TAG + 1)
        has_begun = threading.Event()

        def give_up() -> None:
            has_begun.set()
            link.wait(never, timedelta(seconds=0.3))

        giving_up = threads.submit(give_up)
        has_begun.wait()
        waiting = threads.submit(link.wait, link.recv(room(1), 1, _TAG), _LIMIT)
        with pytest.raises(LinkTimeout):
            giving_up.result()
        other.send(filled(1), 0, _TAG)
        waiting.result(_LIMIT.total_seconds())


def test_an_abort_wakes_all_who_wait() -> None:
    with joined() as (link, _), ThreadPoolExecutor(4) as threads:
        waiting = [
            threads.submit(link.wait, link.recv(room(1), 1, tag), _LIMIT) for tag in range(4)
        ]
        wait_until(lambda: link._mover, "one that moves")  # noqa: SLF001  # nobody else tells
        link.abort()
        for each in waiting:
            with pytest.raises(LinkClosed, match="this rank has closed"):
                each.result(_LIMIT.total_seconds())


def test_both_may_send_much_at_once() -> None:
    flat = torch.arange(5_000_000).view(torch.uint8)
    with joined() as links, ThreadPoolExecutor(2) as threads:
        into = [torch.zeros_like(flat) for _ in links]

        def swap(rank: int) -> None:
            link = links[rank]
            pending = [link.send(flat, 1 - rank, _TAG), link.recv(into[rank], 1 - rank, _TAG)]
            for each in pending:
                link.wait(each, _LIMIT)

        for each in [threads.submit(swap, rank) for rank in range(2)]:
            each.result()
        assert all(torch.equal(each, flat) for each in into)


def test_what_was_begun_goes_out_while_its_rank_waits_elsewhere() -> None:
    flat = torch.arange(2_000_000).view(torch.uint8)
    with joined() as (sender, receiver), ThreadPoolExecutor(1) as threads:
        into = torch.zeros_like(flat)
        waiting = threads.submit(receiver.wait, receiver.recv(into, 0, _TAG), _LIMIT)
        pending = sender.send(flat, 1, _TAG)

        def look() -> bool:
            sender.move()  # as the watchdog does
            return waiting.done()

        wait_until(look, "all of it")
        waiting.result()
        assert pending.is_over
        assert torch.equal(into, flat)


def at_next_read(link: StreamLink, handler: Callable[[], None]) -> None:
    """Let a signal's handler run when the link has taken bytes, and not noted them."""
    (connection,) = link._connections.values()  # noqa: SLF001  # nobody else has its socket

    class Interrupted:
        def __init__(self, end: socket.socket) -> None:
            self._end = end

        def __getattr__(self, name: str) -> Any:
            return getattr(self._end, name)

        def recvmsg_into(self, *into: Any) -> Any:
            connection.socket = self._end
            came = self._end.recvmsg_into(*into)
            handler()
            return came

    connection.socket = cast("socket.socket", Interrupted(connection.socket))


def test_a_handler_that_closes_what_it_has_interrupted_does_not_wait_for_it() -> None:
    with joined() as (link, other):
        at_next_read(link, link.abort)
        pending = [link.recv(room(1), 1, _TAG) for _ in range(2)]
        other.send(filled(1), 0, _TAG)
        link.wait(pending[0], _LIMIT)  # it had come
        with pytest.raises(LinkClosed, match="this rank has closed"):
            link.wait(pending[1], _LIMIT)
        assert link.is_closed(1)
        assert list(link.closed_by()) == []
        wait_until(lambda: other.is_closed(0), "the other end to hear")


def test_a_handler_can_not_use_what_it_has_interrupted_and_is_told() -> None:
    told: list[str] = []

    def handler() -> None:
        for use in (
            lambda: link.send(filled(1), 1, _TAG),
            lambda: link.recv(room(1), 1, _TAG),
            lambda: link.wait(second, _LIMIT),
        ):
            with pytest.raises(LinkError) as caught:
                use()
            told.append(caught.value.reason)
        assert not link.is_done(second)
        assert not link.is_closed(1)
        link.move()

    with joined() as (link, other):
        first, second = [link.recv(room(1), 1, _TAG) for _ in range(2)]
        at_next_read(link, handler)
        other.send(filled(1), 0, _TAG)
        link.wait(first, _LIMIT)
        assert len(told) == 3
        assert all("handler" in each for each in told)
        other.send(filled(1), 0, _TAG)
        link.wait(second, _LIMIT)


def test_a_handler_that_raises_in_the_middle_of_a_message_ends_its_connection() -> None:
    """What follows would be taken for something else."""

    def handler() -> None:
        raise KeyboardInterrupt

    with joined() as (link, other):
        pending = link.recv(room(1), 1, _TAG)
        at_next_read(link, handler)
        other.send(filled(1), 0, _TAG)
        with pytest.raises(KeyboardInterrupt):
            link.wait(pending, _LIMIT)
        with pytest.raises(LinkClosed, match="interrupted in the middle"):
            link.wait(pending, _LIMIT)
        wait_until(lambda: other.is_closed(0), "the other end to hear")


def test_a_handler_may_wait_while_the_wait_that_it_has_interrupted_sleeps() -> None:
    """And what that one waits for may come meanwhile."""
    into = [room(1), room(1)]
    with joined() as (link, other):
        first, second = [link.recv(each, 1, _TAG + at) for at, each in enumerate(into)]
        events = link._events  # noqa: SLF001  # where it sleeps

        class Interrupted:
            def __getattr__(self, name: str) -> Any:
                return getattr(events, name)

            def poll(self, seconds: float) -> list[tuple[int, int]]:
                link._events = events  # noqa: SLF001  # once
                for tag in (_TAG, _TAG + 1):
                    other.send(filled(1), 0, tag)
                link.wait(second, _LIMIT)
                return events.poll(seconds)  # Python goes on with it when a handler returns

        link._events = Interrupted()  # type: ignore[assignment]  # noqa: SLF001  # stands in for it
        link.wait(first, _LIMIT)
        assert [int(each) for each in into] == [7, 7]


def test_who_asks_does_not_wait_for_a_handler_on_another_thread() -> None:
    entered, leave = threading.Event(), threading.Event()

    def handler() -> None:
        entered.set()
        assert leave.wait(_LIMIT.total_seconds())

    with joined() as (link, other), ThreadPoolExecutor(1) as threads:
        pending = link.recv(room(1), 1, _TAG)
        at_next_read(link, handler)
        waiting = threads.submit(link.wait, pending, _LIMIT)
        other.send(filled(1), 0, _TAG)
        assert entered.wait(_LIMIT.total_seconds())
        link.move()
        assert not link.is_closed(1)
        link.abort()
        wait_until(lambda: other.is_closed(0), "the other end to hear")
        leave.set()
        waiting.result()


def test_what_had_come_before_an_abort_is_not_lost() -> None:
    with joined() as (link, other):
        into = room(1)
        pending = link.recv(into, 1, _TAG)
        other.send(filled(1), 0, _TAG)
        link.abort()
        assert link.is_done(pending)
        assert int(into) == 7


_LENGTHS = st.one_of(
    st.integers(0, 300), st.sampled_from([UNASKED_MAX_NBYTES, UNASKED_MAX_NBYTES + 1, 200_000])
)


@given(st.lists(st.tuples(st.integers(0, 2), _LENGTHS, st.booleans()), max_size=30))
def test_whatever_is_sent_arrives_in_the_order_of_its_tag(
    messages: list[tuple[int, int, bool]],
) -> None:
    """Through buffers that hold no message whole; receives are posted early or late."""
    with joined() as (sender, receiver), ThreadPoolExecutor(1) as threads:
        for link in (sender, receiver):
            (connection,) = link._connections.values()  # noqa: SLF001  # nobody else has its socket
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        flats = [filled(length, 1 + at) for at, (_, length, _) in enumerate(messages)]
        into = [room(length + is_early) for _, length, is_early in messages]
        posted = {
            at: receiver.recv(into[at], 0, _TAG + tag)
            for tag in range(3)
            for at in _early(messages, tag)
        }

        def send() -> None:
            sent = [
                sender.send(flat, 1, _TAG + tag)
                for flat, (tag, _, _) in zip(flats, messages, strict=True)
            ]
            for each in sent:
                sender.wait(each, _LIMIT)

        sending = threads.submit(send)
        for at, (tag, _, _) in enumerate(messages):
            if at not in posted:
                posted[at] = receiver.recv(into[at], 0, _TAG + tag)
        for pending in posted.values():
            receiver.wait(pending, _LIMIT)
        sending.result()
        for flat, each in zip(flats, into, strict=True):
            assert torch.equal(each[: flat.numel()], flat)
            assert not each[flat.numel() :].any()


def _early(messages: list[tuple[int, int, bool]], tag: int) -> list[int]:
    """The first messages of a tag, up to the first one whose receive is posted late."""
    early = []
    for at, (its, _, is_early) in enumerate(messages):
        if its == tag:
            if not is_early:
                break
            early.append(at)
    return early


def members(*lengths: int) -> list[torch.Tensor]:
    return [filled(length, 1 + at) for at, length in enumerate(lengths)]


def test_what_is_shared_is_mapped_and_its_sender_told() -> None:
    flats = members(100_000, 5)
    with joined() as (sender, receiver):
        sent = sender.send_share(Share.of(flats), flats, 1, _TAG)
        assert not sender.is_done(sent)
        borrowed = receiver.recv_share(100_005, 0, _TAG)
        receiver.wait(borrowed, _LIMIT)
        sender.wait(sent, _LIMIT)
        assert borrowed.share is not None
        for flat, place in zip(flats, places([100_000, 5]), strict=True):
            memory = borrowed.share.mapped(place, flat.numel())
            assert torch.equal(torch.frombuffer(memory, dtype=torch.uint8), flat)


@pytest.mark.parametrize("lengths", [(9,), (100_000, 1, 5_000_000), (0, 3, 0, 0, 200_000, 0)])
def test_what_can_not_be_shared_is_sent(lengths: tuple[int, ...]) -> None:
    flats = members(*lengths)
    with joined() as (sender, receiver), ThreadPoolExecutor(1) as threads:
        sent = sender.send_share(None, flats, 1, _TAG)
        sending = threads.submit(sender.wait, sent, _LIMIT)
        take_a_copy(receiver, flats)
        sending.result()


def take_a_copy(receiver: StreamLink, flats: list[torch.Tensor]) -> None:
    borrowed = receiver.recv_share(sum(map(len, flats)), 0, _TAG)
    receiver.wait(borrowed, _LIMIT)
    assert borrowed.share is None
    into = [torch.zeros_like(each) for each in flats]
    receiver.wait(receiver.recv_instead(borrowed, into), _LIMIT)
    for got, want in zip(into, flats, strict=True):
        assert torch.equal(got, want)


def test_where_too_many_descriptors_are_under_way_its_content_is_sent() -> None:
    flats = members(100_000, 5)
    with joined() as (sender, receiver), ThreadPoolExecutor(1) as threads:
        (connection,) = sender._connections.values()  # noqa: SLF001  # nobody else has its socket
        refusing = Refusing(connection.socket, errno.ETOOMANYREFS, is_of_descriptors=True)
        connection.socket = cast("socket.socket", refusing)
        sending = threads.submit(
            sender.wait, sender.send_share(Share.of(flats), flats, 1, _TAG), _LIMIT
        )
        take_a_copy(receiver, flats)
        sending.result()


class Refusing:
    """A socket over which the system sends nothing, or passes no descriptors."""

    def __init__(self, end: socket.socket, error: int, *, is_of_descriptors: bool = False) -> None:
        self._end = end
        self._error = error
        self._is_of_descriptors = is_of_descriptors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    def sendmsg(self, parts: Any, rights: tuple[Any, ...] = (), flags: int = 0) -> int:
        if rights or not self._is_of_descriptors:
            raise OSError(self._error, os.strerror(self._error))
        return self._end.sendmsg(parts, rights, flags)


def test_where_the_receiver_can_have_no_more_descriptors_its_content_is_sent() -> None:
    run_python(
        """
        import os, resource
        from tests.unit.test_stream_link import *
        flats = members(100_000, 5)
        with joined() as (sender, receiver), ThreadPoolExecutor(1) as threads:
            threads.submit(int).result()
            sent = sender.send_share(Share.of(flats), flats, 1, payload_tag(0, 1))
            files = open_files()
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, 4096))
            sending = threads.submit(sender.wait, sent, timedelta(seconds=60))
            take_a_copy(receiver, flats)
            sending.result()
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
            assert open_files() <= files
        """
    )


def unsealed() -> int:
    descriptor = os.memfd_create("objcomm")
    os.ftruncate(descriptor, 4096)
    return descriptor


def sealed() -> int:
    share = Share.of(members(8))
    return os.dup(share.descriptors[0])


@pytest.mark.parametrize(
    ("said", "descriptors"),
    [
        (frame(Kind.SHARE, nbytes=8, number=1), [unsealed]),
        (frame(Kind.SHARE, nbytes=9, number=1), [sealed]),
        (frame(Kind.SHARE, nbytes=8, number=1), [unsealed, sealed]),
        (frame(Kind.SHARE, _HEAD, nbytes=8, number=1), [sealed]),
        (frame(Kind.OFFER, nbytes=8, number=1), [sealed]),
        (frame(Kind.OFFER, nbytes=0), []),
        (frame(Kind.MESSAGE, nbytes=0), [sealed]),
        (frame(Kind.MESSAGE, nbytes=0), []),
        (frame(Kind.MESSAGE, nbytes=8) + bytes(8), []),
    ],
    ids=[
        "memory that may change",
        "another length",
        "memory of which a part may change",
        "a first message",
        "an offer with a descriptor",
        "an offer of nothing",
        "a message with a descriptor",
        "nothing",
        "a message",
    ],
)
def test_what_is_no_share_ends_the_connection_and_leaves_no_file(
    said: bytes, descriptors: list[Callable[[], int]]
) -> None:
    gc.collect()
    files = open_files()
    with facing() as (link, other):
        pending = link.recv_share(8, 1, _TAG)
        mine = [make() for make in descriptors]
        socket.send_fds(other, [said], mine)
        for each in mine:
            os.close(each)
        with suppress(LinkClosed):
            link.wait(pending, _LIMIT)
        with pytest.raises(LinkClosed, match="which no link of objcomm does"):
            link.send(filled(1), 1, _TAG)
    del link, other, pending
    gc.collect()
    assert open_files() == files


def test_a_file_is_judged_when_its_frame_is_whole() -> None:
    """Its sender may make it shorter before it is sealed, and who maps it would be killed."""
    file = os.memfd_create("objcomm", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 2 << 20)
    said = frame(Kind.SHARE, nbytes=2 << 20, number=1)
    with facing() as (link, other):
        borrowed = link.recv_share(2 << 20, 1, _TAG)
        socket.send_fds(other, [said[:1]], [file])
        link.move()
        os.ftruncate(file, 4096)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, 1 | 2 | 4 | 8)
        os.close(file)
        other.sendall(said[1:])
        link.wait(borrowed, _LIMIT)
        assert borrowed.share is not None
        with pytest.raises(ValueError, match="of 4096"):
            borrowed.share.mapped((0, 0), 2 << 20)


def test_so_many_files_wait_for_who_takes_nothing_and_no_more() -> None:
    flats = members(9)
    with joined() as (sender, receiver), ThreadPoolExecutor(1) as threads:
        sent = [sender.send_share(Share.of(flats), flats, 1, _TAG) for _ in range(70)]
        waiting = [threads.submit(sender.wait, each, _LIMIT) for each in sent]
        borrowed = [receiver.recv_share(9, 0, _TAG) for _ in sent]
        shared = 0
        for each in borrowed:
            receiver.wait(each, _LIMIT)
            shared += each.share is not None
            if each.share is None:
                into = room(9)
                receiver.wait(receiver.recv_instead(each, [into]), _LIMIT)
                assert torch.equal(into, flats[0])
        assert shared == LENT_FILES_MAX
        for done in waiting:
            done.result()
        sender.send_share(Share.of(flats), flats, 1, _TAG)
        last = receiver.recv_share(9, 0, _TAG)
        receiver.wait(last, _LIMIT)
        assert last.share is not None


def test_a_peer_can_not_fill_this_process_with_files() -> None:
    with facing() as (link, other):
        for number in range(LENT_FILES_MAX + 1):
            file = sealed()
            socket.send_fds(other, [frame(Kind.SHARE, nbytes=8, number=number)], [file])
            os.close(file)
        wait_until(lambda: link.is_closed(1), "it to be refused")
        with pytest.raises(LinkClosed, match="more files than may wait here"):
            link.send(filled(1), 1, _TAG)


def test_memory_is_not_bytes() -> None:
    flats = members(100_000)
    with joined() as (sender, receiver):
        sender.send_share(Share.of(flats), flats, 1, _TAG)
        with pytest.raises(LinkClosed, match="100000 bytes for 200000"):
            receiver.wait(receiver.recv(room(200_000), 0, _TAG), _LIMIT)


def test_an_end_lets_go_of_what_nobody_has_taken() -> None:
    gc.collect()
    files = open_files()
    flats = members(100_000)
    with joined() as (sender, receiver):
        sent = [sender.send_share(Share.of(flats), flats, 1, _TAG) for _ in range(3)]
        receiver.move()
        borrowed = receiver.recv_share(100_000, 0, _TAG)
        sender.abort()
        receiver.wait(borrowed, _LIMIT)  # it had come
        for each in sent[1:]:
            with pytest.raises(LinkClosed):
                sender.wait(each, _LIMIT)
    del sender, receiver, borrowed, sent, each
    gc.collect()
    assert open_files() == files


def test_an_interrupted_wait_leaves_the_message_to_the_next_one() -> None:
    with joined() as (link, other), interrupting(link), suppress(KeyboardInterrupt):
        into = room(1)
        pending = link.recv(into, 1, _TAG)
        link.wait(pending, _LIMIT)
    with joined() as (link, other):
        into = room(1)
        pending = link.recv(into, 1, _TAG)
        with interrupting(link), pytest.raises(KeyboardInterrupt):
            link.wait(pending, _LIMIT)
        other.send(filled(1), 0, _TAG)
        link.wait(pending, _LIMIT)
        assert int(into) == 7


@contextmanager
def interrupting(link: StreamLink) -> Iterator[None]:
    """Ctrl-C while the calling thread sleeps in the link."""
    events = link._events  # noqa: SLF001  # where it sleeps

    class Interrupted:
        def __getattr__(self, name: str) -> Callable[..., object]:
            found: Callable[..., object] = getattr(events, name)
            return found

        def poll(self, *_: object) -> object:
            link._events = events  # noqa: SLF001  # once
            raise KeyboardInterrupt

    link._events = Interrupted()  # type: ignore[assignment]  # noqa: SLF001  # stands in for it
    yield
