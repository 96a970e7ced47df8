"""One operation's transfers over a link: starting them, waiting for them, and naming failures.

A receiver waits for one *unit* at a time. Normally, all data after a head is one unit, and a single
receipt informs the sender. If a message's header says that it is paced, each piece is a unit with
its own receipt, so that both ends know how many bytes have arrived. This module knows tags and
receipts, but not what the bytes mean.
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
    Pieces,
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

#: A process may have 65,530 mappings. Smaller members can be copied just as fast.
MAPPED_MIN_NBYTES = 1 << 20

#: The tensors of one unit, in order.
Unit = list[torch.Tensor]


class Meter(Protocol):
    """Receives a call's progress in bytes, on the thread that moves them; never raises."""

    def expect(self, nbytes: int) -> None:
        """Announce ``nbytes`` more bytes to move."""

    def moved(self, nbytes: int) -> None:
        """Report ``nbytes`` more bytes as arrived, here or at all ranks this one sends them to."""


class _Nobody:
    def expect(self, nbytes: int) -> None:
        """See ``Meter``."""

    def moved(self, nbytes: int) -> None:
        """See ``Meter``."""


#: The meter of a call that shows no progress.
NOBODY: Meter = _Nobody()


def is_paced(message: Message) -> bool:
    """Return whether each piece of the data after the head has a receipt."""
    return bool(message.header.flags & _PACED)


def nbytes_of(units: Sequence[Unit]) -> int:
    """Return the total length of some units in bytes."""
    return sum(flat.numel() for unit in units for flat in unit)


class Arriving(NamedTuple):
    """Bytes on their way to this rank.

    Attributes:
        flat: the memory that they arrive in.
        await_from: waits for them; takes the rank that sends them.
    """

    flat: torch.Tensor
    await_from: Callable[[int], None]

    def wait(self, peer: int) -> torch.Tensor:
        """Wait for the bytes, and return the memory with them."""
        self.await_from(peer)
        return self.flat


class Loan(NamedTuple):
    """Memory that another rank on this host hands over to this one.

    Attributes:
        buffers: where the content goes.
        peer: the rank that owns the memory.
        borrowed: the transfer.
    """

    buffers: Sequence[Buffer]
    peer: int
    borrowed: Borrowed


class _Milestone(NamedTuple):
    """A unit on its way from this rank to some others.

    Attributes:
        nbytes: number of bytes to report as moved once all of the ranks have it.
        receipts: one per rank: the pending receive, the rank, and the memory for the receipt.
    """

    nbytes: int
    receipts: list[tuple[Pending, int, torch.Tensor]]


class Transfers:
    """See the module docstring. Sends are only started; ``finish`` completes them.

    Attributes:
        lane: the lane on which the call is made.
        entry: the call's record on this rank, which counts bytes moved over the link.
        sends: unfinished sends, each with its peer, its memory, and the owner of that memory.
        milestones: receipts that ``finish`` waits for.
    """

    entry: CallRecord
    _link: Link
    lane: Lane
    _deadline: Deadline
    _meter: Meter
    sends: list[tuple[Pending, int, Memory | Pieces, object]]
    milestones: Sequence[list[_Milestone]] = ()

    # Properties, because small messages need none of these tags.

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
        """Cut bytes so that a receiver that waits for them notices when the peer goes away.

        If the link needs it, the last byte is sent separately. The receiver waits for that byte
        first: its receive remains posted until everything before it has arrived.
        """
        if not self._link.needs_last_byte_apart or not pieces or pieces[-1].numel() <= 1:
            return pieces
        *rest, last = pieces
        return [*rest, last[:-1], last[-1:]]

    def units(
        self, message: Message, flats: Sequence[torch.Tensor], chunk_nbytes: int
    ) -> list[Unit]:
        """Cut data after a head, or a part of it, the same way on sender and receiver."""
        if is_paced(message):
            return [self.ended([piece]) for flat in flats for piece in flat.split(chunk_nbytes)]
        return [self.ended(list(flats))] if flats else []

    def send_flat(
        self, flat: torch.Tensor, peer: int, *, is_result: bool = False, is_ended: bool
    ) -> None:
        """Start sending bytes that both ranks agreed on; ``peer`` calls ``arriving``.

        Args:
            flat: ``uint8``; must not change before ``finish``.
            peer: the rank to send to.
            is_result: whether it belongs to the stream of results, not that of payloads.
            is_ended: whether the receiver waits for its end first; see ``ended``.
        """
        tag = self._result_tag if is_result else self._payload_tag
        for piece in self.ended([flat]) if is_ended else [flat]:
            self._send(piece, peer, tag, flat)

    def arriving(
        self, flat: torch.Tensor, peer: int, *, is_result: bool = False, is_ended: bool
    ) -> "Arriving":
        """Start receiving what ``peer`` sends with ``send_flat`` and the same options."""
        tag = self._result_tag if is_result else self._payload_tag
        pieces = self.ended([flat]) if is_ended else [flat]
        pendings = [self._post(peer, piece, tag) for piece in pieces]
        return Arriving(flat, functools.partial(self._wait_backwards, pendings))

    def confirm(self, received_from: Iterable[int], sent_to: Iterable[int]) -> None:
        """Send receipts to some ranks, and let ``finish`` wait for receipts from others."""
        for peer in received_from:
            self._send(empty(1), peer, self._receipt_tag, None)
        for peer in sent_to:
            flat = empty(1)
            self.sends.append((self._post(peer, flat, self._receipt_tag), peer, flat, None))

    def ready_signals_of(self, peers: Iterable[int]) -> Callable[[], None]:
        """Expect go-aheads from some ranks; the returned function waits for them.

        Like ``_expect_receipts``, call this before starting the sends that they follow.
        """
        flats = [(peer, empty(1)) for peer in peers]
        posted = [(self._post(peer, flat, self._receipt_tag), peer, flat) for peer, flat in flats]

        def wait() -> None:
            for pending, peer, _ in posted:
                self._wait(pending, peer)

        return wait

    def give_signal(self, peer: int) -> None:
        """Signal to ``peer`` that this rank accepts the data that follows."""
        self._send(empty(1), peer, self._receipt_tag, None)

    def send_raw(self, raw: bytes, peer: int, tag: int) -> None:
        """Start sending a few bytes that are not part of a message."""
        self._send(torch.frombuffer(bytearray(raw), dtype=torch.uint8), peer, tag, None)

    def share(
        self, flats: Sequence[torch.Tensor], peers: Sequence[int], share: Share | None
    ) -> None:
        """Start handing bytes over to ranks on this host, all of which call ``borrow``.

        Args:
            flats: empty if there is nothing to hand over; must not change before ``finish``.
            peers: the ranks to hand them to.
            share: holds their content; None if the system provides no such memory.
        """
        for peer in peers if flats else ():
            try:
                pending = self._sharing(peer).send_share(share, flats, peer, self._payload_tag)
            except LinkError as error:
                raise self._naming(error, (peer,)) from error
            self.sends.append((pending, peer, flats[0], flats))
            self.entry.sent_nbytes += nbytes_of([list(flats)])

    def borrow(self, buffers: Sequence[Buffer], peer: int) -> "Loan | None":
        """Start receiving what ``peer`` hands over with ``share``; None if there is nothing.

        Args:
            buffers: where the content goes: copied to those with memory, mapped for the others.
            peer: the rank that hands it over.
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
        """Wait for the memory handed over; return the buffers, all filled.

        Raises:
            WireError: it is not what was announced, or there is no memory for a copy.
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
        """Give some ranks on this host a share, and get theirs; all of them call this.

        Args:
            share: this rank's share; None if it has none.
            peers: the other ranks.

        Raises:
            TransportError: one of them is gone.
        """
        token = [empty(1)]  # sent in place of a missing share
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
        """Receive the content over the link, if the system has no memory to share."""
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
            raise WireError(f"nothing is handed over to rank {peer}")  # a bug in the caller
        return sharing

    def finish(self) -> None:
        """Wait until everything that was sent has been taken; receipts are awaited first.

        A link may not wake a thread that waits for a send when the connection closes. With such a
        link, one of its own threads does the waiting, so that this thread can give up.
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
        """Wait until the peers have everything that was sent, before this rank waits elsewhere."""
        if self.sends:
            try:
                self._link.wait_apart(self._await_sends)
            except LinkError as error:  # the wait was given up
                raise self._naming(error, (self.entry.awaits,)) from error
            self.sends.clear()

    def _await_sends(self) -> None:
        for pending, peer, _, _ in reversed(self.sends):
            self._wait(pending, peer)

    def _expect_receipts(
        self, units: Sequence[Unit], peers: Sequence[int], *, is_counted: bool = True
    ) -> None:
        """Let ``finish`` wait for each unit's receipts in order, and report them to the meter.

        Call this before starting the sends. A rank may send a receipt only after the link has
        announced that this rank posted the receive, and the announcement would queue behind them.
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
        """Start receiving what ``peer`` sends; the iterator waits for one unit after another."""
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
        """Wait for a unit, and report that it has arrived."""
        self._wait_backwards(pendings, peer)
        self._meter.moved(nbytes_of([unit]))

    def _send(self, flat: torch.Tensor, peer: int, tag: int, owner: object) -> None:
        try:
            pending = self._link.send(flat, peer, tag)
        except LinkError as error:
            raise self._naming(error, (peer,)) from error
        self.entry.sent_nbytes += 0 if tag & RECEIPT else flat.numel()
        if pending is not None:
            # The memory must outlive the transfer, so its owner is stored with it.
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
        """Wait for the end first; see ``ended``."""
        for pending in reversed(pendings):
            self._wait(pending, peer)

    def _wait(self, pending: Pending, peer: int) -> None:
        self.entry.awaits = peer
        try:
            self._link.wait(pending, self._deadline.left())
        except LinkError as error:
            raise self._naming(error, (peer,)) from error

    def _naming(self, error: LinkError, peers: tuple[int, ...]) -> TransportError:
        """Convert a link's error to one that names the ranks involved."""
        if self._has_timed_out(error):
            return TransportTimeout(self.entry.operation, peers, self._deadline.seconds)
        return TransportError(self.entry.operation, peers, error.reason)

    def _has_timed_out(self, error: LinkError) -> bool:
        # The watchdog marks the call as expired before it closes connections. The clock alone says
        # nothing: if a busy machine held this thread up, an earlier end may be noticed only now.
        return self.entry.has_expired or isinstance(error, LinkTimeout)


def share_of(flats: Sequence[torch.Tensor]) -> Share | None:
    """Return tensors' content in memory to hand over; None if there is no memory or no tensor."""
    with contextlib.suppress(OSError):  # no memory left, or the system refuses such files
        return Share.of(flats) if flats else None
    return None


def with_memory(buffer: Buffer) -> Buffer:
    """Return the same buffer with memory, if it has none."""
    flat = buffer.flat
    return allocate(buffer.kind, flat.numel()) if flat.is_meta else buffer


def taken_out(buffers: Sequence[Buffer], share: Share) -> list[Buffer]:
    """Return buffers with the content of a share, which is no longer needed afterwards."""
    try:
        where = places([each.flat.numel() for each in buffers])
        return [_filled(*each, share) for each in zip(buffers, where, strict=True)]
    except ValueError as error:
        reason = f"the shared memory is smaller than its sender said: {error}"
        raise WireError(reason) from error


def _filled(buffer: Buffer, place: Place, share: Share) -> Buffer:
    """Return a buffer with its content: mapped if it has no memory, otherwise copied."""
    if buffer.flat.is_meta:
        with contextlib.suppress(OSError):  # too many mappings in this process
            return over(buffer.kind, share.mapped(place, buffer.flat.numel()))
    buffer = with_memory(buffer)
    share.read_into(buffer.flat, place)
    return buffer
