"""The link over streams: its frames, and the threads that wait in it."""

import errno
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import cast
from unittest import mock

import pytest

from objcomm._transport.frames import AHEAD_MAX, AHEAD_MAX_NBYTES, UNASKED_MAX_NBYTES, Kind
from objcomm._transport.link import LinkClosed, LinkTimeout, payload_tag
from objcomm._transport.streams import StreamLink
from tests.contracts import check_link, is_over
from tests.unit.stream_links import (
    HEAD,
    HEADER,
    LIMIT,
    TAG,
    Refusing,
    behind_doors,
    facing,
    filled,
    frame,
    joined,
    room,
)
from tests.waits import PATIENCE_S, wait_until

Make = Callable[..., AbstractContextManager[list[StreamLink]]]


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("make", [joined, behind_doors])
def test_threads_keep_the_contract_of_links(make: Make, *, across: bool) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(3) as ranks:
        groups = [stack.enter_context(make(3, across=across)) for _ in range(5)]

        def check(rank: int) -> None:
            links = [each[rank] for each in groups]
            check_link(lambda _: links.pop(0), rank, 3)

        list(ranks.map(check, range(3)))


@pytest.mark.parametrize(
    "said", [frame(99), frame(Kind.MESSAGE, nbytes=9) + bytes(9)], ids=["not a frame", "too long"]
)
def test_what_no_link_sends_ends_the_connection_and_says_so(said: bytes) -> None:
    def say(other: socket.socket) -> None:
        with suppress(OSError):  # the link ends before it has read all bytes
            other.sendall(said)

    with facing() as (link, other), ThreadPoolExecutor(1) as pool:
        pending = link.recv(room(8), 1, TAG)
        pool.submit(say, other)
        with pytest.raises(LinkClosed, match="which objcomm never does"):
            link.wait(pending, LIMIT)
        assert link.is_closed(1)
        with pytest.raises(LinkClosed):
            link.send(filled(1), 1, TAG)


@pytest.mark.parametrize("kept", range(0, HEADER.size + 8, 5))
def test_a_stream_that_ends_within_a_frame_ends_the_connection(kept: int) -> None:
    with facing() as (link, other):
        into = room(8)
        pending = link.recv(into, 1, TAG)
        other.sendall((frame(Kind.MESSAGE, nbytes=8) + b"abcdefgh")[:kept])
        other.close()
        with pytest.raises(LinkClosed, match="died, exited or lost its network"):
            link.wait(pending, LIMIT)
        assert list(link.closed_by()) == [1]


def test_messages_that_no_thread_has_read_are_unread_but_an_end_is_not() -> None:
    with facing() as (link, other):
        assert not link.has_unread(1)
        other.sendall(frame(Kind.MESSAGE, nbytes=1) + b"a")
        assert link.has_unread(1)
        link.move()
        assert not link.has_unread(1)
        other.sendall(frame(Kind.MESSAGE, nbytes=1) + b"b")
        other.close()
        assert link.has_unread(1)
        assert link.is_closed(1)  # it moves bytes first
        assert not link.has_unread(1)
        into = room(1), room(1)
        for each in into:
            link.wait(link.recv(each, 1, TAG), LIMIT)
        assert [int(each) for each in into] == [*b"ab"]


def test_a_sender_is_ahead_by_a_limited_number_of_bytes() -> None:
    """A short message does not overtake one that was held back before it."""
    lengths = [AHEAD_MAX_NBYTES // 2, AHEAD_MAX_NBYTES // 2, AHEAD_MAX_NBYTES // 4, 1]
    with joined() as (sender, receiver), ThreadPoolExecutor(1) as threads:
        sent = [sender.send(filled(nbytes, 1 + at), 1, HEAD) for at, nbytes in enumerate(lengths)]
        waiting = threads.submit(sender.wait, sent[1], LIMIT)

        def look() -> bool:
            receiver.move()  # as the watchdog does, whatever its rank is doing
            return waiting.done()

        wait_until(look, "what may be ahead")
        receiver.move()
        assert [is_over(sender, each) for each in sent] == [True, True, False, False]
        assert sum(map(len, receiver.unread())) == AHEAD_MAX_NBYTES
        waiting = threads.submit(sender.wait, sent[-1], LIMIT)
        until = time.monotonic() + LIMIT.total_seconds()
        for at, nbytes in enumerate(lengths):
            assert receiver.take(0, HEAD, until) == bytes([1 + at]) * nbytes
        waiting.result()


def test_a_held_back_message_that_can_no_longer_be_sent_raises() -> None:
    with joined() as (sender, receiver):
        sent = [sender.send(filled(1), 1, HEAD) for _ in range(AHEAD_MAX + 1)]
        (connection,) = sender._connections.values()  # noqa: SLF001  # no public way to the socket
        connection.socket = cast("socket.socket", Refusing(connection.socket, errno.ENOMEM))
        for _ in range(AHEAD_MAX):
            receiver.wait(receiver.recv(room(1), 0, HEAD), LIMIT)
        with pytest.raises(LinkClosed, match="Cannot allocate memory"):
            sender.wait(sent[-1], LIMIT)
        assert not is_over(sender, sent[-1])
        assert all(is_over(sender, each) for each in sent[:-1])


def test_messages_that_no_rank_takes_need_little_memory_there() -> None:
    """The first message has arrived; a thousand later ones are only offered."""
    with facing() as (link, other):
        sent = [link.send(filled(30_000), 1, HEAD)]
        sent += [link.send(filled(1000), 1, TAG) for _ in range(1000)]
        link.abort()
        assert [is_over(link, each) for each in sent] == [True] + [False] * 1000
        came = b"".join(iter(lambda: other.recv(1 << 20), b""))
    message = frame(Kind.MESSAGE, HEAD, 30_000) + b"\7" * 30_000
    offers = b"".join(frame(Kind.OFFER, TAG, 1000, number) for number in range(1, 1001))
    assert came.startswith(message)
    assert offers.startswith(came[len(message) :])


def test_each_of_many_threads_gets_its_own_message() -> None:
    """One of them moves bytes for all; when its own arrives, another takes over."""
    with joined() as (link, other), ThreadPoolExecutor(8) as threads:
        into = {tag: room(1) for tag in range(TAG, TAG + 8)}

        def take(tag: int) -> None:
            link.wait(link.recv(into[tag], 1, tag), LIMIT)

        for order in (1, -1):
            taken = [threads.submit(take, tag) for tag in into]
            for tag in list(into)[::order]:
                other.send(filled(1, tag % 200), 0, tag)
                wait_until(lambda: sum(each.done() for each in taken), "one more")  # noqa: B023
            for each in taken:
                each.result()
            assert all(int(each) == tag % 200 for tag, each in into.items())


def test_a_wait_continues_after_the_thread_that_moved_bytes_gave_up() -> None:
    with joined() as (link, other), ThreadPoolExecutor(2) as threads:
        never = link.recv(room(1), 1, TAG + 1)
        has_begun = threading.Event()

        def give_up() -> None:
            has_begun.set()
            link.wait(never, timedelta(seconds=0.3))

        giving_up = threads.submit(give_up)
        has_begun.wait()
        waiting = threads.submit(link.wait, link.recv(room(1), 1, TAG), LIMIT)
        with pytest.raises(LinkTimeout):
            giving_up.result()
        other.send(filled(1), 0, TAG)
        waiting.result(LIMIT.total_seconds())


def test_a_wait_ends_when_another_thread_attends_to_an_arrived_message() -> None:
    with ThreadPoolExecutor(2) as threads, joined() as (link, other):
        signal = link.signal()
        waiting = threads.submit(signal.wait, 2 * PATIENCE_S)
        wait_until(lambda: link._loop.leader_wait is signal, "it to wait")  # noqa: SLF001  # no other sign
        other.send(b"first", 0, HEAD)
        wait_until(lambda: link.has_come(1, HEAD), "the message")

        def accept(message: bytes) -> bool:
            signal.set()
            return message == b"first"

        threads.submit(link.attend, 1, {HEAD: accept})  # until the link ends
        assert waiting.result(PATIENCE_S)


def test_an_abort_wakes_all_waiting_threads() -> None:
    with joined() as (link, _), ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(link.wait, link.recv(room(1), 1, tag), LIMIT) for tag in range(4)]
        wait_until(lambda: link._loop._leader, "one that moves")  # noqa: SLF001  # nothing else shows it
        link.abort()
        for each in waiting:
            with pytest.raises(LinkClosed, match="this rank has closed"):
                each.result(LIMIT.total_seconds())


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("make", [joined, behind_doors])
def test_a_farewell_reaches_the_connected_ranks(make: Make, *, across: bool) -> None:
    with make(across=across) as (link, other), ThreadPoolExecutor(1) as threads:
        pending = other.recv(room(1), 0, TAG)
        waiting = threads.submit(other.wait, pending, LIMIT)
        link.wait(link.send(filled(1), 1, payload_tag(0, 2)), LIMIT)
        link.abort(b"why")
        with pytest.raises(LinkClosed, match="its end of the stream is closed"):
            waiting.result(LIMIT.total_seconds())
        assert other.farewell_of(0) == b"why"
        assert not link.farewell_of(1)


def test_no_farewell_is_sent_in_the_middle_of_a_message() -> None:
    flat = filled(8 << 20)  # more than the system's buffers accept
    with joined() as (link, other):
        sent, coming = link.send(flat, 1, TAG), other.recv(room(8 << 20), 0, TAG)
        other.move()  # it asks for the message
        link.move()  # this fills the system's buffers
        assert not is_over(link, sent)
        link.abort(b"why")
        with pytest.raises(LinkClosed):
            other.wait(coming, LIMIT)
        assert not other.farewell_of(0)


def test_a_farewell_counts_once_the_connection_has_ended() -> None:
    with facing() as (link, other):
        other.sendall(frame(Kind.FAREWELL, nbytes=3) + b"why")
        link.move()
        assert not link.farewell_of(1)
        other.close()
        with mock.patch.object(link._loop, "handle_pending"):  # noqa: SLF001  # by another thread
            assert link.closed_by() == [1]
            assert link.farewell_of(1) == b"why"


@pytest.mark.parametrize("across", [False, True])
def test_messages_in_pieces_arrive_whole_however_little_the_system_accepts(*, across: bool) -> None:
    pieces: list[bytes | memoryview] = [bytes([at]) * n for at, n in enumerate((1, 900_000, 0, 7))]
    sent = [[*pieces, bytes([at])] for at in range(4)]  # together more than the peer gives credit
    sent.append([b"many"] * 1100)  # more than one system call accepts
    with joined(across=across) as (link, other), ThreadPoolExecutor(1) as threads:
        link._connections[1].socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # noqa: SLF001  # the least
        pending = [link.send(each, 1, HEAD) for each in sent]
        until = time.monotonic() + LIMIT.total_seconds()
        taking = threads.submit(lambda: [other.take(0, HEAD, until) for _ in sent])
        for each in pending:
            link.wait(each, LIMIT)
        assert taking.result() == [b"".join(each) for each in sent]


def test_the_system_of_a_host_accepts_a_message_while_its_receiver_computes() -> None:
    allowed = int(Path("/proc/sys/net/core/wmem_max").read_text())
    with joined() as (link, other):
        nbytes = min(UNASKED_MAX_NBYTES, allowed + 1)  # the default is at most what is allowed
        assert link.send(filled(nbytes), 1, HEAD) is None
        assert len(other.take(0, HEAD, time.monotonic() + LIMIT.total_seconds())) == nbytes


def test_too_long_a_first_message_is_an_error_that_ends_nothing() -> None:
    with joined() as (link, other):
        with pytest.raises(ValueError, match="a first message of"):
            link.send(filled(UNASKED_MAX_NBYTES + 1), 1, HEAD)
        link.send(filled(1), 1, HEAD)
        assert other.take(0, HEAD, time.monotonic() + LIMIT.total_seconds()) == b"\7"
