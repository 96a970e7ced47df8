"""How long the names of ranks' addresses take to be looked up on the host of the store.

torch's store looks up the name of each client that connects, and answers nobody meanwhile (torch
2.13): in a slow look-up all ranks wait. A resolver may lose a query now and then, so one quick
look-up says little.
"""

import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from objcomm.doctor.bounded import within
from objcomm.doctor.facts import SLOW_LOOKUP_SECONDS, Lookup

_TIMES = 50  # of a resolver that loses one query in twenty, this finds 92 %
_LOST_SECONDS = 0.9  # a resolver asks again after a second at the earliest
_ADDRESSES_MAX = 64
_AT_ONCE = 16


def lookups(callers: Mapping[str, int], seconds: float) -> tuple[Lookup, ...]:
    """Look up the name of each address again and again, until one look-up is slow.

    Args:
        callers: addresses from which ranks connect to the store, with the lowest rank of each.
        seconds: how long all may take.
    """
    if not callers:
        return ()
    deadline = time.monotonic() + seconds
    chosen = list(callers.items())[:_ADDRESSES_MAX]
    with ThreadPoolExecutor(min(_AT_ONCE, len(chosen)), "objcomm-doctor") as crew:
        return tuple(crew.map(lambda each: _lookup(each[0], each[1], deadline), chosen))


def _lookup(address: str, rank: int, deadline: float) -> Lookup:
    seen = as_seen(address)
    slowest, count, before = 0.0, 0, 0.0
    while count < _TIMES and slowest < SLOW_LOOKUP_SECONDS and time.monotonic() < deadline:
        began, is_lost = time.monotonic(), False
        try:
            within(
                deadline - began,
                lambda: socket.getnameinfo((seen, 0), socket.NI_NUMERICSERV),
            )
        except TimeoutError:
            is_lost = True
        except OSError:  # its name is unknown: that took as long
            pass
        took = time.monotonic() - began
        # A busy machine may wake a thread late, but not twice in a row.
        is_lost = is_lost or took >= _LOST_SECONDS
        slowest = max(slowest, took if is_lost else min(before, took))
        before = took
        count += 1
    return Lookup(rank, seen, slowest, count)


def as_seen(address: str) -> str:
    """What a store calls a client's address: it listens on both families where there are two."""
    try:
        socket.socket(socket.AF_INET6).close()
    except OSError:
        return address
    return address if ":" in address else f"::ffff:{address}"
