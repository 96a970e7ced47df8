"""The connection between two ranks: its sockets, from the handshake to the end.

The two ranks may call, that is connect to, each other at the same time. Each then sends on the
connection that it opened, and reads from the other one, the ``inlet``.

Bytes that the system has accepted from a sender reach a peer on the same host whatever happens.
Bytes for another host are still on their way, and are lost if this end is closed while data from
that host is unread. So closing such a connection waits until the other host's system has them, for
a third of a second at most.

A host that loses power or its network closes nothing. The system probes idle connections, and ends
them if nothing answers. A connection in use is ended here when an answer is due and nothing was
heard for too long. A process that computes, or is stopped, is not silent, because its system
answers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from struct import Struct
from typing import TYPE_CHECKING, Protocol

import torch

from objcomm._codecs.buffers import readable
from objcomm._transport.event_loop import ENDS, OWN_DOING, READS, EventLoop, hang_up
from objcomm._transport.frames import AHEAD_MAX_NBYTES, FAREWELL_MAX_NBYTES, HEADER, Kind
from objcomm._transport.link import HOST_LOST, PEER_LOST
from objcomm._transport.peer import Peer
from objcomm._transport.pending import Members, Transfer
from objcomm._transport.share import FILES_MAX, Share
from objcomm._transport.sockets import Silence, await_delivery, is_outage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from objcomm._transport.link import Memory, Pieces

# An open file of a process, as it is transferred.
_DESCRIPTOR = Struct("i")
_RIGHTS_NBYTES = socket.CMSG_SPACE(FILES_MAX * _DESCRIPTOR.size)
# Only Linux has all of these and this link, but the module is imported on other systems, too. A
# plain number, because ``&`` of an IntFlag takes 1.6 µs.
_TRUNCATED = int(getattr(socket, "MSG_CTRUNC", 0))
_IN, _OUT = getattr(select, "EPOLLIN", 0), getattr(select, "EPOLLOUT", 0)

# The most that a large message sends or receives before other connections get a turn.
_TURN_NBYTES = 4 << 20
# How many pieces a system call accepts, less one for the frame's header.
_PIECES_MAX = 1023
# How long closing waits for the other host's system to receive what was sent. Less than the time
# for which a thread waits for the one that may close connections, see ``noticeboard``.
_DELIVERY_SECONDS = 0.3

_CLOSED = f"{PEER_LOST} (its end of the stream is closed)"
TORN = "this rank was interrupted in the middle of a message"


class Renewing(Protocol):
    """Calls a peer again, see ``calling``."""

    def let_in(self) -> None:
        """Accept the callers that are waiting."""

    def calls_again(self, connection: Connection, error: OSError) -> bool:
        """Return whether a failed connection will be called again; if so, close its socket."""


class Connection:
    """See the module docstring. Every method but ``has_ended_there`` requires the loop's lock.

    Attributes:
        peer: the protocol with the peer.
        socket: sends to the peer, and receives from it unless there is an ``inlet``.
        inlet: the socket that receives, if both ranks have called each other.
        awaited_handshake: the part of the peer's handshake that has yet to arrive.
        own_handshake: the part of this rank's handshake that has yet to be sent.
        is_open: whether more than the handshake may be sent. A peer on another host is not
            identified before its handshake has arrived.
        called: when this rank began to call; 0 if it did not.
        called_way: when it called last.
        way: index of the peer's address to call.
        is_to_call: whether the call has failed and has to be repeated.
        failed: why nothing more can be sent, although received data may be unread.
        silence: measures how long the peer's host has not answered; None for this host.
        is_watched: whether the leader is woken when the system can take more bytes.
        is_hung_up: whether this end was shut down by a thread that could not end it completely.
        was_ended_there: whether the peer closed it.
        undelivered: sockets that were ended here but not closed yet.
    """

    __slots__ = (
        "_calling",
        "_is_ended",
        "_loop",
        "_lost_seconds",
        "awaited_handshake",
        "called",
        "called_way",
        "failed",
        "inlet",
        "is_hung_up",
        "is_open",
        "is_to_call",
        "is_watched",
        "own_handshake",
        "peer",
        "silence",
        "socket",
        "undelivered",
        "was_ended_there",
        "way",
    )

    def __init__(
        self,
        rank: int,
        end: socket.socket,
        loop: EventLoop,
        lost_seconds: float | None,
        calling: Renewing | None = None,
    ) -> None:
        """Create a connection whose socket is used from ``attach`` on.

        Args:
            rank: the peer's.
            end: its socket, or one that has yet to be connected.
            loop: handles events on its sockets.
            lost_seconds: how long the peer's host may stay silent; None for this host.
            calling: calls the peer again if it was not reached; None if that never happens.
        """
        self.peer = Peer(rank)
        self.socket = end
        self.inlet: socket.socket | None = None
        self.awaited_handshake = self.own_handshake = b""
        self.is_open = True
        self.called = self.called_way = 0.0
        self.way = 0
        self.is_to_call = False
        self.failed = ""
        self.silence: Silence | None = None
        self.is_watched = self.is_hung_up = self.was_ended_there = False
        self.undelivered: list[socket.socket] = []
        self._loop = loop
        self._lost_seconds = lost_seconds
        self._calling = calling
        self._is_ended = False

    @property
    def is_far(self) -> bool:
        """Whether the peer is on another host."""
        return self._lost_seconds is not None

    def attach(self, end: socket.socket) -> None:
        """Start watching a socket: the one to send on, or the ``inlet``."""
        if self._lost_seconds is None:
            # All that a sender may be ahead: so it need not wait for the receiver in the middle of
            # a message. The system may allow less. TCP chooses a size itself.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, AHEAD_MAX_NBYTES)
        else:
            silence = Silence(end, self._lost_seconds)
            if end is self.socket:
                self.silence = silence
        end.setblocking(False)  # noqa: FBT003  # its only parameter
        self._loop.watch(end, self)

    def detach(self) -> None:
        """Close the socket for sending, before another one replaces it."""
        self._loop.close_socket(self.socket)
        self.is_watched = False

    def sockets(self) -> list[socket.socket]:
        """Return the one or two sockets; none while the peer has to be called again."""
        if self.is_to_call:
            return []
        return [self.socket] if self.inlet is None else [self.socket, self.inlet]

    def has_ended_there(self) -> bool:
        """Return whether the other end is known to have closed it."""
        if self.is_far and self.own_handshake:
            return False  # a failed call may be repeated
        return any(map(_has_ended, self.sockets()))

    # ------------------------------------------------------------------ out

    def send(self, flat: Memory | Pieces, nbytes: int, tag: int) -> Transfer | None:
        """Begin to send a message.

        Args:
            flat: the message.
            nbytes: its length.
            tag: its tag.

        Returns:
            The transfer; None if the system has accepted the whole message.
        """
        peer, sent = self.peer, 0
        head = peer.head_of(nbytes, tag)
        if head and self.is_open and not (self.own_handshake or peer.outgoing or peer.contents):
            pieces = flat if isinstance(flat, list) else [flat]
            if isinstance(flat, torch.Tensor):
                pieces = [readable(flat)]
            try:
                sent = self.socket.sendmsg((head, *pieces[:_PIECES_MAX]), (), socket.MSG_NOSIGNAL)
            except OSError as error:
                self._has_no_room(error)
            if sent == len(head) + nbytes:
                return None
        transfer = Members(flat) if isinstance(flat, list) else Transfer(flat)
        if not head:
            peer.hold(transfer, tag)
            self.carry_out()
        elif peer.ended:
            transfer.end(peer.ended)
        else:
            peer.queue(head, transfer, sent)
            self._watch_room()
        return transfer

    def carry_out(self) -> None:
        """Send the queued frames, or end the connection if the protocol has ended."""
        if self.peer.ended:
            self.end(self.peer.ended)
        else:
            self.flush()

    def flush(self) -> None:
        """Send as much as the system takes; the rest waits."""
        if self.is_to_call or self.peer.ended:
            return
        peer, left = self.peer, _TURN_NBYTES
        try:
            while self.own_handshake:
                sent = self.socket.send(self.own_handshake, socket.MSG_NOSIGNAL)
                self.own_handshake = self.own_handshake[sent:]
            while self.is_open and left > 0 and (first := peer.first_out()) is not None:
                view, _, share = first
                if share is not None:
                    sent = self._hand_over(view, share)
                else:
                    sent = self.socket.send(view, socket.MSG_NOSIGNAL) if view.nbytes else 0
                left -= sent
                peer.sent(sent)
        except OSError as error:
            self._has_no_room(error)
        self._watch_room()

    def _hand_over(self, frame: memoryview, share: Share) -> int:
        """Send an offer with its descriptors, or without if too many are in transit."""
        files = b"".join(map(_DESCRIPTOR.pack, share.descriptors))
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, files)
        try:
            return self.socket.sendmsg((frame,), (rights,), socket.MSG_NOSIGNAL)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            return self.socket.send(self.peer.keep_share(), socket.MSG_NOSIGNAL)

    def _has_no_room(self, error: OSError) -> None:
        """Handle a send error, but leave the loss of the peer for ``read`` to detect."""
        if isinstance(error, (BlockingIOError, BrokenPipeError, ConnectionResetError)):
            return
        if not isinstance(error, ConnectionRefusedError) and not is_an_outage(error):
            self.end(f"nothing can be sent to rank {self.peer.rank} ({error})")
        elif self.is_open:
            self.failed = why(error)  # data that came before may be unread
        else:
            self.lose(error)

    def _watch_room(self) -> None:
        """Ask to be woken when the system takes more bytes, while something waits to be sent."""
        peer = self.peer
        is_waiting = self.is_open and (peer.outgoing or peer.contents)
        is_wanted = bool(self.own_handshake or is_waiting)
        if is_wanted != self.is_watched and not (self.is_to_call or peer.ended):
            self.is_watched = is_wanted
            self._loop.events.modify(self.socket, READS | _OUT * is_wanted)

    # ------------------------------------------------------------------ in

    def handle(self, descriptor: int, event: int) -> None:
        """See ``EventHandler``."""
        try:
            if event & ENDS and self.awaited_handshake and self._calling is not None:
                self._calling.let_in()  # the peer may have called as well, and sent more there
            if event & _OUT:
                self.flush()
            # That may have ended it or replaced its socket.
            if event & ~_OUT and self._loop.sockets.get(descriptor) is self:
                if self.inlet is None or self.inlet.fileno() == descriptor:
                    self.read(is_ending=bool(event & ENDS))
                else:
                    self._receive_own_call()
        except BaseException:
            self.end(TORN)
            raise

    def read(self, *, is_ending: bool) -> None:
        """Read what has arrived; all of it if the other end has closed the connection."""
        peer, left = self.peer, _TURN_NBYTES
        end = self.inlet or self.socket
        try:
            while left > 0 and not peer.ended:
                if peer.filling is not None:
                    into = peer.filling
                    count = end.recv_into(into)
                elif self.awaited_handshake and not self._has_handshake():
                    return
                else:
                    into = peer.room()
                    count, rights, flags, _ = end.recvmsg_into(
                        (into,), _RIGHTS_NBYTES, socket.MSG_CMSG_CLOEXEC
                    )
                    if rights or flags & _TRUNCATED:  # a read stops after descriptors
                        files = [n for *_, each in rights for (n,) in _DESCRIPTOR.iter_unpack(each)]
                        share = Share(files)
                        peer.descriptors.append(None if flags & _TRUNCATED else share)
                if not count:
                    self._receive_end()
                    return
                left -= count
                peer.received(count)
                # If it is watched, the leader, which is this thread, learns when there is room.
                if ((peer.outgoing or peer.contents) and not self.is_watched) or peer.ended:
                    self.carry_out()
                if count < len(into) and not is_ending:  # there was no more
                    return
        except BlockingIOError:
            pass
        except OSError as error:
            self.lose(error)

    def _has_handshake(self) -> bool:
        """Read the rest of the peer's handshake; return False if the connection has ended."""
        end = self.inlet or self.socket
        while self.awaited_handshake:
            received = end.recv(len(self.awaited_handshake))
            if not received:
                self._receive_end()
                return False
            if not self.awaited_handshake.startswith(received):
                self.refuse("the wrong handshake")
                return False
            self.awaited_handshake = self.awaited_handshake[len(received) :]
            if not self.awaited_handshake and not self.is_open:
                self.open()
        return not self.peer.ended

    def open(self) -> None:
        """Send what was waiting for the peer to prove its identity."""
        self.is_open = True
        self.flush()

    def _receive_own_call(self) -> None:
        """Handle an event on this rank's own call when both have called; only its end is valid."""
        closed = _CLOSED
        try:
            received = self.socket.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            received, closed = b"", why(error)
        if received:
            self.refuse("data over the wrong connection")
            return
        inlet = self.inlet
        while not self.peer.ended and inlet is not None and has_bytes(inlet):
            self.read(is_ending=True)  # all that the peer sent before has arrived
        if inlet is not None and self._lost_seconds is not None and not self.peer.ended:
            # Between hosts, data that it sent before may still be on its way, followed by the end.
            self.detach()
            self.socket, self.inlet = inlet, None
            self.is_open, self.failed = False, self.failed or closed
            self.silence = Silence(inlet, self._lost_seconds)
            with contextlib.suppress(OSError):  # the other rank may be alive and wait for more
                inlet.shutdown(socket.SHUT_WR)
            return
        self.was_ended_there = not self.is_hung_up
        self.end(OWN_DOING if self.is_hung_up else self.failed or closed)

    # ------------------------------------------------------------------ the end

    def _receive_end(self) -> None:
        """End the connection because no more data will come."""
        self.was_ended_there = self.was_ended_there or not self.is_hung_up
        self.end(OWN_DOING if self.is_hung_up else self.failed or _CLOSED)

    def lose(self, error: OSError) -> None:
        """Handle a system error: call again if the peer was not reached yet, or end."""
        if self._calling is None or not self._calling.calls_again(self, error):
            self.was_ended_there = True
            self.end(self.failed or why(error))

    def _say_farewell(self, farewell: bytes) -> None:
        """Report whose loss makes this rank leave, unless other bytes are waiting to be sent."""
        peer = self.peer
        is_free = self.is_open and not (self.own_handshake or peer.outgoing or peer.contents)
        if is_free and not peer.ended and 0 < len(farewell) <= FAREWELL_MAX_NBYTES:
            with contextlib.suppress(OSError):  # the system takes nothing, or the peer has left
                head = HEADER.pack(Kind.FAREWELL, 0, len(farewell), 0)
                self.socket.send(head + farewell, socket.MSG_NOSIGNAL)

    def lose_host(self) -> None:
        """End the connection because the peer's host does not answer; keep what has arrived."""
        self.read(is_ending=True)
        self.was_ended_there = True
        self.end(f"{HOST_LOST} (no answer)")

    def leave(self, farewell: bytes) -> None:
        """End the connection from this side; keep all that has arrived."""
        if self._is_ended:
            return
        try:
            if not (self.is_to_call or self.peer.ended):
                self.read(is_ending=True)
            if not (self.is_hung_up or self.peer.ended):
                self.was_ended_there = self.has_ended_there()
                self._say_farewell(farewell)
        finally:
            self.end(OWN_DOING)

    def refuse(self, what: str) -> None:
        """End the connection because the peer has sent something that no link sends."""
        self.peer.refuse(what)
        self.end(self.peer.ended)

    def end(self, reason: str) -> None:
        """Close the sockets and end all transfers."""
        if self._is_ended:
            return
        is_to_deliver = self.is_far and reason is OWN_DOING and not self.is_hung_up
        try:
            for end in self.sockets():
                if not is_to_deliver:
                    self._loop.close_socket(end)
                elif end not in self.undelivered:
                    self.undelivered.append(end)
                    self._loop.unwatch(end)
        finally:
            self.peer.end(reason)
        self._is_ended = True  # not reached if a signal handler has raised; then it is repeated


def close_when_delivered(ends: Sequence[socket.socket]) -> None:
    """Close sockets once the other hosts have what was sent, or after a short wait."""
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_WR)  # tells the other ends immediately that nothing more comes
    try:
        await_delivery(ends, time.monotonic() + _DELIVERY_SECONDS, is_draining=True)
    finally:
        for end in ends:
            hang_up(end)
            end.close()


def is_an_outage(error: OSError) -> bool:
    """Return whether an error means that a host is out of reach."""
    return is_outage(os.strerror(error.errno or 0))


def why(error: OSError) -> str:
    """Return what a system error says about the other end."""
    text = os.strerror(error.errno or 0)
    return f"{HOST_LOST if is_outage(text) else PEER_LOST} ({text})"


def has_bytes(end: socket.socket) -> bool:
    """Return whether data, or the end of the stream, can be read."""
    watched = select.poll()
    with contextlib.suppress(ValueError):  # it was closed in the meantime
        watched.register(end, select.POLLIN)
    return bool(watched.poll(0))


def has_unread(end: socket.socket) -> bool:
    """Return whether data, and not only the end, can be read; consumes neither data nor errors."""
    import fcntl  # noqa: PLC0415  # Windows has none
    import termios  # noqa: PLC0415  # likewise

    try:
        return any(fcntl.ioctl(end, termios.FIONREAD, bytes(4)))
    except (OSError, ValueError):  # it was closed in the meantime
        return False


def _has_ended(end: socket.socket) -> bool:
    """Return whether the other end is known to have closed it; earlier data may still arrive."""
    if end.fileno() < 0:
        return True
    watched = select.poll()
    watched.register(end, select.POLLRDHUP)
    return bool(watched.poll(0))
