"""Whether connections stand and take more bytes, and whether what was sent is on its way."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from objcomm._algorithms.exchange import Exchange
from objcomm._transport.sockets import Flow, flow, open_sockets
from objcomm._wire.message import compose
from tests.unit.memory_link import MemoryLink, Wires, exchange_on, new_lane
from tests.unit.stream_links import tcp_pair


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    mine, theirs = tcp_pair()
    with mine, theirs:
        yield mine, theirs


def flow_of(end: socket.socket) -> Flow:
    return Flow({os.fstat(end.fileno()).st_ino: end.fileno()})


def test_a_connection_that_stands_takes_more(ends: tuple[socket.socket, socket.socket]) -> None:
    assert flow_of(ends[0]).is_free()


def test_several_threads_may_ask_at_once(ends: tuple[socket.socket, socket.socket]) -> None:
    watched = flow_of(ends[0])
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(lambda: [watched.is_free() for _ in range(3000)]) for _ in range(4)]
        assert all(all(each.result()) for each in asked)


def test_one_that_is_full_takes_none(ends: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = ends
    watched = flow_of(mine)
    with contextlib.suppress(BlockingIOError):
        while True:
            mine.send(bytes(1 << 20), socket.MSG_DONTWAIT)
    assert not watched.is_free()
    theirs.close()


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_one_that_has_ended_takes_none(
    ends: tuple[socket.socket, socket.socket], *, is_reset: bool
) -> None:
    mine, theirs = ends
    watched = flow_of(mine)
    if is_reset:
        mine.send(b"unread")
        assert theirs.recv(1, socket.MSG_PEEK)
    theirs.close()
    assert not watched.is_free()


def test_another_file_of_the_same_number_is_not_taken_for_it(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    mine, _ = ends
    watched = flow_of(mine)
    other = socket.create_server(("127.0.0.1", 0))
    with other, socket.create_connection(other.getsockname()) as second:
        os.dup2(second.fileno(), mine.fileno())
        assert not watched.is_free()


@pytest.mark.usefixtures("ends")
def test_new_connections_are_found_and_those_before_let_be() -> None:
    before = open_sockets()
    assert flow(before, 1) is None  # none is new
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()):
            found = flow(before, 1)
            assert found is not None
            assert found.is_free()
        assert not found.is_free()  # and that it listens is no matter
    assert flow(before, 1000) is None  # too many to ask


def swap(exchanges: list[Exchange]) -> list[bool]:
    """Each sends its first message to the other; whether these were certain to be asked for."""
    for rank, each in enumerate(exchanges):
        each.send_head(compose(each.header, b""), [1 - rank])
    for rank, each in enumerate(exchanges):
        each.recv_heads([1 - rank])
    told = [each.are_asked_for() for each in exchanges]
    for each in exchanges:
        each.finish()
    return told


@pytest.mark.parametrize("is_flowing", [False, True])
def test_only_where_all_bytes_flow_is_a_send_waited_for_on_the_callers_thread(
    *, is_flowing: bool
) -> None:
    waited_apart: list[object] = []

    class Link(MemoryLink):
        def is_flowing(self) -> bool:
            return is_flowing

        def wait_apart(self, wait: Callable[[], None]) -> None:
            waited_apart.append(wait)

    wires, lanes = Wires(2), [new_lane(), new_lane()]
    for sequence in range(2):
        links = [Link(wires, rank) for rank in range(2)]
        both = zip(links, lanes, strict=True)
        swap([exchange_on(link, lane, sequence=sequence) for link, lane in both])
    assert len(waited_apart) == (2 if is_flowing else 4)


def test_only_who_has_taken_a_message_before_has_asked_for_the_next() -> None:
    wires = Wires(2)
    links, lanes = [MemoryLink(wires, 0), MemoryLink(wires, 1)], [new_lane(), new_lane()]

    def call(sequence: int) -> list[Exchange]:
        both = zip(links, lanes, strict=True)
        return [exchange_on(link, lane, sequence=sequence) for link, lane in both]

    assert swap(call(0)) == [False, False]
    assert swap(call(1)) == [True, True]
    sending, receiving = call(2)
    sending.send_head(compose(sending.header, b""), [1])
    assert not sending.are_asked_for()
    receiving.recv_heads([0])
    sending.confirm([1], [])
    assert not sending.are_asked_for()


def test_who_has_sent_since_it_took_the_last_message_has_asked_for_one_more() -> None:
    wires = Wires(2)
    links, lanes = [MemoryLink(wires, 0), MemoryLink(wires, 1)], [new_lane(), new_lane()]

    def told(sequence: int, source: int) -> bool:
        both = zip(links, lanes, strict=True)
        exchanges = [exchange_on(link, lane, sequence=sequence) for link, lane in both]
        sending, receiving = exchanges[source], exchanges[1 - source]
        sending.send_head(compose(sending.header, b""), [1 - source])
        is_asked_for = sending.are_asked_for()
        receiving.recv_heads([source])
        for each in exchanges:
            each.finish()
        return is_asked_for

    # As in broadcasts whose source moves on: only who was answered once can know.
    moving = [told(sequence, sequence % 2) for sequence in range(5)]
    assert moving == [False, False, True, True, True]
    assert not told(5, 0)  # the same source again: nothing came from the other one meanwhile
    assert told(6, 1)  # to it something came, in both
    assert not told(7, 1)
    assert told(8, 0)
