"""The link that carries all object bytes: a Gloo mesh of objcomm's own.

The user's process group carries none of it, so a time-out or an abort here closes no connection
of theirs (on a shared Gloo group it would close them all, and end DDP).
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.autograd.profiler
import torch.distributed as dist

from objcomm.codecs.buffers import empty
from objcomm.transport.link import POKE_TAG, Deadline, Pending
from objcomm.transport.rendezvous import Progress, forget, meet
from objcomm.transport.sockets import flow, notice_outages, open_sockets
from objcomm.transport.threads import Apart
from objcomm.world import CONNECT_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


# What Gloo says of connections that it closed because a wait of this rank's own timed out.
_OWN_DOING = "Application timeout"

_profiler = torch.autograd.profiler


class GlooLink:
    """Joins ranks of one group by a private ``ProcessGroupGloo``.

    Constructing it is collective.

    Attributes:
        rank: rank within the group.
        size: number of ranks that it joins.
        hosts: of each rank that it joins, as a number.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        members: tuple[int, ...],
        deadline: Deadline,
        progress: Progress,
    ) -> None:
        """Meet the other ranks and connect to each; may block in C++ up to the limit.

        Args:
            store: a connection to it that no other thread uses, with a prefix that is theirs alone.
            rank: this one, within the group.
            members: those that it joins, as ranks within the group.
            deadline: how long to wait.
            progress: tells others how far it has come.

        Raises:
            GivenUpError: ``progress`` was ended from outside.
            RuntimeError: the ranks met, but a connection failed.
        """
        self.rank = rank
        self.size = size = len(members)
        self._places = {member: place for place, member in enumerate(members)}
        place = self._places[rank]
        self.hosts = meet(store, place, size, progress)
        prefixed = dist.PrefixStore(f"objcomm/{progress.nonce}", store)
        # All ranks are here: one that dies now must not hold this thread for as long as a call.
        limit = min(deadline.left(), CONNECT_MAX)
        before = open_sockets()
        # Any: torch's stubs leave out point-to-point of a backend.
        self._mesh: Any = dist.ProcessGroupGloo(prefixed, place, size, limit)
        self._apart = Apart()
        self._flow = flow(before, size - 1)
        if len(set(self.hosts)) > 1:
            notice_outages(before, deadline.lost_seconds)
        forget(store, progress.nonce, size)

    def send(self, flat: torch.Tensor, peer: int, tag: int) -> Pending:
        """See ``base.Link``."""
        return _begun(self._mesh.send, flat, self._places[peer], tag)

    def recv(self, flat: torch.Tensor, peer: int, tag: int) -> Pending:
        """See ``base.Link``."""
        return _begun(self._mesh.recv, flat, self._places[peer], tag)

    def abort(self) -> None:
        """See ``base.Link``: a receive that times out closes all of this rank's connections.

        ``ProcessGroup.abort()`` does not wake a waiting Gloo operation (tried with torch 2.13).
        """
        for peer in self._others():
            # To each in turn: a connection that is closed already refuses, and closes no other.
            self._poke(peer)
        self._apart.abandon()

    def is_flowing(self) -> bool:
        """See ``base.Link``."""
        return self._flow is not None and self._flow.is_free()

    def wait_apart(self, wait: Callable[[], None]) -> None:
        """See ``base.Link``."""
        self._apart.do(wait)

    def closed(self) -> Sequence[int]:
        """See ``base.Connections``."""
        return [peer for peer in self._others() if self.is_closed(peer)]

    def _others(self) -> list[int]:
        return [peer for peer in self._places if peer != self.rank]

    def is_closed(self, peer: int) -> bool:
        """See ``base.Connections``."""
        try:
            self.recv(empty(1), peer, POKE_TAG)
        except RuntimeError:
            return True
        return False

    def beside(self, peers: Collection[int]) -> Sequence[int]:
        """See ``base.Connections``."""
        theirs = {self.hosts[self._places[peer]] for peer in peers}
        return [peer for peer in self._others() if self.hosts[self._places[peer]] in theirs]

    def closed_by(self) -> Sequence[int]:
        """See ``base.Connections``."""
        return [peer for peer in self._others() if _OWN_DOING not in self._poke(peer)]

    def _poke(self, peer: int) -> str:
        """Begin a receive that ends at once, and say how."""
        try:
            self.recv(empty(1), peer, POKE_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            return str(error)
        return ""


def is_cut_off(group: dist.ProcessGroup, peer: int) -> bool:
    """Whether a process group's own Gloo connection to one of its ranks has closed.

    Moves nothing, and closes nothing: what begins a receive that nobody answers is told of the end
    of a connection. Each such receive keeps 130 bytes until the group is destroyed.
    """
    backend: Any = None
    with contextlib.suppress(RuntimeError):  # it has none for CPU memory
        backend = group._get_backend(torch.device("cpu"))  # noqa: SLF001  # no public way
    if not isinstance(backend, dist.ProcessGroupGloo):
        return False
    receive: Callable[..., Pending] = backend.recv  # type: ignore[attr-defined]  # not in torch's stubs
    try:
        _begun(receive, empty(1), peer, POKE_TAG)
    except RuntimeError:
        return True
    return False


def _begun(begin: Callable[..., Pending], flat: torch.Tensor, place: int, tag: int) -> Pending:
    """Begin a transfer that ``torch.profiler`` does not see.

    Of one that it sees, the time of its end is written into the profiler's memory, even when the
    profiler was stopped before and that memory is somebody else's: torch 2.13 damages the heap so,
    with a plain ``irecv`` too. A receive that stands ready outlives any ``with profile()``.
    """
    if not _profiler._is_profiler_enabled:  # noqa: SLF001  # torch.optim's own way to ask
        return begin([flat], place, tag)
    torch.autograd._enable_record_function(False)  # noqa: SLF001, FBT003  # there is no public way
    try:
        return begin([flat], place, tag)
    finally:
        torch.autograd._enable_record_function(True)  # noqa: SLF001, FBT003  # likewise
