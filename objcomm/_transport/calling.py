"""Connects pairs of ranks on first use, after all ranks have met.

In a large group, only some pairs are connected when the ranks meet. The others connect when one of
the two starts the first transfer, in either direction: that rank calls the address on which the
other one listens. On the same host, the caller may send immediately, because the kernel reports
which user owns the listening process, and buffers the data until the connection is accepted.
Between hosts, the caller first waits for an answer that proves that it has reached the right rank.
If two ranks call each other, each sends on the connection that it opened and reads from the other
one.

A network may fail temporarily, and unrelated processes may crowd a listener, so a failed call may
be retried, at each of the peer's addresses.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import time
from typing import TYPE_CHECKING

from objcomm._transport.connection import TORN, Connection, is_an_outage, why
from objcomm._transport.doors import called_at
from objcomm._transport.event_loop import OWN_DOING, EventLoop
from objcomm._transport.link import LinkClosed, LinkError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from objcomm._transport.doors import Doors

# How long to keep calling if a host may be silent indefinitely.
_CALLED_SECONDS = 60.0
# How long to wait for an answer at one address if the peer has another one.
_NEXT_WAY_SECONDS = 1.0


class _Caller:
    """A connection whose caller has not identified itself yet."""

    def __init__(self, end: socket.socket, received: bytes, calling: Calling) -> None:
        self.socket = end
        self.received = received
        self._calling = calling

    def handle(self, descriptor: int, event: int) -> None:  # noqa: ARG002  # see ``EventHandler``
        """See ``EventHandler``."""
        self._calling.receive_caller(self)


class Calling:
    """See the module docstring. Every method requires the loop's lock.

    Attributes:
        listeners: the sockets on which other ranks call.
    """

    def __init__(
        self,
        doors: Doors,
        listeners: Sequence[socket.socket],
        loop: EventLoop,
        connections: dict[int, Connection],
        lost_seconds: float,
    ) -> None:
        """Start watching the listeners.

        Args:
            doors: how all ranks are reached.
            listeners: the sockets on which other ranks call; this object owns them from now on.
            loop: handles events on the sockets.
            connections: the existing connections by rank; new ones are added.
            lost_seconds: how long another host may stay silent.
        """
        self._doors = doors
        self.listeners = tuple(listeners)
        self._loop = loop
        self._connections = connections
        self._lost_seconds = lost_seconds
        self._callers: dict[int, _Caller] = {}
        for each in self.listeners:
            each.settimeout(0)
            loop.watch(each, self)

    # ------------------------------------------------------------------ calls

    def connection_to(self, peer: int) -> Connection:
        """Return the connection to a peer, and call the peer if there is none.

        Raises:
            KeyError: the group has no such peer.
            LinkClosed: the link was aborted.
            LinkError: this process can't connect.
        """
        if peer not in self._doors.others:
            raise KeyError(peer)
        self.let_in()  # it may have called
        return self._connections.get(peer) or self._call(peer)

    def _call(self, peer: int) -> Connection:
        doors, failed = self._doors, None
        try:
            try:
                end, own_handshake, where = doors.call(peer)
            except OSError as error:
                is_theirs = isinstance(error, (ConnectionError, BlockingIOError))
                if not is_theirs and not is_an_outage(error):
                    raise
                family = socket.AF_UNIX if doors.is_near(peer) else socket.AF_INET
                end, own_handshake, where = socket.socket(family), doors.handshake_to(peer), ""
                failed = error
        except OSError as error:
            raise LinkError(f"this process can't connect to it ({error})") from error
        connection = self._made(peer, end)
        connection.awaited_handshake, connection.own_handshake = (
            doors.handshake_from(peer, where),
            own_handshake,
        )
        connection.is_open = doors.is_near(peer)
        connection.called = connection.called_way = time.monotonic()
        try:
            self._use(connection)
            if failed is not None:
                connection.lose(failed)
            else:
                connection.flush()
        except OSError as error:
            connection.end(TORN)
            raise LinkError(f"this process can't connect to it ({error})") from error
        except BaseException:
            connection.end(TORN)
            raise
        if self._loop.is_aborted:  # a signal handler aborted the link, unaware of this connection
            connection.end(OWN_DOING)
            raise LinkClosed(OWN_DOING)
        return connection

    def _made(self, peer: int, end: socket.socket) -> Connection:
        lost_seconds = None if self._doors.is_near(peer) else self._lost_seconds
        return Connection(peer, end, self._loop, lost_seconds, self)

    def _use(self, connection: Connection) -> None:
        connection.attach(connection.socket)
        self._connections[connection.peer.rank] = connection

    def calls_again(self, connection: Connection, error: OSError) -> bool:
        """Return whether a failed connection will be called again; if so, close its socket.

        Linux gives up on a call sooner than on an established connection: after 3 s if nothing
        answers for the other host's address (ARP).
        """
        may_pass = (
            is_an_outage(error) or isinstance(error, BlockingIOError) or self._has_way(connection)
        )
        if not connection.own_handshake or not may_pass or self._is_given_up(connection):
            return False
        connection.detach()
        connection.is_to_call = True
        connection.way += 1
        return True

    def is_due(self, connection: Connection) -> bool:
        """Return whether ``look_after`` has something to do for a connection."""
        if connection.is_to_call:
            return True
        is_silent = bool(connection.own_handshake)
        return is_silent and (self._is_given_up(connection) or self._is_next_way_due(connection))

    def look_after(self, connection: Connection) -> None:
        """Call again, try the next address, or give up."""
        if connection.is_to_call:
            self._call_again(connection)
        elif connection.own_handshake and self._is_given_up(connection):
            connection.lose_host()
        elif self._is_next_way_due(connection):
            connection.lose(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))

    def _call_again(self, connection: Connection) -> None:
        doors, peer = self._doors, connection.peer.rank
        if self._loop.is_aborted:
            connection.end(OWN_DOING)
            return
        try:
            end, own_handshake, where = doors.call(peer, connection.way)
        except OSError as error:
            is_refused = isinstance(error, ConnectionError) and not self._has_way(connection)
            connection.way += 1
            if is_refused or self._is_given_up(connection):
                connection.was_ended_there = True
                connection.end(why(error))
            return
        connection.socket, connection.own_handshake = end, own_handshake
        connection.awaited_handshake = doors.handshake_from(peer, where)
        connection.is_to_call, connection.failed = False, ""
        connection.called_way = time.monotonic()
        try:
            self._use(connection)
            connection.flush()
        except BaseException:
            connection.end(TORN)
            raise

    def _has_way(self, connection: Connection) -> bool:
        """Return whether the peer has an address that has not been called yet."""
        return connection.way + 1 < self._doors.ways_to(connection.peer.rank)

    def _is_next_way_due(self, connection: Connection) -> bool:
        """Return whether to call the peer's next address because this one does not answer."""
        is_silent = (
            connection.own_handshake and not connection.is_to_call and self._has_way(connection)
        )
        return bool(is_silent) and time.monotonic() - connection.called_way > _NEXT_WAY_SECONDS

    def _is_given_up(self, connection: Connection) -> bool:
        """Return whether a call has taken too long."""
        waited = time.monotonic() - connection.called
        return waited > (_CALLED_SECONDS if math.isinf(self._lost_seconds) else self._lost_seconds)

    # ------------------------------------------------------------------ callers

    def handle(self, descriptor: int, event: int) -> None:  # noqa: ARG002  # see ``EventHandler``
        """See ``EventHandler``; a caller is waiting."""
        self.let_in()

    def let_in(self) -> None:
        """Accept the callers that are waiting."""
        for listener in self.listeners:
            try:
                for end in self._doors.accept(listener):
                    self.identify_caller(end)
            except OSError as error:  # no descriptors left: don't keep callers waiting
                rank = self._doors.rank
                self._doors.on_refused(f"rank {rank} can't accept connections ({error})")
                self.shut()
                return

    def identify_caller(self, end: socket.socket, received: bytes = b"") -> None:
        """Find out which rank has called, if the caller is a rank.

        Args:
            end: the connection.
            received: what was already read of the caller's handshake.
        """
        # There are more callers than ranks, and a rank would have sent its handshake by now.
        if len(self._callers) >= len(self._doors.others):
            for longest in tuple(self._callers.values())[:1]:
                self._doors.on_refused("a process that said nothing")
                self._send_away(longest)
        caller = _Caller(end, received, self)
        self._callers[end.fileno()] = caller
        try:
            self._loop.watch(end, caller)
        except (OSError, ValueError):  # it can't be watched, or a signal handler closed it
            self._send_away(caller)
            return
        self.receive_caller(caller)

    def receive_caller(self, caller: _Caller) -> None:
        """Read more of a caller's handshake; once it is complete, accept or drop the caller."""
        doors, descriptor = self._doors, caller.socket.fileno()
        if self._callers.get(descriptor) is not caller:  # it was dropped in the meantime
            return
        try:
            while due := doors.handshake_nbytes - len(caller.received):
                came = caller.socket.recv(due)
                if not came:
                    self._send_away(caller)
                    return
                caller.received += came
        except BlockingIOError:
            return
        except OSError:
            self._send_away(caller)
            return
        try:
            peer = doors.caller(caller.socket, caller.received)
        except OSError:  # it has another key, although all ranks had the same one when they met
            peer = None
        if self._callers.pop(descriptor, None) is None:  # a signal handler has done this
            return
        self._loop.unwatch(caller.socket)
        if peer is None or not self._admit(peer, caller.socket):
            caller.socket.close()

    def _send_away(self, caller: _Caller) -> None:
        self._callers.pop(caller.socket.fileno(), None)
        self._loop.close_socket(caller.socket)

    def _admit(self, peer: int, end: socket.socket) -> bool:
        """Take over a connection that a rank has opened; return False if it is not needed."""
        doors, connection = self._doors, self._connections.get(peer)
        if self._loop.is_aborted:
            return False
        if connection is None:
            connection = self._made(peer, end)
        elif (
            connection.peer.ended or len(connection.awaited_handshake) != doors.handshake_nbytes
        ):  # it has answered
            return False
        try:
            is_unsent = (
                connection.is_to_call or len(connection.own_handshake) == doors.handshake_nbytes
            )
            if is_unsent or not connection.awaited_handshake:
                self._adopt(connection, end, doors.handshake_to(peer, called_at(end)))
            else:
                # Both have called. The peer's call proves its identity, so it won't answer ours.
                connection.awaited_handshake, connection.inlet = b"", end
                connection.attach(end)
                connection.open()
        except OSError:
            connection.end(TORN)
            return False
        except BaseException:
            connection.end(TORN)
            raise
        return True

    def _adopt(self, connection: Connection, end: socket.socket, own_handshake: bytes) -> None:
        """Use the peer's connection in both directions; nothing was exchanged on this rank's."""
        if connection.called and not connection.is_to_call:
            connection.detach()
        connection.socket, connection.awaited_handshake, connection.own_handshake = end, b"", b""
        connection.is_to_call = connection.is_watched = False
        connection.peer.outgoing.appendleft((memoryview(own_handshake), None, None))
        self._use(connection)
        connection.open()

    # ------------------------------------------------------------------ the end

    def shut(self) -> None:
        """Stop listening, and drop the callers that have not been accepted."""
        for listener in self.listeners:
            self._loop.close_socket(listener)
        for each in tuple(self._callers.values()):
            self._send_away(each)

    def close(self) -> None:
        """Close this process's copies of the callers' sockets; the connections stay up."""
        for each in tuple(self._callers.values()):
            each.socket.close()
        self._callers.clear()  # they refer to this object
