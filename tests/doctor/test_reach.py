"""Names, ports and listeners: what is reachable, how failures are named, and that waits end."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from unittest import mock

import pytest

from objcomm._bootstrap.doctor.facts import Contact, Peer
from objcomm._bootstrap.doctor.links import answering, contact, contacts
from objcomm._bootstrap.doctor.meeting import reach
from objcomm._transport.threads import AbandonedError, Signal, done_within
from tests.hosts import free_port

HERE = "127.0.0.1"
#: Long ago: only the time allowed for a host is left.
NEVER = 0.0
TOKEN = "0123456789abcdef" * 2


def peer(port: int) -> Peer:
    return Peer(3, "machine", HERE, port, TOKEN)


def problem_at(port: int, seconds: float = 60.0) -> str:
    return contact(peer(port), seconds, NEVER).problem


@contextlib.contextmanager
def answered(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Yield a port at which a thread answers each connection in turn."""
    with socket.create_server((HERE, 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the client has left, or nobody connects any more
                while True:
                    visitor, _ = server.accept()
                    with visitor:
                        answer(visitor)

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            serving.join()


def test_a_call_in_time_returns_or_raises() -> None:
    assert done_within(60.0, lambda: 42) == 42
    with pytest.raises(ValueError, match="forty"):
        done_within(60.0, lambda: int("forty"))


def test_a_call_that_takes_too_long_is_abandoned() -> None:
    end = threading.Event()
    with pytest.raises(TimeoutError):
        done_within(0.01, end.wait)
    end.set()


def test_a_woken_caller_stops_waiting_and_a_later_result_is_undone() -> None:
    end, is_woken, undone = threading.Event(), Signal(), Future[bool]()
    is_woken.set()
    with pytest.raises(AbandonedError):
        done_within(60.0, lambda: end.wait(60.0), undone.set_result, is_woken)
    end.set()
    assert undone.result(60.0)


def test_a_listener_is_reached_until_it_is_closed_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with answering(HERE, TOKEN) as port:
        assert contact(peer(port), 60.0, NEVER) == Contact(3)
    assert set(threading.enumerate()) <= before
    assert problem_at(port) == "connection refused"


def test_a_listener_has_one_of_the_ports_that_the_user_names() -> None:
    first = free_port()
    ports = range(first, first + 2)
    with answering(HERE, TOKEN, ports) as one, answering(HERE, TOKEN, ports) as other:
        assert {one, other} == set(ports)
        assert not problem_at(other)
        with (
            pytest.raises(OSError, match=f"none of the ports {first}-{first + 1} is free"),
            answering(HERE, TOKEN, ports),
        ):
            pass


def test_many_are_reached_at_once_and_in_order() -> None:
    with answering(HERE, TOKEN) as port:
        found = contacts([peer(port)] * 40, 60.0, 0.0)
    assert [each.problem for each in found] == [""] * 40
    assert contacts([], 60.0, 60.0) == ()


def test_another_token_or_protocol_is_another_program() -> None:
    with answering(HERE, "f" * 32) as port:
        assert problem_at(port) == "another program answered"

    def greet(visitor: socket.socket) -> None:
        visitor.recv(1)
        visitor.sendall(b"220 mail.example ESMTP\r\n")

    with answered(greet) as port:
        assert problem_at(port) == "another program answered"


def test_a_closed_port_refuses_and_a_silent_one_does_not_answer() -> None:
    assert problem_at(free_port()) == "connection refused"
    with socket.create_server((HERE, 0)) as mute:
        assert problem_at(mute.getsockname()[1], 0.05) == "no answer"


def test_a_rank_may_answer_later_than_its_host() -> None:
    def answer_late(visitor: socket.socket) -> None:
        time.sleep(0.2)
        visitor.recv(1)
        visitor.sendall(TOKEN.encode())

    with answered(answer_late) as port:
        assert not contact(peer(port), 0.05, time.monotonic() + 60.0).problem


@pytest.mark.parametrize(("said", "problem"), [(TOKEN, "large ones are lost"), ("", "no answer")])
def test_lost_large_packets_are_distinguished_from_a_silent_rank(said: str, problem: str) -> None:
    is_over = threading.Event()

    def answer(visitor: socket.socket) -> None:
        visitor.sendall(said.encode())
        is_over.wait()

    with answered(answer) as port:
        found = problem_at(port, 0.2)
        is_over.set()
    assert problem in found


def test_ranks_that_do_not_listen_are_not_tried() -> None:
    assert problem_at(0) == "it does not listen"


def test_a_name_without_an_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", mock.Mock(side_effect=unknown))
    with pytest.raises(OSError, match="name or service not known"):
        reach("nobody.invalid", 1, NEVER)


def test_a_resolver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: end.wait())
    monkeypatch.setattr("objcomm._bootstrap.doctor.meeting._RESOLVE_SECONDS", 0.01)
    monkeypatch.setattr("objcomm._bootstrap.doctor.meeting._ATTEMPT_SECONDS", 0.0)
    with pytest.raises(OSError, match="no answer"):
        reach("slow.example", 1, NEVER)
    end.set()


def test_a_port_that_opens_later_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    connect, opened = socket.create_connection, []

    def opens_after_a_refusal(address: tuple[str, int], seconds: float) -> socket.socket:
        try:
            return connect(address, seconds)
        except ConnectionRefusedError:
            opened.append(socket.create_server((HERE, port)))
            raise

    monkeypatch.setattr(socket, "create_connection", opens_after_a_refusal)
    assert reach(HERE, port, time.monotonic() + 60.0) == (HERE, HERE)
    (server,) = opened
    server.close()


def test_a_port_that_stays_closed_ends_the_wait() -> None:
    with pytest.raises(OSError, match="connection refused"):
        reach(HERE, free_port(), time.monotonic() + 0.1)
