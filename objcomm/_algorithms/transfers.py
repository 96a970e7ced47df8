"""One operation's transfers over a link: begun, waited for, and named where they fail.

A receiver waits for a *unit* in one go. Normally all that follows a head is one unit, and one
receipt tells the sender of it. Where a message's header says that it is paced, each piece is a unit
with a receipt of its own, so that both ends know how many bytes have arrived. Knows tags and
receipts; knows no message, and nothing of what the bytes mean.
"""

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from objcomm._codecs.buffers import Buffer, allocate, empty, over
from objcomm._observe.history import CallRecord
from objcomm._transport.lane import Lane
from objcomm._transport.link import (
    RECEIPT,
    Borrowed,
    Deadline,
    Link,
    LinkError,
    LinkTimeout,
    Memory,
    Pending,
    Sharing,
    payload_tag,
    receipt_tag,
    result_tag,
)
from objcomm._transport.share import Place, Share, places
from objcomm._wire.header import Flag
from objcomm._wire.message import Message
from objcomm.errors import TransportError, TransportTimeout, WireError

_PACED = int(Flag.PACED)  # an IntFlag's ``&`` costs 0.7 µs

#: A process may have 65,530 mappings; smaller members are as fast to copy.
MAPPED_MIN_NBYTES = 1 << 20

#: The tensors of one unit, in order.
Unit = list[torch.Tensor]


class Meter(Protocol):
    """Is told of a call's bytes while they move, on the thread that moves them; never raises."""

    def expect(self, nbytes: int) -> None:
        """So many more are to move."""

    def moved(self, nbytes: int) -> None:
        """So many have arrived: here, or at all the ranks to which this one sends them."""


class _Nobody:
    def expect(self, nbytes: int) -> None:
        """See ``Meter``."""

    def moved(self, nbytes: int) -> None:
        """See ``Meter``."""


#: The meter of a call that shows nothing.
NOBODY: Meter = _Nobody()


def is_paced(message: Message) -> bool:
    """Whether each piece of what follows the head has a receipt."""
    return bool(message.header.flags & _PACED)


def nbytes_of(units: Sequence[Unit]) -> int:
    """How long some units are together."""
    return sum(flat.numel() for unit in units for flat in unit)


class Arriving(NamedTuple):
    """Bytes on their way to this rank.

    Attributes:
        flat: where they arrive.
        await_from: waits for them, given the rank that sends them.
    """

    flat: torch.Tensor
    await_from: Callable[[int], None]

    def wait(self, peer: int) -> torch.Tensor:
        """Where they have arrived."""
        self.await_from(peer)
        return self.flat


class Loan(NamedTuple):
    """Memory that a rank of this host hands over to this one.

    Attributes:
        buffers: what its members become.
        peer: whose it is.
        borrowed: the transfer.
    """

    buffers: Sequence[Buffer]
    peer: int
    borrowed: Borrowed


class _Milestone(NamedTuple):
    """A unit on its way from this rank to some others.

    Attributes:
        nbytes: how many bytes have moved when all of them have it.
        receipts: each one's: the receive, the rank, and where it arrives.
    """

    nbytes: int
    receipts: list[tuple[Pending, int, torch.Tensor]]


class Transfers:
    """See the module; sends are begun, ``finish`` ends them.

    Attributes:
        lane: on which the call is made.
        entry: the call on this rank, which counts what moves over the link.
        sends: those that are not over, with their peers, their memory, and what owns that.
        milestones: receipts that ``finish`` waits for.
    """

    entry: CallRecord
    _link: Link
    lane: Lane
    _deadline: Deadline
    _meter: Meter
    sends: list[tuple[Pending, int, Memory, object]]
    milestones: Sequence[list[_Milestone]] = ()

    # What is small needs none of these.

    @property
    def _payload_tag(self) -> int:
        return payload_tag(self.lane.number, self.entry.header.sequence)

    @property
    def _receipt_tag(self) -> int:
        return receipt_tag(self.lane.number, self.entry.header.sequence)

    @property
    def _result_tag(self) -> int:
        return result_tag(self.lane.number, self.entry.header.sequence)

    def ended(self, pieces: list[torch.Tensor]) -> Unit:
        """The same bytes, cut so that who waits for them hears of a peer's end.

        Where the link needs it, the last byte travels by itself. A receiver waits for that first:
        its receive stands posted, and untouched, until all before it has come.
        """
        if not self._link.needs_last_byte_apart or not pieces or pieces[-1].numel() <= 1:
            return pieces
        *rest, last = pieces
        return [*rest, last[:-1], last[-1:]]

    def units(
        self, message: Message, flats: Sequence[torch.Tensor], chunk_nbytes: int
    ) -> list[Unit]:
        """What follows a head, or a part of it, as sender and receiver cut it alike."""
        if is_paced(message):
            return [self.ended([piece]) for flat in flats for piece in flat.split(chunk_nbytes)]
        return [self.ended(list(flats))] if flats else []

    def send_flat(
        self, flat: torch.Tensor, peer: int, *, is_result: bool = False, is_ended: bool
    ) -> None:
        """Begin to send bytes that both ranks have agreed on; ``peer`` calls ``arriving``.

        Args:
            flat: ``uint8``; it may not change before ``finish``.
            peer: to whom.
            is_result: which of the two streams between two ranks it belongs to.
            is_ended: whether the receiver waits for its end first, see ``ended``.
        """
        tag = self._result_tag if is_result else self._payload_tag
        for piece in self.ended([flat]) if is_ended else [flat]:
            self._send(piece, peer, tag, flat)

    def arriving(
        self, flat: torch.Tensor, peer: int, *, is_result: bool = False, is_ended: bool
    ) -> "Arriving":
        """Begin to receive what ``peer`` sends by ``send_flat`` with the same options."""
        tag = self._result_tag if is_result else self._payload_tag
        pieces = self.ended([flat]) if is_ended else [flat]
        pendings = [self._post(peer, piece, tag) for piece in pieces]
        return Arriving(flat, functools.partial(self._wait_backwards, pendings))

    def confirm(self, received_from: Iterable[int], sent_to: Iterable[int]) -> None:
        """Tell some ranks that all they sent has come, and let ``finish`` wait for such words."""
        for peer in received_from:
            self._send(empty(1), peer, self._receipt_tag, None)
        for peer in sent_to:
            flat = empty(1)
            self.sends.append((self._post(peer, flat, self._receipt_tag), peer, flat, None))

    def words_of(self, peers: Iterable[int]) -> Callable[[], None]:
        """Expect a word of some ranks that they take what follows; what comes back waits for it.

        To be called before it is sent, as ``_expect_receipts``.
        """
        flats = [(peer, empty(1)) for peer in peers]
        posted = [(self._post(peer, flat, self._receipt_tag), peer, flat) for peer, flat in flats]

        def wait() -> None:
            for pending, peer, _ in posted:
                self._wait(pending, peer)

        return wait

    def give_word(self, peer: int) -> None:
        """Tell ``peer`` that this rank takes what follows."""
        self._send(empty(1), peer, self._receipt_tag, None)

    def tell(self, raw: bytes, peer: int, tag: int) -> None:
        """Begin to send a few bytes that are no part of a message."""
        self._send(torch.frombuffer(bytearray(raw), dtype=torch.uint8), peer, tag, None)

    def share(
        self, flats: Sequence[torch.Tensor], peers: Sequence[int], share: Share | None
    ) -> None:
        """Begin to hand bytes over to ranks of this host, all of which call ``borrow``.

        Args:
            flats: none if nothing is to be handed over; they may not change before ``finish``.
            peers: to whom.
            share: has their content; None where the system gives no such memory.
        """
        for peer in peers if flats else ():
            try:
                pending = self._sharing(peer).send_share(share, flats, peer, self._payload_tag)
            except LinkError as error:
                raise self._naming(error, (peer,)) from error
            self.sends.append((pending, peer, flats[0], flats))
            self.entry.sent_nbytes += nbytes_of([list(flats)])

    def borrow(self, buffers: Sequence[Buffer], peer: int) -> "Loan | None":
        """Begin to receive what ``peer`` hands over by ``share``; None if that is nothing.

        Args:
            buffers: what it becomes: with memory to copy it into, or without, to be mapped.
            peer: whose it is.
        """
        if not buffers:
            return None
        nbytes = sum(each.flat.numel() for each in buffers)
        self.entry.received_nbytes += nbytes
        self._meter.expect(nbytes)
        try:
            borrowed = self._sharing(peer).recv_share(nbytes, peer, self._payload_tag)
        except LinkError as error:
            raise self._naming(error, (peer,)) from error
        return Loan(buffers, peer, borrowed)

    def lent(self, loan: "Loan | None") -> list[Buffer]:
        """Wait for what is handed over; the buffers, all of them with memory that is filled.

        Raises:
            WireError: it is not what was announced; or there is no memory for a copy.
            TransportError: the peer is gone.
        """
        if loan is None:
            return []
        self._wait(loan.borrowed, loan.peer)
        share = loan.borrowed.share
        if share is None:
            filled = self._copied(loan)
        elif not share.is_final():
            raise WireError("the sender could still change the memory that it shared")
        else:
            filled = taken_out(loan.buffers, share)
            share.close()
        self._meter.moved(sum(each.flat.numel() for each in filled))
        return filled

    def swap(self, share: Share | None, peers: Sequence[int]) -> dict[int, Share | None]:
        """Give some ranks of this host a share, and get theirs; all of them call this.

        Args:
            share: this rank's; None if it has none.
            peers: the others.

        Raises:
            TransportError: one of them is gone.
        """
        token = [empty(1)]  # a share stands for content, which is sent where there is none
        self.share(token, peers, share)
        given: dict[int, Share | None] = {}
        for peer in peers:
            sharing = self._sharing(peer)
            try:
                borrowed = sharing.recv_share(1, peer, self._payload_tag)
                self._wait(borrowed, peer)
                given[peer] = borrowed.share
                if borrowed.share is None:
                    self._wait(sharing.recv_instead(borrowed, [empty(1)]), peer)
            except LinkError as error:
                raise self._naming(error, (peer,)) from error
        return given

    def _copied(self, loan: "Loan") -> list[Buffer]:
        """The same over the link, where the system has nothing to share."""
        buffers = [with_memory(each) for each in loan.buffers]
        try:
            flats = [each.flat for each in buffers]
            pending = self._sharing(loan.peer).recv_instead(loan.borrowed, flats)
        except LinkError as error:
            raise self._naming(error, (loan.peer,)) from error
        self._wait(pending, loan.peer)
        return buffers

    def _sharing(self, peer: int) -> Sharing:
        sharing = self._link.sharing_with(peer)
        if sharing is None:
            raise WireError(f"nothing is handed over to rank {peer}")  # a fault of the caller's
        return sharing

    def finish(self) -> None:
        """Wait until everything that was sent has been taken; receipts come before what they tell.

        A link need not wake who waits for a send when the connection closes. So each wait is one
        that can be abandoned, by a thread of the link's where that is so.
        """
        if self.milestones:
            for row in itertools.zip_longest(*self.milestones):
                for milestone in filter(None, row):
                    for pending, peer, _ in milestone.receipts:
                        self._wait(pending, peer)
                    self._meter.moved(milestone.nbytes)
            self.milestones = ()
        if self.sends:
            self.hand_over()

    def hand_over(self) -> None:
        """Wait until the peers have all that was sent, before this rank waits elsewhere."""
        if self.sends:
            try:
                self._link.wait_apart(self._await_sends)
            except LinkError as error:  # given up
                raise self._naming(error, (self.entry.awaits,)) from error
            self.sends.clear()

    def _await_sends(self) -> None:
        for pending, peer, _, _ in reversed(self.sends):
            self._wait(pending, peer)

    def _expect_receipts(
        self, units: Sequence[Unit], peers: Sequence[int], *, is_counted: bool = True
    ) -> None:
        """Let ``finish`` wait for all receipts of each unit in turn, and tell the meter.

        To be called before the units are sent. A receipt may leave its rank only after the link's
        word that this one has posted the receive, and that would queue behind all that is sent.
        """
        column = []
        for unit in units:
            receipts = []
            for peer in peers:
                flat = empty(1)
                receipts.append((self._post(peer, flat, self._receipt_tag), peer, flat))
            column.append(_Milestone(nbytes_of([unit]) if is_counted else 0, receipts))
        self.milestones = [*self.milestones, column]

    def _stream(self, units: Sequence[Unit], peer: int, *, is_paced: bool) -> Iterator[Unit]:
        """Begin to receive what ``peer`` sends; the iterator waits for one unit after another."""
        ahead = self._link.ahead if is_paced else len(units)
        posted = deque(self._posted(peer, unit) for unit in units[:ahead])
        return self._arrivals(units, peer, posted, is_paced=is_paced)

    def _arrivals(
        self, units: Sequence[Unit], peer: int, posted: deque[list[Pending]], *, is_paced: bool
    ) -> Iterator[Unit]:
        ahead = len(posted)
        for at, unit in enumerate(units):
            self._take(unit, posted.popleft(), peer)
            posted.extend(self._posted(peer, each) for each in units[at + ahead : at + ahead + 1])
            if is_paced:
                self._send(empty(1), peer, self._receipt_tag, None)
            yield unit

    def _take(self, unit: Unit, pendings: Sequence[Pending], peer: int) -> None:
        """Wait for a unit, and tell that it has come."""
        self._wait_backwards(pendings, peer)
        self._meter.moved(nbytes_of([unit]))

    def _send(self, flat: torch.Tensor, peer: int, tag: int, owner: object) -> None:
        try:
            pending = self._link.send(flat, peer, tag)
        except LinkError as error:
            raise self._naming(error, (peer,)) from error
        self.entry.sent_nbytes += 0 if tag & RECEIPT else flat.numel()
        if pending is not None:
            # The memory must outlive the transfer, so its owner is kept beside it.
            self.sends.append((pending, peer, flat, owner))

    def _post(self, peer: int, flat: torch.Tensor, tag: int) -> Pending:
        self.entry.received_nbytes += 0 if tag & RECEIPT else flat.numel()
        try:
            return self._link.recv(flat, peer, tag)
        except LinkError as error:
            raise self._naming(error, (peer,)) from error

    def _posted(self, peer: int, flats: Iterable[torch.Tensor]) -> list[Pending]:
        return [self._post(peer, flat, self._payload_tag) for flat in flats]

    def _wait_backwards(self, pendings: Sequence[Pending], peer: int) -> None:
        """Wait for the end first: see ``ended``."""
        for pending in reversed(pendings):
            self._wait(pending, peer)

    def _wait(self, pending: Pending, peer: int) -> None:
        self.entry.awaits = peer
        try:
            self._link.wait(pending, self._deadline.left())
        except LinkError as error:
            raise self._naming(error, (peer,)) from error

    def _naming(self, error: LinkError, peers: tuple[int, ...]) -> TransportError:
        """What a link raised, as an error that names the ranks concerned."""
        if self._has_timed_out(error):
            return TransportTimeout(self.entry.operation, peers, self._deadline.seconds)
        return TransportError(self.entry.operation, peers, error.reason)

    def _has_timed_out(self, error: LinkError) -> bool:
        # What the watchdog closes because our limit has passed, it marks first. Another end may
        # have come before, and be noticed late: a busy machine has held this thread up.
        return self.entry.has_expired or isinstance(error, LinkTimeout)


def share_of(flats: Sequence[torch.Tensor]) -> Share | None:
    """Members' content in memory to be handed over; None if there is none of it, or of them."""
    with contextlib.suppress(OSError):  # no memory for it, or the system refuses such files
        return Share.of(flats) if flats else None
    return None


def with_memory(buffer: Buffer) -> Buffer:
    """The same with memory, if it has none."""
    flat = buffer.flat
    return allocate(buffer.kind, flat.numel()) if flat.is_meta else buffer


def taken_out(buffers: Sequence[Buffer], share: Share) -> list[Buffer]:
    """Buffers with the content of a share, which they do not need any more."""
    try:
        where = places([each.flat.numel() for each in buffers])
        return [_filled(*each, share) for each in zip(buffers, where, strict=True)]
    except ValueError as error:
        told = f"the shared memory is smaller than its sender said: {error}"
        raise WireError(told) from error


def _filled(buffer: Buffer, place: Place, share: Share) -> Buffer:
    """A buffer with its content: mapped if it has no memory, and copied where it has."""
    if buffer.flat.is_meta:
        with contextlib.suppress(OSError):  # the process has no room for more mappings
            return over(buffer.kind, share.mapped(place, buffer.flat.numel()))
    buffer = with_memory(buffer)
    share.read_into(buffer.flat, place)
    return buffer
