"""Who reaches whom, and how fast: who tries whom when, and what is measured over a Gloo group.

All ranks compute the same schedule from what they all know. Whether each rank can be reached where
Gloo would listen is tried first, and how far its clock is off.
"""

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch.distributed as dist

from objcomm._bootstrap.doctor.facts import MeasuredLink, MeasuredLinks, Peer, Reachable
from objcomm._bootstrap.doctor.host import connect, listen, reason_of
from objcomm._bootstrap.init import shutdown
from objcomm._collectives.agree import any_rank
from objcomm._observe.inspect.rows import Clock
from objcomm._p2p.messages import recv, send
from objcomm.errors import ObjcommError, text_of

Pair = tuple[int, int]

#: Of more others than this a rank tries some only.
PEERS_MAX = 64
#: Of more pairs than this some only are measured.
PAIRS_MAX = 4096


def distances(size: int) -> list[int]:
    """How far apart two ranks of a ring may be, in the order in which they are tried.

    Neighbours first, then across the ring, then powers of two: so that a beginning of the list has
    every rank in it alike, and near ones with far ones.
    """
    most = size // 2
    first = [1, most, *(1 << bit for bit in range(1, size.bit_length()))]
    ordered = dict.fromkeys(each for each in [*first, *range(1, most + 1)] if 1 <= each <= most)
    return list(ordered)


def peers_of(rank: int, size: int) -> list[int]:
    """The ranks that one tries to reach: all of them, or ``PEERS_MAX`` with rank 0 among them."""
    around = [(rank + way * far) % size for far in distances(size) for way in (1, -1)]
    first = [0] * (rank != 0)
    return list(dict.fromkeys([*first, *around]))[:PEERS_MAX]


def pairs(size: int) -> list[Pair]:
    """The pairs to measure, those first that tell most; the lower rank of each first."""
    found: dict[Pair, None] = {}
    for far in distances(size):
        for rank in range(size):
            one, other = sorted((rank, (rank + far) % size))
            found[one, other] = None
        if len(found) >= PAIRS_MAX:
            break
    return list(found)[:PAIRS_MAX]


def rounds(wanted: Sequence[Pair], machines: Sequence[str]) -> list[list[Pair]]:
    """Lay pairs into rounds so that no host has to do with two pairs of one round.

    Args:
        wanted: the pairs, the first of them as early as may be.
        machines: the host of each rank.
    """
    laid: list[list[Pair]] = []
    busy: dict[str, set[int]] = {machine: set() for machine in machines}
    free_from = dict.fromkeys(machines, 0)
    for pair in wanted:
        here = {machines[rank] for rank in pair}
        at = max(free_from[machine] for machine in here)
        while any(at in busy[machine] for machine in here):
            at += 1
        while len(laid) <= at:
            laid.append([])
        laid[at].append(pair)
        for machine in here:
            busy[machine].add(at)
            while free_from[machine] in busy[machine]:
                free_from[machine] += 1
    return laid


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

    def __init__(self, address: str, token: str, ports: Sequence[int] = ()) -> None:
        """Begin to listen.

        Args:
            address: of this host.
            token: what to answer.
            ports: those of which one is to be used; any if empty.

        Raises:
            OSError: nobody can listen there.
        """
        self._socket = listen(address, ports)
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


def contacts(peers: Sequence[Peer], seconds: float, patience: float) -> tuple[Reachable, ...]:
    """Try to reach other ranks, several at once.

    Args:
        peers: whom.
        seconds: how long to wait for each one's host.
        patience: how long to wait for all, where their hosts have let this rank in.
    """
    if not peers:
        return ()
    until = time.monotonic() + patience
    with ThreadPoolExecutor(min(_AT_ONCE, len(peers)), "objcomm-doctor") as pool:
        return tuple(pool.map(lambda peer: contact(peer, seconds, until), peers))


def contact(peer: Peer, seconds: float, until: float) -> Reachable:
    """Try to reach one rank.

    Args:
        peer: which.
        seconds: how long to wait for its host, whose system answers however busy it is.
        until: how long to wait for itself, if that is longer, in seconds of ``time.monotonic``: of
            two cores with twenty threads to run, one gave no answer within three seconds.
    """
    if not peer.address:
        return Reachable(peer.rank, "it does not listen")
    clock = Clock()
    for _ in range(_ROUNDS):
        try:
            found = _clock(peer, seconds, until)
        except OSError as error:
            return Reachable(peer.rank, reason_of(error))
        except ValueError:
            return Reachable(peer.rank, _STRANGER)
        clock = min(clock, found, key=lambda each: each.margin_seconds)
    return Reachable(peer.rank, "", clock.ahead_seconds, clock.margin_seconds)


def _clock(peer: Peer, seconds: float, until: float) -> Clock:
    """Bounds of a rank's clock: it told the time after it was asked and before that was heard.

    Raises:
        OSError: it can't be reached.
        ValueError: somebody else was.
    """
    asked = time.time()
    with connect(peer.address, peer.port, seconds) as connection:
        connection.settimeout(max(seconds, until - time.monotonic()))
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


_WARM_UP, _TRIPS = 2, 20
# Larger messages only where the smaller one says that they will not take long.
_SIZES = (256 << 10, 1 << 20, 8 << 20)
_SLOW_SECONDS = 0.5
# The best of some: what else runs on a host disturbs one message, and seldom all of them.
_REPEATS = 5
_ENOUGH_SECONDS = 0.3
_EMPTY = b""
# A clock's step, so that no link is infinitely fast.
_LEAST_SECONDS = 1e-7


def measure(
    store: dist.Store, rank: int, machines: Sequence[str], connect_seconds: float, seconds: float
) -> MeasuredLinks:
    """Measure the links of a job whose ranks reach one another; every rank must call this.

    Args:
        store: in which its ranks meet.
        rank: this one.
        machines: the host of each rank.
        connect_seconds: how long the group may take to be made, and each message to come.
        seconds: how long all may take; pairs for which there is no time are left out.

    Returns:
        What this rank has measured as a sender, and what ended it.
    """
    size = len(machines)
    measured: list[MeasuredLink] = []
    left = size * (size - 1) // 2
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=connect_seconds),
        )
        deadline = time.monotonic() + seconds
        for together in rounds(pairs(size), machines):
            # It is a barrier, too: a round disturbs no other one.
            if any_rank(time.monotonic() > deadline):
                break
            measured += [link for pair in together if rank in pair for link in _pair(rank, pair)]
            left -= len(together)
    except (ObjcommError, RuntimeError, ValueError) as error:
        return MeasuredLinks(tuple(measured), text_of(error).partition("\n")[0], left)
    finally:
        shutdown()
    return MeasuredLinks(tuple(measured), "", left)


def _pair(rank: int, pair: Pair) -> list[MeasuredLink]:
    """Both directions, one after the other; each rank returns the one in which it sent."""
    first, second = pair
    is_first = rank == first
    peer = second if is_first else first
    latency = _ping(peer) if is_first else _pong(peer)
    if is_first:
        speed = _push(peer, latency)
        _pull(peer)
    else:
        _pull(peer)
        speed = _push(peer, latency)
    return [MeasuredLink(rank, peer, latency, speed)]


def _ping(peer: int) -> float:
    quickest = float("inf")
    for trip in range(_WARM_UP + _TRIPS):
        began = time.perf_counter()
        send(_EMPTY, peer)
        recv(peer)
        if trip >= _WARM_UP:
            quickest = min(quickest, time.perf_counter() - began)
    send(quickest / 2, peer)
    return quickest / 2


def _pong(peer: int) -> float:
    for _ in range(_WARM_UP + _TRIPS):
        recv(peer)
        send(_EMPTY, peer)
    return float(recv(peer))


def _push(peer: int, latency: float) -> float:
    """Send larger and larger messages; returns bytes per second of the last size, the best."""
    speed = 0.0
    for nbytes in _SIZES:
        if speed and nbytes / speed > _SLOW_SECONDS:
            break
        payload = bytes(nbytes)
        enough = time.perf_counter() + _ENOUGH_SECONDS
        speed = _speed(payload, peer, latency)
        for _ in range(_REPEATS - 1):
            if time.perf_counter() < enough:
                speed = max(speed, _speed(payload, peer, latency))
    send(_EMPTY, peer)
    return speed


def _speed(payload: bytes, peer: int, latency: float) -> float:
    began = time.perf_counter()
    send(payload, peer)
    recv(peer)  # a word that it has come, which takes as long as the message's first byte
    seconds = time.perf_counter() - began - 2 * latency
    return len(payload) / max(seconds, _LEAST_SECONDS)


def _pull(peer: int) -> None:
    while recv(peer):
        send(_EMPTY, peer)
