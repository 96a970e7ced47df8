"""Names, ports and listeners: what is reached, how failures are named, and that waits end."""

import contextlib
import json
import socket
import threading
import time
from unittest import mock

import pytest

from objcomm._bootstrap.doctor.facts import Peer
from objcomm._bootstrap.doctor.host import (
    UnreachedError,
    is_own,
    own_address,
    reach,
    resolve,
    touch,
    within,
)
from objcomm._bootstrap.doctor.links import Listener, contact, contacts
from tests.hosts import free_port

HERE = "127.0.0.1"
#: Long ago: there is no more patience than for a host.
NEVER = 0.0


def peer(port: int, address: str = HERE) -> Peer:
    return Peer(3, "machine", address, port, "token", 1)


def test_a_call_gives_what_it_returns_or_raises() -> None:
    assert within(60.0, lambda: 42) == 42
    with pytest.raises(ValueError, match="forty"):
        within(60.0, lambda: int("forty"))


def test_a_call_that_takes_too_long_is_left_behind() -> None:
    end = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.01, end.wait)
    end.set()


def test_a_listener_is_reached_and_its_clock_is_ours() -> None:
    with Listener(HERE, "token") as listener:
        found = contact(peer(listener.port), 60.0, NEVER)
    assert found.peer == 3
    assert not found.problem
    assert abs(found.ahead_seconds) <= found.margin_seconds


def test_a_listener_has_one_of_the_ports_that_the_user_names() -> None:
    first = free_port()
    ports = range(first, first + 2)
    with Listener(HERE, "token", ports) as one, Listener(HERE, "token", ports) as other:
        assert {one.port, other.port} == set(ports)
        assert not contact(peer(other.port), 60.0, NEVER).problem
        with pytest.raises(OSError, match=f"none of the ports {first}-{first + 1} is free"):
            Listener(HERE, "token", ports)


def test_another_clock_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    asker = threading.get_ident()
    ahead = 1000.0

    def told() -> float:
        return real() + (0.0 if threading.get_ident() == asker else ahead)

    monkeypatch.setattr(time, "time", told)
    with Listener(HERE, "token") as listener:
        found = contact(peer(listener.port), 60.0, NEVER)
    assert abs(found.ahead_seconds - ahead) <= found.margin_seconds


def test_many_are_reached_at_once_and_in_order() -> None:
    with Listener(HERE, "token") as listener:
        found = contacts([peer(listener.port)] * 40, 60.0, 0.0)
    assert [each.problem for each in found] == [""] * 40
    assert contacts([], 60.0, 60.0) == ()


def test_another_token_is_another_program() -> None:
    with Listener(HERE, "other") as listener:
        assert contact(peer(listener.port), 60.0, NEVER).problem == "another program answered"


def test_another_protocol_is_another_program() -> None:
    with socket.create_server((HERE, 0)) as server:

        def answer() -> None:
            visitor, _ = server.accept()
            with visitor:
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
            with contextlib.suppress(OSError):  # who came has left, or nobody comes any more
                while True:
                    visitor, _ = server.accept()
                    time.sleep(0.2)
                    with visitor:
                        visitor.sendall(json.dumps(["token", time.time()]).encode())

        answering = threading.Thread(target=answer)
        answering.start()
        found = contact(peer(server.getsockname()[1]), 0.05, time.monotonic() + 60.0)
        server.shutdown(socket.SHUT_RDWR)
        answering.join()
    assert not found.problem


def test_who_does_not_listen_is_not_tried() -> None:
    assert contact(peer(1, address=""), 60.0, NEVER).problem == "it does not listen"


def test_a_listener_leaves_no_thread_and_no_port() -> None:
    before = set(threading.enumerate())
    with Listener(HERE, "token") as listener:
        port = listener.port
    assert set(threading.enumerate()) <= before
    with pytest.raises(UnreachedError, match="connection refused"):
        touch(HERE, port, 60.0)


def test_a_name_without_an_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HERE in resolve("localhost")
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", mock.Mock(side_effect=unknown))
    with pytest.raises(UnreachedError, match=r"'nobody.invalid' stands for no address"):
        resolve("nobody.invalid", 60.0)


def test_a_resolver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: end.wait())
    with pytest.raises(UnreachedError, match=r"took more than 0.01 s"):
        resolve("slow.example", 0.01)
    end.set()


def test_own_addresses_are_told_from_others() -> None:
    assert is_own(HERE)
    assert not is_own("203.0.113.7")  # of no network, RFC 5737
    assert own_address("203.0.113.7") == ""
    assert own_address(HERE) == HERE


def test_a_port_that_opens_later_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    opened = []

    def opens_after_a_refusal(address: str, port: int, seconds: float) -> str:
        try:
            return touch(address, port, seconds)
        except UnreachedError:
            opened.append(socket.create_server((HERE, port)))
            raise

    monkeypatch.setattr("objcomm._bootstrap.doctor.host.touch", opens_after_a_refusal)
    assert reach([HERE], port, time.monotonic() + 60.0) == HERE
    (server,) = opened
    server.close()


def test_a_port_that_stays_closed_ends_the_wait() -> None:
    with pytest.raises(UnreachedError, match="connection refused"):
        reach([HERE], free_port(), time.monotonic() + 0.1)
