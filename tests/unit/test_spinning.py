"""A rank with its own core polls for a moment before it sleeps, if its last wait was short."""

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from objcomm._transport.link import LinkClosed, LinkTimeout
from objcomm._transport.streams import StreamLink
from tests.unit.stream_links import HEAD, LIMIT, joined

LONG_SECONDS = LIMIT.total_seconds()


class _Looks:
    """A link's epoll that records how long each poll may sleep."""

    def __init__(self, link: StreamLink, on_look: Callable[[int], object]) -> None:
        self._events = vars(vars(link)["_loop"])["events"]
        self._on_look = on_look
        self.seconds: list[float] = []
        vars(vars(link)["_loop"])["events"] = self

    def poll(self, seconds: float) -> Any:
        self.seconds.append(seconds)
        self._on_look(len(self.seconds))
        return self._events.poll(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._events, name)


def _take(link: StreamLink) -> bytes:
    return link.take(1, HEAD, time.monotonic() + LONG_SECONDS)


def _looks_of_the_second_wait(spin_seconds: float) -> list[float]:
    """Return how long each poll of the second wait may sleep; its third poll brings the message."""
    with joined(spin_seconds=spin_seconds) as (link, other):
        _Looks(link, lambda count: other.send(b"first", 0, HEAD) if count == 1 else None)
        assert _take(link) == b"first"

        def answer(count: int) -> None:
            if count == 3 or looks.seconds[-1] > 0:
                other.send(b"second", 0, HEAD)

        looks = _Looks(link, answer)
        assert _take(link) == b"second"
        return looks.seconds


def test_a_wait_after_a_short_one_polls_before_it_sleeps() -> None:
    assert _looks_of_the_second_wait(spin_seconds=LONG_SECONDS)[:3] == [0, 0, 0]


@pytest.mark.parametrize("spin_seconds", [0.0, 1e-9])
def test_a_wait_after_a_longer_one_sleeps_immediately(spin_seconds: float) -> None:
    assert _looks_of_the_second_wait(spin_seconds)[0] > 0


def test_the_first_wait_of_a_link_sleeps_immediately() -> None:
    with joined(spin_seconds=LONG_SECONDS) as (link, other):
        looks = _Looks(link, lambda _: other.send(b"first", 0, HEAD))
        assert _take(link) == b"first"
        assert looks.seconds[0] > 0


def test_a_wait_polls_no_longer_than_its_limit() -> None:
    with joined(spin_seconds=math.inf) as (link, _):  # every wait is short enough
        looks = _Looks(link, lambda _: None)
        with pytest.raises(LinkTimeout):
            link.take(1, HEAD, time.monotonic() + 0.01)
        assert looks.seconds[0] == 0


def test_ending_the_link_ends_a_wait_that_polls() -> None:
    with joined(spin_seconds=LONG_SECONDS) as (link, other), ThreadPoolExecutor(1) as thread:
        _Looks(link, lambda count: other.send(b"first", 0, HEAD) if count == 1 else None)
        assert _take(link) == b"first"
        _Looks(link, lambda count: thread.submit(link.abort) if count == 3 else None)
        with pytest.raises(LinkClosed):
            _take(link)
