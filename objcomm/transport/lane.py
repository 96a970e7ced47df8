"""An ordered sequence of operations over one link, and the receives that stand ready for it."""

import threading

import torch

from objcomm.frames import WINDOW_NBYTES
from objcomm.transport.base import Link, Pending, head_tag


class Lane:
    """The calls of one thread at a time; other lanes of the same link can't mix with it.

    For each peer that ever sent on it, a receive for the next first message stands posted, so that
    a peer's message need not wait until this rank enters the operation: broadcasting 1 KiB to
    3 ranks took 275 µs so instead of 400, to 7 ranks 0.8 ms instead of 3.3.

    Attributes:
        name: as given to ``objcomm.lane``.
        number: what its tags and headers carry.
        sequence: operations started on it so far.
        owner: the thread that uses it.
        busy_with: the operation whose ranks wait for each other just now, or nothing.
    """

    def __init__(self, name: str, number: int, owner: threading.Thread) -> None:
        self.name = name
        self.number = number
        self.sequence = 0
        self.owner = owner
        self.busy_with = ""
        self._standing: dict[int, tuple[bytearray, Pending]] = {}

    def standing(self, link: Link, peer: int) -> tuple[bytearray, Pending]:
        """The receive that is posted for ``peer``'s next first message."""
        if peer not in self._standing:
            raw = bytearray(WINDOW_NBYTES)
            flat = torch.frombuffer(raw, dtype=torch.uint8)
            self._standing[peer] = raw, link.recv(flat, peer, head_tag(self.number))
        return self._standing[peer]

    def stand_again(self, link: Link, peer: int) -> None:
        """Post the next one, now that the last one's message has arrived."""
        del self._standing[peer]
        self.standing(link, peer)
