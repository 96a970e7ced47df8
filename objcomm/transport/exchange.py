"""One operation's traffic on one lane: heads, what follows them, and its figures.

Knows links, messages and this operation's header; knows nothing of what the messages mean, nor
who has to send to whom.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch

from objcomm.admission import Gate
from objcomm.errors import TransportError, TransportTimeout
from objcomm.frames import EVERYONE, Header
from objcomm.history import Entry
from objcomm.memory import empty, view
from objcomm.message import Message, open_body
from objcomm.transport import topology
from objcomm.transport.base import (
    Deadline,
    Link,
    Pending,
    head_tag,
    payload_tag,
    reason_of,
    receipt_tag,
    result_tag,
)
from objcomm.transport.device import DevicePath
from objcomm.transport.lane import Lane, Standing
from objcomm.transport.outage import cause_of

# A transfer that is done says so even after the link has broken, so any limit serves to ask it;
# Gloo takes zero for its own default.
_INSTANT = timedelta(milliseconds=1)

# So much is taken by the system's socket buffers, whether or not the peer reads.
_UNNOTICED_NBYTES = 1 << 16


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


class Exchange:
    """What one rank sends and receives in one operation; sends are begun, ``finish`` ends them.

    Attributes:
        entry: the call on this rank.
        header: what this rank's own messages carry.
        device: moves the members that lie on an accelerator.
        gate: signs this rank's messages and judges the others'.
        rank: this rank, within the group.
        size: number of ranks.
        hosts: of each rank, as a number.
        rounds: how often this rank had to wait for what depended on an earlier message.
        sent_nbytes: bytes sent over the link so far, to all ranks together.
        received_nbytes: bytes received over the link so far.
    """

    def __init__(  # all of them are facts of one call, named by the caller
        self,
        *,
        link: Link,
        lane: Lane,
        entry: Entry,
        deadline: Deadline,
        gate: Gate,
        device: DevicePath,
    ) -> None:
        """Begin.

        Args:
            link: joins the ranks.
            lane: whose turn it is.
            entry: the call, whose header has what must agree on all ranks.
            deadline: for all waits together.
            gate: signs this rank's messages and judges the others'.
            device: see ``device.DevicePath``.
        """
        self.header = header = entry.header
        self.device = device
        self.rank = link.rank
        self.size = link.size
        self.hosts = link.hosts
        self.rounds = self.sent_nbytes = self.received_nbytes = 0
        self._link = link
        self._lane = lane
        self.entry = entry
        self._deadline = deadline
        self.gate = gate
        self._head_tag = head_tag(lane.number)
        self._payload_tag = payload_tag(lane.number, header.sequence)
        self._receipt_tag = receipt_tag(lane.number, header.sequence)
        self._result_tag = result_tag(lane.number, header.sequence)
        self._sends: list[tuple[Pending, int, torch.Tensor, object]] = []

    def send_head(
        self, message: Message, peers: Iterable[int], destination: int = EVERYONE
    ) -> None:
        """Begin to send the first part of ``message`` to some ranks, or for one rank alone."""
        flat = torch.frombuffer(self.gate.head_of(message, destination), dtype=torch.uint8)
        for peer in peers:
            self._send(flat, peer, self._head_tag, message)

    def recv_heads(self, peers: Sequence[int], *, made_by: int | None = None) -> list[Message]:
        """Wait for the next first message of each of ``peers``.

        Args:
            peers: whose connections they come over.
            made_by: who made what they pass on; each of them made its own if None.

        Raises:
            DesyncError: a peer is in another operation.
            DecodeError: its codec is not accepted here, and more of its message would follow.
            WireError: its bytes are no message of this group and lane.
            TransportTimeout: the limit passed; names all that are missing.
            TransportError: a peer is gone.
        """
        standing = [self._standing(peer) for peer in peers]
        messages = []
        for at, (peer, each) in enumerate(zip(peers, standing, strict=True)):
            self.entry.awaits = peer
            try:
                each.pending.wait(self._deadline.left())
            except RuntimeError as error:
                is_late = self._has_timed_out(error)
                missing = _absent(peers, standing, at) if is_late else (peer,)
                raise self._naming(error, missing) from error
            message = self.open(each.raw, peer if made_by is None else made_by)
            each.renew()
            self.received_nbytes += message.header.head_nbytes
            messages.append(message)
        self.rounds += 1
        return messages

    def _standing(self, peer: int) -> Standing:
        try:
            return self._lane.standing(self._link, peer)
        except RuntimeError as error:
            raise self._naming(error, (peer,)) from error

    def open(self, raw: bytearray | memoryview, sender: int) -> Message:
        """Check ``sender``'s first message, with whose bytes ``raw`` begins, and take it in."""
        header = self.gate.header_in(raw)
        self.gate.check_call(self.header, header, sender)
        return self.adopt(raw, header)

    def adopt(self, raw: bytes | bytearray | memoryview, header: Header) -> Message:
        """Take in a first message that was checked when it arrived."""
        message = self.gate.take_in(raw, header)
        if header.is_inline and message.refusal is None:
            open_body(message, self.device.device)
        return message

    def send_rest(self, message: Message, peers: Iterable[int]) -> None:
        """Begin to send what follows the head, to some ranks."""
        if message.is_all_head:
            return
        for peer in peers:
            for piece in _ended(self.body(message)) + _ended(self.pieces(message)):
                self._send(piece, peer, self._payload_tag, message)
            self._expect_receipt(peer, message)

    def recv_rest(self, arriving: Sequence[tuple[int, Message]]) -> None:
        """Wait for what follows the heads of some peers, from all at once."""
        arriving = [(peer, message) for peer, message in arriving if not message.is_all_head]
        if not arriving:
            return
        self._wait_for([(peer, _ended(self.body(message))) for peer, message in arriving])
        for _, message in arriving:
            if not message.header.is_inline:
                open_body(message, self.device.device)
        self._wait_for([(peer, _ended(self.pieces(message))) for peer, message in arriving])
        for peer, message in arriving:
            self._send_receipt(peer, message)

    def relay_rest(self, message: Message, root: int) -> None:
        """Pass on what follows the head of ``root``'s message, piece by piece, to all ranks."""
        if message.is_all_head:
            return
        nbytes = message.header.body_nbytes + message.header.payload_nbytes
        parent, children, chunk_nbytes = self._place(nbytes, root)
        if not message.header.is_inline:
            self._relay(view(message.body).split(chunk_nbytes), parent, children, message)
            if parent is not None:
                open_body(message, self.device.device)
        self._relay(self.pieces(message, chunk_nbytes), parent, children, message)
        for child in children:
            self._expect_receipt(child, message)
        if parent is not None:
            self._send_receipt(parent, message)

    def _place(self, nbytes: int, root: int) -> tuple[int | None, list[int], int]:
        """From whom ``root``'s bytes come to this rank, to whom they go on, in which pieces."""
        route, chunk_nbytes = topology.for_payload(nbytes, self.hosts)
        return *route(self.rank, root, self.size), chunk_nbytes

    def relay(self, flats: Sequence[torch.Tensor], root: int) -> None:
        """Bytes that all ranks have agreed on, none empty, from ``root``'s memory into others'."""
        parent, children, chunk_nbytes = self._place(sum(flat.numel() for flat in flats), root)
        self._relay([p for f in flats for p in f.split(chunk_nbytes)], parent, children, flats)
        self.confirm([] if parent is None else [parent], children)

    def send_flat(
        self, flat: torch.Tensor, peer: int, *, is_result: bool = False, is_ended: bool
    ) -> None:
        """Begin to send bytes that both ranks have agreed on; ``peer`` calls ``arriving``.

        Args:
            flat: ``uint8``; it may not change before ``finish``.
            peer: to whom.
            is_result: which of the two streams between two ranks it belongs to.
            is_ended: whether the last byte travels by itself.
        """
        tag = self._result_tag if is_result else self._payload_tag
        for piece in _ended([flat]) if is_ended else [flat]:
            self._send(piece, peer, tag, flat)

    def arriving(
        self, flat: torch.Tensor, peer: int, *, is_result: bool = False, is_ended: bool
    ) -> "Arriving":
        """Begin to receive what ``peer`` sends by ``send_flat`` with the same options."""
        tag = self._result_tag if is_result else self._payload_tag
        pieces = _ended([flat]) if is_ended else [flat]
        pendings = [self._post(peer, piece, tag) for piece in pieces]
        return Arriving(flat, functools.partial(self._wait_backwards, pendings))

    def confirm(self, received_from: Iterable[int], sent_to: Iterable[int]) -> None:
        """Tell some ranks that all they sent has come, and let ``finish`` wait for such words."""
        for peer in received_from:
            self._send(empty(1), peer, self._receipt_tag, None)
        for peer in sent_to:
            flat = empty(1)
            self._sends.append((self._post(peer, flat, self._receipt_tag), peer, flat, None))

    def finish(self) -> None:
        """Wait until everything that was sent has been taken; receipts come before what they tell.

        When a connection closes, Gloo does not wake whoever waits for a send that is under way (see
        ``_ended``), but it does for the receive of a receipt.
        """
        for pending, peer, _, _ in reversed(self._sends):
            self._wait(pending, peer)
        self._sends.clear()

    def _expect_receipt(self, peer: int, message: Message) -> None:
        if self._is_noticed(message):
            flat = empty(1)
            pending = self._post(peer, flat, self._receipt_tag)
            self._sends.append((pending, peer, flat, message))

    def _send_receipt(self, peer: int, message: Message) -> None:
        if self._is_noticed(message):
            self._send(empty(1), peer, self._receipt_tag, message)

    def _is_noticed(self, message: Message) -> bool:
        """Whether so much follows its head here that a receipt is due; the same on both ranks."""
        body_nbytes = 0 if message.header.is_inline else message.header.body_nbytes
        flats = self.device.not_carried(message)
        return body_nbytes + sum(flat.numel() for flat in flats) > _UNNOTICED_NBYTES

    def body(self, message: Message) -> list[torch.Tensor]:
        """What of ``message``'s body follows its head, as bytes."""
        return [] if message.header.is_inline else [view(message.body)]

    def pieces(
        self, message: Message, chunk_nbytes: int = topology.CHUNK_MAX_NBYTES
    ) -> list[torch.Tensor]:
        """What follows its body over this link, in pieces; known once the body is open."""
        flats = self.device.not_carried(message)
        return [piece for flat in flats for piece in flat.split(chunk_nbytes)]

    def _relay(
        self,
        pieces: Sequence[torch.Tensor],
        parent: int | None,
        children: Sequence[int],
        owner: object,
    ) -> None:
        if not pieces:
            return
        self.rounds += 1
        ended = [_ended([piece]) for piece in pieces]
        arriving = [] if parent is None else [self._posted(parent, parts) for parts in ended]
        for at, parts in enumerate(ended):
            if parent is not None:
                self._wait_backwards(arriving[at], parent)
            for child in children:
                for part in parts:
                    self._send(part, child, self._payload_tag, owner)

    def _send(self, flat: torch.Tensor, peer: int, tag: int, owner: object) -> None:
        try:
            pending = self._link.send(flat, peer, tag)
        except RuntimeError as error:
            raise self._naming(error, (peer,)) from error
        # The memory must outlive the transfer, so its owner is kept beside it.
        self._sends.append((pending, peer, flat, owner))
        self.sent_nbytes += flat.numel() if tag != self._receipt_tag else 0

    def _post(self, peer: int, flat: torch.Tensor, tag: int) -> Pending:
        self.received_nbytes += flat.numel() if tag != self._receipt_tag else 0
        try:
            return self._link.recv(flat, peer, tag)
        except RuntimeError as error:
            raise self._naming(error, (peer,)) from error

    def _posted(self, peer: int, flats: Iterable[torch.Tensor]) -> list[Pending]:
        return [self._post(peer, flat, self._payload_tag) for flat in flats]

    def _wait_for(self, arriving: Sequence[tuple[int, list[torch.Tensor]]]) -> None:
        if not any(flats for _, flats in arriving):
            return
        self.rounds += 1
        posted = [(self._posted(peer, flats), peer) for peer, flats in arriving]
        for pendings, peer in posted:
            self._wait_backwards(pendings, peer)

    def _wait_backwards(self, pendings: Sequence[Pending], peer: int) -> None:
        """Wait for the end first: see ``_ended``."""
        for pending in reversed(pendings):
            self._wait(pending, peer)

    def _wait(self, pending: Pending, peer: int) -> None:
        self.entry.awaits = peer
        try:
            pending.wait(self._deadline.left())
        except RuntimeError as error:
            raise self._naming(error, (peer,)) from error

    def _naming(self, error: RuntimeError, peers: tuple[int, ...]) -> TransportError:
        """What a link raised, as an error that names the ranks concerned."""
        if self._has_timed_out(error):
            return TransportTimeout(self.entry.operation, peers, self._deadline.seconds)
        told = reason_of(error)
        reason = f"{cause_of(told)} ({told})"
        return TransportError(self.entry.operation, peers, reason)

    def _has_timed_out(self, error: RuntimeError) -> bool:
        # Gloo counts whole milliseconds, so its limit may pass before ours.
        return self._deadline.has_passed or "Timed out" in str(error)


def _ended(pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same bytes, of which the last one travels by itself.

    When a connection closes, Gloo wakes the receives that stand posted, but neither the one that is
    being filled nor a send whose receive is posted: whoever waits for one of those waits until the
    limit (``Pair::signalException`` of torch 2.13 forgets ``rx_``, and the ``ubuf`` in ``tx_``). So
    a receiver waits for the last byte first, which is posted until all before it has come.
    """
    if not pieces or pieces[-1].numel() <= 1:
        return pieces
    *rest, last = pieces
    return [*rest, last[:-1], last[-1:]]


def _absent(peers: Sequence[int], standing: Sequence[Standing], start: int) -> tuple[int, ...]:
    """Of the ranks from ``start`` on, that one and all others whose message has not come."""
    others = zip(peers[start + 1 :], standing[start + 1 :], strict=True)
    return peers[start], *(peer for peer, each in others if not _is_done(each.pending))


def _is_done(pending: Pending) -> bool:
    try:
        return pending.wait(_INSTANT)
    except RuntimeError:
        return False
