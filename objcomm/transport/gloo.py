"""The link that carries all object bytes: a Gloo mesh of objcomm's own.

The user's process group carries none of it, so a time-out or an abort here closes no connection
of theirs (on a shared Gloo group it would close them all, and end DDP).
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from objcomm.errors import TransportError
from objcomm.transport.base import POKE_TAG, Deadline, Pending
from objcomm.transport.rendezvous import FIRST_USE, forget, meet

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")


class GlooLink:
    """Joins all ranks of one group by a private ``ProcessGroupGloo``.

    Constructing it is collective.

    Attributes:
        rank: rank within the group.
        size: number of ranks.
        is_one_host: whether all ranks run on one machine.
        nonce: a name that only this link ever had, the same on each rank.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, deadline: Deadline) -> None:
        self.rank = rank
        self.size = size
        self.nonce, self.is_one_host = meet(store, rank, size, deadline)
        prefixed = dist.PrefixStore(f"objcomm/{self.nonce}", store)
        try:
            # Any: torch's stubs leave out point-to-point of a backend.
            self._mesh: Any = _interruptibly(
                lambda: dist.ProcessGroupGloo(prefixed, rank, size, deadline.left())
            )
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
                    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                    self._mesh.recv([nothing], peer, POKE_TAG).wait(timedelta(milliseconds=1))


def _interruptibly(make: Callable[[], R]) -> R:
    """Call ``make``, which blocks in C++, so that Ctrl-C ends the wait for it."""
    made: Future[R] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:  # noqa: BLE001  # raised by the thread that waits
            made.set_exception(error)

    threading.Thread(target=run, name="objcomm-connect", daemon=True).start()
    return made.result()  # waits in Python, where signals are handled
