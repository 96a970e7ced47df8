"""One rank's side of the protocol between two ranks over a stream, without sockets or waits.

Bytes enter through ``room`` and ``received`` and leave through ``first_out`` and ``sent``, in
pieces of any length. The other methods serve this rank's program. Received bytes are copied at most
once: after a header, ``room`` returns the memory where its content belongs.

Every frame is checked. One of an unknown kind, one that is too long, or a reply to nothing ends the
connection.

This module does not lock; every call requires the link's lock.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from objcomm._codecs.buffers import BufferKind, allocate, writable
from objcomm._transport.frames import (
    CREDIT_EACH,
    CREDIT_FROM_NBYTES,
    FAREWELL_MAX_NBYTES,
    HEADER,
    LENT_FILES_MAX,
    TINY_MAX_NBYTES,
    UNASKED_MAX_NBYTES,
    WAITING_LANES_MAX,
    WAITING_MAX,
    Kind,
    may_be_ahead,
)
from objcomm._transport.link import LANE_BITS, LinkClosed
from objcomm._transport.pending import Awaited, Lent, Loan, Members, Transfer

if TYPE_CHECKING:
    from objcomm._transport.pending import Attendance
    from objcomm._transport.share import Share

_HEADER_NBYTES = HEADER.size
# Enum members are slower to look up and to compare.
_MESSAGE = int(Kind.MESSAGE)
# For several small messages. The rest of a longer one is read directly into its destination.
_RAW_NBYTES = 1 << 17


class Peer:
    """See the module docstring.

    Attributes:
        rank: the peer's.
        ended: why the connection has ended; empty while it is up.
        farewell: content of the peer's ``FAREWELL``; empty if none has arrived.
        arrived: by tag, what arrived before it was asked for: messages, or numbers of offers.
        attendance: takes in first messages while a thread attends to this peer.
        bells: by tag, the wait of a thread for first messages; it is over when one has arrived.
        outgoing: what to send, in order: bytes, the transfer that ends with them, and the share to
            hand over with the first of them.
        contents: the same for ``CONTENT`` frames, which all others may overtake.
        descriptors: descriptors that arrived ahead of their frames; None for those that were lost.
    """

    __slots__ = (
        "_ahead",  # by tag: lengths of first messages not known to be taken, in order
        "_filled",  # the message being read: a transfer, or its tag and its bytes
        "_held",  # by tag: first messages that wait for credit
        "_is_content",  # whether ``first_out`` returned part of a content
        "_is_within",  # whether part of the first content was sent
        "_lent_files",  # number of files handed over and not yet confirmed by the peer
        "_numbers",  # number of this rank's offers so far
        "_offered",  # by number: this rank's offers that were not taken yet
        "_offers",  # by number: lengths of the peer's offers whose content has not arrived
        "_posted",  # by tag: receives for which nothing has arrived
        "_raw",  # ``_raw[:_used]`` was read but not parsed
        "_rooms",  # what the same content fills next
        "_shares",  # by number: the peer's offers that can be mapped
        "_taken",  # by number: receives whose content was requested
        "_unreported",  # by tag: number of first messages taken here but not reported to the peer
        "_used",
        "_view",
        "_waiting",  # number of small messages and offers in ``arrived``
        "arrived",
        "attendance",
        "bells",
        "contents",
        "descriptors",
        "ended",
        "farewell",
        "filling",
        "outgoing",
        "rank",
    )

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ended = ""
        self.farewell = b""
        self.arrived: dict[int, deque[bytes | int]] = {}
        self.attendance: Attendance | None = None
        self.bells: dict[int, Awaited] = {}
        self.outgoing: deque[tuple[memoryview, Transfer | None, Share | None]] = deque()
        self.contents: deque[tuple[memoryview, Transfer | None, Share | None]] = deque()
        self.descriptors: deque[Share | None] = deque()
        self.filling: memoryview | None = None
        self._is_content = self._is_within = False
        self._waiting = self._lent_files = self._numbers = 0
        self._posted: dict[int, deque[Transfer]] = {}
        self._offered: dict[int, tuple[Transfer, int]] = {}
        self._offers: dict[int, int] = {}
        self._shares: dict[int, Share] = {}
        self._taken: dict[int, Transfer] = {}
        self._held: dict[int, deque[Transfer]] = {}
        self._ahead: dict[int, list[int]] = {}
        self._unreported: dict[int, int] = {}
        self._raw = bytearray(_RAW_NBYTES)
        self._view = memoryview(self._raw)
        self._used = 0
        self._rooms: deque[memoryview] = deque()
        self._filled: Transfer | tuple[int, bytes] | None = None

    # ------------------------------------------------------------------ what this rank sends

    def head_of(self, nbytes: int, tag: int) -> bytes:
        """Return the header of a message that may be sent now; empty if it must be held.

        The caller must send a header next, followed by the message; if empty, it calls ``hold``.
        """
        if tag >> LANE_BITS:
            return HEADER.pack(_MESSAGE, tag, nbytes, 0) if nbytes <= TINY_MAX_NBYTES else b""
        ahead = self._ahead.get(tag)
        if ahead is None:
            ahead = self._ahead[tag] = []
        if tag in self._held or not may_be_ahead(ahead, nbytes):  # messages stay in order
            return b""
        ahead.append(nbytes)
        return HEADER.pack(_MESSAGE, tag, nbytes, self._unreported.pop(tag, 0))

    def queue(self, head: bytes, transfer: Transfer, sent: int = 0) -> None:
        """Queue a message, of which ``sent`` bytes, header included, were sent already."""
        for each in (memoryview(head), *transfer.views[:-1]):
            if sent < each.nbytes:
                self.outgoing.append((each[sent:], None, None))
            sent = max(0, sent - each.nbytes)
        self.outgoing.append((transfer.view[sent:], transfer, None))

    def hold(self, transfer: Transfer, tag: int) -> None:
        """Keep a message until there is credit for it, or until the peer has a buffer for it."""
        if tag >> LANE_BITS:
            number = self._offer(transfer, tag)
            self._say(Kind.OFFER, tag, transfer.nbytes, number)
        else:
            self._held.setdefault(tag, deque()).append(transfer)

    def lend(self, transfer: Lent, tag: int) -> None:
        """Offer members that the peer may map, or only a copy if too many files are outstanding.

        Raises:
            LinkClosed: the connection has ended.
        """
        if self.ended:
            raise LinkClosed(self.ended)
        if self._lent_files + transfer.files > LENT_FILES_MAX:
            transfer.share, transfer.files = None, 0
        self._lent_files += transfer.files
        kind = Kind.OFFER if transfer.share is None else Kind.SHARE
        frame = HEADER.pack(kind, tag, transfer.nbytes, self._offer(transfer, tag))
        self.outgoing.append((memoryview(frame), None, transfer.share))

    def _offer(self, transfer: Transfer, tag: int) -> int:
        self._numbers = number = self._numbers + 1
        self._offered[number] = transfer, tag
        return number

    def _say(self, kind: Kind, tag: int, nbytes: int, number: int) -> None:
        self.outgoing.append((memoryview(HEADER.pack(kind, tag, nbytes, number)), None, None))

    # ------------------------------------------------------------------ bytes out

    def first_out(self) -> tuple[memoryview, Transfer | None, Share | None] | None:
        """Return what to send next; None if there is nothing."""
        self._is_content = self._is_within or not self.outgoing
        queue = self.contents if self._is_content else self.outgoing
        return queue[0] if queue else None

    def sent(self, nbytes: int) -> None:
        """Note that ``nbytes`` of ``first_out`` were sent, and with them its descriptors."""
        queue = self.contents if self._is_content else self.outgoing
        view, transfer, _ = queue[0]
        if nbytes < view.nbytes:
            self._is_within = self._is_content
            queue[0] = view[nbytes:], transfer, None
            return
        queue.popleft()
        self._is_within = self._is_content and transfer is None
        if transfer is not None:
            transfer.end()

    def keep_share(self) -> memoryview:
        """Return what to send instead if the system refuses to hand over ``first_out``."""
        _, tag, nbytes, number = HEADER.unpack(self.outgoing[0][0])
        offer = memoryview(HEADER.pack(Kind.OFFER, tag, nbytes, number))
        self.outgoing[0] = offer, None, None
        return offer

    # ------------------------------------------------------------------ what this rank receives

    def take(self, tag: int) -> bytes | None:
        """Return the next first message; None if none has arrived."""
        arrived = self.arrived.get(tag)
        if not arrived:
            return None
        message: bytes = arrived.popleft()  # type: ignore[assignment]  # first messages are never offered
        self._note_taken(tag, len(message))
        return message

    def give_out(self, tag: int) -> None:
        """Pass what has arrived to the function that accepts all messages with a tag."""
        arrived, attendance = self.arrived.get(tag), self.attendance
        if not arrived or attendance is None or attendance.error is not None:
            return
        accept = attendance.accepts[tag]
        try:
            while arrived and accept(arrived[0]):  # type: ignore[arg-type]  # likewise
                message: bytes = arrived.popleft()  # type: ignore[assignment]  # likewise
                self._note_taken(tag, len(message))
        except Exception as error:  # noqa: BLE001  # raised by the attending thread
            attendance.error = error
            attendance.prompt()

    def post(self, transfer: Transfer, tag: int) -> None:
        """Fill a receive with what has arrived, or queue it.

        Raises:
            LinkClosed: the connection has ended, and nothing that arrived before is left.
        """
        arrived = self.arrived.get(tag)
        if not arrived:
            if self.ended:
                raise LinkClosed(self.ended)
            self._posted.setdefault(tag, deque()).append(transfer)
            return
        found = arrived.popleft()
        self._waiting -= tag >> LANE_BITS > 0
        if not arrived:
            del self.arrived[tag]
        if isinstance(found, int):
            self.take_offer(transfer, found)
        else:
            self._deliver(transfer, tag, found)

    def take_offer(self, transfer: Transfer, number: int) -> None:
        """Fill a receive with the peer's offer of that number."""
        nbytes = self._offers[number]
        if isinstance(transfer, Loan) and nbytes == transfer.lent_nbytes:
            transfer.share = self._shares.pop(number, None)
            transfer.number = number
            if transfer.share is not None:
                del self._offers[number]
                self._say(Kind.HELD, 0, 0, number)
            transfer.end()
        elif nbytes > transfer.nbytes or isinstance(transfer, Loan) or number in self._shares:
            self.refuse(f"{nbytes} bytes for {transfer.nbytes}")
            transfer.end(self.ended)
        elif self.ended:
            transfer.end(self.ended)
        else:
            self._taken[number] = transfer
            self._say(Kind.TAKE, 0, 0, number)

    def _deliver(self, transfer: Transfer, tag: int, content: memoryview | bytes) -> None:
        nbytes = len(content)
        if nbytes > transfer.view.nbytes or isinstance(transfer, Loan):
            self.refuse(f"{nbytes} bytes for {transfer.view.nbytes}")
            transfer.end(self.ended)
            return
        transfer.view[:nbytes] = content
        transfer.end()
        if tag >> LANE_BITS == 0:
            self._note_taken(tag, nbytes)

    def _note_taken(self, tag: int, nbytes: int) -> None:
        """Count a first message as taken; credit its sender before it has to wait."""
        unreported = self._unreported[tag] = self._unreported.get(tag, 0) + 1
        if unreported >= CREDIT_EACH or nbytes > CREDIT_FROM_NBYTES:
            del self._unreported[tag]
            self._say(Kind.CREDIT, tag, 0, unreported)

    # ------------------------------------------------------------------ bytes in

    def room(self) -> memoryview:
        """Return where to read the next bytes to; never empty."""
        filling = self.filling
        return self._view[self._used :] if filling is None else filling

    def received(self, nbytes: int) -> None:
        """Process bytes read into ``room``, and the ``descriptors`` that came with them."""
        filling = self.filling
        if filling is None:
            self._used += nbytes
            self._parse()
        elif nbytes < len(filling):
            self.filling = filling[nbytes:]
        else:
            self._conclude()

    def _parse(self) -> None:  # noqa: C901, PLR0912, PLR0915  # one loop: a function for each step would cost a call
        """Parse the frames that were read, and move an incomplete one to the front."""
        raw, at, end = self._raw, 0, self._used
        while end - at >= _HEADER_NBYTES and not self.ended:
            if self.farewell:
                self.refuse("a frame after its farewell")
                break
            kind, tag, nbytes, number = HEADER.unpack_from(raw, at)
            at += _HEADER_NBYTES
            if kind == _MESSAGE:
                if number:
                    ahead = self._ahead.get(tag, ())
                    if number <= len(ahead) and tag not in self._held:
                        del self._ahead[tag][:number]
                    else:
                        self._credit(tag, number)
                        if self.ended:
                            break
                most = TINY_MAX_NBYTES if tag >> LANE_BITS else UNASKED_MAX_NBYTES
                if nbytes > most:
                    self.refuse(f"a message of {nbytes} bytes unasked")
                elif end - at >= nbytes:
                    self._arrive(tag, self._view[at : at + nbytes])
                    at += nbytes
                elif not self._may_come(tag, nbytes):
                    self.refuse("more first messages than it may be ahead")
                else:
                    # The rest is read directly into its destination.
                    content = allocate(BufferKind.BYTES, nbytes)
                    room = writable(content.flat)
                    room[: end - at] = self._view[at:end]
                    self.filling = room[end - at :]
                    self._filled = tag, content.owner
                    at = end
            elif kind == Kind.CONTENT:
                at = self._begin_content(number, at, end)
            elif kind in (Kind.OFFER, Kind.SHARE):
                self._receive_offer(tag, nbytes, number, is_shared=kind == Kind.SHARE)
            elif kind in (Kind.TAKE, Kind.HELD):
                self._give(number, is_held=kind == Kind.HELD)
            elif kind == Kind.CREDIT:
                self._credit(tag, number)
            elif kind == Kind.FAREWELL and 0 < nbytes <= FAREWELL_MAX_NBYTES:
                if end - at < nbytes:
                    at -= _HEADER_NBYTES  # it is read in one piece
                    break
                self.farewell = bytes(self._view[at : at + nbytes])
                at += nbytes
            else:
                self.refuse(f"a frame of kind {kind}")
        if 0 < at < end:
            raw[: end - at] = raw[at:end]
        self._used = end - at
        if len(self.descriptors) > (self._used > 0):
            self.refuse("a descriptor without a frame")

    def _arrive(self, tag: int, content: memoryview | bytes) -> None:  # noqa: C901  # likewise
        """Deliver or keep a complete message."""
        posted = self._posted.get(tag)
        if posted:
            transfer = posted.popleft()
            if not posted:
                del self._posted[tag]
            self._deliver(transfer, tag, content)
            return
        arrived = self.arrived.get(tag)
        if arrived is None:
            arrived = self.arrived[tag] = deque()
            if not tag >> LANE_BITS and self._is_one_lane_too_many():
                return
        if tag >> LANE_BITS:
            if self._is_one_too_many():
                return
        elif arrived and not self._may_come(tag, len(content)):
            self.refuse("more first messages than it may be ahead")
            return
        arrived.append(bytes(content))  # copies nothing if it is bytes already
        if self.attendance is not None and tag in self.attendance.accepts:
            self.give_out(tag)
            return
        bell = self.bells.get(tag)
        if bell is not None:
            bell.is_over = True
            if bell.turn is not None:
                bell.end()

    def _receive_offer(self, tag: int, nbytes: int, number: int, *, is_shared: bool) -> None:
        descriptors = self.descriptors
        is_bare = is_shared and not descriptors
        if number in self._offers or tag >> LANE_BITS == 0 or is_bare:
            self.refuse("an offer that is not allowed")
            return
        share = descriptors.popleft() if is_shared else None
        if share is not None and not share.is_fixed():
            self.refuse("memory that it could truncate")
            return
        self._offers[number] = nbytes
        if share is not None:
            self._shares[number] = share
            if sum(len(each.descriptors) for each in self._shares.values()) > LENT_FILES_MAX:
                self.refuse("more files than may wait here")
                return
        posted = self._posted.get(tag)
        if not posted:
            if not self._is_one_too_many():
                self.arrived.setdefault(tag, deque()).append(number)
            return
        transfer = posted.popleft()
        if not posted:
            del self._posted[tag]
        self.take_offer(transfer, number)

    def _give(self, number: int, *, is_held: bool) -> None:
        """Handle the peer's answer to an offer: it has a buffer for it, or has mapped it."""
        transfer, tag = self._offered.get(number, (None, 0))
        is_shared = isinstance(transfer, Lent) and transfer.share is not None
        if transfer is None or (is_held and not is_shared):
            self.refuse("an answer to an offer that was not made")
            return
        del self._offered[number]  # not before: a refusal must reach a thread that waits for it
        if isinstance(transfer, Lent):
            self._lent_files -= transfer.files
        if is_held:
            transfer.end()
            return
        head = HEADER.pack(Kind.CONTENT, tag, 0, number)
        self.contents.append((memoryview(head), None, None))
        for each in transfer.views[:-1]:
            self.contents.append((each, None, None))
        self.contents.append((transfer.view, transfer, None))

    def _begin_content(self, number: int, at: int, end: int) -> int:
        """Fill a transfer with the content read so far; return where that ends in the buffer."""
        transfer = self._taken.pop(number, None)
        if transfer is None:
            self.refuse("content that was not requested")
            return at
        nbytes = self._offers.pop(number)
        rooms = deque([transfer.view[:nbytes]])
        if isinstance(transfer, Members):
            rooms = deque(transfer.views)
        while rooms and at < end:
            came = min(len(rooms[0]), end - at)
            rooms[0][:came] = self._view[at : at + came]
            at += came
            rooms[0] = rooms[0][came:]
            if not rooms[0]:
                rooms.popleft()
        self._filled, self._rooms = transfer, rooms
        self._conclude()
        return at

    def _conclude(self) -> None:
        """Continue with the next buffer of the same content, or finish it."""
        while self._rooms:
            self.filling = self._rooms.popleft()
            if self.filling:
                return
        filled = self._filled
        self.filling = self._filled = None
        if isinstance(filled, Transfer):
            filled.end()
        elif filled is not None:
            self._arrive(*filled)

    def _credit(self, tag: int, count: int) -> None:
        """Handle the peer's report that it has taken ``count`` first messages; send held ones."""
        ahead = self._ahead.get(tag, [])
        if not 0 < count <= len(ahead):
            self.refuse("credit for what was not sent")
            return
        del ahead[:count]
        held = self._held.get(tag)
        while held and may_be_ahead(ahead, nbytes := held[0].nbytes):
            ahead.append(nbytes)
            head = HEADER.pack(_MESSAGE, tag, nbytes, self._unreported.pop(tag, 0))
            self.queue(head, held[0])
            held.popleft()
        if not held:
            self._held.pop(tag, None)

    # ------------------------------------------------------------------ limits and the end

    def _may_come(self, tag: int, nbytes: int) -> bool:
        """Return whether the peer may send this before what has arrived is taken."""
        if tag >> LANE_BITS:
            return True
        waiting: list[int] = [*map(len, self.arrived.get(tag, ()))]  # type: ignore[arg-type]  # no offers
        return may_be_ahead(waiting, nbytes)

    def _is_one_too_many(self) -> bool:
        """Count a small message or an offer that waits; if too many do, end the connection.

        Returns:
            Whether there are too many.
        """
        self._waiting += 1
        if self._waiting <= WAITING_MAX:
            return False
        self.refuse(f"more than {WAITING_MAX} words and offers ahead")
        return True

    def _is_one_lane_too_many(self) -> bool:
        """End the connection if first messages wait in too many lanes; return whether they do."""
        lanes = [of for of, each in self.arrived.items() if each and not of >> LANE_BITS]
        if len(lanes) < WAITING_LANES_MAX:
            return False
        self.refuse(f"messages in more than {WAITING_LANES_MAX} lanes ahead")
        return True

    def refuse(self, what: str) -> None:
        """End the connection because the peer has sent something that no link sends."""
        self.end(f"rank {self.rank} has sent {what}, which objcomm never does")

    def end(self, reason: str) -> None:
        """End all outstanding transfers; complete messages can still be taken.

        May be called again by a thread that was interrupted during the first call.
        """
        self.ended = self.ended or reason
        left = [each for each, _ in self._offered.values()]
        left += [each for _, each, _ in (*self.outgoing, *self.contents) if each is not None]
        left += [each for held in self._held.values() for each in held]
        left += [each for posted in self._posted.values() for each in posted]
        left += self._taken.values()
        if isinstance(self._filled, Transfer):
            left.append(self._filled)
        for each in (*left, *self.bells.values()):
            each.end(self.ended)
        for table in (self._offered, self._held, self._posted, self._taken, self._shares):
            table.clear()
        for queue in (self.outgoing, self.contents, self.descriptors, self._rooms):
            queue.clear()
        self.filling = self._filled = None
        if self.attendance is not None:
            self.attendance.prompt()
