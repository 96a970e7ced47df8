"""Links over streams between threads of this process, and against a peer that is not a link."""

import math
import os
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

from objcomm._transport.calling import Calling
from objcomm._transport.doors import Door, Doors, Handshakes
from objcomm._transport.link import head_tag, payload_tag
from objcomm._transport.streams import StreamLink

LIMIT = timedelta(seconds=300)
HEADER = struct.Struct("<IIQQ")
TAG = payload_tag(0, 1)
HEAD = head_tag(3)


@contextmanager
def joined(
    size: int = 2, *, across: bool = False, spin_seconds: float = 0.0
) -> Iterator[list[StreamLink]]:
    """Yield the links of ``size`` ranks, each as if on its own host if ``across``."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for rank in range(size):
        for peer in range(rank):
            sockets[rank][peer], sockets[peer][rank] = tcp_pair() if across else socket.socketpair()
    hosts = {rank: rank * across for rank in range(size)}
    links = [
        StreamLink(rank, dict(sorted(each.items())), hosts, spin_seconds=spin_seconds)
        for rank, each in enumerate(sockets)
    ]
    try:
        yield links
    finally:
        for each in links:
            each.abort()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection like those between hosts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@contextmanager
def behind_doors(
    size: int = 2, *, across: bool = False, lost_seconds: float = math.inf
) -> Iterator[list[StreamLink]]:
    """Yield links like those of ``joined``, but none of them connected yet."""
    doors = {rank: Door.opened("streams", ["127.0.0.1"]) for rank in range(size)}
    endpoints = {rank: door.endpoint for rank, door in doors.items()}
    hosts = {rank: rank * across for rank in doors}
    handshakes = Handshakes("5e" * 32, None)
    links = []
    for rank, door in doors.items():
        theirs = Doors(door, endpoints, hosts, rank, handshakes)
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
    """Yield rank 0's link and the other end of its only stream."""
    mine, other = socket.socketpair()
    link = StreamLink(0, {1: mine})
    with other:
        yield link, other
    link.abort()


def room(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def filled(nbytes: int, value: int = 7) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def frame(kind: int, tag: int = TAG, nbytes: int = 0, number: int = 0) -> bytes:
    return HEADER.pack(kind, tag, nbytes, number)


def doors_of(link: StreamLink) -> Any:
    """Return a link's doors: where it finds the other ranks, and what it knows about them."""
    calling = link._calling  # noqa: SLF001  # no public way
    assert calling is not None
    return calling._doors  # noqa: SLF001  # likewise


def both_call(links: list[StreamLink], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each of two ranks call the other before it listens."""
    with monkeypatch.context() as deaf:
        deaf.setattr(Calling, "let_in", lambda *_: None)
        begun = [link.send(filled(1, link.rank), 1 - link.rank, TAG) for link in links]
    with ThreadPoolExecutor(2) as threads:  # between hosts, each waits for the other's handshake
        list(threads.map(lambda link, each: link.wait(each, LIMIT), links, begun))


def arrives(sent: Any, links: list[StreamLink], flat: torch.Tensor, tag: int = TAG) -> None:
    """Wait on both ranks for what the first of them has begun to send to the other."""
    into = torch.zeros_like(flat)
    coming = links[1].recv(into, links[0].rank, tag)
    with ThreadPoolExecutor(1) as thread:
        waited = thread.submit(links[0].wait, sent, LIMIT)
        links[1].wait(coming, LIMIT)
        waited.result(LIMIT.total_seconds())
    assert torch.equal(into, flat)


def members(*lengths: int) -> list[torch.Tensor]:
    return [filled(length, 1 + at) for at, length in enumerate(lengths)]


def take_a_copy(receiver: StreamLink, flats: list[torch.Tensor]) -> None:
    borrowed = receiver.recv_share(sum(map(len, flats)), 0, TAG)
    receiver.wait(borrowed, LIMIT)
    assert borrowed.share is None
    into = [torch.zeros_like(each) for each in flats]
    receiver.wait(receiver.recv_instead(borrowed, into), LIMIT)
    for got, want in zip(into, flats, strict=True):
        assert torch.equal(got, want)


class Refusing:
    """A socket on which the system sends nothing, or passes no descriptors."""

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

    def send(self, part: Any, flags: int = 0) -> int:
        return self.sendmsg((part,), (), flags)
