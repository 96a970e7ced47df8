"""Makes the ranks of one group agree on a name that no earlier group of theirs ever had.

A store outlives process groups, and groups made again get the same names: keys of an earlier
group, even of one that crashed half-way, must not be taken for this one's. So each rank says
hello under a fresh random number, and rank 0 answers to that number.
"""

from __future__ import annotations  # torch may be built without distributed

import time
import uuid
from typing import TYPE_CHECKING

import torch.distributed as dist

from objcomm.errors import TransportTimeout

if TYPE_CHECKING:
    from objcomm.transport.base import Deadline

_PAUSE_MIN_SECONDS = 0.0005
_PAUSE_MAX_SECONDS = 0.02


def agree_on_nonce(store: dist.Store, rank: int, size: int, deadline: Deadline) -> str:
    """Meet all ranks and return a name that is new and the same on each.

    Every rank of the group must call this. Waits in Python, so Ctrl-C works.

    Args:
        store: the group's own.
        rank: rank within the group.
        size: number of ranks.
        deadline: how long to wait for the last one.

    Raises:
        TransportTimeout: some ranks did not come; rank 0 knows which, the others name rank 0.
    """
    store = dist.PrefixStore("objcomm", store)
    return _host(store, size, deadline) if rank == 0 else _guest(store, rank, deadline)


def _host(store: dist.Store, size: int, deadline: Deadline) -> str:
    nonce = uuid.uuid4().hex
    answered: dict[int, bytes] = {}
    missing = set(range(1, size))
    pause = _PAUSE_MIN_SECONDS
    while missing:
        for peer in sorted(missing):
            if store.check([f"hello/{peer}"]):
                number = store.get(f"hello/{peer}")
                if answered.get(peer) != number:  # a stale hello is answered too, to nobody
                    store.set(f"welcome/{number.decode()}", nonce)
                    answered[peer] = number
                    pause = _PAUSE_MIN_SECONDS
            if store.check([f"joined/{nonce}/{peer}"]):
                missing.discard(peer)
        if missing:
            pause = _sleep(pause, deadline, tuple(sorted(missing)))
    for peer, number in answered.items():
        for key in (f"hello/{peer}", f"welcome/{number.decode()}", f"joined/{nonce}/{peer}"):
            store.delete_key(key)
    return nonce


def _guest(store: dist.Store, rank: int, deadline: Deadline) -> str:
    number = uuid.uuid4().hex
    store.set(f"hello/{rank}", number)
    pause = _PAUSE_MIN_SECONDS
    while not store.check([f"welcome/{number}"]):
        pause = _sleep(pause, deadline, (0,))
    nonce = store.get(f"welcome/{number}").decode()
    store.set(f"joined/{nonce}/{rank}", "")
    return nonce


def _sleep(pause: float, deadline: Deadline, missing: tuple[int, ...]) -> float:
    if deadline.has_passed:
        raise TransportTimeout("first use of the group", missing, deadline.seconds)
    time.sleep(pause)
    return min(2 * pause, _PAUSE_MAX_SECONDS)
