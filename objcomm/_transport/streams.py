"""The link over streams: a socket for each pair of ranks, Unix within a host and TCP between hosts.

Six modules do the work; each uses those before it. ``frames`` defines the frame format, ``pending``
what threads wait for, ``peer`` the protocol with one rank, ``event_loop`` the waits, ``connection``
the sockets to one rank, and ``calling`` connects ranks on first use.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import sys
import time
from typing import TYPE_CHECKING, NoReturn, Self

from objcomm._transport.calling import Calling
from objcomm._transport.connection import (
    TORN,
    Connection,
    close_when_delivered,
    has_bytes,
    has_unread,
)
from objcomm._transport.event_loop import (
    ENDS,
    IN_A_HANDLER,
    OWN_DOING,
    READS,
    EventLoop,
    Signal,
    hang_up,
)
from objcomm._transport.frames import UNASKED_MAX_NBYTES
from objcomm._transport.link import (
    HOST_LOST,
    LANE_BITS,
    LinkClosed,
    LinkError,
    Pending,
)
from objcomm._transport.pending import Attendance, Awaited, Lent, Loan, Members, Transfer
from objcomm._transport.sockets import await_delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from datetime import timedelta

    import torch

    from objcomm._transport.doors import Doors
    from objcomm._transport.link import Borrowed, Memory, Pieces
    from objcomm._transport.share import Share

# How long the attending thread leaves received data to a thread that waits, or has just waited.
_STAND_BY_MS = 5
# A signal handler that interrupted the lock's owner may take a while.
_PATIENCE_SECONDS = 1.0


class StreamLink:
    """Connects ranks by stream sockets; see ``Connections`` for the contract of its methods.

    Attributes:
        kind: its name in the log.
        rank: this rank within the group.
        size: number of ranks that it connects.
        hosts: host number of each rank.
        head_max_nbytes: the longest eager message.
        needs_last_byte_apart: False, because the end of a stream wakes a thread that waits for any
            of its bytes.
        is_interruptible: True, because signals interrupt its sleep.
        ahead: any number works.
        shares_memory: True; see ``Link``.
        is_interrupted: see ``Link``.
    """

    head_max_nbytes = UNASKED_MAX_NBYTES
    needs_last_byte_apart = False
    is_interruptible = True
    ahead = 64
    shares_memory = True

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        hosts: Mapping[int, int] | None = None,
        *,
        doors: Doors | None = None,
        listeners: Sequence[socket.socket] = (),
        lost_seconds: float = math.inf,
        spin_seconds: float = 0.0,
    ) -> None:
        """Start using the sockets.

        Args:
            rank: this rank within the group.
            sockets: connected sockets to other ranks, owned by this link from now on.
            hosts: host number of each rank; None if ``sockets`` has all ranks, all on this host.
            doors: how all ranks are reached, if not all are connected.
            listeners: where the others call in that case; owned by this link from now on.
            lost_seconds: how long another host may stay silent.
            spin_seconds: how long a wait may poll before it sleeps.
        """
        self._pid = os.getpid()
        self._listeners = tuple(listeners)
        self._connections: dict[int, Connection] = {}
        self._calling: Calling | None = None
        self._farewell = b""
        self._loop = EventLoop(spin_seconds)
        self._lock = self._loop.lock
        self.is_interrupted: Callable[[], bool] = self._loop.is_interrupted
        self._hosts = dict(hosts or dict.fromkeys(sorted({rank, *sockets}), 0))
        self._near = frozenset(
            peer for peer, host in self._hosts.items() if host == self._hosts[rank]
        )
        self.rank = rank
        self.size = len(self._hosts)
        self.hosts = tuple(self._hosts.values())
        self.kind = " and ".join(
            ["Unix sockets"] * (len(self._near) > 1) + ["TCP"] * (len(self._near) < self.size)
        )
        if doors is not None:
            self._calling = Calling(doors, listeners, self._loop, self._connections, lost_seconds)
        for peer, end in sockets.items():
            lost_after = None if peer in self._near else lost_seconds
            made = Connection(peer, end, self._loop, lost_after, self._calling)
            self._connections[peer] = made
            made.attach(end)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Explicitly, or the user would see Python's warnings about unclosed sockets. While the
        # interpreter ends, the names of modules may already be None.
        connections = list(getattr(self, "_connections", {}).values())
        if not is_finalizing() and getattr(self, "_pid", 0) == os.getpid():
            far = [each for each in connections if each.is_far and not each.peer.ended]
            close_when_delivered([end for each in far for end in each.sockets()])
        for each in connections:
            for end in (*each.sockets(), *each.undelivered):
                end.close()
        if connections:
            self._connections.clear()  # they refer to the loop, which refers to them
        for end in getattr(self, "_listeners", ()):
            end.close()
        for name in ("_calling", "_loop"):
            if getattr(self, name, None) is not None:
                getattr(self, name).close()

    def sharing_with(self, peer: int) -> Self | None:
        """See ``Link``."""
        return self if peer in self._near else None

    # ------------------------------------------------------------------ transfers

    def send(self, flat: Memory | Pieces, peer: int, tag: int) -> Pending:
        """See ``Link``."""
        if self.is_interrupted():
            raise LinkError(IN_A_HANDLER)
        connection = self._connections.get(peer) or self._opened(peer)
        nbytes = sum(map(len, flat)) if isinstance(flat, list) else len(flat)
        if nbytes > UNASKED_MAX_NBYTES and not tag >> LANE_BITS:
            raise ValueError(f"a first message of {nbytes} bytes")
        with self._lock:
            if connection.peer.ended:
                raise LinkClosed(connection.peer.ended)
            try:
                pending = connection.send(flat, nbytes, tag)
            except BaseException:  # whole or not at all: a signal handler may raise at any step
                connection.end(TORN)
                raise
            if self._loop.leader_wait is not None:
                self._loop.wake_leader_if_over()
        return pending

    def expect(self, peers: Sequence[int], tag: int) -> None:  # noqa: ARG002  # the system buffers messages
        """See ``Link``. Connects to the peers, so that the end of a peer is noticed."""
        if len(self._connections) < self.size - 1:
            for peer in peers:
                self.call(peer)

    def take(self, peer: int, tag: int, until: float) -> bytes:
        """See ``Link``."""
        if self.is_interrupted():
            raise LinkError(IN_A_HANDLER)
        connection = self._connections.get(peer) or self._opened(peer)
        protocol = connection.peer
        while True:
            with self._lock:
                if protocol.arrived.get(tag):
                    try:
                        message = protocol.take(tag)
                        if protocol.outgoing:
                            connection.carry_out()
                            self._loop.wake_leader_if_over()
                    except BaseException:  # as in ``send``
                        connection.end(TORN)
                        raise
                    if message is not None:
                        return message
                if protocol.ended:
                    raise LinkClosed(protocol.ended)
                bell = protocol.bells.get(tag)
                if bell is None:
                    bell = protocol.bells[tag] = Awaited()
                bell.is_over = False
            try:
                self._loop.run_until_over(bell, until)
            except LinkClosed:
                self.abort()  # see ``wait``
                raise

    def recv(self, flat: Memory, peer: int, tag: int) -> Pending:
        """See ``Link``."""
        transfer = Transfer(flat)
        connection = self._connections.get(peer) or self._opened(peer)
        self._begin(connection, connection.peer.post, transfer, tag)
        return transfer

    def send_share(
        self, share: Share | None, flats: Sequence[torch.Tensor], peer: int, tag: int
    ) -> Pending:
        """See ``Sharing``."""
        transfer = Lent(share, flats)
        connection = self._connections.get(peer) or self._opened(peer)
        self._begin(connection, connection.peer.lend, transfer, tag)
        return transfer

    def recv_share(self, nbytes: int, peer: int, tag: int) -> Borrowed:
        """See ``Sharing``."""
        transfer = Loan(nbytes, peer)
        connection = self._connections.get(peer) or self._opened(peer)
        self._begin(connection, connection.peer.post, transfer, tag)
        return transfer

    def recv_instead(self, borrowed: Borrowed, flats: Sequence[torch.Tensor]) -> Pending:
        """See ``Sharing``."""
        transfer = Members(flats)
        connection = self._connections.get(borrowed.peer) or self._opened(borrowed.peer)
        self._begin(connection, connection.peer.take_offer, transfer, borrowed.number)
        return transfer

    def _begin(
        self,
        connection: Connection,
        begin: Callable[[Transfer, int], None] | Callable[[Lent, int], None],
        transfer: Transfer,
        which: int,
    ) -> None:
        """Begin a transfer, whole or not at all: a signal handler may raise at any step.

        Args:
            connection: the connection to its peer.
            begin: the method of the protocol that begins it.
            transfer: the transfer.
            which: its tag, or the number of an offer.
        """
        if self.is_interrupted():
            raise LinkError(IN_A_HANDLER)
        with self._lock:
            try:
                begin(transfer, which)  # type: ignore[arg-type]  # a ``Lent`` if ``begin`` takes one
                if connection.peer.outgoing or connection.peer.ended:
                    connection.carry_out()
            except LinkClosed:
                raise
            except BaseException:
                connection.end(TORN)
                raise
            if self._loop.leader_wait is not None:
                self._loop.wake_leader_if_over()

    def wait(self, pending: Pending, limit: timedelta) -> None:
        """See ``Link``."""
        if pending is None:
            return
        if not pending.is_over:
            try:
                self._loop.run_until_over(pending, time.monotonic() + limit.total_seconds())
            except LinkClosed:
                self.abort()  # a signal may have interrupted the first one halfway
                raise
        if pending.reason:
            raise LinkClosed(pending.reason)

    def wait_apart(self, wait: Callable[[], None]) -> None:
        """See ``Link``. ``abort`` ends any wait here."""
        wait()

    def has_come(self, peer: int, tag: int) -> bool:
        """See ``Link``."""
        connection = self._connections.get(peer)
        return connection is not None and bool(connection.peer.arrived.get(tag))

    def came_late(self, peer: int, tag: int) -> bool:
        """See ``Link``."""
        self._loop.handle_pending()
        return self.has_come(peer, tag)

    def unread(self) -> Sequence[bytes]:
        """See ``Connections``."""
        return [
            bytes(each)
            for connection in tuple(self._connections.values())
            for tag, arrived in tuple(connection.peer.arrived.items())
            if tag >> LANE_BITS == 0
            for each in tuple(arrived)
            if not isinstance(each, int)
        ]

    # ------------------------------------------------------------------ attending threads

    def attend(self, peer: int, accepts: Mapping[int, Callable[[bytes], bool]]) -> NoReturn:
        """See ``Connections``."""
        connection = self._connections.get(peer) or self._opened(peer)
        protocol, loop = connection.peer, self._loop
        attendance = protocol.attendance = Attendance(accepts)
        prompted, idle = select.poll(), select.poll()
        for each in (prompted, idle):
            each.register(attendance.prompts, select.POLLIN)
        idle.register(loop.events, select.POLLIN)
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(attendance.prompts)
                with self._lock:
                    for tag in accepts:
                        protocol.give_out(tag)
                    if protocol.outgoing:
                        connection.carry_out()
                        loop.wake_leader_if_over()
                    if attendance.error is not None:
                        protocol.attendance = None
                        try:
                            raise attendance.error
                        finally:  # its traceback refers to the attendance
                            attendance.error = None
                    if protocol.ended:
                        raise LinkClosed(protocol.ended)
                idle.poll()
                # A waiting thread reads what has arrived. So does one that is about to wait again,
                # as in a series of receives; two threads would get in each other's way.
                if loop.is_in_use(_STAND_BY_MS / 1e3):
                    prompted.poll(_STAND_BY_MS)
                else:
                    loop.handle_pending()
        finally:
            with self._lock:  # the functions in ``accepts`` may refer to this link
                protocol.attendance = None
            attendance.close()

    def prompt(self, peer: int) -> None:
        """See ``Connections``."""
        connection = self._connections.get(peer)
        attendance = None if connection is None else connection.peer.attendance
        if attendance is not None:
            attendance.prompt()

    def signal(self) -> Signal:
        """See ``Connections``."""
        return Signal(self._loop, self)

    # ------------------------------------------------------------------ connections

    def take_over_caller(self, end: socket.socket, received: bytes) -> None:
        """Take over a caller that came before this link was in use, and what it has sent."""
        with self._lock:
            if self._calling is None:
                end.close()
            else:
                self._calling.identify_caller(end, received)

    def call(self, peer: int) -> None:
        """See ``Connections``."""
        if peer in self._connections or self.is_interrupted():
            return
        if self._lock.acquire(timeout=_PATIENCE_SECONDS):
            try:
                with contextlib.suppress(LinkError):  # aborted, or not possible at the moment
                    self._connection_to(peer)
            finally:
                self._lock.release()

    def _opened(self, peer: int) -> Connection:
        if self.is_interrupted():
            raise LinkError(IN_A_HANDLER)
        with self._lock:
            return self._connection_to(peer)

    def _connection_to(self, peer: int) -> Connection:
        if self._loop.is_aborted:  # a forked process has closed all of its copies
            raise LinkClosed(OWN_DOING)
        if self._calling is None:
            raise KeyError(peer)
        return self._calling.connection_to(peer)

    def move(self, *, is_awaited: bool = True) -> None:
        """See ``Link``. Also ends connections to hosts that have been silent for too long."""
        self._loop.handle_pending()
        if self.is_interrupted():
            return
        for each in tuple(self._connections.values()):
            silence = each.silence
            if each.peer.ended or (silence is None and not each.is_to_call):
                continue
            is_silent = is_awaited and silence is not None and silence.is_too_long()
            is_due = self._calling is not None and self._calling.is_due(each)
            if (is_due or is_silent) and self._lock.acquire(timeout=_PATIENCE_SECONDS):
                try:
                    if each.peer.ended:
                        continue
                    if is_silent and silence is each.silence and not each.is_to_call:
                        each.lose_host()
                    elif is_due and self._calling is not None:
                        self._calling.look_after(each)
                    self._loop.wake_leader_if_over()
                finally:
                    self._lock.release()

    def closed(self) -> Sequence[int]:
        """See ``Connections``."""
        self._loop.handle_pending()
        return [peer for peer in tuple(self._connections) if self._has_ended(peer)]

    def has_lost_any(self) -> bool:
        """See ``Connections``."""
        return any(each.peer.ended for each in tuple(self._connections.values()))

    def has_lost_all(self) -> bool:
        """See ``Connections``."""
        return 0 < len(self._connections) == self.size - 1 == len(self.closed())

    def is_closed(self, peer: int) -> bool:
        """See ``Connections``."""
        connection = self._connections.get(peer)
        if connection is None or not connection.peer.ended:
            self._loop.handle_pending()
        return self._has_ended(peer)

    def _has_ended(self, peer: int) -> bool:
        connection = self._connections.get(peer)
        if connection is None:
            return self._loop.is_aborted
        if connection.peer.ended or not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            return bool(connection.peer.ended)
        try:
            return bool(connection.peer.ended) or connection.has_ended_there()
        finally:
            self._lock.release()

    def is_out_of_reach(self, peer: int) -> bool:
        """See ``Connections``."""
        connection = self._connections.get(peer)
        return connection is not None and connection.peer.ended.startswith(HOST_LOST)

    def closed_by(self) -> Sequence[int]:
        """See ``Connections``."""
        self._loop.handle_pending()
        return [
            peer
            for peer, each in tuple(self._connections.items())
            if each.was_ended_there or (not each.peer.ended and self._has_ended(peer))
        ]

    def has_unread(self, peer: int) -> bool:
        """See ``Connections``."""
        connection = self._connections.get(peer)
        if connection is not None:
            return not connection.peer.ended and any(map(has_unread, connection.sockets()))
        # It may be one of the callers.
        return self._calling is not None and any(map(has_bytes, self._calling.listeners))

    def beside(self, peers: Collection[int]) -> Sequence[int]:
        """See ``Connections``."""
        theirs = {self._hosts[peer] for peer in peers}
        return [peer for peer, host in self._hosts.items() if host in theirs and peer != self.rank]

    # ------------------------------------------------------------------ the end

    def refuse(self) -> None:
        """See ``Connections``. Skips other hosts, whose messages may already be on their way."""
        for each in tuple(self._connections.values()):
            if not each.is_far and not each.peer.ended:
                for end in each.sockets():
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RD)

    def await_delivery(self, until: float) -> None:
        """See ``Connections``."""
        far = [each for each in tuple(self._connections.values()) if each.is_far]
        await_delivery(
            [end for each in far if not each.peer.ended for end in each.sockets()], until
        )

    def farewell_of(self, peer: int) -> bytes:
        """See ``Connections``."""
        connection = self._connections.get(peer)
        if connection is None:
            return b""
        # The leader may be about to read it.
        is_unread = self._has_ended(peer) and not (connection.peer.ended or self.is_interrupted())
        if is_unread and self._lock.acquire(timeout=_PATIENCE_SECONDS):
            try:
                for end in connection.sockets():
                    connection.handle(end.fileno(), READS | ENDS)
                self._loop.wake_leader_if_over()
            finally:
                self._lock.release()
        return connection.peer.farewell if connection.peer.ended else b""

    def abort(self, farewell: bytes = b"") -> None:
        """See ``Link``. A forked process only closes its copies, because the link is its parent's.

        A signal handler that has interrupted this link hangs up, and leaves the rest to the
        interrupted thread. So does a thread that can't get the lock because of a handler. Threads
        that wait for this link continue immediately. This method waits a moment at most for other
        hosts to receive what was sent to them.
        """
        self._farewell = farewell or self._farewell  # another thread may be the first to abort
        self._loop.is_aborted = True
        if os.getpid() != self._pid:
            self.__del__()
        elif self.is_interrupted() or not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            self._hang_up()
        else:
            left: list[socket.socket] = []
            try:
                for each in [*self._connections.values()]:
                    try:
                        each.leave(self._farewell)
                    finally:
                        left += each.undelivered
                        each.undelivered = []
            finally:
                try:
                    self._shut_doors()
                finally:
                    try:
                        self._loop.wake_all()
                    finally:
                        self._lock.release()
                        close_when_delivered(left)

    def _hang_up(self) -> None:
        for each in tuple(self._connections.values()):
            if not each.peer.ended and not each.is_hung_up:
                each.was_ended_there = each.has_ended_there()
                each.is_hung_up = True
                for end in each.sockets():
                    hang_up(end)
        self._loop.wake_leader()
        self._shut_doors()

    def _shut_doors(self) -> None:
        if self._calling is not None:
            self._calling.shut()
