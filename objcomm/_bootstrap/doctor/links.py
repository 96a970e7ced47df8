"""Who reaches whom, and how fast: which ranks try which others, when, and what is measured.

All ranks compute the same schedule from what they all know. Before a Gloo group is made, each rank
answers others at the address where Gloo listens: so a rank that can't be reached is known by name.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from objcomm._bootstrap.doctor.facts import Contact, Link, Measured, Peer
from objcomm._bootstrap.init import shutdown
from objcomm._collectives.agree import any_rank
from objcomm._p2p.messages import recv, send
from objcomm._transport.doors import Door
from objcomm.errors import ObjcommError, text_of

Pair = tuple[int, int]

#: A rank tries to reach no more others than this.
PEERS_MAX = 64
#: No more pairs than this are measured.
PAIRS_MAX = 4096


def distances(size: int) -> list[int]:
    """How far apart two ranks of a ring may be, in the order in which they are tried.

    Neighbours first, then across the ring, then powers of two: so any first part of the list has
    every rank in it alike, and near ones with far ones.
    """
    most = size // 2
    first = [1, most, *(1 << bit for bit in range(1, size.bit_length()))]
    ordered = dict.fromkeys(each for each in [*first, *range(1, most + 1)] if 1 <= each <= most)
    return list(ordered)


def peers_of(rank: int, size: int) -> list[int]:
    """The ranks that one tries to reach: all others, or ``PEERS_MAX`` with rank 0 among them."""
    around = [(rank + way * far) % size for far in distances(size) for way in (1, -1)]
    return list(dict.fromkeys([0] * (rank != 0) + around))[:PEERS_MAX]


def pairs(size: int) -> list[Pair]:
    """The pairs to measure, the most telling first; the lower rank of each first."""
    around = distances(size)[: PAIRS_MAX // size + 2]
    both = ((rank, (rank + far) % size) for far in around for rank in range(size))
    return list(dict.fromkeys((min(pair), max(pair)) for pair in both))[:PAIRS_MAX]


def rounds(wanted: Sequence[Pair], machines: Sequence[str]) -> list[list[Pair]]:
    """Divide pairs into rounds so that no host has two pairs in one round.

    Args:
        wanted: the pairs, the first of them as early as possible.
        machines: the host of each rank.
    """
    laid: list[list[Pair]] = []
    busy: list[set[str]] = []
    full = dict.fromkeys(machines, 0)  # so many of the first rounds have no room for a host
    for pair in wanted:
        here = {machines[rank] for rank in pair}
        later = range(max(full[machine] for machine in here), len(busy))
        at = next((at for at in later if not busy[at] & here), len(busy))
        if at == len(busy):
            laid.append([])
            busy.append(set())
        laid[at].append(pair)
        busy[at] |= here
        for machine in here:
            full[machine] += full[machine] == at
    return laid


_AT_ONCE = 32
_TOKEN_NBYTES = 32
# Some packets of the largest size. A host that sends larger ones than a switch on the way takes
# gets small messages through, and no large ones.
_REST_NBYTES = 1 << 16
_STRANGER = "another program answered"
_LOST = "small packets arrive and large ones are lost (see the MTU of both hosts and of switches)"


@contextlib.contextmanager
def answering(address: str, token: str, ports: Sequence[int] = ()) -> Iterator[int]:
    """Answer each caller, in a thread, until the block ends; gives the port.

    It listens as objcomm's own connections do.

    Args:
        address: of this host.
        token: what to answer, of 32 characters.
        ports: the port must be one of these; any if empty.

    Raises:
        OSError: nobody can listen there.
    """
    with Door.opened("streams", [address], ports) as door:
        if not door.place.port:
            raise OSError(door.place.lacks)
        listener = door.listeners[-1]
        listener.settimeout(None)
        answer = threading.Thread(
            target=_answer, args=(listener, token), name="objcomm-doctor", daemon=True
        )
        answer.start()
        try:
            yield door.place.port
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # which ends its wait for callers
            answer.join()


def _answer(listener: socket.socket, token: str) -> None:
    while True:
        try:
            caller, _ = listener.accept()
        except ConnectionAbortedError:  # it has left again
            continue
        except OSError:  # the listener was shut down
            return
        with caller, contextlib.suppress(OSError):  # it has left
            caller.settimeout(1.0)
            caller.recv(1)
            caller.sendall(token.encode())  # in a small packet of its own
            caller.sendall(bytes(_REST_NBYTES))


def contacts(peers: Sequence[Peer], seconds: float, patience: float) -> tuple[Contact, ...]:
    """Try to reach other ranks, several at once.

    Args:
        peers: which.
        seconds: how long to wait for each one's host.
        patience: how long to wait for all, where their hosts have let this rank in.
    """
    until = time.monotonic() + patience
    with ThreadPoolExecutor(_AT_ONCE, "objcomm-doctor") as pool:
        return tuple(pool.map(lambda peer: contact(peer, seconds, until), peers))


def contact(peer: Peer, seconds: float, until: float) -> Contact:
    """Try to reach one rank.

    Args:
        peer: which.
        seconds: how long to wait for its host, whose system answers however busy it is.
        until: how long to wait for the rank itself, if that is longer, in seconds of
            ``time.monotonic``: with twenty threads on two cores, one took more than three seconds.
    """
    if not peer.port:
        return Contact(peer.rank, "it does not listen")
    token = ""
    try:
        with socket.create_connection((peer.address, peer.port), seconds) as connection:
            connection.settimeout(max(seconds, until - time.monotonic()))
            connection.sendall(b"?")  # a door opens to callers that say something
            with connection.makefile("rb") as answer:
                token = answer.read(_TOKEN_NBYTES).decode("ascii", "replace")
                answer.read(_REST_NBYTES)
    except OSError as error:
        is_lost = token == peer.token and isinstance(error, TimeoutError)
        return Contact(peer.rank, _LOST if is_lost else cause_of(error))
    return Contact(peer.rank, "" if token == peer.token else _STRANGER)


def cause_of(error: Exception) -> str:
    """How a connection failed, in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer"
    return (getattr(error, "strerror", None) or str(error)).lower()


_WARM_UP, _TRIPS = 2, 20
# Larger and larger, while there is time, and then the best of some: other programs disturb one
# message, and seldom all of them.
_SIZES = (256 << 10, 1 << 20, *[8 << 20] * 5)
_ENOUGH_SECONDS = 0.3


def measure(
    store: dist.Store, rank: int, machines: Sequence[str], connect_seconds: float, seconds: float
) -> Measured:
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
    links: list[Link] = []
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=len(machines),
            timeout=timedelta(seconds=connect_seconds),
        )
        deadline = time.monotonic() + seconds
        for together in rounds(pairs(len(machines)), machines):
            # It is a barrier, too: no round disturbs another one.
            if any_rank(time.monotonic() > deadline):
                break
            for pair in together:
                for src, dst in (pair, pair[::-1]):
                    if rank == src:
                        links.append(_sent(src, dst))
                    elif rank == dst:
                        while recv(src):
                            send(b"", src)
    except (ObjcommError, RuntimeError, ValueError) as error:
        return Measured(tuple(links), text_of(error).partition("\n")[0])
    finally:
        shutdown()
    return Measured(tuple(links))


def _sent(src: int, dst: int) -> Link:
    """Send messages to a rank that answers each; the largest ones say how fast the link is."""
    trips = [_round_trip(dst, b"?") for _ in range(_WARM_UP + _TRIPS)]
    latency = min(trips[_WARM_UP:]) / 2
    speeds: dict[int, float] = {}
    until = time.perf_counter() + _ENOUGH_SECONDS
    for nbytes in _SIZES:
        # The answer takes as long as the message's first byte; no link is infinitely fast.
        seconds = max(_round_trip(dst, bytes(nbytes)) - 2 * latency, 1e-7)
        speeds[nbytes] = max(nbytes / seconds, speeds.get(nbytes, 0.0))
        if time.perf_counter() > until:
            break
    send(b"", dst)
    return Link(src, dst, latency, speeds[max(speeds)])


def _round_trip(peer: int, payload: bytes) -> float:
    began = time.perf_counter()
    send(payload, peer)
    recv(peer)
    return time.perf_counter() - began
