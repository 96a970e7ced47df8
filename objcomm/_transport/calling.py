"""Connects ranks when they first use each other, after all have met.

Of many ranks only some pairs are connected from the beginning. A rank that begins the first
transfer with another one, in either direction, calls at its door. On the same host it may send at
once: the kernel says whose process is there, and keeps what comes before the caller is let in. From
another host the answer comes first, which proves that it is that rank. If both call, each sends
over its own call, and reads what comes over the other's.

A network may fail for a while, and strangers may crowd a door, so a call that fails may be made
again, at each of the peer's addresses in turn.
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
from objcomm._transport.link import LinkClosed, LinkError
from objcomm._transport.mover import OWN_DOING, Mover

if TYPE_CHECKING:
    from collections.abc import Sequence

    from objcomm._transport.doors import Doors

# How long a rank calls again, if a host may be out of reach for ever.
_CALLED_SECONDS = 60.0
# How long a rank waits at one of a peer's addresses, if there is another one.
_NEXT_WAY_SECONDS = 1.0


class _Caller:
    """A connection of which it is not known yet which rank is at its end."""

    def __init__(self, end: socket.socket, said: bytes, calling: Calling) -> None:
        self.socket = end
        self.said = said
        self._calling = calling

    def handle(self, descriptor: int, event: int) -> None:  # noqa: ARG002  # see ``Socketed``
        """See ``Socketed``."""
        self._calling.hear_caller(self)


class Calling:
    """See the module; every method with the mover's lock held.

    Attributes:
        listeners: where the other ranks call.
    """

    def __init__(
        self,
        doors: Doors,
        listeners: Sequence[socket.socket],
        mover: Mover,
        connections: dict[int, Connection],
        lost_seconds: float,
    ) -> None:
        """Begin.

        Args:
            doors: those of all ranks.
            listeners: where the others call; they are this object's from now on.
            mover: moves what comes over sockets.
            connections: those that there are, by rank; new ones are added.
            lost_seconds: for how long another host may answer nothing.
        """
        self._doors = doors
        self.listeners = tuple(listeners)
        self._mover = mover
        self._connections = connections
        self._lost_seconds = lost_seconds
        self._callers: dict[int, _Caller] = {}
        for each in self.listeners:
            each.settimeout(0)
            mover.watch(each, self)

    # ------------------------------------------------------------------ calls

    def connection_to(self, peer: int) -> Connection:
        """The connection to a rank with which nothing was begun yet.

        Raises:
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
                end, own_word, where = doors.call(peer)
            except OSError as error:
                is_theirs = isinstance(error, (ConnectionError, BlockingIOError))
                if not is_theirs and not is_an_outage(error):
                    raise
                family = socket.AF_UNIX if doors.is_near(peer) else socket.AF_INET
                end, own_word, where = socket.socket(family), doors.word_to(peer), ""
                failed = error
        except OSError as error:
            raise LinkError(f"this process can't connect to it ({error})") from error
        connection = self._made(peer, end)
        connection.word, connection.own_word = doors.word_from(peer, where), own_word
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
        if self._mover.is_aborted:  # by a signal's handler, which did not see it yet
            connection.end(OWN_DOING)
            raise LinkClosed(OWN_DOING)
        return connection

    def _made(self, peer: int, end: socket.socket) -> Connection:
        lost_seconds = None if self._doors.is_near(peer) else self._lost_seconds
        return Connection(peer, end, self._mover, lost_seconds, self)

    def _use(self, connection: Connection) -> None:
        connection.attach(connection.socket)
        self._connections[connection.peer.rank] = connection

    def calls_again(self, connection: Connection, error: OSError) -> bool:
        """Whether a connection that was lost is to be called again; then it has no socket now.

        Linux gives up a call sooner than a connection: after 3 s, if nobody answers for the other
        host's address (ARP).
        """
        may_pass = (
            is_an_outage(error) or isinstance(error, BlockingIOError) or self._has_way(connection)
        )
        if not connection.own_word or not may_pass or self._is_given_up(connection):
            return False
        connection.detach()
        connection.is_to_call = True
        connection.way += 1
        return True

    def is_due(self, connection: Connection) -> bool:
        """Whether a connection needs ``look_after``."""
        if connection.is_to_call:
            return True
        is_silent = bool(connection.own_word)
        return is_silent and (self._is_given_up(connection) or self._is_next_way_due(connection))

    def look_after(self, connection: Connection) -> None:
        """Call again, or at the next address, or give up."""
        if connection.is_to_call:
            self._call_again(connection)
        elif connection.own_word and self._is_given_up(connection):
            connection.lose_host()
        elif self._is_next_way_due(connection):
            connection.lose(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))

    def _call_again(self, connection: Connection) -> None:
        doors, peer = self._doors, connection.peer.rank
        if self._mover.is_aborted:
            connection.end(OWN_DOING)
            return
        try:
            end, own_word, where = doors.call(peer, connection.way)
        except OSError as error:
            is_refused = isinstance(error, ConnectionError) and not self._has_way(connection)
            connection.way += 1
            if is_refused or self._is_given_up(connection):
                connection.was_ended_there = True
                connection.end(why(error))
            return
        connection.socket, connection.own_word = end, own_word
        connection.word = doors.word_from(peer, where)
        connection.is_to_call, connection.failed = False, ""
        connection.called_way = time.monotonic()
        try:
            self._use(connection)
            connection.flush()
        except BaseException:
            connection.end(TORN)
            raise

    def _has_way(self, connection: Connection) -> bool:
        """Whether the peer was not yet called at all of its addresses."""
        return connection.way + 1 < self._doors.ways_to(connection.peer.rank)

    def _is_next_way_due(self, connection: Connection) -> bool:
        """Whether a peer is to be called at its next address, as it does not answer at one."""
        is_silent = connection.own_word and not connection.is_to_call and self._has_way(connection)
        return bool(is_silent) and time.monotonic() - connection.called_way > _NEXT_WAY_SECONDS

    def _is_given_up(self, connection: Connection) -> bool:
        """Whether a call has taken too long."""
        waited = time.monotonic() - connection.called
        return waited > (_CALLED_SECONDS if math.isinf(self._lost_seconds) else self._lost_seconds)

    # ------------------------------------------------------------------ callers

    def handle(self, descriptor: int, event: int) -> None:  # noqa: ARG002  # see ``Socketed``
        """See ``Socketed``: somebody calls."""
        self.let_in()

    def let_in(self) -> None:
        """Listen to all that have called."""
        for listener in self.listeners:
            try:
                for end in self._doors.accept(listener):
                    self.listen_to(end)
            except OSError as error:  # no descriptors left: a rank that calls must not wait
                rank = self._doors.rank
                self._doors.on_refused(f"rank {rank} can't accept connections ({error})")
                self.shut()
                return

    def listen_to(self, end: socket.socket, said: bytes = b"") -> None:
        """Hear which rank has called, if it is one.

        Args:
            end: the connection.
            said: what the caller has said already.
        """
        # No more can be ranks. One that is has said its word by now.
        if len(self._callers) >= len(self._doors.others):
            for longest in tuple(self._callers.values())[:1]:
                self._doors.on_refused("a process that said nothing")
                self._send_away(longest)
        caller = _Caller(end, said, self)
        self._callers[end.fileno()] = caller
        try:
            self._mover.watch(end, caller)
        except (OSError, ValueError):  # no room for it; or closed by a signal's handler
            self._send_away(caller)
            return
        self.hear_caller(caller)

    def hear_caller(self, caller: _Caller) -> None:
        """Read more of a caller's word; when it is whole, let the caller in or send it away."""
        doors, descriptor = self._doors, caller.socket.fileno()
        if self._callers.get(descriptor) is not caller:  # it was sent away meanwhile
            return
        try:
            while due := doors.word_nbytes - len(caller.said):
                came = caller.socket.recv(due)
                if not came:
                    self._send_away(caller)
                    return
                caller.said += came
        except BlockingIOError:
            return
        except OSError:
            self._send_away(caller)
            return
        try:
            peer = doors.caller(caller.socket, caller.said)
        except OSError:  # another key, though all ranks had one when they met
            peer = None
        if self._callers.pop(descriptor, None) is None:  # by a signal's handler
            return
        self._mover.unwatch(caller.socket)
        if peer is None or not self._admit(peer, caller.socket):
            caller.socket.close()

    def _send_away(self, caller: _Caller) -> None:
        self._callers.pop(caller.socket.fileno(), None)
        self._mover.let_go(caller.socket)

    def _admit(self, peer: int, end: socket.socket) -> bool:
        """Take in a connection that a rank has made; False if it has one."""
        doors, connection = self._doors, self._connections.get(peer)
        if self._mover.is_aborted:
            return False
        if connection is None:
            connection = self._made(peer, end)
        elif connection.peer.ended or len(connection.word) != doors.word_nbytes:  # it has answered
            return False
        try:
            is_unsaid = connection.is_to_call or len(connection.own_word) == doors.word_nbytes
            if is_unsaid or not connection.word:
                self._adopt(connection, end, doors.word_to(peer, called_at(end)))
            else:
                # Both have called. Its call has proved who it is, so it does not answer this one's.
                connection.word, connection.inlet = b"", end
                connection.attach(end)
                connection.open()
        except OSError:
            connection.end(TORN)
            return False
        except BaseException:
            connection.end(TORN)
            raise
        return True

    def _adopt(self, connection: Connection, end: socket.socket, own_word: bytes) -> None:
        """Use a peer's call for all, where this rank has none on which anything was said."""
        if connection.called and not connection.is_to_call:
            connection.detach()
        connection.socket, connection.word, connection.own_word = end, b"", b""
        connection.is_to_call = connection.is_watched = False
        connection.peer.outgoing.appendleft((memoryview(own_word), None, None))
        self._use(connection)
        connection.open()

    # ------------------------------------------------------------------ the end

    def shut(self) -> None:
        """Let nobody in any more; callers that were not let in notice."""
        for listener in self.listeners:
            self._mover.let_go(listener)
        for each in tuple(self._callers.values()):
            self._send_away(each)

    def close(self) -> None:
        """Close this process's copies of callers' sockets, without a word to anybody."""
        for each in tuple(self._callers.values()):
            each.socket.close()
        self._callers.clear()  # which know this object
