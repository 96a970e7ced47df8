"""Find out which ranks reach each other, and how fast: the schedule and the measurements.

All ranks compute the same schedule from facts that all have. Before a Gloo group is created, each
rank answers others at the address where Gloo listens, so that an unreachable rank is identified.
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

#: The most ranks that a rank tries to reach.
PEERS_MAX = 64
#: The most pairs that are measured.
PAIRS_MAX = 4096


def distances(size: int) -> list[int]:
    """Return the distances between two ranks of a ring, in the order in which to try them.

    Neighbors come first, then ranks across the ring, then powers of two, then the rest. So any
    prefix of the list treats all ranks alike, and contains near and far ranks.
    """
    most = size // 2
    first = [1, most, *(1 << bit for bit in range(1, size.bit_length()))]
    ordered = dict.fromkeys(each for each in [*first, *range(1, most + 1)] if 1 <= each <= most)
    return list(ordered)


def peers_of(rank: int, size: int) -> list[int]:
    """Return the ranks that a rank tries to reach: all, or ``PEERS_MAX`` including rank 0."""
    around = [(rank + way * far) % size for far in distances(size) for way in (1, -1)]
    return list(dict.fromkeys([0] * (rank != 0) + around))[:PEERS_MAX]


def pairs(size: int) -> list[Pair]:
    """Return the pairs to measure, the most informative first, each with its lower rank first."""
    around = distances(size)[: PAIRS_MAX // size + 2]
    both = ((rank, (rank + far) % size) for far in around for rank in range(size))
    return list(dict.fromkeys((min(pair), max(pair)) for pair in both))[:PAIRS_MAX]


def rounds(wanted: Sequence[Pair], machines: Sequence[str]) -> list[list[Pair]]:
    """Divide pairs into rounds in which no host has two pairs.

    Args:
        wanted: the pairs; the first ones are placed as early as possible.
        machines: the host of each rank.
    """
    laid: list[list[Pair]] = []
    busy: list[set[str]] = []
    full = dict.fromkeys(machines, 0)  # for each host, how many of the first rounds are taken
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
# Several packets of the maximum size. If a host sends larger packets than a switch on the way
# accepts, small messages arrive and large ones do not.
_REST_NBYTES = 1 << 16
_STRANGER = "another program answered"
_LOST = "small packets arrive and large ones are lost (see the MTU of both hosts and of switches)"


@contextlib.contextmanager
def answering(address: str, token: str, ports: Sequence[int] = ()) -> Iterator[int]:
    """Answer each caller on a thread until the block ends; yield the port.

    It listens in the same way as objcomm's own connections.

    Args:
        address: an address of this host.
        token: the answer, of 32 characters.
        ports: the ports to choose from; any free port if empty.

    Raises:
        OSError: it can't listen there.
    """
    with Door.opened("streams", [address], ports) as door:
        if not door.endpoint.port:
            raise OSError(door.endpoint.lacks)
        listener = door.listeners[-1]
        listener.settimeout(None)
        answer = threading.Thread(
            target=_answer, args=(listener, token), name="objcomm-doctor", daemon=True
        )
        answer.start()
        try:
            yield door.endpoint.port
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # ends the wait for callers
            answer.join()


def _answer(listener: socket.socket, token: str) -> None:
    while True:
        try:
            caller, _ = listener.accept()
        except ConnectionAbortedError:  # the caller has left again
            continue
        except OSError:  # the listener was shut down
            return
        with caller, contextlib.suppress(OSError):  # likewise
            caller.settimeout(1.0)
            caller.recv(1)
            caller.sendall(token.encode())  # in a separate small packet
            caller.sendall(bytes(_REST_NBYTES))


def contacts(peers: Sequence[Peer], seconds: float, patience: float) -> tuple[Contact, ...]:
    """Try to reach other ranks, several at the same time.

    Args:
        peers: the ranks to reach.
        seconds: how long to wait for each one's host.
        patience: how long to wait for all ranks whose hosts have accepted the connection.
    """
    until = time.monotonic() + patience
    with ThreadPoolExecutor(_AT_ONCE, "objcomm-doctor") as pool:
        return tuple(pool.map(lambda peer: contact(peer, seconds, until), peers))


def contact(peer: Peer, seconds: float, until: float) -> Contact:
    """Try to reach one rank.

    Args:
        peer: the rank to reach.
        seconds: how long to wait for its host, whose kernel answers even if it is busy.
        until: when to stop waiting for the rank itself, if that is later, in seconds of
            ``time.monotonic``. With twenty threads on two cores, one rank took more than 3 s.
    """
    if not peer.port:
        return Contact(peer.rank, "it does not listen")
    token = ""
    try:
        with socket.create_connection((peer.address, peer.port), seconds) as connection:
            connection.settimeout(max(seconds, until - time.monotonic()))
            connection.sendall(b"?")  # the listener accepts only callers that send something
            with connection.makefile("rb") as answer:
                token = answer.read(_TOKEN_NBYTES).decode("ascii", "replace")
                answer.read(_REST_NBYTES)
    except OSError as error:
        is_lost = token == peer.token and isinstance(error, TimeoutError)
        return Contact(peer.rank, _LOST if is_lost else cause_of(error))
    return Contact(peer.rank, "" if token == peer.token else _STRANGER)


def cause_of(error: Exception) -> str:
    """Describe how a connection failed, in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer"
    return (getattr(error, "strerror", None) or str(error)).lower()


_WARM_UP, _TRIPS = 2, 20
# Increasing sizes while there is time, and the best of several of the largest, because other
# programs disturb single messages but seldom all of them.
_SIZES = (256 << 10, 1 << 20, *[8 << 20] * 5)
_ENOUGH_SECONDS = 0.3


def measure(
    store: dist.Store, rank: int, machines: Sequence[str], connect_seconds: float, seconds: float
) -> Measured:
    """Measure the links of a job whose ranks all reach each other; every rank must call this.

    Args:
        store: the store in which its ranks meet.
        rank: this rank.
        machines: the host of each rank.
        connect_seconds: how long the creation of the group may take, and each message.
        seconds: how long all measurements may take; pairs for which there is no time are skipped.

    Returns:
        What this rank has measured as a sender, and the error that ended the measurement, if any.
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
            # This is also a barrier, so rounds do not disturb each other.
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
    """Measure a link with messages to a rank that answers each; the largest give the rate."""
    trips = [_round_trip(dst, b"?") for _ in range(_WARM_UP + _TRIPS)]
    latency = min(trips[_WARM_UP:]) / 2
    speeds: dict[int, float] = {}
    until = time.perf_counter() + _ENOUGH_SECONDS
    for nbytes in _SIZES:
        # The answer and the message's first byte take one latency each; no link is infinitely fast.
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
