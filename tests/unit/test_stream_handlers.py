"""The link over streams when a signal handler, or Ctrl-C, interrupts it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from objcomm._transport.link import LinkClosed, LinkError
from objcomm._transport.streams import StreamLink
from tests.contracts import is_over
from tests.unit.stream_links import LIMIT, TAG, filled, joined, room
from tests.waits import wait_until


class Interrupted:
    """An object of which a test replaces methods."""

    def __init__(self, original: Any, **methods: Callable[..., Any]) -> None:
        self._original = original
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def at_next_read(link: StreamLink, handler: Callable[[], None]) -> None:
    """Run a signal handler once the link has read bytes but not yet recorded them."""
    connection: Any
    (connection,) = link._connections.values()  # noqa: SLF001  # no public way to the socket
    end = connection.socket

    def recvmsg_into(*into: Any) -> Any:
        connection.socket = end
        came = end.recvmsg_into(*into)
        handler()
        return came

    connection.socket = Interrupted(end, recvmsg_into=recvmsg_into)


def at_next_sleep(link: StreamLink, handler: Callable[[], None]) -> None:
    """Run a signal handler while the calling thread sleeps in the link."""
    loop: Any = link._loop  # noqa: SLF001  # no public way to where it sleeps
    events = loop.events

    def poll(seconds: float) -> Any:
        loop.events = events
        handler()
        return events.poll(seconds)  # Python resumes it when a handler returns

    loop.events = Interrupted(events, poll=poll)


def interrupt() -> None:
    """Act as a handler of Ctrl-C."""
    raise KeyboardInterrupt


def test_a_handler_that_closes_the_link_it_has_interrupted_does_not_wait_for_it() -> None:
    with joined() as (link, other):
        at_next_read(link, link.abort)
        pending = [link.recv(room(1), 1, TAG) for _ in range(2)]
        other.send(filled(1), 0, TAG)
        link.wait(pending[0], LIMIT)  # it had arrived
        with pytest.raises(LinkClosed, match="this rank has closed"):
            link.wait(pending[1], LIMIT)
        assert link.is_closed(1)
        assert list(link.closed_by()) == []
        wait_until(lambda: other.is_closed(0), "the other end to hear")


def test_a_handler_that_uses_the_link_it_has_interrupted_gets_errors() -> None:
    has_run = threading.Event()

    def handler() -> None:
        for use in (
            lambda: link.send(filled(1), 1, TAG),
            lambda: link.recv(room(1), 1, TAG),
            lambda: link.wait(second, LIMIT),
        ):
            with pytest.raises(LinkError) as caught:
                use()
            assert "handler" in caught.value.reason
        assert not is_over(link, second)
        assert not link.is_closed(1)
        link.move()
        has_run.set()

    with joined() as (link, other):
        first, second = [link.recv(room(1), 1, TAG) for _ in range(2)]
        at_next_read(link, handler)
        other.send(filled(1), 0, TAG)
        link.wait(first, LIMIT)
        assert has_run.is_set()
        other.send(filled(1), 0, TAG)
        link.wait(second, LIMIT)


def test_a_handler_that_raises_in_the_middle_of_a_message_ends_its_connection() -> None:
    """Otherwise the bytes that follow would be misread."""
    with joined() as (link, other):
        pending = link.recv(room(1), 1, TAG)
        at_next_read(link, interrupt)
        other.send(filled(1), 0, TAG)
        with pytest.raises(KeyboardInterrupt):
            link.wait(pending, LIMIT)
        with pytest.raises(LinkClosed, match="interrupted in the middle"):
            link.wait(pending, LIMIT)
        wait_until(lambda: other.is_closed(0), "the other end to hear")


def test_a_handler_may_wait_if_it_has_interrupted_a_sleep() -> None:
    """The awaited message may arrive meanwhile."""
    into = [room(1), room(1)]
    with joined() as (link, other):
        first, second = [link.recv(each, 1, TAG + at) for at, each in enumerate(into)]

        def handler() -> None:
            for tag in (TAG, TAG + 1):
                other.send(filled(1), 0, tag)
            link.wait(second, LIMIT)

        at_next_sleep(link, handler)
        link.wait(first, LIMIT)
        assert [int(each) for each in into] == [7, 7]


def test_queries_do_not_wait_for_a_handler_on_another_thread() -> None:
    entered, leave = threading.Event(), threading.Event()

    def handler() -> None:
        entered.set()
        assert leave.wait(LIMIT.total_seconds())

    with joined() as (link, other), ThreadPoolExecutor(1) as threads:
        pending = link.recv(room(1), 1, TAG)
        at_next_read(link, handler)
        waiting = threads.submit(link.wait, pending, LIMIT)
        other.send(filled(1), 0, TAG)
        assert entered.wait(LIMIT.total_seconds())
        link.move()
        assert not link.is_closed(1)
        link.abort()
        wait_until(lambda: other.is_closed(0), "the other end to hear")
        leave.set()
        waiting.result()


def test_an_interrupted_wait_leaves_the_message_to_the_next_one() -> None:
    with joined() as (link, other):
        into = room(1)
        pending = link.recv(into, 1, TAG)
        at_next_sleep(link, interrupt)
        with pytest.raises(KeyboardInterrupt):
            link.wait(pending, LIMIT)
        other.send(filled(1), 0, TAG)
        link.wait(pending, LIMIT)
        assert int(into) == 7
