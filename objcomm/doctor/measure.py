"""The links between ranks, measured with objcomm's own messages over a Gloo group."""

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from objcomm.consensus import any_rank
from objcomm.doctor.facts import Link, Links
from objcomm.doctor.schedule import Pair, pairs, rounds
from objcomm.errors import ObjcommError, text_of
from objcomm.p2p import recv, send
from objcomm.start import shutdown

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
) -> Links:
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
    measured: list[Link] = []
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
        return Links(tuple(measured), text_of(error).partition("\n")[0], left)
    finally:
        shutdown()
    return Links(tuple(measured), "", left)


def _pair(rank: int, pair: Pair) -> list[Link]:
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
    return [Link(rank, peer, latency, speed)]


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
