"""The protocol between two ranks over a stream, as one of them sees it: without a socket or a wait.

Bytes come in by ``room`` and ``received`` and go out by ``first_out`` and ``sent``, in pieces of
any length; all other methods are what this rank's program wants. Received bytes are copied at most
once: when a header has been read, ``room`` is where its content belongs.

Nothing that arrives is believed before it is checked: a frame of no kind, one that is too long, or
one that answers nothing ends the connection.

Nothing here locks: the link's lock is held around every call.
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
    UNASKED_MAX_NBYTES,
    WAITING_LANES_MAX,
    WAITING_MAX,
    WORD_MAX_NBYTES,
    Kind,
    may_be_ahead,
)
from objcomm._transport.link import LANE_BITS, LinkClosed
from objcomm._transport.pending import Awaited, Lent, Loan, Members, Transfer

if TYPE_CHECKING:
    from objcomm._transport.pending import Attendance
    from objcomm._transport.share import Share

_HEADER_NBYTES = HEADER.size
# An enumeration's members take longer to find, and to compare.
_MESSAGE = int(Kind.MESSAGE)
# Room for some small messages. The rest of a longer one is read to where it stays.
_RAW_NBYTES = 1 << 17


class Peer:
    """See the module.

    Attributes:
        rank: the peer's.
        ended: why the connection has ended; empty while it is up.
        farewell: what the peer has said before it closed the connection.
        arrived: by tag: what came before it was asked for, as bytes or as an offer's number.
        attendance: takes in first messages, if a thread attends to this peer.
        bells: by tag: what a thread waits for that takes first messages; over when there is one.
        outgoing: what has yet to go out, in order: bytes, the transfer that they end, and what is
            handed over with the first of them.
        contents: the same of ``CONTENT``, which everything else may overtake.
        descriptors: those that came before their frames; None for some that got lost.
    """

    __slots__ = (
        "_ahead",  # by tag: lengths of first messages that are not known to be taken, in order
        "_filled",  # the message that is being read: a transfer, or its tag and its bytes
        "_held",  # by tag: first messages for which there is no credit
        "_is_content",  # whether ``first_out`` gave a part of a content
        "_is_within",  # whether a part of the first content was sent
        "_lent_files",  # how many were handed over of which the peer has not said that it has them
        "_numbers",  # of this rank's offers
        "_offered",  # by number: this rank's offers that wait to be taken
        "_offers",  # by number: lengths of what the peer has offered, and not sent
        "_posted",  # by tag: the receives for which nothing has come
        "_raw",  # what was read and not looked at is ``_raw[:_used]``
        "_rooms",  # what is to be filled next by the same content
        "_shares",  # by number: the peer's offers that can be mapped
        "_taken",  # by number: receives for which content was asked
        "_untold",  # by tag: how many first messages were taken here, and the peer not told so
        "_used",
        "_view",
        "_waiting",  # how many words and offers are in ``arrived``
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
        self._untold: dict[int, int] = {}
        self._raw = bytearray(_RAW_NBYTES)
        self._view = memoryview(self._raw)
        self._used = 0
        self._rooms: deque[memoryview] = deque()
        self._filled: Transfer | tuple[int, bytes] | None = None

    # ------------------------------------------------------------------ what this rank sends

    def head_of(self, nbytes: int, tag: int) -> bytes:
        """The header of a message that may be sent now; empty if it has to be ``hold``-ed.

        The caller must send it next, followed by the message.
        """
        if tag >> LANE_BITS:
            return HEADER.pack(_MESSAGE, tag, nbytes, 0) if nbytes <= WORD_MAX_NBYTES else b""
        ahead = self._ahead.get(tag)
        if ahead is None:
            ahead = self._ahead[tag] = []
        if tag in self._held or not may_be_ahead(ahead, nbytes):  # none overtakes another
            return b""
        ahead.append(nbytes)
        return HEADER.pack(_MESSAGE, tag, nbytes, self._untold.pop(tag, 0))

    def queue(self, head: bytes, transfer: Transfer, sent: int = 0) -> None:
        """Let a message go out in its turn; of header and message so many bytes were sent."""
        if sent < _HEADER_NBYTES:
            self.outgoing.append((memoryview(head)[sent:], None, None))
            sent = _HEADER_NBYTES
        self.outgoing.append((transfer.view[sent - _HEADER_NBYTES :], transfer, None))

    def hold(self, transfer: Transfer, tag: int) -> None:
        """Keep a message until there is credit for it, or until the peer has room."""
        if tag >> LANE_BITS:
            number = self._offer(transfer, tag)
            self._say(Kind.OFFER, tag, transfer.view.nbytes, number)
        else:
            self._held.setdefault(tag, deque()).append(transfer)

    def lend(self, transfer: Lent, tag: int) -> None:
        """Offer members that the peer may map, or only their content if too many files wait.

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
        """What goes out next; None if there is nothing."""
        self._is_content = self._is_within or not self.outgoing
        queue = self.contents if self._is_content else self.outgoing
        return queue[0] if queue else None

    def sent(self, nbytes: int) -> None:
        """So many bytes of what ``first_out`` gave were sent, and its descriptors with them."""
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
        """The system does not hand over what ``first_out`` gave; what to send instead."""
        _, tag, nbytes, number = HEADER.unpack(self.outgoing[0][0])
        offer = memoryview(HEADER.pack(Kind.OFFER, tag, nbytes, number))
        self.outgoing[0] = offer, None, None
        return offer

    # ------------------------------------------------------------------ what this rank receives

    def take(self, tag: int) -> bytes | None:
        """The next first message; None if none has come."""
        arrived = self.arrived.get(tag)
        if not arrived:
            return None
        message: bytes = arrived.popleft()  # type: ignore[assignment]  # first messages are never offered
        self._note_taken(tag, len(message))
        return message

    def give_out(self, tag: int) -> None:
        """Hand what has come to the function that accepts all messages with a tag."""
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
        """Let a receive have what has come, or wait for it.

        Raises:
            LinkClosed: the connection has ended, and nothing that came before is left.
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
        """Let a receive have what the peer has offered under a number."""
        nbytes = self._offers[number]
        room = transfer.nbytes if isinstance(transfer, Members) else transfer.view.nbytes
        if isinstance(transfer, Loan) and nbytes == transfer.nbytes:
            transfer.share = self._shares.pop(number, None)
            transfer.number = number
            if transfer.share is not None:
                del self._offers[number]
                self._say(Kind.HELD, 0, 0, number)
            transfer.end()
        elif nbytes > room or isinstance(transfer, Loan) or number in self._shares:
            self.refuse(f"{nbytes} bytes for {room}")
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
        """A first message was taken, and its sender hears of it before it has to wait."""
        untold = self._untold[tag] = self._untold.get(tag, 0) + 1
        if untold >= CREDIT_EACH or nbytes > CREDIT_FROM_NBYTES:
            del self._untold[tag]
            self._say(Kind.CREDIT, tag, 0, untold)

    # ------------------------------------------------------------------ bytes in

    def room(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        filling = self.filling
        return self._view[self._used :] if filling is None else filling

    def received(self, nbytes: int) -> None:
        """So many bytes are in ``room``, with what was appended to ``descriptors``."""
        filling = self.filling
        if filling is None:
            self._used += nbytes
            self._parse()
        elif nbytes < len(filling):
            self.filling = filling[nbytes:]
        else:
            self._conclude()

    def _parse(self) -> None:  # noqa: C901, PLR0912, PLR0915  # one loop, of which each step by itself would cost a call
        """Take the frames out of what was read; what is left of the last one goes to the front."""
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
                most = WORD_MAX_NBYTES if tag >> LANE_BITS else UNASKED_MAX_NBYTES
                if nbytes > most:
                    self.refuse(f"a message of {nbytes} bytes unasked")
                elif end - at >= nbytes:
                    self._arrive(tag, self._view[at : at + nbytes])
                    at += nbytes
                elif not self._may_come(tag, nbytes):
                    self.refuse("more first messages than it may be ahead")
                else:
                    # The rest of it is read to where it belongs.
                    content = allocate(BufferKind.BYTES, nbytes)
                    room = writable(content.flat)
                    room[: end - at] = self._view[at:end]
                    self.filling = room[end - at :]
                    self._filled = tag, content.owner
                    at = end
            elif kind == Kind.CONTENT:
                at = self._begin_content(number, at, end)
            elif kind in (Kind.OFFER, Kind.SHARE):
                self._hear_offer(tag, nbytes, number, is_shared=kind == Kind.SHARE)
            elif kind in (Kind.TAKE, Kind.HELD):
                self._give(number, is_held=kind == Kind.HELD)
            elif kind == Kind.CREDIT:
                self._credit(tag, number)
            elif kind == Kind.FAREWELL and 0 < nbytes <= FAREWELL_MAX_NBYTES:
                if end - at < nbytes:
                    at -= _HEADER_NBYTES  # it is read whole
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
        """A message is here whole."""
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
        arrived.append(bytes(content))  # which copies no bytes
        if self.attendance is not None and tag in self.attendance.accepts:
            self.give_out(tag)
            return
        bell = self.bells.get(tag)
        if bell is not None:
            bell.is_over = True
            if bell.turn is not None:
                bell.end()

    def _hear_offer(self, tag: int, nbytes: int, number: int, *, is_shared: bool) -> None:
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
        """The peer has room for what was offered, or has mapped it."""
        transfer, tag = self._offered.get(number, (None, 0))
        is_shared = isinstance(transfer, Lent) and transfer.share is not None
        if transfer is None or (is_held and not is_shared):
            self.refuse("an answer to an offer that was not made")
            return
        del self._offered[number]  # not before: a thread that waits for it hears of a refusal
        if isinstance(transfer, Lent):
            self._lent_files -= transfer.files
        if is_held:
            transfer.end()
            return
        head = HEADER.pack(Kind.CONTENT, tag, 0, number)
        self.contents.append((memoryview(head), None, None))
        for each in transfer.views[:-1] if isinstance(transfer, Members) else ():
            self.contents.append((each, None, None))
        self.contents.append((transfer.view, transfer, None))

    def _begin_content(self, number: int, at: int, end: int) -> int:
        """Fill a transfer with what has been read of its content; returns where that ends."""
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
        """What was being filled is full; there may be more of it."""
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
        """The peer has taken so many first messages, which may let others go out."""
        ahead = self._ahead.get(tag, [])
        if not 0 < count <= len(ahead):
            self.refuse("credit for what was not sent")
            return
        del ahead[:count]
        held = self._held.get(tag)
        while held and may_be_ahead(ahead, nbytes := held[0].view.nbytes):
            ahead.append(nbytes)
            head = HEADER.pack(_MESSAGE, tag, nbytes, self._untold.pop(tag, 0))
            self.queue(head, held[0])
            held.popleft()
        if not held:
            self._held.pop(tag, None)

    # ------------------------------------------------------------------ limits and the end

    def _may_come(self, tag: int, nbytes: int) -> bool:
        """Whether the peer may have sent this before what has come is taken."""
        if tag >> LANE_BITS:
            return True
        waiting: list[int] = [*map(len, self.arrived.get(tag, ()))]  # type: ignore[arg-type]  # no offers
        return may_be_ahead(waiting, nbytes)

    def _is_one_too_many(self) -> bool:
        """Count a word or an offer that has to wait; whether it may not, which ends all."""
        self._waiting += 1
        if self._waiting <= WAITING_MAX:
            return False
        self.refuse(f"more than {WAITING_MAX} words and offers ahead")
        return True

    def _is_one_lane_too_many(self) -> bool:
        """Whether first messages come in a lane in which they may not, which ends all."""
        lanes = [of for of, each in self.arrived.items() if each and not of >> LANE_BITS]
        if len(lanes) < WAITING_LANES_MAX:
            return False
        self.refuse(f"messages in more than {WAITING_LANES_MAX} lanes ahead")
        return True

    def refuse(self, what: str) -> None:
        """End because the peer has sent what no link sends."""
        self.end(f"rank {self.rank} has sent {what}, which objcomm never does")

    def end(self, reason: str) -> None:
        """End all that is under way; what has come whole can still be taken.

        May be called again, by a thread that was interrupted in the middle of it.
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
