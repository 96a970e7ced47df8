"""When another host counts as silent, from what the kernel reports about a connection to it."""

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest

from objcomm._transport import sockets
from objcomm._transport.sockets import Silence
from tests.unit.stream_links import tcp_pair


class _Kernel:
    """The kernel's report on a connection, at simulated times; the watchdog looks once a second.

    Attributes:
        heard: when the other host last answered.
        sent: when something was last sent.
        repeated: how often it was sent again.
        unanswered: number of packets without an acknowledgement.
        probes: number of keepalive probes without an answer.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, silence: Silence) -> None:
        self._seconds = self.heard = self.sent = 1000.0
        self.repeated = self.unanswered = self.probes = 0
        self._silence = silence
        monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: self._seconds))
        monkeypatch.setattr(sockets, "_tcp_state_of", self._state)

    def _state(self, _: socket.socket) -> tuple[int, ...]:
        ages = [round((self._seconds - each) * 1000) for each in (self.sent, self.heard)]
        return self.repeated, self.probes, self.unanswered, *ages, 0

    def silent_after(self, looks: int) -> int | None:
        """Return the look, of at most so many, that found the other host silent for too long."""
        for look in range(1, looks + 1):
            self._seconds += 1.0
            if self._silence.is_too_long():
                return look
        return None

    def pause(self, seconds: float) -> None:
        """Let time pass while the process does not run."""
        self._seconds += seconds

    def send(self) -> None:
        """Send a packet, and retransmit it once."""
        self.sent, self.unanswered, self.repeated = self._seconds, 1, 1

    def answer(self) -> None:
        """Let the other host answer without taking any data."""
        self.heard, self.probes = self._seconds, 0


@pytest.mark.parametrize(
    ("option", "value"),
    [("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 127), ("TCP_USER_TIMEOUT", 0)],
)
def test_the_kernel_ends_no_idle_connection_before_half_an_hour(option: str, value: int) -> None:
    end, other = tcp_pair()
    with end, other:
        Silence(end, 60.0)
        assert end.getsockopt(socket.IPPROTO_TCP, getattr(socket, option)) == value


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Kernel]:
    """Yield the kernel's report on one connection, which may be silent for 10 s."""
    one, other = tcp_pair()
    with one, other:
        yield _Kernel(monkeypatch, Silence(one, 10.0))


def test_silence_counts_once_there_is_something_to_answer(kernel: _Kernel) -> None:
    assert kernel.silent_after(3600) is None  # nothing is sent
    kernel.send()
    assert kernel.silent_after(30) == 12


def test_unanswered_probes_count_as_well(kernel: _Kernel) -> None:
    assert kernel.silent_after(20) is None
    kernel.probes = 1
    assert kernel.silent_after(60) is None  # a busy system may miss one
    kernel.probes = 2
    assert kernel.silent_after(30) == 12


def test_a_packet_that_was_sent_once_may_be_answered_a_moment_later(kernel: _Kernel) -> None:
    assert kernel.silent_after(20) is None
    kernel.unanswered = 1  # a different packet at each look
    assert kernel.silent_after(60) is None


def test_a_host_that_answers_but_takes_no_data_is_not_silent(kernel: _Kernel) -> None:
    """Linux retransmits what the receiver has no room for at longer and longer intervals."""
    for pause in (1, 2, 4, 8, 16, 32, 64, 120, 120):
        kernel.send()
        assert kernel.silent_after(1) is None
        kernel.answer()
        assert kernel.silent_after(pause) is None


def test_time_in_which_this_process_does_not_run_is_no_silence(kernel: _Kernel) -> None:
    kernel.send()
    assert kernel.silent_after(2) is None
    kernel.pause(600.0)
    kernel.send()
    assert kernel.silent_after(1) is None
    assert kernel.silent_after(30) == 12


def test_a_full_connection_is_not_silent_for_the_real_kernel() -> None:
    one, other = tcp_pair()
    with one, other:
        silence = Silence(one, 0.5)
        one.settimeout(0)
        with suppress(BlockingIOError):
            while one.send(bytes(1 << 16)):
                pass
        for _ in range(30):  # the other system answers that it has no room
            assert not silence.is_too_long()
            time.sleep(0.1)
