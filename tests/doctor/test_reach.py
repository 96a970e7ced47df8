"""Names, ports and listeners: what is reachable, how failures are named, and that waits end."""

import contextlib
import socket
import threading
import time
from unittest import mock

import pytest

from objcomm._bootstrap.doctor.facts import Peer
from objcomm._bootstrap.doctor.links import answering, contact, contacts
from objcomm._bootstrap.doctor.meeting import reach
from objcomm._transport.threads import done_within
from tests.hosts import free_port

HERE = "127.0.0.1"
#: Long ago: only the time allowed for a host is left.
NEVER = 0.0


TOKEN = "0123456789abcdef" * 2


def peer(port: int) -> Peer:
    return Peer(3, "machine", HERE, port, TOKEN)


def test_a_call_gives_what_it_returns_or_raises() -> None:
    assert done_within(60.0, lambda: 42) == 42
    with pytest.raises(ValueError, match="forty"):
        done_within(60.0, lambda: int("forty"))


def test_a_call_that_takes_too_long_is_left_behind() -> None:
    end = threading.Event()
    with pytest.raises(TimeoutError):
        done_within(0.01, end.wait)
    end.set()


def test_a_listener_is_reached() -> None:
    with answering(HERE, TOKEN) as port:
        found = contact(peer(port), 60.0, NEVER)
    assert found.peer == 3
    assert not found.problem


def test_a_listener_has_one_of_the_ports_that_the_user_names() -> None:
    first = free_port()
    ports = range(first, first + 2)
    with answering(HERE, TOKEN, ports) as one, answering(HERE, TOKEN, ports) as other:
        assert {one, other} == set(ports)
        assert not contact(peer(other), 60.0, NEVER).problem
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


def test_another_token_is_another_program() -> None:
    with answering(HERE, "f" * 32) as port:
        assert contact(peer(port), 60.0, NEVER).problem == "another program answered"


def test_another_protocol_is_another_program() -> None:
    with socket.create_server((HERE, 0)) as server:

        def answer() -> None:
            visitor, _ = server.accept()
            with visitor:
                visitor.recv(1)
                visitor.sendall(b"220 mail.example ESMTP\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        found = contact(peer(server.getsockname()[1]), 60.0, NEVER)
        answering.join()
    assert found.problem == "another program answered"


def test_a_closed_port_refuses_and_a_silent_one_does_not_answer() -> None:
    assert contact(peer(free_port()), 60.0, NEVER).problem == "connection refused"
    with socket.create_server((HERE, 0)) as mute:
        assert contact(peer(mute.getsockname()[1]), 0.05, NEVER).problem == "no answer"


def test_a_rank_may_answer_later_than_its_host() -> None:
    with socket.create_server((HERE, 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):  # the client has left, or nobody connects any more
                while True:
                    visitor, _ = server.accept()
                    time.sleep(0.2)
                    with visitor:
                        visitor.recv(1)
                        visitor.sendall(TOKEN.encode())

        answering = threading.Thread(target=answer)
        answering.start()
        found = contact(peer(server.getsockname()[1]), 0.05, time.monotonic() + 60.0)
        server.shutdown(socket.SHUT_RDWR)
        answering.join()
    assert not found.problem


@pytest.mark.parametrize(("said", "problem"), [(TOKEN, "large ones are lost"), ("", "no answer")])
def test_lost_large_packets_are_distinguished_from_a_silent_rank(said: str, problem: str) -> None:
    is_over = threading.Event()
    with socket.create_server((HERE, 0)) as server:

        def answer() -> None:
            visitor, _ = server.accept()
            with visitor:
                visitor.sendall(said.encode())
                is_over.wait()

        answers = threading.Thread(target=answer)
        answers.start()
        found = contact(peer(server.getsockname()[1]), 0.2, NEVER)
        is_over.set()
        answers.join()
    assert problem in found.problem


def test_ranks_that_do_not_listen_are_not_tried() -> None:
    assert contact(peer(0), 60.0, NEVER).problem == "it does not listen"


def test_a_listener_leaves_no_thread_and_no_port() -> None:
    before = set(threading.enumerate())
    with answering(HERE, TOKEN) as port:
        pass
    assert set(threading.enumerate()) <= before
    assert contact(peer(port), 60.0, NEVER).problem == "connection refused"


def test_a_name_without_an_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
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
