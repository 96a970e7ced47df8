"""Durations of name lookups, with a resolver that the test controls."""

import socket
import threading
import time
from unittest import mock

import pytest

from objcomm._bootstrap.doctor.host import lookups


class Resolver:
    """A fake of the system's resolver and of the clock."""

    def __init__(self, patch: pytest.MonkeyPatch, *takes: float) -> None:
        self._takes = list(takes)
        self._now = 1000.0
        self.asked: list[str] = []
        patch.setattr(socket, "getnameinfo", self.look_up)
        patch.setattr("objcomm._bootstrap.doctor.host.time", mock.Mock(monotonic=lambda: self._now))

    def look_up(self, address: tuple[str, int], flags: int) -> tuple[str, str]:
        assert flags == socket.NI_NUMERICSERV  # as torch 2.13 calls it
        self.asked.append(address[0])
        self._now += self._takes.pop(0) if self._takes else 0.001
        raise socket.gaierror(socket.EAI_NONAME, "as good as any answer")


def test_a_name_is_looked_up_until_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(monkeypatch, 0.001, 0.1, 5.0)
    (found,) = lookups(1, {"::1": 3}, 100.0)
    assert (found.by, found.rank, found.address, found.count) == (1, 3, "::1", 3)
    assert found.seconds == pytest.approx(5.0)
    assert resolver.asked == ["::1"] * 3


def test_one_slow_look_up_may_be_the_machines_and_two_in_a_row_are_the_resolvers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Resolver(monkeypatch, 0.001, 0.7, 0.001, 0.3)
    (once,) = lookups(1, {"::1": 0}, 100.0)
    assert once.seconds == pytest.approx(0.001)
    assert once.count == 50
    Resolver(monkeypatch, 0.001, 0.3, 0.25)
    (twice,) = lookups(1, {"::1": 0}, 100.0)
    assert twice.seconds == pytest.approx(0.25)
    assert twice.count == 3


def test_a_resolver_that_loses_no_query_is_asked_many_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolver = Resolver(monkeypatch)
    (found,) = lookups(1, {"::1": 0}, 100.0)
    assert found.seconds == pytest.approx(0.001)
    assert found.count == len(resolver.asked) == 50


def test_an_address_is_looked_up_as_the_store_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(monkeypatch, 1.0)
    (found,) = lookups(1, {"10.0.0.1": 0}, 100.0)
    with mock.patch.object(socket, "socket", side_effect=OSError("the kernel has no IPv6")):
        (other,) = lookups(1, {"10.0.0.1": 0}, 0.0)
    assert found.address in {"::ffff:10.0.0.1", "10.0.0.1"}
    assert resolver.asked == [found.address]
    assert (other.address, other.count) == ("10.0.0.1", 0)


def test_a_resolver_that_never_answers_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(socket, "getnameinfo", lambda *_: may_end.wait())
    began = time.monotonic()
    (found,) = lookups(1, {"::1": 0}, 0.3)
    assert not may_end.is_set()
    assert 0.2 < found.seconds <= time.monotonic() - began  # Python's waits end up to 1 ms early
    may_end.set()


def test_no_name_is_looked_up_if_no_rank_came() -> None:
    assert lookups(1, {}, 1.0) == ()
