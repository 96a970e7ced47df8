"""The link that carries all object bytes: a Gloo mesh of objcomm's own.

The user's process group carries none of it, so a time-out or an abort here closes no connection
of theirs (on a shared Gloo group it would close them all, and end DDP).
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from objcomm.errors import TransportError
from objcomm.transport.base import POKE_TAG, Deadline, Pending
from objcomm.transport.rendezvous import FIRST_USE, agree_on_nonce, forget


class GlooLink:
    """Joins all ranks of one group by a private ``ProcessGroupGloo``.

    Constructing it is collective.

    Attributes:
        rank: rank within the group.
        size: number of ranks.
        nonce: a name that only this link ever had, the same on each rank.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, deadline: Deadline) -> None:
        self.rank = rank
        self.size = size
        self.nonce = agree_on_nonce(store, rank, size, deadline)
        prefixed = dist.PrefixStore(f"objcomm/{self.nonce}", store)
        try:
            # Any: torch's stubs leave out point-to-point of a backend.
            self._mesh: Any = dist.ProcessGroupGloo(prefixed, rank, size, deadline.left())
        except RuntimeError as error:
            others = tuple(peer for peer in range(size) if peer != rank)
            raise TransportError(FIRST_USE, others, str(error)) from error
        if rank == 0:
            forget(store, self.nonce)

    def send(self, flat: torch.Tensor, peer: int, tag: int) -> Pending:
        """See ``base.Link``."""
        pending: Pending = self._mesh.send([flat], peer, tag)
        return pending

    def recv(self, flat: torch.Tensor, peer: int, tag: int) -> Pending:
        """See ``base.Link``."""
        pending: Pending = self._mesh.recv([flat], peer, tag)
        return pending

    def abort(self) -> None:
        """See ``base.Link``: a receive that times out closes all of this rank's connections.

        ``ProcessGroup.abort()`` does not wake a waiting Gloo operation (tried with torch 2.13).
        """
        for peer in range(self.size):
            # To each in turn: a connection that is closed already refuses, and closes no other.
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.uint8)
                    self._mesh.recv([nothing], peer, POKE_TAG).wait(timedelta(milliseconds=1))
