"""Makes the ranks of one group agree on a name that no earlier group of theirs ever had.

A store outlives process groups, and groups made again get the same names: keys of an earlier
group, even of one that crashed half-way, must not be taken for this one's. So each rank says
hello under a fresh random number, rank 0 answers to that number, and when all have taken its
answer it says go.
"""

from __future__ import annotations  # torch may be built without distributed

import socket
import time
import uuid
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from objcomm.errors import TransportTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from objcomm.transport.base import Deadline

#: What errors call the meeting.
FIRST_USE = "first use of the group"

_PREFIX = "objcomm"
_ONE_HOST, _SEVERAL_HOSTS = "one host", "several hosts"

_PAUSE_MIN_SECONDS = 0.0005
_PAUSE_MAX_SECONDS = 0.02


class Meeting(NamedTuple):
    """What all ranks know once they have met.

    Attributes:
        nonce: a name that no earlier group had.
        is_one_host: whether all ranks run on one machine.
    """

    nonce: str
    is_one_host: bool


def meet(store: dist.Store, rank: int, size: int, deadline: Deadline) -> Meeting:
    """Meet all ranks and agree on a name that is new, and on where they are.

    Every rank of the group must call this. Waits in Python, so Ctrl-C works.

    Args:
        store: the group's own.
        rank: rank within the group.
        size: number of ranks.
        deadline: how long to wait for the last one.

    Raises:
        TransportTimeout: some ranks did not come; all that did know which.
    """
    ours = dist.PrefixStore(_PREFIX, store)
    if rank != 0:
        return _Guest(ours, rank, size, deadline).meet()
    return _meet_as_host(ours, size, deadline)


def _machine() -> str:
    """A name that two ranks share only on one machine."""
    return f"{socket.gethostname()}/{uuid.getnode():x}"


def forget(store: dist.Store, nonce: str) -> None:
    """Leave nothing behind, once every rank has gone on; rank 0 only."""
    dist.PrefixStore(_PREFIX, store).delete_key(f"go/{nonce}")


def _meet_as_host(store: dist.Store, size: int, deadline: Deadline) -> Meeting:
    nonce = uuid.uuid4().hex
    answered: dict[int, str] = {}
    machines = {0: _machine()}
    missing = list(range(1, size))
    pause = _PAUSE_MIN_SECONDS
    while missing:
        for peer in missing:
            if store.check([f"hello/{peer}"]):
                number, _, machine = store.get(f"hello/{peer}").decode().partition(" ")
                if answered.get(peer) != number:  # a stale hello is answered too, to nobody
                    store.set(f"welcome/{number}", nonce)
                    answered[peer] = number
                    machines[peer] = machine
                    pause = _PAUSE_MIN_SECONDS
        missing = _not_joined(store, nonce, missing)
        if missing:
            pause = _sleep(pause, deadline, missing)
    for peer, number in answered.items():
        for key in (f"hello/{peer}", f"welcome/{number}", f"joined/{nonce}/{peer}"):
            store.delete_key(key)
    is_one_host = len(set(machines.values())) == 1
    store.set(f"go/{nonce}", _ONE_HOST if is_one_host else _SEVERAL_HOSTS)
    return Meeting(nonce, is_one_host)


class _Guest:
    """A rank that waits for rank 0's answer, and then for the others."""

    def __init__(self, store: dist.Store, rank: int, size: int, deadline: Deadline) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._deadline = deadline

    def meet(self) -> Meeting:
        number = uuid.uuid4().hex
        self._store.set(f"hello/{self._rank}", f"{number} {_machine()}")
        self._wait_for(f"welcome/{number}", lambda: [0])
        nonce = self._store.get(f"welcome/{number}").decode()
        self._store.set(f"joined/{nonce}/{self._rank}", "")
        others = [peer for peer in range(1, self._size) if peer != self._rank]
        self._wait_for(f"go/{nonce}", lambda: _not_joined(self._store, nonce, others) or [0])
        return Meeting(nonce, self._store.get(f"go/{nonce}").decode() == _ONE_HOST)

    def _wait_for(self, key: str, absent: Callable[[], list[int]]) -> None:
        pause = _PAUSE_MIN_SECONDS
        while not self._store.check([key]):
            missing = absent() if self._deadline.has_passed else []
            pause = _sleep(pause, self._deadline, missing)


def _not_joined(store: dist.Store, nonce: str, peers: list[int]) -> list[int]:
    return [peer for peer in peers if not store.check([f"joined/{nonce}/{peer}"])]


def _sleep(pause: float, deadline: Deadline, missing: list[int]) -> float:
    if deadline.has_passed:
        raise TransportTimeout(FIRST_USE, tuple(missing), deadline.seconds)
    time.sleep(pause)
    return min(2 * pause, _PAUSE_MAX_SECONDS)
