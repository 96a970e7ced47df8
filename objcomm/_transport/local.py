"""The link between ranks of one host: a stream socket of the system's for each pair.

It has no thread. Whoever waits moves what there is to move, for all: the *mover* sleeps until any
socket has bytes or room, takes them in, and wakes the threads whose transfers are over. When its
own is over the next one that waits becomes the mover.

What goes over a stream is a frame: a kind, a tag and a number, and then perhaps bytes.

- ``MESSAGE``: a message of at most 64 KiB, at once. The system keeps it, or the other end does,
  until somebody asks for it. First messages of a lane are counted, and a sender is no more than
  four ahead of who takes them: so far the search for the reason of a wait can see. Of what follows
  them only words of a few bytes go so, so that who takes nothing needs little memory for it.
- ``OFFER``: there is one that may not. It waits in its sender's memory for
- ``TAKE``: there is room for it now; and then goes out as
- ``CONTENT``, from the sender's memory into the receiver's, past all buffers of this module.
- ``SHARE``: an offer of memory that the other end may map; its descriptor comes along. The answer
  is
- ``HELD``; or ``TAKE``, where the descriptor got lost: the receiver's system may have no more.
- ``CREDIT``: so many first messages of a lane have been taken. A first message that goes the other
  way says so by its number, and then none of these is due: it would wake its receiver for nothing.

Nothing that arrives is believed before it was judged: a frame of no kind, one that is too long, or
one that answers nothing ends the connection.

Where many ranks share a host only some pairs are connected from the beginning. Who begins the first
transfer with another rank, in either direction, calls at its door, and may send at once: the system
keeps what comes before the other one lets it in. If both call, each sends over its own call, and
reads what comes over the other's.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import socket
import threading
import time
from collections import deque
from enum import IntEnum
from struct import Struct
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from objcomm._codecs.buffers import writable
from objcomm._config import FOREVER_SECONDS
from objcomm._transport.link import (
    LANE_BITS,
    PEER_LOST,
    LinkClosed,
    LinkError,
    LinkTimeout,
    Pending,
)
from objcomm._transport.share import FILES_MAX, Share

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from datetime import timedelta

    from objcomm._transport.link import Borrowed, Memory
    from objcomm._transport.threads import ThreadPool

# Kind and tag; length of the message; number of the offer, or of messages taken.
_HEADER = Struct("<IIQQ")
_HEADER_NBYTES = _HEADER.size

#: What is not longer goes out unasked; a first message must. The system keeps 208 KiB for a reader
#: that is busy (Linux' own default).
UNASKED_MAX_NBYTES = 1 << 16
_WORD_MAX_NBYTES = 64
#: First messages of a lane that a sender may be ahead of who takes them.
AHEAD_MAX = 4
_TOLD_EACH = 2

#: So many files may wait for a peer that takes nothing; a process may often have 1,024 open.
LENT_FILES_MAX = 64
# One of a process's open files, as it travels.
_DESCRIPTOR = Struct("i")
_RIGHTS_NBYTES = socket.CMSG_SPACE(FILES_MAX * _DESCRIPTOR.size)

# Room for a message with its header, and some more of them.
_RAW_NBYTES = 2 * UNASKED_MAX_NBYTES
# The system counts milliseconds in 31 bits.
_SLEEP_MAX_SECONDS = 1e6
# As much of a large message goes out before others get a turn.
_TURN_NBYTES = 4 << 20

# Other systems than Linux have none of these, and no such link; but this module is imported there.
_TRUNCATED = int(getattr(socket, "MSG_CTRUNC", 0))  # an IntFlag's ``&`` takes 1.6 µs
_READS = sum(getattr(select, name, 0) for name in ("EPOLLIN", "EPOLLRDHUP"))
_ENDS = sum(getattr(select, name, 0) for name in ("EPOLLRDHUP", "EPOLLHUP", "EPOLLERR"))

_OWN_DOING = "this rank has closed its connections"
_TORN = "this rank was interrupted in the middle of a message"
_IN_A_HANDLER = "a signal's handler has used connections that it had interrupted"

# The lock's owner may have been interrupted by a signal, whose handler takes its time.
_PATIENCE_SECONDS = 1.0


class Kind(IntEnum):
    """What a frame is; see the module."""

    MESSAGE = 1
    OFFER = 2
    TAKE = 3
    CONTENT = 4
    CREDIT = 5
    SHARE = 6
    HELD = 7


class Doors(Protocol):
    """How ranks of one host reach each other at any time; what they say first are *words*.

    Attributes:
        word_nbytes: how long each word is.
    """

    word_nbytes: int

    def call(self, peer: int) -> socket.socket:
        """Connect to a rank, and say this rank's word.

        Raises:
            ConnectionRefusedError: it has closed its door.
            OSError: this process can't.
        """

    def caller(self, end: socket.socket, said: bytes) -> int | None:
        """Which rank has called and said this; None if it was a stranger."""

    def word_from(self, peer: int) -> bytes:
        """What a rank says to this one, and nobody else can."""

    def word_to(self, peer: int) -> bytes:
        """What this one says to a rank."""


class _Caller:
    """A connection of which it is not known yet which rank is at its end."""

    def __init__(self, end: socket.socket, said: bytes = b"") -> None:
        self.socket = end
        self.said = said


class _Transfer:
    """A message on its way out or in.

    Attributes:
        flat: its memory, or the room for it, which lives as long as bytes may come.
        view: the same as the system takes it.
        is_over: whether that may be used again.
        reason: why it ended without having been carried; empty otherwise.
        turn: held by the thread that waits for it while another one is the mover.
    """

    __slots__ = ("flat", "is_over", "reason", "turn", "view")

    def __init__(self, flat: Memory) -> None:
        self.flat = flat
        self.view = flat if isinstance(flat, memoryview) else writable(flat)
        self.is_over = False
        self.reason = ""
        self.turn: threading.Lock | None = None

    def end(self, reason: str = "") -> None:
        """Let it be over, and whoever waits for it go on."""
        self.reason = reason
        self.is_over = True
        turn = self.turn
        if turn is not None:
            self.turn = None
            turn.release()


class _Members(_Transfer):
    """Several memories that go out or come in one after another.

    Attributes:
        flats: all of them.
        views: the same as the system takes them.
        nbytes: how long they are together.
    """

    __slots__ = ("flats", "nbytes", "views")

    def __init__(self, flats: Sequence[torch.Tensor]) -> None:
        super().__init__(flats[-1])
        self.flats = flats
        self.views = [writable(flat) for flat in flats]
        self.nbytes = sum(map(len, self.views))


class _Lent(_Members):
    """Members for who maps them, or takes a copy.

    Attributes:
        share: has their content; None where there is only a copy.
        files: how many it has.
    """

    __slots__ = ("files", "share")

    def __init__(self, share: Share | None, flats: Sequence[torch.Tensor]) -> None:
        super().__init__(flats)
        self.share = share
        self.files = 0 if share is None else len(share.descriptors)

    def end(self, reason: str = "") -> None:
        """See ``_Transfer``; an error may keep this object for long."""
        self.share = None
        super().end(reason)


class _Borrowed(_Transfer):
    """Memory that a peer lends; see ``link.Borrowed``.

    Attributes:
        nbytes: how long its members are together.
        peer: whose it is.
        number: of its offer, where its content can only be copied.
    """

    __slots__ = ("nbytes", "number", "peer", "share")

    def __init__(self, nbytes: int, peer: int) -> None:
        super().__init__(_NOTHING)
        self.nbytes = nbytes
        self.peer = peer
        self.number = 0
        self.share: Share | None = None


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class _Connection:
    """One peer: its socket, what has come of it, and what has yet to go there.

    Attributes:
        peer: its rank.
        socket: to it, and from it unless there is an ``inlet``.
        inlet: where what it sends comes, if each has called the other.
        word: what it has yet to say before all else.
        arrived: by tag: what came before it was asked for, as bytes, or as an offer's number.
        posted: by tag: the receives for which nothing has come.
        outgoing: what the system had no room for, in order; with the transfer that it ends, and
            what is handed over with its first byte.
        offered: sends that wait to be taken, by number; they count from 0.
        offers: numbers and lengths of what the peer has offered, and has not sent.
        shares: those of them that can be mapped.
        descriptors: what came of those whose frames have not; None for one that got lost.
        taken: receives for which content was asked, by number.
        rooms: what is to be filled after ``filling``, by the same content.
        lent_files: files handed over of which the peer has not said that it has them.
        held: by tag: first messages for which there is no credit.
        ahead: by tag: first messages that are not known to be taken.
        untold: by tag: first messages that were taken here, and the peer not told so.
        is_watched: whether the mover is woken when there is room for ``outgoing``.
        is_hung_up: whether this end was shut by who could not end it whole.
        ended: why the connection has ended; empty while it stands.
        was_ended_there: whether the peer closed it.
    """

    __slots__ = (
        "ahead",
        "arrived",
        "descriptors",
        "ended",
        "filled",
        "filling",
        "held",
        "inlet",
        "is_hung_up",
        "is_watched",
        "lent_files",
        "offered",
        "offers",
        "outgoing",
        "peer",
        "posted",
        "raw",
        "rooms",
        "shares",
        "socket",
        "taken",
        "untold",
        "used",
        "view",
        "was_ended_there",
        "word",
    )

    def __init__(self, peer: int, end: socket.socket, word: bytes = b"") -> None:
        self.peer = peer
        self.socket = end
        self.inlet: socket.socket | None = None
        self.word = word
        self.arrived: dict[int, deque[bytes | bytearray | int]] = {}
        self.posted: dict[int, deque[_Transfer]] = {}
        self.outgoing: deque[tuple[memoryview, _Transfer | None, Share | None]] = deque()
        self.offered: dict[int, tuple[_Transfer, int]] = {}
        self.offers: dict[int, int] = {}
        self.shares: dict[int, Share] = {}
        self.descriptors: deque[Share | None] = deque()
        self.taken: dict[int, _Transfer] = {}
        self.held: dict[int, deque[_Transfer]] = {}
        self.ahead: dict[int, int] = {}
        self.untold: dict[int, int] = {}
        self.ended = ""
        self.lent_files = 0
        self.is_hung_up = False
        self.is_watched = False
        self.was_ended_there = False
        # What was read and not looked at: ``raw[:used]``.
        self.raw = bytearray(_RAW_NBYTES)
        self.view = memoryview(self.raw)
        self.used = 0
        # The message whose bytes come next, what is left of its room, and what it is for.
        self.filling: memoryview | None = None
        self.rooms: deque[memoryview] = deque()
        self.filled: _Transfer | tuple[int, bytearray] | None = None

    def sockets(self) -> list[socket.socket]:
        """Its one, or two."""
        return [self.socket] if self.inlet is None else [self.socket, self.inlet]

    def has_ended_there(self) -> bool:
        """Whether the other end is known to have closed it."""
        return any(map(_has_ended, self.sockets()))


class LocalLink:
    """Joins ranks of one host by stream sockets; see ``Connections`` for its methods' contract.

    Attributes:
        kind: what the log calls it.
        rank: rank within the group.
        size: number of ranks that it joins.
        hosts: of each of them, as a number.
        needs_last_byte_apart: the end of a stream wakes whoever waits for any of its bytes.
        is_interruptible: it sleeps where signals wake it.
        ahead: nothing depends on it.
    """

    kind = "Unix sockets"
    needs_last_byte_apart = False
    is_interruptible = True
    ahead = 64

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        peers: Collection[int] = (),
        doors: Doors | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """Begin.

        Args:
            rank: this one, within the group.
            sockets: to other ranks, connected; they are this link's from now on.
            peers: all other ranks, if there are more.
            doors: those of all ranks, in that case.
            listener: where the others call, in that case; it is this link's from now on.
        """
        self._connections: dict[int, _Connection] = {}
        self._callers: dict[int, _Caller] = {}
        self._doors = doors
        self._listener = listener
        self._peers = frozenset(peers or sockets)
        # A byte in there wakes the mover.
        self._alarm, self._heard = socket.socketpair()
        self._events = select.epoll()
        self._events.register(self._heard, select.EPOLLIN)
        for end in (self._alarm, self._heard):
            end.settimeout(0)
        self.rank = rank
        self.size = len(self._peers) + 1
        self.hosts = (0,) * self.size
        self._pid = os.getpid()
        # It knows its owner: a signal's handler must not wait for what it has interrupted.
        self._lock = threading.RLock()
        # As threading.Condition asks. A plain attribute: it is asked for each message.
        self._is_owned_here: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]  # noqa: SLF001  # see above
        self._mover = 0  # a thread's number
        self._moved_for: _Transfer | None = None
        self._waiting: deque[_Transfer] = deque()
        self._numbers = 0
        self._is_aborted = False
        self._by_descriptor: dict[int, _Connection] = {}
        for peer, end in sockets.items():
            self._add(_Connection(peer, end))
        if listener is not None:
            listener.settimeout(0)
            self._events.register(listener, select.EPOLLIN)

    def _add(self, connection: _Connection) -> None:
        self._connections[connection.peer] = connection
        self._attend(connection, connection.socket)

    def _attend(self, connection: _Connection, end: socket.socket) -> None:
        """Move what comes over one of a connection's sockets."""
        end.setblocking(False)  # noqa: FBT003  # its one parameter
        self._by_descriptor[end.fileno()] = connection
        self._events.register(end, _READS)

    def sharing_with(self, peer: int) -> Self:  # noqa: ARG002  # all are on this host
        """See ``Link``."""
        return self

    def __del__(self) -> None:
        # By name, or the system's warnings of what was left open are the user's.
        for each in getattr(self, "_connections", {}).values():
            for end in each.sockets():
                end.close()
        self._shut_door()
        for name in ("_alarm", "_heard"):
            if hasattr(self, name):
                getattr(self, name).close()

    def over(self, raw: bytearray) -> memoryview:
        """See ``Link``."""
        return memoryview(raw)

    def send(self, flat: Memory, peer: int, tag: int) -> Pending:
        """See ``Link``."""
        transfer = _Transfer(flat)
        if transfer.view.nbytes > UNASKED_MAX_NBYTES and not tag >> LANE_BITS:
            raise ValueError(f"a first message of {transfer.view.nbytes} bytes")
        self._begin(self._send, self._connections.get(peer) or self._opened(peer), transfer, tag)
        return None if transfer.is_over and not transfer.reason else transfer

    def recv(self, flat: Memory, peer: int, tag: int) -> Pending:
        """See ``Link``."""
        transfer = _Transfer(flat)
        self._begin(self._post, self._connections.get(peer) or self._opened(peer), transfer, tag)
        return transfer

    def send_share(
        self, share: Share | None, flats: Sequence[torch.Tensor], peer: int, tag: int
    ) -> Pending:
        """See ``Sharing``."""
        transfer = _Lent(share, flats)
        self._begin(self._lend, self._connections.get(peer) or self._opened(peer), transfer, tag)
        return transfer

    def recv_share(self, nbytes: int, peer: int, tag: int) -> Borrowed:
        """See ``Sharing``."""
        transfer = _Borrowed(nbytes, peer)
        self._begin(self._post, self._connections.get(peer) or self._opened(peer), transfer, tag)
        return transfer

    def recv_instead(self, borrowed: Borrowed, flats: Sequence[torch.Tensor]) -> Pending:
        """See ``Sharing``."""
        transfer = _Members(flats)
        self._begin(self._take, self._connections[borrowed.peer], transfer, borrowed.number)
        return transfer

    def _begin(
        self,
        begin: Callable[[_Connection, Any, int], None],
        connection: _Connection,
        transfer: _Transfer,
        which: int,
    ) -> None:
        """Begin a transfer, whole or not at all: a signal's handler may raise at any step.

        Args:
            begin: takes all that follows.
            connection: to its peer.
            transfer: what is begun.
            which: its tag, or the number of an offer.
        """
        if self._is_owned_here():
            raise LinkError(_IN_A_HANDLER)
        with self._lock:
            try:
                begin(connection, transfer, which)
            except BaseException:
                self._end(connection, _TORN)
                raise
            if self._moved_for is not None:
                self._wake_mover()

    def wait(self, pending: Pending, limit: timedelta) -> None:
        """See ``Link``."""
        if pending is None:
            return
        if not pending.is_over:
            self._await(pending, time.monotonic() + limit.total_seconds())
        if pending.reason:
            raise LinkClosed(pending.reason)

    def is_done(self, pending: Pending) -> bool:
        """See ``Link``."""
        if pending is None:
            return True
        if not pending.is_over:
            self._move_what_is_there()
        return pending.is_over and not pending.reason

    def wait_apart(self, wait: Callable[[], None]) -> None:
        """See ``Link``: ``abort`` ends any wait here."""
        if self._is_aborted:
            raise LinkClosed(_OWN_DOING)
        wait()

    def move(self) -> None:
        """See ``Link``."""
        self._move_what_is_there()

    def is_flowing(self) -> bool:
        """See ``Link``."""
        return not any(each.ended or each.outgoing for each in tuple(self._connections.values()))

    def abort(self) -> None:
        """See ``Link``. A forked process lets go of its copies only: the link is its parent's.

        A signal's handler that has interrupted this link hangs up, and leaves the rest to whom it
        has interrupted; so does who can't have the lock because of one.
        """
        self._is_aborted = True
        if os.getpid() != self._pid:
            self.__del__()
        elif self._is_owned_here() or not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            self._hang_up()
        else:
            try:
                self._end_all()
            finally:
                self._lock.release()

    def _hang_up(self) -> None:
        for each in tuple(self._connections.values()):
            if not each.ended and not each.is_hung_up:
                each.was_ended_there = each.has_ended_there()
                each.is_hung_up = True
                for end in each.sockets():
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
        self._shut_door()

    def _end_all(self) -> None:
        try:
            for each in [each for each in self._connections.values() if not each.ended]:
                try:
                    self._read(each, is_ending=True)  # what has come is here, if not asked for
                    if not each.is_hung_up:
                        each.was_ended_there = each.has_ended_there()
                finally:
                    self._end(each, _OWN_DOING)
        finally:
            self._shut_door()
            while self._waiting:
                self._wake_one()
            self._sound()

    def _shut_door(self) -> None:
        """Let in nobody any more; who has called and was not let in hears so."""
        listener = getattr(self, "_listener", None)
        if listener is not None:
            listener.close()
            for each in tuple(self._callers.values()):
                each.socket.close()

    def closed(self) -> Sequence[int]:
        """See ``Connections``."""
        self._move_what_is_there()
        return [peer for peer in tuple(self._connections) if self._has_ended(peer)]

    def is_closed(self, peer: int) -> bool:
        """See ``Connections``."""
        connection = self._connections.get(peer)
        if connection is None or not connection.ended:
            self._move_what_is_there()
        return self._has_ended(peer)

    def is_out_of_reach(self, peer: int) -> bool:  # noqa: ARG002  # it is this host
        """See ``Connections``."""
        return False

    def has_lost_all(self) -> bool:
        """See ``Connections``."""
        return bool(self._connections) and len(self.closed()) == len(self._connections)

    def closed_by(self) -> Sequence[int]:
        """See ``Connections``."""
        self._move_what_is_there()
        return [
            peer
            for peer, each in tuple(self._connections.items())
            if each.was_ended_there or (not each.ended and self._has_ended(peer))
        ]

    def has_unread(self, peer: int) -> bool:
        """See ``Connections``."""
        connection = self._connections.get(peer)
        if connection is None or connection.ended:
            return False
        return any(map(_has_unread, connection.sockets()))

    def beside(self, peers: Collection[int]) -> Sequence[int]:
        """See ``Connections``: all are."""
        return sorted(self._peers) if peers else []

    def _has_ended(self, peer: int) -> bool:
        connection = self._connections.get(peer)
        if connection is None:
            return self._is_aborted
        if connection.ended or not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            return bool(connection.ended)
        try:
            return bool(connection.ended) or connection.has_ended_there()
        finally:
            self._lock.release()

    def joins(self, peer: int) -> bool:
        """Whether a rank is one of those of this host."""
        return peer in self._peers

    def has_begun(self, pending: Pending) -> bool:
        """Whether a transfer is one of such a link's."""
        return isinstance(pending, _Transfer)

    def needs_a_mover(self) -> bool:
        """Whether what has begun here may end only while somebody moves it.

        The receives that stand ready for first messages need nobody before they are waited for.
        """
        if self._is_owned_here():
            raise LinkError(_IN_A_HANDLER)
        with self._lock:
            return any(
                each.outgoing
                or each.offered
                or each.held
                or each.taken
                or each.filled is not None
                or any(tag >> LANE_BITS for tag in each.posted)
                for each in self._connections.values()
            )

    @contextlib.contextmanager
    def moved_by(self, threads: ThreadPool) -> Iterator[None]:
        """A block that waits elsewhere, while another thread moves all that there is here.

        Raises:
            LinkError: this process can start no more threads.
        """
        end = _Transfer(_NOTHING)
        try:
            _submit(threads, functools.partial(self._move_until, end))
            yield
        finally:
            self._let_go_on(end)

    def is_moved_here(self) -> bool:
        """Whether the calling thread runs a signal's handler, which has interrupted the mover."""
        return self._mover == threading.get_ident()

    def move_during(self, wait: Callable[[], None], threads: ThreadPool) -> None:
        """Let another thread do ``wait``, as the calling one is the only one to move meanwhile.

        Raises:
            LinkError: what ``wait`` raises; or this process can start no more threads.
        """
        end, errors = _Transfer(_NOTHING), deque[BaseException]()

        def wait_there() -> None:
            try:
                wait()
            except BaseException as error:  # noqa: BLE001  # raised by the thread that asked
                errors.append(error)
            finally:
                self._let_go_on(end)

        _submit(threads, wait_there)
        self._await(end, time.monotonic() + FOREVER_SECONDS)
        if errors:
            raise errors.pop()

    def _move_until(self, end: _Transfer) -> None:
        with contextlib.suppress(LinkError):  # whoever waits for its connection is told
            self._await(end, time.monotonic() + FOREVER_SECONDS)

    def _let_go_on(self, awaited: _Transfer) -> None:
        """Let who waits for what another thread does go on."""
        with self._lock:
            awaited.end()
            self._wake_mover()

    # ------------------------------------------------------------------ who moves

    def _await(self, transfer: _Transfer, until: float) -> None:
        while not self._has_ended_by_turn(transfer, until):
            if self._is_aborted:  # a signal may have struck between its table and its end
                self.abort()
                raise LinkClosed(_OWN_DOING)
            if time.monotonic() >= until:
                raise LinkTimeout("timeout")

    def _has_ended_by_turn(self, transfer: _Transfer, until: float) -> bool:
        """Move all until a transfer is over, or sleep until the one who moves has something."""
        if self._is_owned_here():
            raise LinkError(_IN_A_HANDLER)
        turn, me = None, threading.get_ident()
        with self._lock:
            if transfer.is_over:
                return True
            if self._mover not in (0, me):
                turn = transfer.turn = threading.Lock()
                turn.acquire()
                self._waiting.append(transfer)
            else:
                # The mover is this thread already if a signal's handler has interrupted its sleep.
                before = self._mover, self._moved_for
                self._mover, self._moved_for = me, transfer
        if turn is None:
            try:
                self._move(transfer, until)
            finally:
                self._pass_on(*before)
        else:
            try:
                left = until - time.monotonic()
                turn.acquire(timeout=min(max(0.0, left), _SLEEP_MAX_SECONDS))
            finally:
                self._take_back(transfer)
        return transfer.is_over

    def _wake_mover(self) -> None:
        """Wake who moves, if another thread has ended what it waits for."""
        if self._moved_for is not None and self._moved_for.is_over:
            self._sound()

    def _sound(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has not heard the last ones yet
            self._alarm.send(b"!")

    def _take_back(self, transfer: _Transfer) -> None:
        """Wait no longer; a turn that came too late is the next one's."""
        with self._lock:
            transfer.turn = None
            if transfer in self._waiting:
                self._waiting.remove(transfer)
            elif not self._mover:
                self._wake_one()

    def _pass_on(self, mover: int, moved_for: _Transfer | None) -> None:
        """Move no longer; the next one does, or what a signal's handler has interrupted goes on."""
        with self._lock:
            self._mover, self._moved_for = mover, moved_for
            if mover:
                self._wake_mover()  # it sleeps on, whatever was moved meanwhile
            else:
                self._wake_one()

    def _wake_one(self) -> None:
        """Let one of those that wait be the next to move."""
        while self._waiting:
            transfer = self._waiting.popleft()
            turn, transfer.turn = transfer.turn, None
            if turn is not None:  # else it is over, and was woken
                turn.release()
                return

    def _move_what_is_there(self) -> None:
        """Take in what has come, unless another thread does so anyway."""
        if self._is_owned_here() or not self._lock.acquire(blocking=False):
            return
        me = threading.get_ident()
        try:
            if self._mover not in (0, me):
                return
            before = self._mover, self._moved_for
            self._mover = me
        finally:
            self._lock.release()
        try:
            self._move_once(0.0)
        finally:
            self._pass_on(*before)

    def _move(self, transfer: _Transfer, until: float) -> None:
        while not transfer.is_over and not self._is_aborted:
            left = until - time.monotonic()
            if left <= 0:
                return
            self._move_once(min(left, _SLEEP_MAX_SECONDS))

    def _move_once(self, seconds: float) -> None:
        events = self._events.poll(seconds)
        with self._lock:
            for descriptor, event in events:
                connection = self._by_descriptor.get(descriptor)
                if connection is None:
                    self._hear(descriptor)
                    continue
                try:
                    if event & select.EPOLLOUT:
                        self._flush(connection)
                    if event & ~select.EPOLLOUT and not connection.ended:
                        if connection.inlet is None or connection.inlet.fileno() == descriptor:
                            self._read(connection, is_ending=bool(event & _ENDS))
                        else:
                            self._hear_the_end(connection)
                except BaseException:
                    self._end(connection, _TORN)
                    raise

    def _hear(self, descriptor: int) -> None:
        """Be woken by another thread, which may have ended what the mover waits for."""
        if descriptor == self._heard.fileno():
            self._heard.recv(64)
        elif self._doors is not None and descriptor in self._callers:
            self._hear_caller(self._doors, descriptor)
        elif self._doors is not None:
            self._let_in(self._doors)

    # ------------------------------------------------------------------ who connects later

    def hear(self, end: socket.socket, said: bytes) -> None:
        """Listen to who has called before this link was in use, and has said so much since."""
        with self._lock:
            if self._doors is None:
                end.close()
            else:
                self._listen_to(self._doors, _Caller(end, said))

    def _opened(self, peer: int) -> _Connection:
        """The connection to a rank with which nothing was begun yet.

        Raises:
            LinkClosed: the link was aborted.
            LinkError: this process can't connect.
        """
        if self._is_owned_here():
            raise LinkError(_IN_A_HANDLER)
        with self._lock:
            if self._doors is None or peer not in self._peers:
                raise KeyError(peer)
            if self._is_aborted:
                raise LinkClosed(_OWN_DOING)
            self._let_in(self._doors)  # it may have called
            return self._connections.get(peer) or self._call(self._doors, peer)

    def _call(self, doors: Doors, peer: int) -> _Connection:
        try:
            connection = _Connection(peer, doors.call(peer), doors.word_from(peer))
        except ConnectionRefusedError as error:
            connection = _Connection(peer, socket.socket(socket.AF_UNIX))
            connection.socket.close()
            connection.ended = f"{PEER_LOST} ({os.strerror(error.errno or 0)})"
            connection.was_ended_there = True
            self._connections[peer] = connection
        except OSError as error:
            raise LinkError(f"this process can't connect to it ({error})") from error
        else:
            self._add(connection)
        return connection

    def _let_in(self, doors: Doors) -> None:
        """Listen to all who have called."""
        try:
            while self._listener is not None and self._listener.fileno() >= 0:
                end, _ = self._listener.accept()
                self._listen_to(doors, _Caller(end))
        except BlockingIOError:
            pass
        except OSError:  # no descriptors left: who calls must not wait
            self._shut_door()

    def _listen_to(self, doors: Doors, caller: _Caller) -> None:
        if len(self._callers) > len(self._peers):  # strangers, who say nothing
            self._send_away(next(iter(self._callers.values())))
        caller.socket.setblocking(False)  # noqa: FBT003  # its one parameter
        self._callers[caller.socket.fileno()] = caller
        self._events.register(caller.socket, _READS)
        self._hear_caller(doors, caller.socket.fileno())

    def _hear_caller(self, doors: Doors, descriptor: int) -> None:
        caller = self._callers[descriptor]
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
        peer = doors.caller(caller.socket, caller.said)
        self._events.unregister(caller.socket)
        del self._callers[descriptor]
        if peer is None or not self._admit(doors, peer, caller.socket):
            caller.socket.close()

    def _send_away(self, caller: _Caller) -> None:
        self._events.unregister(caller.socket)
        del self._callers[caller.socket.fileno()]
        caller.socket.close()

    def _admit(self, doors: Doors, peer: int, end: socket.socket) -> bool:
        """Take in a connection that a rank has made; False if it has one."""
        connection = self._connections.get(peer)
        if connection is None:
            connection = _Connection(peer, end)
            self._add(connection)
            self._push(connection, doors.word_to(peer))
            return True
        if connection.ended or connection.word != doors.word_from(peer):
            return False
        # Both have called. Its own call has proved who it is, so it does not answer this one's.
        connection.word, connection.inlet = b"", end
        self._attend(connection, end)
        return True

    def _hear_the_end(self, connection: _Connection) -> None:
        """Over this rank's own call nothing comes, where both have called, but its end."""
        try:
            said = connection.socket.recv(1)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said:
            self._refuse(connection, "something over the wrong connection")
            return
        inlet = connection.inlet
        while not connection.ended and inlet is not None and _has_bytes(inlet):
            self._read(connection, is_ending=True)  # what it sent before is here whole
        connection.was_ended_there = not connection.is_hung_up
        closed = f"{PEER_LOST} (its end of the stream is closed)"
        self._end(connection, _OWN_DOING if connection.is_hung_up else closed)

    # ------------------------------------------------------------------ out

    def _send(self, connection: _Connection, transfer: _Transfer, tag: int) -> None:
        nbytes = transfer.view.nbytes
        if connection.ended:
            raise LinkClosed(connection.ended)
        if nbytes > (_WORD_MAX_NBYTES if tag >> LANE_BITS else UNASKED_MAX_NBYTES):
            number = self._offered(connection, transfer, tag)
            self._push(connection, _HEADER.pack(Kind.OFFER, tag, nbytes, number))
        elif tag >> LANE_BITS == 0 and connection.ahead.get(tag, 0) >= AHEAD_MAX:
            connection.held.setdefault(tag, deque()).append(transfer)
        else:
            self._send_at_once(connection, transfer, tag)

    def _lend(self, connection: _Connection, transfer: _Lent, tag: int) -> None:
        if connection.ended:
            raise LinkClosed(connection.ended)
        if connection.lent_files + transfer.files > LENT_FILES_MAX:
            transfer.share, transfer.files = None, 0
        connection.lent_files += transfer.files
        kind = Kind.OFFER if transfer.share is None else Kind.SHARE
        number = self._offered(connection, transfer, tag)
        frame = memoryview(_HEADER.pack(kind, tag, transfer.nbytes, number))
        connection.outgoing.append((frame, None, transfer.share))
        self._flush(connection)

    def _offered(self, connection: _Connection, transfer: _Transfer, tag: int) -> int:
        self._numbers = number = self._numbers + 1
        connection.offered[number] = transfer, tag
        return number

    def _send_at_once(self, connection: _Connection, transfer: _Transfer, tag: int) -> None:
        taken = 0
        if tag >> LANE_BITS == 0:
            connection.ahead[tag] = connection.ahead.get(tag, 0) + 1
            taken = connection.untold.pop(tag, 0)
        view = transfer.view
        head = _HEADER.pack(Kind.MESSAGE, tag, view.nbytes, taken)
        sent = 0
        if not connection.outgoing:
            try:
                sent = connection.socket.sendmsg((head, view), (), socket.MSG_NOSIGNAL)
            except OSError as error:
                self._has_no_room(connection, error)
                if connection.ended:
                    transfer.end(connection.ended)
                    return
            if sent == _HEADER_NBYTES + view.nbytes:
                transfer.is_over = True
                return
        if sent < _HEADER_NBYTES:
            connection.outgoing.append((memoryview(head)[sent:], None, None))
            sent = _HEADER_NBYTES
        connection.outgoing.append((view[sent - _HEADER_NBYTES :], transfer, None))
        self._watch(connection)

    def _push(
        self, connection: _Connection, frame: bytes, transfer: _Transfer | None = None
    ) -> None:
        """Send a frame, and after it a transfer's memory; what the system has no room for waits."""
        if connection.ended:
            if transfer is not None:
                transfer.end(connection.ended)
            return
        connection.outgoing.append((memoryview(frame), None, None))
        if transfer is not None:
            for each in transfer.views[:-1] if isinstance(transfer, _Members) else ():
                connection.outgoing.append((each, None, None))
            connection.outgoing.append((transfer.view, transfer, None))
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        outgoing, left = connection.outgoing, _TURN_NBYTES
        try:
            while outgoing and left > 0:
                view, transfer, share = outgoing[0]
                if share is not None:
                    sent = self._hand_over(connection, view, share)
                else:
                    sent = connection.socket.send(view, socket.MSG_NOSIGNAL) if view.nbytes else 0
                left -= sent
                if sent < view.nbytes:
                    outgoing[0] = view[sent:], transfer, None
                    continue
                outgoing.popleft()
                if transfer is not None:
                    transfer.end()
        except OSError as error:
            self._has_no_room(connection, error)
        self._watch(connection)

    def _hand_over(self, connection: _Connection, frame: memoryview, share: Share) -> int:
        """Send an offer and its descriptor; or only that, where too many are on their way."""
        files = b"".join(map(_DESCRIPTOR.pack, share.descriptors))
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, files)
        try:
            return connection.socket.sendmsg((frame,), (rights,), socket.MSG_NOSIGNAL)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            _, tag, nbytes, number = _HEADER.unpack(frame)
            offer = _HEADER.pack(Kind.OFFER, tag, nbytes, number)
            connection.outgoing[0] = memoryview(offer), None, None
            return connection.socket.send(offer, socket.MSG_NOSIGNAL)

    def _has_no_room(self, connection: _Connection, error: OSError) -> None:
        """What the system says to bytes for it; that the peer is gone, the mover reads."""
        if not isinstance(error, (BlockingIOError, BrokenPipeError, ConnectionResetError)):
            self._end(connection, f"nothing can be sent to rank {connection.peer} ({error})")

    def _watch(self, connection: _Connection) -> None:
        """Be woken when there is room again, as long as something waits for it."""
        is_wanted = bool(connection.outgoing)
        if is_wanted != connection.is_watched and not connection.ended:
            connection.is_watched = is_wanted
            self._events.modify(connection.socket, _READS | select.EPOLLOUT * is_wanted)

    # ------------------------------------------------------------------ in

    def _read(self, connection: _Connection, *, is_ending: bool) -> None:
        left = _TURN_NBYTES
        receive = (connection.inlet or connection.socket).recv_into
        try:
            while left > 0 and not connection.ended:
                filling = connection.filling
                if filling is None:
                    into = connection.view[connection.used :]
                    count = self._read_frames(connection, into)
                else:
                    into = filling
                    count = receive(into)
                left -= count
                if not count and connection.is_hung_up:
                    self._end(connection, _OWN_DOING)
                elif not count:
                    connection.was_ended_there = True
                    self._end(connection, f"{PEER_LOST} (its end of the stream is closed)")
                elif filling is None:
                    connection.used += count
                    self._parse(connection)
                elif count < len(filling):
                    connection.filling = filling[count:]
                else:
                    self._conclude(connection)
                if count < len(into) and not is_ending:  # there was no more
                    return
        except BlockingIOError:
            pass
        except OSError as error:
            connection.was_ended_there = True
            self._end(connection, f"{PEER_LOST} ({os.strerror(error.errno or 0)})")

    def _read_frames(self, connection: _Connection, into: memoryview) -> int:
        """Read bytes, and the descriptors that may come with them, and then are the last bytes."""
        end = connection.inlet or connection.socket
        while connection.word:
            said = end.recv(len(connection.word))
            if not said:
                return 0
            if not connection.word.startswith(said):
                self._refuse(connection, "another word than its own")
                return len(said)
            connection.word = connection.word[len(said) :]
        count, rights, flags, _ = end.recvmsg_into((into,), _RIGHTS_NBYTES, socket.MSG_CMSG_CLOEXEC)
        if rights or flags & _TRUNCATED:
            files = [each for *_, some in rights for (each,) in _DESCRIPTOR.iter_unpack(some)]
            share = Share(files)
            connection.descriptors.append(None if flags & _TRUNCATED else share)
        return count

    def _parse(self, connection: _Connection) -> None:
        """Take the frames out of what was read; what is left of the last one goes to the front."""
        raw, at, end = connection.raw, 0, connection.used
        while end - at >= _HEADER_NBYTES and not connection.ended:
            kind, tag, nbytes, number = _HEADER.unpack_from(raw, at)
            at += _HEADER_NBYTES
            if kind == Kind.MESSAGE:
                if number:
                    self._credit(connection, tag, number)
                at = self._begin_message(connection, tag, nbytes, at, end)
            elif kind == Kind.CONTENT:
                at = self._begin_content(connection, number, at, end)
            elif kind in (Kind.OFFER, Kind.SHARE):
                self._offer(connection, tag, nbytes, number, is_shared=kind == Kind.SHARE)
            elif kind in (Kind.TAKE, Kind.HELD):
                self._give(connection, number, is_held=kind == Kind.HELD)
            elif kind == Kind.CREDIT:
                self._credit(connection, tag, number)
            else:
                self._refuse(connection, f"a frame of kind {kind}")
        if 0 < at < end:
            raw[: end - at] = raw[at:end]
        connection.used = end - at
        if len(connection.descriptors) > (connection.used > 0):
            self._refuse(connection, "a descriptor that belongs to nothing")

    def _arrive(self, connection: _Connection, tag: int, content: memoryview) -> None:
        """A message is here whole."""
        posted = connection.posted.get(tag)
        if not posted:
            arrived = connection.arrived.get(tag)
            if arrived is None:
                arrived = connection.arrived[tag] = deque()
            if tag >> LANE_BITS == 0 and len(arrived) >= AHEAD_MAX:
                self._refuse(connection, "more first messages than it may be ahead")
                return
            arrived.append(bytes(content))
            return
        transfer = posted.popleft()
        if not posted:
            del connection.posted[tag]
        self._deliver(connection, transfer, tag, content)

    def _deliver(
        self,
        connection: _Connection,
        transfer: _Transfer,
        tag: int,
        content: memoryview | bytes | bytearray,
    ) -> None:
        nbytes = len(content)
        if nbytes > transfer.view.nbytes or isinstance(transfer, _Borrowed):
            reason = self._refuse(connection, f"{nbytes} bytes for {transfer.view.nbytes}")
            transfer.end(reason)
            return
        transfer.view[:nbytes] = content
        transfer.end()
        if tag >> LANE_BITS == 0:
            self._tell_taken(connection, tag)

    def _tell_taken(self, connection: _Connection, tag: int) -> None:
        untold = connection.untold.get(tag, 0) + 1
        if untold >= _TOLD_EACH:
            self._push(connection, _HEADER.pack(Kind.CREDIT, tag, 0, untold))
            untold = 0
        connection.untold[tag] = untold

    def _post(self, connection: _Connection, transfer: _Transfer, tag: int) -> None:
        """A receive gets what has come, or waits for it."""
        arrived = connection.arrived.get(tag)
        if arrived:
            found = arrived.popleft()
            if not arrived:
                del connection.arrived[tag]
            self._match(connection, transfer, tag, found)
        elif connection.ended:
            raise LinkClosed(connection.ended)
        else:
            posted = connection.posted.get(tag)
            if posted is None:
                posted = connection.posted[tag] = deque()
            posted.append(transfer)

    def _match(
        self,
        connection: _Connection,
        transfer: _Transfer,
        tag: int,
        found: bytes | bytearray | int,
    ) -> None:
        """A receive gets what had come before it."""
        if isinstance(found, int):
            self._take(connection, transfer, found)
        else:
            self._deliver(connection, transfer, tag, found)

    def _begin_message(
        self, connection: _Connection, tag: int, nbytes: int, at: int, end: int
    ) -> int:
        """A message has come; what is left of it is read to where it belongs."""
        if nbytes > (_WORD_MAX_NBYTES if tag >> LANE_BITS else UNASKED_MAX_NBYTES):
            self._refuse(connection, f"a message of {nbytes} bytes unasked")
        if connection.ended:
            return at
        if end - at >= nbytes:
            self._arrive(connection, tag, connection.view[at : at + nbytes])
            return at + nbytes
        content = bytearray(nbytes)
        came = end - at
        content[:came] = connection.raw[at:end]
        connection.filling = memoryview(content)[came:]
        connection.filled = tag, content
        return end

    def _offer(
        self,
        connection: _Connection,
        tag: int,
        nbytes: int,
        number: int,
        *,
        is_shared: bool,
    ) -> None:
        descriptors = connection.descriptors
        is_bare = is_shared and not descriptors
        if number in connection.offers or tag >> LANE_BITS == 0 or is_bare:
            self._refuse(connection, "an offer that may not be made")
            return
        share = descriptors.popleft() if is_shared else None
        if share is not None and not share.is_fixed():
            self._refuse(connection, "memory that it could shorten")
            return
        connection.offers[number] = nbytes
        if share is not None:
            connection.shares[number] = share
            if sum(len(each.descriptors) for each in connection.shares.values()) > LENT_FILES_MAX:
                self._refuse(connection, "more files than may wait here")
                return
        posted = connection.posted.get(tag)
        if not posted:
            connection.arrived.setdefault(tag, deque()).append(number)
            return
        transfer = posted.popleft()
        if not posted:
            del connection.posted[tag]
        self._take(connection, transfer, number)

    def _take(self, connection: _Connection, transfer: _Transfer, number: int) -> None:
        nbytes = connection.offers[number]
        room = transfer.nbytes if isinstance(transfer, _Members) else transfer.view.nbytes
        if isinstance(transfer, _Borrowed) and nbytes == transfer.nbytes:
            transfer.share = connection.shares.pop(number, None)
            transfer.number = number
            if transfer.share is not None:
                del connection.offers[number]
                self._push(connection, _HEADER.pack(Kind.HELD, 0, 0, number))
            transfer.end()
        elif nbytes > room or isinstance(transfer, _Borrowed) or number in connection.shares:
            reason = self._refuse(connection, f"{nbytes} bytes for {room}")
            transfer.end(reason)
        elif connection.ended:
            transfer.end(connection.ended)
        else:
            connection.taken[number] = transfer
            self._push(connection, _HEADER.pack(Kind.TAKE, 0, 0, number))

    def _give(self, connection: _Connection, number: int, *, is_held: bool) -> None:
        found = connection.offered.pop(number, None)
        transfer, tag = found or (None, 0)
        is_shared = isinstance(transfer, _Lent) and transfer.share is not None
        if transfer is None or (is_held and not is_shared):
            self._refuse(connection, "an answer to what was not offered")
            return
        if isinstance(transfer, _Lent):
            connection.lent_files -= transfer.files
        if is_held:
            transfer.end()
            return
        self._push(connection, _HEADER.pack(Kind.CONTENT, tag, 0, number), transfer)

    def _begin_content(self, connection: _Connection, number: int, at: int, end: int) -> int:
        transfer = connection.taken.pop(number, None)
        if transfer is None:
            self._refuse(connection, "what nobody has asked for")
            return at
        nbytes = connection.offers.pop(number)
        rooms = deque([transfer.view[:nbytes]])
        if isinstance(transfer, _Members):
            rooms = deque(transfer.views)
        while rooms and at < end:
            came = min(len(rooms[0]), end - at)
            rooms[0][:came] = connection.view[at : at + came]
            at += came
            rooms[0] = rooms[0][came:]
            if not rooms[0]:
                rooms.popleft()
        connection.filled, connection.rooms = transfer, rooms
        self._conclude(connection)
        return at

    def _conclude(self, connection: _Connection) -> None:
        """What was being filled is full; there may be more of it."""
        while connection.rooms:
            connection.filling = connection.rooms.popleft()
            if connection.filling:
                return
        filled = connection.filled
        connection.filling = connection.filled = None
        if isinstance(filled, _Transfer):
            filled.end()
        elif filled is not None:
            tag, content = filled
            self._arrive(connection, tag, memoryview(content))

    def _credit(self, connection: _Connection, tag: int, count: int) -> None:
        ahead = connection.ahead.get(tag, 0) - count
        if ahead < 0 or not count:
            self._refuse(connection, "credit for what was not sent")
            return
        connection.ahead[tag] = ahead
        held = connection.held.get(tag)
        while held and connection.ahead[tag] < AHEAD_MAX and not connection.ended:
            transfer = held.popleft()
            self._send_at_once(connection, transfer, tag)
            if transfer.is_over:
                transfer.end()
        if not held:
            connection.held.pop(tag, None)

    # ------------------------------------------------------------------ the end

    def _refuse(self, connection: _Connection, what: str) -> str:
        reason = f"rank {connection.peer} has sent {what}, which no link of objcomm does"
        self._end(connection, reason)
        return reason

    def _end(self, connection: _Connection, reason: str) -> None:
        if connection.ended:
            return
        connection.ended = reason
        for end in connection.sockets():
            self._events.unregister(end)
            del self._by_descriptor[end.fileno()]
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        left = [each for each, _ in connection.offered.values()]
        left += [each for _, each, _ in connection.outgoing if each is not None]
        left += [each for held in connection.held.values() for each in held]
        left += [each for posted in connection.posted.values() for each in posted]
        left += connection.taken.values()
        if isinstance(connection.filled, _Transfer):
            left.append(connection.filled)
        for table in (connection.offered, connection.held, connection.posted, connection.taken):
            table.clear()
        connection.outgoing.clear()
        connection.shares.clear()
        connection.descriptors.clear()
        connection.rooms.clear()
        connection.filling = connection.filled = None
        for each in left:
            each.end(reason)


def _has_bytes(end: socket.socket) -> bool:
    """Whether something can be read, or the end of all."""
    watched = select.poll()
    watched.register(end, select.POLLIN)
    return bool(watched.poll(0))


def _has_unread(end: socket.socket) -> bool:
    """Whether bytes can be read, the end of all not counted; takes none."""
    try:
        return bool(end.recv(1, socket.MSG_PEEK))
    except OSError:  # none are there, or it was closed meanwhile
        return False


def _submit(threads: ThreadPool, job: Callable[[], None]) -> None:
    try:
        threads.submit(job)
    except RuntimeError as error:
        raise LinkError(f"this process can start no more threads ({error})") from error


def _has_ended(end: socket.socket) -> bool:
    """Whether the other end is known to have closed it; what it sent before may still come."""
    if end.fileno() < 0:
        return True
    watched = select.poll()
    watched.register(end, select.POLLRDHUP)
    return bool(watched.poll(0))
