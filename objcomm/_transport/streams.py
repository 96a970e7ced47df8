"""The link between ranks over streams: for each pair a socket, of Unix in a host, of TCP between.

It has no thread. Whoever waits moves what there is to move, for all: the *mover* sleeps until any
socket has bytes or room, takes them in, and wakes the threads whose transfers are over. When its
own is over the next one that waits becomes the mover. Who attends to all that a peer sends moves
only what nobody else does.

Falling asleep and being woken takes longer than most waits in a row of calls. So a rank with a core
of its own polls for ``SPIN_SECONDS`` before it sleeps, unless its last wait took longer than that.

What goes over a stream is a frame: a kind, a tag and a number, and then perhaps bytes.

- ``MESSAGE``: a message of at most 1.5 MiB, at once. The system keeps it, or the other end does,
  until somebody asks for it. First messages of a lane are counted, and a sender is no more than
  16 of them, and 2 MiB, ahead of the receiver: 16, because that is how far the search for the
  reason of a wait can see, and the bytes, so that an idle receiver needs little memory. Of what
  follows them only words of a few bytes go so.
- ``OFFER``: there is one that may not. It waits in its sender's memory for
- ``TAKE``: there is room for it now; and then goes out as
- ``CONTENT``, from the sender's memory into the receiver's, past all buffers of this module.
- ``SHARE``: an offer of memory that the other end may map, on the same host; its descriptor comes
  along. The answer is
- ``HELD``; or ``TAKE``, where the descriptor got lost: the receiver's system may have no more.
- ``CREDIT``: so many first messages of a lane have been taken. A first message that goes the other
  way says so by its number, and then none of these is due: it would wake its receiver for nothing.

Nothing that arrives is believed before it was judged: a frame of no kind, one that is too long, or
one that answers nothing ends the connection.

Of many ranks only some pairs are connected from the beginning. Who begins the first transfer with
another rank, in either direction, calls at its door. On the same host it may send at once: the
kernel says whose process is there, and keeps what comes before it lets the caller in. From another
host the answer comes first, which proves that it is that rank. If both call, each sends over its
own call, and reads what comes over the other's.

Bytes that the system has taken from a sender reach a peer of the same host whatever follows. Those
for another host are still on their way, and are lost if this end is closed while something from
there lies unread. So who closes it waits until the other host's system has them, or a third of a
second.

A host that loses its power or its network ends nothing. The system asks on connections that are
idle, and ends them; those on which something is under way end here, when nothing was heard from
there for too long although something was to be answered. A process that computes, or is stopped,
is no silence: its system answers for it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from enum import IntEnum
from struct import Struct
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from objcomm._codecs.buffers import BufferKind, allocate, writable
from objcomm._transport.doors import called_at
from objcomm._transport.link import (
    HOST_LOST,
    LANE_BITS,
    PEER_LOST,
    LinkClosed,
    LinkError,
    LinkTimeout,
    Pending,
)
from objcomm._transport.share import FILES_MAX, Share
from objcomm._transport.sockets import Silence, ask_when_idle, await_delivery, is_outage
from objcomm._transport.threads import guard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from datetime import timedelta

    from objcomm._transport.doors import Doors
    from objcomm._transport.link import Borrowed, Memory

# Kind and tag; length of the message; number of the offer, or of messages taken.
_HEADER = Struct("<IIQQ")
_HEADER_NBYTES = _HEADER.size

#: A first message is not longer. Of more than some 2 MB a broadcast to 3 ranks takes less from
#: memory that all of them map.
UNASKED_MAX_NBYTES = 3 << 19
_WORD_MAX_NBYTES = 64
#: In so many lanes first messages of one peer may wait here, and so many words and offers in all.
#: No program comes near that. One that wants to fill another rank's memory does, with 150 MiB.
WAITING_LANES_MAX = 64
WAITING_MAX = 1 << 14
#: How many first messages of a lane, and bytes, a sender may be ahead of its receiver.
AHEAD_MAX = 16
AHEAD_MAX_NBYTES = 2 << 20
#: After so many that were taken, or one that is longer, their sender is told: so what it has not
#: heard of leaves room for the longest one. To tell it of every second one cost each rank of a
#: broadcast or gather in a row a third of its processor time.
TOLD_EACH = 8
_TOLD_FROM_NBYTES = (AHEAD_MAX_NBYTES - UNASKED_MAX_NBYTES) // TOLD_EACH

#: So many files may wait for a peer that takes nothing; a process may often have 1,024 open.
LENT_FILES_MAX = 64
# One of a process's open files, as it travels.
_DESCRIPTOR = Struct("i")
_RIGHTS_NBYTES = socket.CMSG_SPACE(FILES_MAX * _DESCRIPTOR.size)

# Room for some small messages. Of a longer one the rest is read to where it stays.
_RAW_NBYTES = 1 << 17
#: How long a wait may poll before it sleeps. In a row of broadcasts between two ranks, each with a
#: core, one takes 123 µs without this, 120 µs with a quarter of it, which most waits outlast, and
#: 66 µs with all of it. The processor's time is the same: to sleep and be woken costs as much.
SPIN_SECONDS = 200e-6
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

# For so long the attending thread leaves what comes to one that waits, if there is one.
_STAND_BY_MS = 5
# For so long a rank calls again, if a host may be out of reach for ever.
_CALLED_SECONDS = 60.0
# For so long a rank waits at one of a peer's addresses, if there is another one.
_NEXT_WAY_SECONDS = 1.0
# As long as something is awaited it looks so often whether it missed that nothing is any more.
_LOOK_SECONDS = 0.5

# The lock's owner may have been interrupted by a signal, whose handler takes its time.
_PATIENCE_SECONDS = 1.0
# For the other host's system to have what was sent before an end. Less than a thread waits for the
# one that may close connections, see ``noticeboard``.
_DELIVERY_SECONDS = 0.3


class Kind(IntEnum):
    """What a frame is; see the module."""

    MESSAGE = 1
    OFFER = 2
    TAKE = 3
    CONTENT = 4
    CREDIT = 5
    SHARE = 6
    HELD = 7


_MESSAGE = int(Kind.MESSAGE)  # an enumeration's members take longer to find, and to compare


class _Caller:
    """A connection of which it is not known yet which rank is at its end."""

    def __init__(self, end: socket.socket, said: bytes = b"") -> None:
        self.socket = end
        self.said = said


class _Awaited:
    """What a thread waits for, which moves the link meanwhile.

    Attributes:
        is_over: whether the wait is.
        reason: why it ended before what was awaited; empty otherwise.
        turn: held by the thread that waits while another one is the mover.
    """

    __slots__ = ("is_over", "reason", "turn")

    def __init__(self) -> None:
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


class _Transfer(_Awaited):
    """A message on its way out or in.

    Attributes:
        flat: its memory, or the room for it, which lives as long as bytes may come; both may be
            used again when it is over.
        view: the same as the system takes it.
    """

    __slots__ = ("flat", "view")

    def __init__(self, flat: Memory, view: memoryview | None = None) -> None:
        self.flat = flat
        self.view = _view_of(flat) if view is None else view
        self.is_over = False
        self.reason = ""
        self.turn = None


class _Signal(_Awaited):
    """See ``Connections.signal``."""

    __slots__ = ("_link",)

    def __init__(self, link: StreamLink) -> None:
        self.is_over = False
        self.reason = ""
        self.turn = None
        self._link = link

    def set(self) -> None:
        """See ``Awaitable``."""
        self._link.end(self)

    def wait(self, seconds: float = -1) -> bool:
        """See ``Awaitable``."""
        until = math.inf if seconds < 0 else time.monotonic() + seconds
        try:
            self._link.await_end(self, until)
        except LinkTimeout:
            pass
        except LinkError:  # nothing moves any more, and who knows why sets this
            turn = threading.Lock()
            turn.acquire()
            self.turn = turn
            if not self.is_over:
                turn.acquire(timeout=seconds)
        return self.is_over


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


def _view_of(memory: Memory) -> memoryview:
    return writable(memory) if isinstance(memory, torch.Tensor) else memoryview(memory)


class _Attendance:
    """Who takes in all first messages of a peer with a tag; see ``Connections.attend``.

    Attributes:
        accept: takes one in.
        bell: what the thread waits for that attends, where a message is awaited.
        prompts: a descriptor on which it hears all that is for it; the mover does not.
    """

    __slots__ = ("_lock", "accept", "bell", "prompts")

    def __init__(self, accept: Callable[[bytes], bool]) -> None:
        self.accept = accept
        self.bell = _Awaited()
        self.prompts = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = guard()

    def prompt(self) -> None:
        """Let the thread look again."""
        # Without the link's lock: who calls may be within a step of another link. If the thread
        # misses the end of its wait so, its next look finds it.
        self.bell.is_over = True
        with self._lock:
            if self.prompts >= 0:
                os.eventfd_write(self.prompts, 1)

    def close(self) -> None:
        """The thread attends no more."""
        with self._lock:
            os.close(self.prompts)
            self.prompts = -1


class _Connection:
    """One peer: its socket, what has come of it, and what has yet to go there.

    Attributes:
        peer: its rank.
        socket: to it, and from it unless there is an ``inlet``.
        inlet: where what it sends comes, if each has called the other.
        word: what it has yet to say before all else.
        own_word: what this rank has.
        is_open: whether more than that may be sent: of another host nobody knows before its word
            who is there.
        called: when this rank began to call, if it did.
        called_way: when it last did.
        way: at which of the peer's addresses it calls next.
        is_to_call: whether that has failed, and is to be done again.
        failed: why nothing more can be sent, though what came before may lie unread.
        silence: how long its host has answered nothing; None for this host.
        arrived: by tag: what came before it was asked for, as bytes, or as an offer's number.
        attended: by tag: what takes in all first messages.
        bells: by tag: what a thread waits for that takes first messages; over when there is one.
        posted: by tag: the receives for which nothing has come.
        outgoing: what the system had no room for, in order; with the transfer that it ends, and
            what is handed over with its first byte.
        contents: the same of ``CONTENT``, which all else may overtake.
        is_within: whether a part of the first of these was sent.
        offered: sends that wait to be taken, by number; they count from 0.
        waiting: how many words and offers lie in ``arrived``.
        offers: numbers and lengths of what the peer has offered, and has not sent.
        shares: those of them that can be mapped.
        descriptors: what came of those whose frames have not; None for one that got lost.
        taken: receives for which content was asked, by number.
        rooms: what is to be filled after ``filling``, by the same content.
        lent_files: files handed over of which the peer has not said that it has them.
        held: by tag: first messages for which there is no credit.
        ahead: by tag: how long the first messages are that are not known to be taken, in order.
        untold: by tag: first messages that were taken here, and the peer not told so.
        is_watched: whether the mover is woken when there is room for these.
        is_hung_up: whether this end was shut by who could not end it whole.
        ended: why the connection has ended; empty while it stands.
        was_ended_there: whether the peer closed it.
    """

    __slots__ = (
        "ahead",
        "arrived",
        "attended",
        "bells",
        "called",
        "called_way",
        "contents",
        "descriptors",
        "ended",
        "failed",
        "filled",
        "filling",
        "held",
        "inlet",
        "is_hung_up",
        "is_open",
        "is_to_call",
        "is_watched",
        "is_within",
        "lent_files",
        "offered",
        "offers",
        "outgoing",
        "own_word",
        "peer",
        "posted",
        "raw",
        "rooms",
        "shares",
        "silence",
        "socket",
        "taken",
        "untold",
        "used",
        "view",
        "waiting",
        "was_ended_there",
        "way",
        "word",
    )

    def __init__(self, peer: int, end: socket.socket, word: bytes = b"") -> None:
        self.peer = peer
        self.socket = end
        self.inlet: socket.socket | None = None
        self.word = word
        self.own_word = b""
        self.is_open = True
        self.called = self.called_way = 0.0
        self.way = 0
        self.waiting = 0
        self.is_to_call = False
        self.failed = ""
        self.silence: Silence | None = None
        self.arrived: dict[int, deque[bytes | int]] = {}
        self.attended: dict[int, _Attendance] = {}
        self.bells: dict[int, _Transfer] = {}
        self.posted: dict[int, deque[_Transfer]] = {}
        self.outgoing: deque[tuple[memoryview, _Transfer | None, Share | None]] = deque()
        self.contents: deque[tuple[memoryview, _Transfer | None, Share | None]] = deque()
        self.is_within = False
        self.offered: dict[int, tuple[_Transfer, int]] = {}
        self.offers: dict[int, int] = {}
        self.shares: dict[int, Share] = {}
        self.descriptors: deque[Share | None] = deque()
        self.taken: dict[int, _Transfer] = {}
        self.held: dict[int, deque[_Transfer]] = {}
        self.ahead: dict[int, list[int]] = {}
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
        self.filled: _Transfer | tuple[int, bytes] | None = None

    def sockets(self) -> list[socket.socket]:
        """Its one, or two; none while it is to be called again."""
        if self.is_to_call:
            return []
        return [self.socket] if self.inlet is None else [self.socket, self.inlet]

    def has_ended_there(self) -> bool:
        """Whether the other end is known to have closed it."""
        if self.silence is not None and self.own_word:
            return False  # a call that has failed may be made again
        return any(map(_has_ended, self.sockets()))


class StreamLink:
    """Joins ranks by stream sockets; see ``Connections`` for its methods' contract.

    Attributes:
        kind: what the log calls it.
        rank: rank within the group.
        size: number of ranks that it joins.
        hosts: of each of them, as a number.
        head_max_nbytes: what goes out unasked.
        needs_last_byte_apart: the end of a stream wakes whoever waits for any of its bytes.
        is_interruptible: it sleeps where signals wake it.
        ahead: nothing depends on it.
        is_interrupted: see ``Link``.
    """

    head_max_nbytes = UNASKED_MAX_NBYTES
    needs_last_byte_apart = False
    is_interruptible = True
    ahead = 64

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
        """Begin.

        Args:
            rank: this one, within the group.
            sockets: to other ranks, connected; they are this link's from now on.
            hosts: of each rank, as a number; None if these are all, and on this host.
            doors: those of all ranks, if there are more than these.
            listeners: where the others call, in that case; they are this link's from now on.
            lost_seconds: for how long another host may answer nothing.
            spin_seconds: for how long a wait may poll before it sleeps.
        """
        self._connections: dict[int, _Connection] = {}
        self._callers: dict[int, _Caller] = {}
        self._doors = doors
        self._listeners = tuple(listeners)
        self._hosts = dict(hosts or dict.fromkeys(sorted({rank, *sockets}), 0))
        self._near = frozenset(
            peer for peer, host in self._hosts.items() if host == self._hosts[rank]
        )
        self._lost_seconds = lost_seconds
        self._spin_seconds = spin_seconds
        self._waited_seconds = math.inf  # by the last that moved until its wait was over
        # A byte in there wakes the mover.
        self._alarm, self._heard = socket.socketpair()
        self._events = select.epoll()
        self._events.register(self._heard, select.EPOLLIN)
        for end in (self._alarm, self._heard):
            end.settimeout(0)
        self.rank = rank
        self.size = len(self._hosts)
        self.hosts = tuple(self._hosts.values())
        self.kind = " and ".join(
            ["Unix sockets"] * (len(self._near) > 1) + ["TCP"] * (len(self._near) < self.size)
        )
        self._pid = os.getpid()
        # It knows its owner: a signal's handler must not wait for what it has interrupted.
        self._lock = guard()
        # As threading.Condition asks. A plain attribute: it is asked for each message.
        self.is_interrupted: Callable[[], bool] = self._lock._is_owned  # noqa: SLF001  # see above
        self._mover = 0  # a thread's number
        self._moved_for: _Awaited | None = None
        self._waiting: deque[_Awaited] = deque()
        self._numbers = 0
        self._left: list[socket.socket] = []  # ended here, and not closed yet
        self._is_aborted = False
        self._by_descriptor: dict[int, _Connection] = {}
        for peer, end in sockets.items():
            self._add(_Connection(peer, end))
        for each in self._listeners:
            each.settimeout(0)
            self._events.register(each, select.EPOLLIN)

    def _add(self, connection: _Connection) -> None:
        if connection.peer not in self._near:
            connection.silence = Silence(connection.socket, self._lost_seconds)
        self._attend(connection, connection.socket)
        self._connections[connection.peer] = connection

    def _attend(self, connection: _Connection, end: socket.socket) -> None:
        """Move what comes over one of a connection's sockets."""
        end.setblocking(False)  # noqa: FBT003  # its one parameter
        self._by_descriptor[end.fileno()] = connection
        self._events.register(end, _READS)

    def sharing_with(self, peer: int) -> Self | None:
        """See ``Link``."""
        return self if peer in self._near else None

    def __del__(self) -> None:
        # By name, or the system's warnings of what was left open are the user's.
        connections = list(getattr(self, "_connections", {}).values())
        if not sys.is_finalizing() and getattr(self, "_pid", 0) == os.getpid():
            far = [each for each in connections if each.silence is not None and not each.ended]
            _close_when_delivered([end for each in far for end in each.sockets()])
        for each in connections:
            for end in each.sockets():
                end.close()
        for each in getattr(self, "_callers", {}).values():
            each.socket.close()
        for name in ("_listeners", "_left"):
            for end in getattr(self, name, ()):
                end.close()
        for name in ("_alarm", "_heard"):
            if hasattr(self, name):
                getattr(self, name).close()

    def send(self, flat: Memory, peer: int, tag: int) -> Pending:
        """See ``Link``."""
        if self.is_interrupted():
            raise LinkError(_IN_A_HANDLER)
        connection = self._connections.get(peer) or self._opened(peer)
        view = writable(flat) if isinstance(flat, torch.Tensor) else memoryview(flat)
        pending: _Transfer | None
        nbytes, is_head = view.nbytes, not tag >> LANE_BITS
        if nbytes > UNASKED_MAX_NBYTES and is_head:
            raise ValueError(f"a first message of {nbytes} bytes")
        with self._lock:
            if connection.ended:
                raise LinkClosed(connection.ended)
            try:
                if nbytes > _WORD_MAX_NBYTES and not is_head:
                    pending = _Transfer(flat, view)
                    number = self._offered(connection, pending, tag)
                    self._push(connection, _HEADER.pack(Kind.OFFER, tag, nbytes, number))
                elif is_head and (
                    tag in connection.held or not _is_within(connection.ahead.get(tag, ()), nbytes)
                ):  # none overtakes another
                    pending = _Transfer(flat, view)
                    connection.held.setdefault(tag, deque()).append(pending)
                else:
                    pending = self._put(connection, flat, view, tag)
            except BaseException:  # whole or not at all: a signal's handler may raise at any step
                self._end(connection, _TORN)
                raise
            if self._moved_for is not None:
                self._wake_mover()
        return pending

    def expect(self, peers: Sequence[int], tag: int) -> None:  # noqa: ARG002  # the system keeps them
        """See ``Link``: a rank that waits for another needs a connection, to hear of its end."""
        if len(self._connections) < self.size - 1:
            for peer in peers:
                self.call(peer)

    def take(self, peer: int, tag: int, until: float) -> bytes:
        """See ``Link``."""
        if self.is_interrupted():
            raise LinkError(_IN_A_HANDLER)
        connection = self._connections.get(peer) or self._opened(peer)
        while True:
            with self._lock:
                arrived = connection.arrived.get(tag)
                if arrived:
                    try:
                        message: bytes = arrived.popleft()  # type: ignore[assignment]  # see below
                        self._note_taken(connection, tag, len(message))
                    except BaseException:  # as in ``send``
                        self._end(connection, _TORN)
                        raise
                    return message  # and no number: none of them is offered
                if connection.ended:
                    raise LinkClosed(connection.ended)
                bell = connection.bells.get(tag)
                if bell is None:
                    bell = connection.bells[tag] = _Transfer(_NOTHING)
                bell.is_over = False
            self.await_end(bell, until)

    def attend(
        self,
        peer: int,
        tag: int,
        accept: Callable[[bytes], bool],
        is_awaited: Callable[[], bool],
    ) -> NoReturn:
        """See ``Connections``."""
        connection = self._connections.get(peer) or self._opened(peer)
        attendance = connection.attended[tag] = _Attendance(accept)
        is_prompted, is_idle = select.poll(), select.poll()
        for each in (is_prompted, is_idle):
            each.register(attendance.prompts, select.POLLIN)
        is_idle.register(self._events, select.POLLIN)
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(attendance.prompts)
                with self._lock:
                    attendance.bell = _Awaited()
                    self._give_out(connection, tag)
                    if connection.ended:
                        raise LinkClosed(connection.ended)
                if is_awaited():
                    with contextlib.suppress(LinkTimeout):
                        self.await_end(attendance.bell, time.monotonic() + _LOOK_SECONDS)
                # Who waits takes in what has come, or is about to; it gets so much time.
                elif is_idle.poll() and not is_prompted.poll(_STAND_BY_MS):
                    self._move_what_is_there(_STAND_BY_MS / 1e3)
        finally:
            with self._lock:  # what accepts may hold this link
                del connection.attended[tag]
            attendance.close()

    def prompt(self, peer: int, tag: int) -> None:
        """See ``Connections``."""
        connection = self._connections.get(peer)
        attendance = None if connection is None else connection.attended.get(tag)
        if attendance is not None:
            attendance.prompt()
            if self._moved_for is attendance.bell:
                self._sound()

    def signal(self) -> _Signal:
        """See ``Connections``."""
        return _Signal(self)

    def end(self, awaited: _Awaited) -> None:
        """Let a wait be over, by any thread."""
        is_within = self.is_interrupted()  # what the mover has found it looks at itself
        with self._lock:
            awaited.is_over = True
            if awaited.turn is not None:
                awaited.end()
            elif self._moved_for is awaited and not is_within:
                self._sound()

    def has_come(self, peer: int, tag: int) -> bool:
        """See ``Link``."""
        connection = self._connections.get(peer)
        return connection is not None and bool(connection.arrived.get(tag))

    def came_late(self, peer: int, tag: int) -> bool:
        """See ``Link``."""
        self._move_what_is_there()
        return self.has_come(peer, tag)

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
        if self.is_interrupted():
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
            self.await_end(pending, time.monotonic() + limit.total_seconds())
        if pending.reason:
            raise LinkClosed(pending.reason)

    def wait_apart(self, wait: Callable[[], None]) -> None:
        """See ``Link``: ``abort`` ends any wait here."""
        wait()

    def move(self, *, is_awaited: bool = True) -> None:
        """See ``Link``; and end connections to hosts that have answered nothing for too long."""
        self._move_what_is_there()
        if self.is_interrupted():
            return
        for each in tuple(self._connections.values()):
            silence = each.silence
            if each.ended or (silence is None and not each.is_to_call):
                continue
            is_silent = is_awaited and silence is not None and silence.is_too_long()
            is_silent = is_silent or bool(each.own_word and self._is_given_up(each))
            is_due = each.is_to_call or is_silent or self._is_next_way_due(each)
            if is_due and self._lock.acquire(timeout=_PATIENCE_SECONDS):
                try:
                    self._look_after(each, is_silent=is_silent and silence is each.silence)
                    self._wake_mover()
                finally:
                    self._lock.release()

    def _look_after(self, connection: _Connection, *, is_silent: bool) -> None:
        if connection.ended:
            return
        if connection.is_to_call:
            if self._doors is not None:
                self._call_again(self._doors, connection)
        elif is_silent:
            self._read(connection, is_ending=True)  # what has come is here
            connection.was_ended_there = True
            self._end(connection, f"{HOST_LOST} (it answers nothing)")
        elif self._is_next_way_due(connection):
            self._lose(connection, TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))

    def _is_next_way_due(self, connection: _Connection) -> bool:
        """Whether a peer is to be called at its next address, as it does not answer at one."""
        is_silent = connection.own_word and not connection.is_to_call and self._has_way(connection)
        return bool(is_silent) and time.monotonic() - connection.called_way > _NEXT_WAY_SECONDS

    def abort(self) -> None:
        """See ``Link``. A forked process lets go of its copies only: the link is its parent's.

        A signal's handler that has interrupted this link hangs up, and leaves the rest to whom it
        has interrupted; so does who can't have the lock because of one. Who waits here goes on at
        once; this returns when other hosts have what was sent to them, or a moment later.
        """
        self._is_aborted = True
        if os.getpid() != self._pid:
            self.__del__()
        elif self.is_interrupted() or not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            self._hang_up()
        else:
            try:
                self._end_all()
            finally:
                left, self._left = self._left, []
                self._lock.release()
                _close_when_delivered(left)

    def await_delivery(self, until: float) -> None:
        """See ``Connections``."""
        far = [each for each in tuple(self._connections.values()) if each.silence is not None]
        await_delivery([end for each in far if not each.ended for end in each.sockets()], until)

    def _hang_up(self) -> None:
        for each in tuple(self._connections.values()):
            if not each.ended and not each.is_hung_up:
                each.was_ended_there = each.has_ended_there()
                each.is_hung_up = True
                for end in each.sockets():
                    _hang_up(end)
        self._sound()
        self._shut_doors()

    def _end_all(self) -> None:
        try:
            for each in [each for each in self._connections.values() if not each.ended]:
                try:
                    if not each.is_to_call:
                        self._read(each, is_ending=True)  # what has come is here, if not asked for
                    if not each.is_hung_up:
                        each.was_ended_there = each.has_ended_there()
                finally:
                    self._end(each, _OWN_DOING)
        finally:
            self._shut_doors()
            while self._waiting:
                self._wake_one()
            self._sound()

    def _shut_doors(self) -> None:
        """Let in nobody any more; who has called and was not let in hears so."""
        for end in [*self._listeners, *(each.socket for each in tuple(self._callers.values()))]:
            self._let_go(end)
        self._callers.clear()

    def _let_go(self, end: socket.socket) -> None:
        """Close a socket that is looked after, and may be closed already."""
        with contextlib.suppress(OSError, ValueError):
            self._events.unregister(end)
        _hang_up(end)
        end.close()

    def closed(self) -> Sequence[int]:
        """See ``Connections``."""
        self._move_what_is_there()
        return [peer for peer in tuple(self._connections) if self._has_ended(peer)]

    def has_lost_any(self) -> bool:
        """See ``Connections``."""
        return any(each.ended for each in tuple(self._connections.values()))

    def is_closed(self, peer: int) -> bool:
        """See ``Connections``."""
        connection = self._connections.get(peer)
        if connection is None or not connection.ended:
            self._move_what_is_there()
        return self._has_ended(peer)

    def is_out_of_reach(self, peer: int) -> bool:
        """See ``Connections``."""
        connection = self._connections.get(peer)
        return connection is not None and connection.ended.startswith(HOST_LOST)

    def has_lost_all(self) -> bool:
        """See ``Connections``."""
        return 0 < len(self._connections) == self.size - 1 == len(self.closed())

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
        if connection is None and any(map(_has_bytes, self._listeners)):
            return True  # it may be the one who has called
        if connection is None or connection.ended:
            return False
        return any(map(_has_unread, connection.sockets()))

    def unread(self) -> Sequence[bytes]:
        """See ``Connections``."""
        return [
            bytes(each)
            for connection in tuple(self._connections.values())
            for tag, arrived in tuple(connection.arrived.items())
            if tag >> LANE_BITS == 0
            for each in tuple(arrived)
            if not isinstance(each, int)
        ]

    def refuse(self) -> None:
        """See ``Connections``; another host may have sent, and not know yet."""
        for each in tuple(self._connections.values()):
            if each.peer in self._near and not each.ended:
                for end in each.sockets():
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RD)

    def beside(self, peers: Collection[int]) -> Sequence[int]:
        """See ``Connections``."""
        theirs = {self._hosts[peer] for peer in peers}
        return [peer for peer, host in self._hosts.items() if host in theirs and peer != self.rank]

    def call(self, peer: int) -> None:
        """See ``Connections``."""
        if peer in self._connections or self.is_interrupted():
            return
        if self._lock.acquire(timeout=_PATIENCE_SECONDS):
            try:
                with contextlib.suppress(LinkError):  # aborted, or this process can't just now
                    self._connection_to(peer)
            finally:
                self._lock.release()

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

    # ------------------------------------------------------------------ who moves

    def await_end(  # noqa: C901, PLR0912  # one loop, of which each step by itself would cost a call
        self, transfer: _Awaited, until: float
    ) -> None:
        """Move all until a transfer is over, or sleep until the thread that moves has ended it."""
        if self.is_interrupted():
            raise LinkError(_IN_A_HANDLER)
        me = threading.get_ident()
        while True:
            turn = None
            with self._lock:
                if transfer.is_over:
                    return
                if self._mover not in (0, me):
                    turn = transfer.turn = threading.Lock()
                    turn.acquire()
                    self._waiting.append(transfer)
                else:
                    # The mover is this thread already if a signal's handler has interrupted its
                    # sleep.
                    before = self._mover, self._moved_for
                    self._mover, self._moved_for = me, transfer
            if turn is None:
                began = time.monotonic()
                is_likely_short = self._waited_seconds <= self._spin_seconds
                try:
                    while (left := until - time.monotonic()) > 0 and not self._is_aborted:
                        if is_likely_short:
                            self._spin(min(until, began + self._spin_seconds))
                        self._move_once(min(left, _SLEEP_MAX_SECONDS))
                        if transfer.is_over:
                            break
                finally:
                    self._waited_seconds = time.monotonic() - began
                    with self._lock:
                        self._mover, self._moved_for = before
                        if before[0]:
                            self._wake_mover()  # it sleeps on, whatever was moved meanwhile
                        elif self._waiting:
                            self._wake_one()
            else:
                try:
                    left = until - time.monotonic()
                    turn.acquire(timeout=min(max(0.0, left), _SLEEP_MAX_SECONDS))
                finally:
                    self._take_back(transfer)
            if transfer.is_over:
                return
            if self._is_aborted:  # a signal may have struck between its table and its end
                self.abort()
                raise LinkClosed(_OWN_DOING)
            if time.monotonic() >= until:
                raise LinkTimeout("timeout")

    def _spin(self, until: float) -> None:
        """Poll until something can be moved, or until that time."""
        while time.monotonic() < until and not self._events.poll(0):
            os.sched_yield()  # another thread may need this core

    def _wake_mover(self) -> None:
        """Wake who moves, if another thread has ended what it waits for."""
        if self._moved_for is not None and self._moved_for.is_over:
            self._sound()

    def _sound(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has not heard the last ones yet
            self._alarm.send(b"!")

    def _take_back(self, transfer: _Awaited) -> None:
        """Wait no longer; a turn that came too late is the next one's."""
        with self._lock:
            transfer.turn = None
            if transfer in self._waiting:
                self._waiting.remove(transfer)
            elif not self._mover:
                self._wake_one()

    def _wake_one(self) -> None:
        """Let one of those that wait be the next to move."""
        while self._waiting:
            transfer = self._waiting.popleft()
            turn, transfer.turn = transfer.turn, None
            if turn is not None:  # else it is over, and was woken
                turn.release()
                return

    def _move_what_is_there(self, seconds: float = 0.0) -> None:
        """Take in what has come, unless another thread does so anyway.

        Args:
            seconds: what comes so soon after is taken in as well, as long as nobody else waits.
        """
        if self.is_interrupted() or not self._lock.acquire(blocking=False):
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
            while self._move_once(seconds) and seconds:
                if self._waiting or self._is_aborted:
                    break
        finally:
            with self._lock:  # as in ``await_end``
                self._mover, self._moved_for = before
                if before[0]:
                    self._wake_mover()
                else:
                    self._wake_one()

    def _move_once(self, seconds: float) -> bool:
        """Move what can be moved within so many seconds; returns whether there was anything."""
        events = self._events.poll(seconds)
        if not events:
            return False
        with self._lock:
            for descriptor, event in events:
                connection = self._by_descriptor.get(descriptor)
                if connection is None:
                    self._hear(descriptor)
                    continue
                try:
                    if event & _ENDS and connection.word and self._doors is not None:
                        self._let_in(self._doors)  # it may have called as well, and said more there
                    if event & select.EPOLLOUT:
                        self._flush(connection)
                    # It may have ended by that, or have another socket now.
                    is_there = self._by_descriptor.get(descriptor) is connection
                    if event & ~select.EPOLLOUT and is_there:
                        if connection.inlet is None or connection.inlet.fileno() == descriptor:
                            self._read(connection, is_ending=bool(event & _ENDS))
                        else:
                            self._hear_the_end(connection)
                except BaseException:
                    self._end(connection, _TORN)
                    raise
        return True

    def _hear(self, descriptor: int) -> None:
        """Be woken by another thread, which may have ended what the mover waits for."""
        if descriptor == self._heard.fileno():
            if self._is_aborted:
                return  # nothing moves any more, and the attending threads must hear it, too
            with contextlib.suppress(BlockingIOError):  # a signal's handler has heard it
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
        if self.is_interrupted():
            raise LinkError(_IN_A_HANDLER)
        with self._lock:
            return self._connection_to(peer)

    def _connection_to(self, peer: int) -> _Connection:
        if self._doors is None or peer not in self._hosts:
            raise KeyError(peer)
        if self._is_aborted:
            raise LinkClosed(_OWN_DOING)
        self._let_in(self._doors)  # it may have called
        return self._connections.get(peer) or self._call(self._doors, peer)

    def _call(self, doors: Doors, peer: int) -> _Connection:
        failed: OSError | None = None
        try:
            try:
                end, own_word, where = doors.call(peer)
            except OSError as error:
                is_theirs = isinstance(error, (ConnectionError, BlockingIOError))
                if not is_theirs and not _is_outage(error):
                    raise
                family = socket.AF_UNIX if peer in self._near else socket.AF_INET
                end, own_word, where = socket.socket(family), doors.word_to(peer), ""
                failed = error
        except OSError as error:
            raise LinkError(f"this process can't connect to it ({error})") from error
        connection = _Connection(peer, end, doors.word_from(peer, where))
        connection.own_word, connection.is_open = own_word, peer in self._near
        connection.called = connection.called_way = time.monotonic()
        try:
            self._add(connection)
            if failed is not None:
                self._lose(connection, failed)
            else:
                self._flush(connection)
        except OSError as error:
            self._end(connection, _TORN)
            raise LinkError(f"this process can't connect to it ({error})") from error
        except BaseException:
            self._end(connection, _TORN)
            raise
        if self._is_aborted:  # by a signal's handler, which did not see it yet
            self._end(connection, _OWN_DOING)
            raise LinkClosed(_OWN_DOING)
        return connection

    def _lose(self, connection: _Connection, error: OSError) -> None:
        """End a connection by what the system says of it, or call again where nobody was there yet.

        A network may fail for a while. Linux gives up a call sooner than a connection, after 3 s
        where the other host does not say at which card it is. And strangers may crowd a door.
        """
        may_pass = (
            _is_outage(error) or isinstance(error, BlockingIOError) or self._has_way(connection)
        )
        if connection.own_word and may_pass and not self._is_given_up(connection):
            self._by_descriptor.pop(connection.socket.fileno(), None)
            self._let_go(connection.socket)
            connection.is_to_call, connection.is_watched = True, False
            connection.way += 1
        else:
            connection.was_ended_there = True
            self._end(connection, connection.failed or _why(error))

    def _has_way(self, connection: _Connection) -> bool:
        """Whether the peer was not yet called at all of its addresses."""
        return self._doors is not None and connection.way + 1 < self._doors.ways_to(connection.peer)

    def _is_given_up(self, connection: _Connection) -> bool:
        """Whether a call has taken too long."""
        waited = time.monotonic() - connection.called
        return waited > (_CALLED_SECONDS if math.isinf(self._lost_seconds) else self._lost_seconds)

    def _call_again(self, doors: Doors, connection: _Connection) -> None:
        if self._is_aborted:
            self._end(connection, _OWN_DOING)
            return
        try:
            end, own_word, where = doors.call(connection.peer, connection.way)
        except OSError as error:
            is_refused = isinstance(error, ConnectionError) and not self._has_way(connection)
            connection.way += 1
            if is_refused or self._is_given_up(connection):
                connection.was_ended_there = True
                self._end(connection, _why(error))
            return
        connection.socket, connection.own_word = end, own_word
        connection.word = doors.word_from(connection.peer, where)
        connection.is_to_call, connection.failed = False, ""
        connection.called_way = time.monotonic()
        try:
            self._add(connection)
            self._flush(connection)
        except BaseException:
            self._end(connection, _TORN)
            raise

    def _let_in(self, doors: Doors) -> None:
        """Listen to all who have called."""
        for listener in self._listeners:
            try:
                for end in doors.accept(listener):
                    self._listen_to(doors, _Caller(end))
            except OSError as error:  # no descriptors left: a rank that calls must not wait
                doors.on_refused(f"rank {self.rank} can't let anybody in ({error})")
                self._shut_doors()
                return

    def _listen_to(self, doors: Doors, caller: _Caller) -> None:
        # No more can be ranks. One that is has said its word by now.
        if len(self._callers) >= self.size - 1:
            for longest in tuple(self._callers.values())[:1]:
                doors.on_refused("a process that said nothing")
                self._send_away(longest)
        descriptor = caller.socket.fileno()
        self._callers[descriptor] = caller
        try:
            self._events.register(caller.socket, _READS)
        except (OSError, ValueError):  # no room for it; or closed by a signal's handler
            self._send_away(caller)
            return
        self._hear_caller(doors, descriptor)

    def _hear_caller(self, doors: Doors, descriptor: int) -> None:
        caller = self._callers.get(descriptor)
        if caller is None:  # it was sent away meanwhile
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
        with contextlib.suppress(OSError, ValueError):
            self._events.unregister(caller.socket)
        if peer is None or not self._admit(doors, peer, caller.socket):
            caller.socket.close()

    def _send_away(self, caller: _Caller) -> None:
        self._callers.pop(caller.socket.fileno(), None)
        self._let_go(caller.socket)

    def _admit(self, doors: Doors, peer: int, end: socket.socket) -> bool:
        """Take in a connection that a rank has made; False if it has one."""
        connection = self._connections.get(peer)
        if self._is_aborted:
            return False
        if connection is None:
            connection = _Connection(peer, end)
        elif connection.ended or len(connection.word) != doors.word_nbytes:  # it has answered
            return False
        try:
            is_unsaid = connection.is_to_call or len(connection.own_word) == doors.word_nbytes
            if is_unsaid or not connection.word:
                self._adopt(connection, end, doors.word_to(peer, called_at(end)))
            else:
                # Both have called. Its call has proved who it is, so it does not answer this one's.
                connection.word, connection.inlet = b"", end
                if connection.silence is not None:
                    ask_when_idle(end, self._lost_seconds)
                self._attend(connection, end)
                self._open(connection)
        except OSError:
            self._end(connection, _TORN)
            return False
        except BaseException:
            self._end(connection, _TORN)
            raise
        return True

    def _adopt(self, connection: _Connection, end: socket.socket, own_word: bytes) -> None:
        """Use a peer's call for all, where this rank has none on which anything was said."""
        if connection.called and not connection.is_to_call:
            self._by_descriptor.pop(connection.socket.fileno(), None)
            self._let_go(connection.socket)
        connection.socket, connection.word, connection.own_word = end, b"", b""
        connection.is_to_call = connection.is_watched = False
        connection.outgoing.appendleft((memoryview(own_word), None, None))
        self._add(connection)
        self._open(connection)

    def _open(self, connection: _Connection) -> None:
        """Send what has waited for a proof of who is there."""
        connection.is_open = True
        self._flush(connection)

    def _hear_the_end(self, connection: _Connection) -> None:
        """Over this rank's own call nothing comes, where both have called, but its end."""
        closed = f"{PEER_LOST} (its end of the stream is closed)"
        try:
            said = connection.socket.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            said, closed = b"", _why(error)
        if said:
            self._refuse(connection, "something over the wrong connection")
            return
        inlet = connection.inlet
        while not connection.ended and inlet is not None and _has_bytes(inlet):
            self._read(connection, is_ending=True)  # what it sent before is here whole
        if inlet is not None and connection.silence is not None and not connection.ended:
            # Between hosts what it sent before may be on its way, and then comes the end of that.
            self._by_descriptor.pop(connection.socket.fileno(), None)
            self._let_go(connection.socket)
            connection.socket, connection.inlet = inlet, None
            connection.is_open, connection.failed = False, connection.failed or closed
            connection.silence = Silence(inlet, self._lost_seconds)
            with contextlib.suppress(OSError):  # the other rank may live, and wait for more
                inlet.shutdown(socket.SHUT_WR)
            return
        connection.was_ended_there = not connection.is_hung_up
        reason = connection.failed or closed
        self._end(connection, _OWN_DOING if connection.is_hung_up else reason)

    # ------------------------------------------------------------------ out

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

    def _put(
        self,
        connection: _Connection,
        flat: Memory,
        view: memoryview,
        tag: int,
        held: _Transfer | None = None,
    ) -> _Transfer | None:
        """Send a message unasked.

        Args:
            connection: to its receiver.
            flat: the message.
            view: the same as the system takes it.
            tag: its tag.
            held: the transfer, if it has waited until the receiver had taken others.

        Returns:
            The transfer; None if the system has taken all of it.
        """
        taken = 0
        if not tag >> LANE_BITS:
            connection.ahead.setdefault(tag, []).append(view.nbytes)
            taken = connection.untold.pop(tag, 0)
        head = _HEADER.pack(_MESSAGE, tag, view.nbytes, taken)
        sent = 0
        is_free = not connection.outgoing and not connection.is_within
        if is_free and connection.is_open and not connection.own_word:
            try:
                sent = connection.socket.sendmsg((head, view), (), socket.MSG_NOSIGNAL)
            except OSError as error:
                self._has_no_room(connection, error)
            if sent == _HEADER_NBYTES + view.nbytes:
                return None
        transfer = held or _Transfer(flat, view)
        if connection.ended:
            transfer.end(connection.ended)
            return transfer
        if sent < _HEADER_NBYTES:
            connection.outgoing.append((memoryview(head)[sent:], None, None))
            sent = _HEADER_NBYTES
        connection.outgoing.append((view[sent - _HEADER_NBYTES :], transfer, None))
        self._watch(connection)
        return transfer

    def _push(
        self, connection: _Connection, frame: bytes, transfer: _Transfer | None = None
    ) -> None:
        """Send a frame, and after it a transfer's memory; what the system has no room for waits."""
        if connection.ended:
            if transfer is not None:
                transfer.end(connection.ended)
            return
        if transfer is None:
            connection.outgoing.append((memoryview(frame), None, None))
        else:
            connection.contents.append((memoryview(frame), None, None))
            for each in transfer.views[:-1] if isinstance(transfer, _Members) else ():
                connection.contents.append((each, None, None))
            connection.contents.append((transfer.view, transfer, None))
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        outgoing, contents, left = connection.outgoing, connection.contents, _TURN_NBYTES
        if connection.is_to_call:
            return
        try:
            while connection.own_word:
                sent = connection.socket.send(connection.own_word, socket.MSG_NOSIGNAL)
                connection.own_word = connection.own_word[sent:]
            while connection.is_open and (outgoing or contents) and left > 0:
                is_content = connection.is_within or not outgoing
                queue = contents if is_content else outgoing
                view, transfer, share = queue[0]
                if share is not None:
                    sent = self._hand_over(connection, view, share)
                else:
                    sent = connection.socket.send(view, socket.MSG_NOSIGNAL) if view.nbytes else 0
                left -= sent
                if sent < view.nbytes:
                    connection.is_within = is_content
                    queue[0] = view[sent:], transfer, None
                    continue
                queue.popleft()
                connection.is_within = is_content and transfer is None
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
        if isinstance(error, (BlockingIOError, BrokenPipeError, ConnectionResetError)):
            return
        if not isinstance(error, ConnectionRefusedError) and not _is_outage(error):
            self._end(connection, f"nothing can be sent to rank {connection.peer} ({error})")
        elif connection.is_open:
            connection.failed = _why(error)  # what came before it may lie unread
        else:
            self._lose(connection, error)

    def _watch(self, connection: _Connection) -> None:
        """Be woken when there is room again, as long as something waits for it."""
        is_waiting = connection.outgoing or connection.contents
        is_wanted = bool(connection.own_word or (connection.is_open and is_waiting))
        if connection.is_to_call:
            return
        if is_wanted != connection.is_watched and not connection.ended:
            connection.is_watched = is_wanted
            self._events.modify(connection.socket, _READS | select.EPOLLOUT * is_wanted)

    # ------------------------------------------------------------------ in

    def _read(  # noqa: C901  # likewise
        self, connection: _Connection, *, is_ending: bool
    ) -> None:
        left = _TURN_NBYTES
        end = connection.inlet or connection.socket
        receive, receive_rights = end.recv_into, end.recvmsg_into
        try:
            while left > 0 and not connection.ended:
                filling = connection.filling
                if filling is not None:
                    into = filling
                    count = receive(into)
                elif connection.word and not self._has_heard_word(connection):
                    return
                else:
                    into = connection.view[connection.used :]
                    count, rights, flags, _ = receive_rights(
                        (into,), _RIGHTS_NBYTES, socket.MSG_CMSG_CLOEXEC
                    )
                    if rights or flags & _TRUNCATED:  # what follows them is not read with them
                        files = [n for *_, each in rights for (n,) in _DESCRIPTOR.iter_unpack(each)]
                        share = Share(files)
                        connection.descriptors.append(None if flags & _TRUNCATED else share)
                left -= count
                if not count:
                    self._hear_end(connection)
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
            self._lose(connection, error)

    def _hear_end(self, connection: _Connection) -> None:
        """Nothing more will come."""
        if connection.is_hung_up:
            self._end(connection, _OWN_DOING)
            return
        connection.was_ended_there = True
        closed = f"{PEER_LOST} (its end of the stream is closed)"
        self._end(connection, connection.failed or closed)

    def _has_heard_word(self, connection: _Connection) -> bool:
        """Read what the peer has to say before all else; False if the connection has ended."""
        end = connection.inlet or connection.socket
        while connection.word:
            said = end.recv(len(connection.word))
            if not said:
                self._hear_end(connection)
                return False
            if not connection.word.startswith(said):
                self._refuse(connection, "another word than its own")
                return False
            connection.word = connection.word[len(said) :]
            if not connection.word and not connection.is_open:
                self._open(connection)
        return not connection.ended

    def _parse(self, connection: _Connection) -> None:  # noqa: C901, PLR0912  # likewise
        """Take the frames out of what was read; what is left of the last one goes to the front."""
        raw, at, end = connection.raw, 0, connection.used
        while end - at >= _HEADER_NBYTES and not connection.ended:
            kind, tag, nbytes, number = _HEADER.unpack_from(raw, at)
            at += _HEADER_NBYTES
            if kind == _MESSAGE:
                if number:
                    ahead = connection.ahead.get(tag, ())
                    if number <= len(ahead) and tag not in connection.held:
                        del connection.ahead[tag][:number]
                    else:
                        self._credit(connection, tag, number)
                        if connection.ended:
                            break
                most = _WORD_MAX_NBYTES if tag >> LANE_BITS else UNASKED_MAX_NBYTES
                if nbytes > most:
                    self._refuse(connection, f"a message of {nbytes} bytes unasked")
                elif end - at >= nbytes:
                    self._arrive(connection, tag, connection.view[at : at + nbytes])
                    at += nbytes
                elif self._is_too_far_ahead(connection, tag, nbytes):
                    self._refuse(connection, "more first messages than it may be ahead")
                elif not connection.ended:
                    # What is left of it is read to where it belongs.
                    content = allocate(BufferKind.BYTES, nbytes)
                    room = writable(content.flat)
                    room[: end - at] = connection.view[at:end]
                    connection.filling = room[end - at :]
                    connection.filled = tag, content.owner
                    at = end
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

    def _arrive(  # noqa: C901  # likewise
        self, connection: _Connection, tag: int, content: memoryview | bytes
    ) -> None:
        """A message is here whole."""
        posted = connection.posted.get(tag)
        if not posted:
            arrived = connection.arrived.get(tag)
            if arrived is None:
                arrived = connection.arrived[tag] = deque()
                if not tag >> LANE_BITS and self._is_one_lane_too_many(connection):
                    return
            if tag >> LANE_BITS:
                if self._is_one_too_many(connection):
                    return
            elif arrived and self._is_too_far_ahead(connection, tag, len(content)):
                self._refuse(connection, "more first messages than it may be ahead")
                return
            arrived.append(bytes(content))  # which copies no bytes
            if connection.attended and tag in connection.attended:
                self._give_out(connection, tag)
                return
            bell = connection.bells.get(tag)
            if bell is not None:
                bell.is_over = True
                if bell.turn is not None:
                    bell.end()
            return
        transfer = posted.popleft()
        if not posted:
            del connection.posted[tag]
        self._deliver(connection, transfer, tag, content)

    def _give_out(self, connection: _Connection, tag: int) -> None:
        """Hand what has come to the function that accepts all messages of a tag."""
        arrived, accept = connection.arrived.get(tag), connection.attended[tag].accept
        while arrived and accept(arrived[0]):  # type: ignore[arg-type]  # no first message is offered
            message: bytes = arrived.popleft()  # type: ignore[assignment]  # likewise
            self._note_taken(connection, tag, len(message))

    def _deliver(
        self,
        connection: _Connection,
        transfer: _Transfer,
        tag: int,
        content: memoryview | bytes,
    ) -> None:
        nbytes = len(content)
        if nbytes > transfer.view.nbytes or isinstance(transfer, _Borrowed):
            reason = self._refuse(connection, f"{nbytes} bytes for {transfer.view.nbytes}")
            transfer.end(reason)
            return
        transfer.view[:nbytes] = content
        transfer.end()
        if tag >> LANE_BITS == 0:
            self._note_taken(connection, tag, nbytes)

    def _note_taken(self, connection: _Connection, tag: int, nbytes: int) -> None:
        """A first message was taken, and its sender will hear of it before it has to wait."""
        untold = connection.untold[tag] = connection.untold.get(tag, 0) + 1
        if untold >= TOLD_EACH or nbytes > _TOLD_FROM_NBYTES:
            del connection.untold[tag]
            self._push(connection, _HEADER.pack(Kind.CREDIT, tag, 0, untold))

    def _post(self, connection: _Connection, transfer: _Transfer, tag: int) -> None:
        """A receive gets what has come, or waits for it."""
        arrived = connection.arrived.get(tag)
        if arrived:
            found = arrived.popleft()
            connection.waiting -= tag >> LANE_BITS > 0
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
        found: bytes | int,
    ) -> None:
        """A receive gets what had come before it."""
        if isinstance(found, int):
            self._take(connection, transfer, found)
        else:
            self._deliver(connection, transfer, tag, found)

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
            if not self._is_one_too_many(connection):
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
        transfer, tag = connection.offered.get(number, (None, 0))
        is_shared = isinstance(transfer, _Lent) and transfer.share is not None
        if transfer is None or (is_held and not is_shared):
            self._refuse(connection, "an answer to what was not offered")
            return
        del connection.offered[number]  # not before: who waits for it hears of a refusal
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
            self._arrive(connection, tag, content)

    def _is_one_too_many(self, connection: _Connection) -> bool:
        """Count a word or an offer that has to wait; whether it may not, which ends all."""
        connection.waiting += 1
        if connection.waiting <= WAITING_MAX:
            return False
        self._refuse(connection, f"more than {WAITING_MAX} words and offers ahead")
        return True

    def _is_one_lane_too_many(self, connection: _Connection) -> bool:
        """Whether first messages come in a lane in which they may not, which ends all."""
        lanes = [of for of, each in connection.arrived.items() if each and not of >> LANE_BITS]
        if len(lanes) < WAITING_LANES_MAX:
            return False
        self._refuse(connection, f"messages in more than {WAITING_LANES_MAX} lanes ahead")
        return True

    def _is_too_far_ahead(self, connection: _Connection, tag: int, nbytes: int) -> bool:
        """Whether a peer may not have sent what comes, before what has come is taken."""
        if tag >> LANE_BITS:
            return False
        arrived = connection.arrived.get(tag, ())
        waiting: list[int] = [*map(len, arrived)]  # type: ignore[arg-type]  # no offers on this tag
        return not _is_within(waiting, nbytes)

    def _credit(self, connection: _Connection, tag: int, count: int) -> None:
        ahead = connection.ahead.get(tag, [])
        if not 0 < count <= len(ahead):
            self._refuse(connection, "credit for what was not sent")
            return
        del ahead[:count]
        held = connection.held.get(tag)
        while held and _is_within(ahead, held[0].view.nbytes) and not connection.ended:
            transfer = held.popleft()
            if self._put(connection, transfer.flat, transfer.view, tag, transfer) is None:
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
        is_to_deliver = connection.silence is not None and reason is _OWN_DOING
        for end in connection.sockets():
            self._by_descriptor.pop(end.fileno(), None)
            if not is_to_deliver or connection.is_hung_up:
                self._let_go(end)
            else:
                with contextlib.suppress(OSError, ValueError):
                    self._events.unregister(end)
                self._left.append(end)
        left = [each for each, _ in connection.offered.values()]
        left += [each for _, each, _ in connection.outgoing if each is not None]
        left += [each for _, each, _ in connection.contents if each is not None]
        left += [each for held in connection.held.values() for each in held]
        left += [each for posted in connection.posted.values() for each in posted]
        left += connection.taken.values()
        left += connection.bells.values()
        if isinstance(connection.filled, _Transfer):
            left.append(connection.filled)
        for table in (connection.offered, connection.held, connection.posted, connection.taken):
            table.clear()
        connection.outgoing.clear()
        connection.contents.clear()
        connection.shares.clear()
        connection.descriptors.clear()
        connection.rooms.clear()
        connection.filling = connection.filled = None
        for each in left:
            each.end(reason)
        for attendance in connection.attended.values():
            attendance.bell.end()
            attendance.prompt()


def _is_within(ahead: Collection[int], nbytes: int) -> bool:
    """Whether one more first message may be ahead, after some of these lengths."""
    return len(ahead) < AHEAD_MAX and sum(ahead) + nbytes <= AHEAD_MAX_NBYTES


def _has_bytes(end: socket.socket) -> bool:
    """Whether something can be read, or the end of all."""
    watched = select.poll()
    with contextlib.suppress(ValueError):  # it was closed meanwhile
        watched.register(end, select.POLLIN)
    return bool(watched.poll(0))


def _has_unread(end: socket.socket) -> bool:
    """Whether bytes can be read, the end of all not counted; takes none, and no error either."""
    import fcntl  # noqa: PLC0415  # Windows has none
    import termios  # noqa: PLC0415  # likewise

    try:
        return any(fcntl.ioctl(end, termios.FIONREAD, bytes(4)))
    except (OSError, ValueError):  # it was closed meanwhile
        return False


def _close_when_delivered(ends: Sequence[socket.socket]) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_WR)  # the other ends hear at once that nothing more comes
    try:
        await_delivery(ends, time.monotonic() + _DELIVERY_SECONDS, is_draining=True)
    finally:
        for end in ends:
            _hang_up(end)
            end.close()


def _hang_up(end: socket.socket) -> None:
    """End a stream, also where a process forked since has a copy of its socket."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _is_outage(error: OSError) -> bool:
    return is_outage(os.strerror(error.errno or 0))


def _why(error: OSError) -> str:
    """What a failure of the system's says of the other end."""
    told = os.strerror(error.errno or 0)
    return f"{HOST_LOST if is_outage(told) else PEER_LOST} ({told})"


def _has_ended(end: socket.socket) -> bool:
    """Whether the other end is known to have closed it; what it sent before may still come."""
    if end.fileno() < 0:
        return True
    watched = select.poll()
    watched.register(end, select.POLLRDHUP)
    return bool(watched.poll(0))
