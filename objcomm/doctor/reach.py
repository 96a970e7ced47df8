"""Whether each rank can be reached where Gloo would listen, and how far its clock is off."""

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from objcomm.doctor.address import connect, listen, reason_of
from objcomm.doctor.facts import Contact, Peer
from objcomm.inspector.clocks import Clock

_AT_ONCE = 32
_ROUNDS = 3
_POLL_SECONDS = 0.2
_MOST_NBYTES = 256

_STRANGER = "another program answered"


class Listener:
    """Answers whoever connects with a token and the time, in a thread of its own.

    Attributes:
        port: where.
    """

    def __init__(self, address: str, token: str) -> None:
        """Begin to listen.

        Args:
            address: of this host.
            token: what to answer.

        Raises:
            OSError: nobody can listen there.
        """
        self._socket = listen(address)
        self._socket.settimeout(_POLL_SECONDS)
        self._token = token
        self._is_over = threading.Event()
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._answer, name="objcomm-doctor", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Listen no more."""
        self._is_over.set()
        self._thread.join()
        self._socket.close()

    def _answer(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(OSError):  # nobody came, or who came has left
                visitor, _ = self._socket.accept()
                with visitor:
                    visitor.sendall(json.dumps([self._token, time.time()]).encode())


def contacts(peers: Sequence[Peer], seconds: float) -> tuple[Contact, ...]:
    """Try to reach other ranks, several at once.

    Args:
        peers: whom.
        seconds: how long to wait for each.
    """
    if not peers:
        return ()
    with ThreadPoolExecutor(min(_AT_ONCE, len(peers)), "objcomm-doctor") as crew:
        return tuple(crew.map(lambda peer: contact(peer, seconds), peers))


def contact(peer: Peer, seconds: float) -> Contact:
    """Try to reach one rank.

    Args:
        peer: which.
        seconds: how long to wait for it.
    """
    if not peer.address:
        return Contact(peer.rank, "it does not listen")
    clock = Clock()
    for _ in range(_ROUNDS):
        try:
            found = _clock(peer, seconds)
        except OSError as error:
            return Contact(peer.rank, reason_of(error))
        except ValueError:
            return Contact(peer.rank, _STRANGER)
        clock = min(clock, found, key=lambda each: each.margin_seconds)
    return Contact(peer.rank, "", clock.ahead_seconds, clock.margin_seconds)


def _clock(peer: Peer, seconds: float) -> Clock:
    """Bounds of a rank's clock: it told the time after it was asked and before that was heard.

    Raises:
        OSError: it can't be reached.
        ValueError: somebody else was.
    """
    asked = time.time()
    with connect(peer.address, peer.port, seconds) as connection:
        token, told = _heard(connection)
    heard = time.time()
    if token != peer.token or not isinstance(told, float) or not math.isfinite(told):
        raise ValueError(_STRANGER)
    return Clock(told - (asked + heard) / 2, (heard - asked) / 2, 1)


def _heard(connection: socket.socket) -> tuple[object, object]:
    text = b""
    while len(text) < _MOST_NBYTES and (part := connection.recv(_MOST_NBYTES)):
        text += part
    answer = json.loads(text)
    if not isinstance(answer, list) or len(answer) != len(("token", "time")):
        raise ValueError(_STRANGER)
    return answer[0], answer[1]
