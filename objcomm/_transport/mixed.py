"""The link of a group on several hosts: within a host its own link, and Gloo's between hosts.

The link of one host has no thread: whoever waits moves it. Who waits for another host sleeps in
Gloo's code, so a thread moves this host's link meanwhile; where nothing can be under way there, as
after small messages, none is needed. A signal's handler may have interrupted the one that moves:
then another thread does what the handler waits for.
"""

from __future__ import annotations  # torch may be built without distributed

import functools
from typing import TYPE_CHECKING

from objcomm._transport.threads import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from datetime import timedelta

    from objcomm._transport.gloo import GlooLink
    from objcomm._transport.link import Memory, Pending, Sharing
    from objcomm._transport.local import LocalLink


class MixedLink:
    """Joins ranks of several hosts by two links; see ``Connections`` for its methods' contract.

    Attributes:
        kind: what the log calls it.
        rank: rank within the group.
        size: number of ranks that it joins.
        hosts: of each of them, as a number.
        needs_last_byte_apart: Gloo does, and a pair's two ranks must know it alike.
        is_interruptible: Gloo's waits are not.
        ahead: as many as Gloo needs.
    """

    kind = "Unix sockets within a host, and Gloo"

    def __init__(self, local: LocalLink, far: GlooLink) -> None:
        """Begin.

        Args:
            local: joins this rank with all others of its host; it is this link's from now on.
            far: joins it with all ranks, and so is this.
        """
        self._local = local
        self._far = far
        self._threads = ThreadPool()
        self.rank = far.rank
        self.size = far.size
        self.hosts = far.hosts
        self.needs_last_byte_apart = far.needs_last_byte_apart
        self.is_interruptible = far.is_interruptible
        self.ahead = far.ahead

    def sharing_with(self, peer: int) -> Sharing | None:
        """See ``Link``."""
        return self._local if self._local.joins(peer) else None

    def over(self, raw: bytearray) -> Memory:
        """See ``Link``: as Gloo takes it, and so may this host's."""
        return self._far.over(raw)

    def send(self, flat: Memory, peer: int, tag: int) -> Pending:
        """See ``Link``."""
        return self._to(peer).send(flat, peer, tag)

    def recv(self, flat: Memory, peer: int, tag: int) -> Pending:
        """See ``Link``."""
        return self._to(peer).recv(flat, peer, tag)

    def wait(self, pending: Pending, limit: timedelta) -> None:
        """See ``Link``."""
        if pending is None or self._local.has_begun(pending):
            self._local.wait(pending, limit)
        elif self._local.is_moved_here():
            wait = functools.partial(self._far.wait, pending, limit)
            self._local.move_during(wait, self._threads)
        elif not self._local.needs_a_mover():
            self._far.wait(pending, limit)
        else:
            with self._local.moved_by(self._threads):
                self._far.wait(pending, limit)

    def is_done(self, pending: Pending) -> bool:
        """See ``Link``."""
        of = self._local if pending is None or self._local.has_begun(pending) else self._far
        return of.is_done(pending)

    def wait_apart(self, wait: Callable[[], None]) -> None:
        """See ``Link``."""
        if self._local.is_moved_here():
            apart = functools.partial(self._far.wait_apart, wait)
            self._local.move_during(apart, self._threads)
        else:
            self._far.wait_apart(wait)

    def move(self) -> None:
        """See ``Link``."""
        self._local.move()

    def is_flowing(self) -> bool:
        """See ``Link``."""
        return self._local.is_flowing() and self._far.is_flowing()

    def abort(self) -> None:
        """See ``Link``."""
        try:
            self._local.abort()
        finally:
            self._far.abort()
            self._threads.close()

    def closed(self) -> Sequence[int]:
        """See ``Connections``."""
        return self._both(self._local.closed(), self._far.closed())

    def has_lost_all(self) -> bool:
        """See ``Connections``."""
        local = self._local
        return local.has_lost_all() and all(
            self._far.is_closed(peer) for peer in self._far.peers() if not local.joins(peer)
        )

    def is_closed(self, peer: int) -> bool:
        """See ``Connections``."""
        return self._to(peer).is_closed(peer)

    def is_out_of_reach(self, peer: int) -> bool:
        """See ``Connections``."""
        return not self._local.joins(peer) and self._far.is_out_of_reach(peer)

    def closed_by(self) -> Sequence[int]:
        """See ``Connections``."""
        return self._both(self._local.closed_by(), self._far.closed_by())

    def has_unread(self, peer: int) -> bool:
        """See ``Connections``."""
        return self._to(peer).has_unread(peer)

    def beside(self, peers: Collection[int]) -> Sequence[int]:
        """See ``Connections``."""
        return self._far.beside(peers)

    def _to(self, peer: int) -> LocalLink | GlooLink:
        return self._local if self._local.joins(peer) else self._far

    def _both(self, local: Sequence[int], far: Sequence[int]) -> Sequence[int]:
        """What each says of those that it carries to; the far one joins this host's ranks, too."""
        return sorted([*local, *(peer for peer in far if not self._local.joins(peer))])
