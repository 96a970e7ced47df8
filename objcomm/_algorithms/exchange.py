"""One operation's traffic on one lane: heads, the data that follows them, and statistics.

Knows links, messages and this operation's header. Knows neither what messages mean nor who has to
send to whom.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from objcomm._algorithms import topology
from objcomm._algorithms.device import DevicePath
from objcomm._algorithms.transfers import (
    MAPPED_MIN_NBYTES,
    NOBODY,
    Meter,
    Transfers,
    Unit,
    is_paced,
    nbytes_of,
    share_of,
    taken_out,
    with_memory,
)
from objcomm._codecs.buffers import empty, view
from objcomm._observe.history import CallRecord
from objcomm._observe.lines import check_lines
from objcomm._transport.lane import Lane
from objcomm._transport.link import Deadline, Link, LinkClosed, LinkError
from objcomm._transport.share import Share
from objcomm._transport.workspace import Workspace, part_nbytes
from objcomm._wire.admission import Gate
from objcomm._wire.header import EVERYONE, check_same_call
from objcomm._wire.message import Message, head_of, open_body
from objcomm.errors import TransportError

#: From this size, large members are handed over in shared memory instead of sent, if possible.
SHARED_MIN_NBYTES = 1 << 20

# The system's socket buffers accept at least this much, whether or not the peer reads.
_UNNOTICED_NBYTES = 1 << 16


class Exchange(Transfers):
    """One rank's traffic in one operation; sends are only started, and ``finish`` completes them.

    Attributes:
        lane: the lane on which the call is made.
        entry: the call's record on this rank.
        header: the header for this rank's own messages.
        device: moves the members in accelerator memory.
        gate: signs this rank's messages and checks the others'.
        rank: this rank, within the group.
        size: number of ranks.
        is_interruptible: whether a signal ends a wait without further help.
        hosts: host number of each rank.
        shares_memory: whether ranks on one host can exchange large memory.
        head_max_nbytes: maximum length of a first message.
    """

    def __init__(
        self,
        link: Link,
        lane: Lane,
        entry: CallRecord,
        deadline: Deadline,
        gate: Gate,
        *,
        device: DevicePath,
        meter: Meter | None = None,
        group: str = "",
    ) -> None:
        """Initialize the exchange.

        Args:
            link: connects the ranks.
            lane: the lane on which the call is made.
            entry: the call, whose header holds what must agree on all ranks.
            deadline: for all waits together.
            gate: signs this rank's messages and checks the others'.
            device: see ``device.DevicePath``.
            meter: counts the bytes that follow heads, if they are sent over ``link``; None if no
                progress is shown.
            group: name of the group, for the log.
        """
        self.entry = entry
        self.header = entry.header
        self.device = device
        self.gate = gate
        self.rank = link.rank
        self.size = link.size
        self.hosts = link.hosts
        self.head_max_nbytes = link.head_max_nbytes
        self.is_interruptible = link.is_interruptible
        self.shares_memory = link.shares_memory
        self._link = link
        self.lane = lane
        self._deadline = deadline
        self._meter = NOBODY if meter is None else meter
        self._group = group
        self.sends = []

    def send_head(
        self,
        message: Message,
        peers: Iterable[int],
        destination: int = EVERYONE,
        *,
        may_be_whole: bool = False,
    ) -> None:
        """Start sending the first part of ``message`` to some ranks.

        Args:
            message: sent in full if ``may_be_whole`` is set and the link can carry it. A received
                one is passed on as it came.
            peers: the ranks to send to.
            destination: the only rank that may accept it; by default, all may.
            may_be_whole: whether its receivers read it, or pass it on as a single message.
        """
        if may_be_whole and not message.is_all_head and message.arrived is None:
            message.make_whole(self.head_max_nbytes)
        pieces = self.gate.pieces_of(message, destination)
        head = pieces[0] if len(pieces) == 1 else pieces
        nbytes = sum(map(len, pieces))
        link, tag = self._link, self.lane.tag
        for peer in peers:
            try:
                pending = link.send(head, peer, tag)
            except LinkError as error:
                raise self._naming(error, (peer,)) from error
            self.entry.sent_nbytes += nbytes
            if pending is not None:
                self.sends.append((pending, peer, head, message))

    def on_devices(
        self, transfer: Callable[[DevicePath], None], stream: torch.Stream | None = None
    ) -> None:
        """Run transfers between devices, once the peers have received everything sent on the link.

        A rank that waits on a device link makes no progress on the other link, and a peer may need
        what was sent there before it can reach the device link.

        Args:
            transfer: starts the transfers.
            stream: the stream to use; if None, the caller's current one.

        Raises:
            TransportError: the link was closed by a verdict, or this rank's backend has failed; the
                latter names no peers.
        """
        self.hand_over()
        self.entry.is_on_devices = True
        try:
            self.device.carry_out(transfer, stream)
        except LinkClosed as error:
            raise self._naming(error, (self.entry.awaits,)) from error
        except LinkError as error:
            raise TransportError(
                self.entry.operation,
                (),
                f"the backend of this rank's device has failed: {error.reason}",
            ) from error
        finally:
            self.entry.is_on_devices = False

    def swap_signals(self, peers: Sequence[int]) -> None:
        """Exchange go-aheads with ranks that all call this, before data follows on device links.

        A rank that has rejected a message must not make others start transfers that only a verdict
        would end.
        """
        if peers:
            are_ready = self.ready_signals_of(peers)
            for peer in peers:
                self.give_signal(peer)
            are_ready()
            self.entry.rounds += 1

    def recv_heads(
        self,
        peers: Sequence[int],
        *,
        made_by: int | None = None,
        unread: Collection[int] = (),
        heads_max: int | Sequence[int] = 1,
    ) -> list[Message]:
        """Wait for the next first message from each of ``peers``.

        Args:
            peers: the ranks over whose connections the messages arrive.
            made_by: the rank that created the message they pass on; if None, each peer created its
                own.
            unread: peers whose messages are only passed on; this rank's own options do not apply
                to them.
            heads_max: how many heads a bundle may contain; one number, or one per peer.

        Raises:
            DesyncError: a peer is in another operation, or at another line, if lines must agree.
            DecodeError: this rank does not accept the codec, and more of the message would follow.
            WireError: the bytes are not a message of this group and lane.
            TransportTimeout: the timeout expired; names all missing ranks.
            TransportError: a peer is gone.
        """
        link, entry, lane, mine = self._link, self.entry, self.lane, self.header
        until = self._deadline.gives_up_at
        if len(peers) > 1:
            link.expect(peers, lane.tag)
        messages = []
        for at, peer in enumerate(peers):
            entry.awaits = peer
            try:
                raw = link.take(peer, lane.tag, until)
            except LinkError as error:
                late = peers[at + 1 :] if self._has_timed_out(error) else ()
                missing = peer, *(each for each in late if not link.came_late(each, lane.tag))
                raise self._naming(error, missing) from error
            lane.taken_of[peer] = mine.sequence
            if peer in unread:
                message = self._open_unread(raw, peer)
            else:
                most = heads_max if isinstance(heads_max, int) else heads_max[at]
                message = self.open(raw, peer if made_by is None else made_by, most)
            entry.received_nbytes += len(message.arrived or b"")
            messages.append(message)
        entry.rounds += 1
        return messages

    def open(self, raw: bytes | memoryview, sender: int, heads_max: int = 1) -> Message:
        """Check and accept a first message that must have been created by ``sender``.

        Args:
            raw: begins with the message.
            sender: that rank.
            heads_max: how many heads a bundle may contain.

        Raises:
            ObjcommError: as for ``recv_heads``.
        """
        gate, mine = self.gate, self.header
        theirs = gate.header_in(raw, sender)
        # All fields from the operation to the fingerprint must match; one of them is the sender.
        if gate.signer is not None or theirs[2:10] != (mine[2], sender, *mine[4:10]):
            gate.check_call(mine, theirs, sender)
        message = gate.take_in(raw, theirs, heads_max)
        # Calls with a name match by name. A header holds only the end of a long path.
        if not mine.name and not mine.call_site.endswith(theirs.call_site):
            must_agree = self.gate.settings.lines_must_agree
            check_lines(mine, theirs, self._group, must_agree=must_agree)
        return message

    def _open_unread(self, raw: bytes, sender: int) -> Message:
        """Open a message that is only passed on; its reader checks whether it is an old one."""
        header = self.gate.header_in(raw, sender)
        check_same_call(self.header, header, sender)
        return head_of(raw, header)

    def send_rest(self, message: Message, peers: Sequence[int]) -> None:
        """Start sending some ranks the data that follows the head."""
        if message.is_all_head:
            return
        beside = [peer for peer in peers if self._is_shared(message, peer)]
        body = self._body_units(message)
        rest = body + (self._payload_units(message) if len(beside) < len(peers) else [])
        if is_paced(message):
            self._meter.expect(nbytes_of(rest))
            self._expect_receipts(rest, peers)
        for peer in peers:
            for piece in itertools.chain.from_iterable(body if peer in beside else rest):
                self._send(piece, peer, self._payload_tag, message)
        if beside:
            flats = message.following_on_host
            self.share(flats, beside, share_of(flats))
        if not is_paced(message) and self._is_noticed(message):
            self.confirm((), peers)

    def recv_rest(self, arriving: Sequence[tuple[int, Message]]) -> None:
        """Wait for the data that follows some peers' heads, from all of them at the same time."""
        arriving = [(peer, message) for peer, message in arriving if not message.is_all_head]
        if not arriving:
            return
        self._wait_for([(*each, self._body_units(each[1])) for each in arriving])
        are_shared = [self._is_shared(message, peer) for peer, message in arriving]
        for (_, message), is_shared in zip(arriving, are_shared, strict=True):
            self._open(message, is_shared=is_shared)
        loans = [
            (message, self.borrow(message.on_host, peer))
            for peer, message in itertools.compress(arriving, are_shared)
        ]
        copied = itertools.compress(arriving, (not each for each in are_shared))
        self._wait_for([(*each, self._payload_units(each[1])) for each in copied])
        self.entry.rounds += bool(loans)
        for message, loan in loans:
            message.replace(message.on_host, self.lent(loan))
        noticed = [each for each in arriving if not is_paced(each[1])]
        self.confirm([peer for peer, message in noticed if self._is_noticed(message)], ())

    def relay_rest(self, message: Message, root: int) -> None:
        """Relay the data that follows the head of ``root``'s message to all ranks, in pieces.

        ``root`` sends the last piece only after each rank has signaled that it accepts the message.
        So if one rank rejects it, no rank has returned from the call.
        """
        if message.is_all_head:
            return
        header = message.header
        place = self._place(header.body_nbytes + header.payload_nbytes, root)
        parent, children, chunk_nbytes = place
        beside = [peer for peer in self._others() if self._is_shared(message, peer)]
        if not header.is_inline:
            is_last = not header.payload_nbytes
            body = self._body_pieces(message, chunk_nbytes)
            self._relay(body, place, message, self.ready_signals_of(children) if is_last else None)
        if parent is not None:
            self._open(message, is_shared=bool(beside))
        if beside:
            parent, children = self._hand_out(message, root, place, beside)
        elif header.payload_nbytes:
            pieces = self._pieces(message, chunk_nbytes)
            self._relay(pieces, place, message, self.ready_signals_of(children))
        if not is_paced(message) and self._is_noticed(message):
            self.confirm([] if parent is None else [parent], children)

    def pass_around(self, messages: Sequence[Message | None], ring: Sequence[int]) -> None:
        """Pass the data that follows some ranks' heads around a ring, from neighbor to neighbor.

        Args:
            messages: one for each rank in the ring; None for a rank that has none for the others.
            ring: the ranks, the same on each; a rank receives from the one before it.
        """
        size, at = len(ring), ring.index(self.rank)
        left, right, next_own = ring[at - 1], ring[(at + 1) % size], messages[(at + 1) % size]
        before = [messages[at - steps] for steps in range(1, size)]  # in the order of arrival
        coming = [each for each in before if each is not None]
        mine = messages[at]
        for cut in (self._body_pieces, self._pieces):
            rest = [(message, self.ended([piece])) for message in coming for piece in cut(message)]
            arriving = [self._posted(left, unit) for _, unit in rest]
            self._meter.expect(nbytes_of([unit for _, unit in rest]))
            own = () if mine is None else cut(mine)
            for piece in itertools.chain.from_iterable(self.ended([each]) for each in own):
                self._send(piece, right, self._payload_tag, mine)
            for (message, unit), pendings in zip(rest, arriving, strict=True):
                self._take(unit, pendings, left)
                for piece in unit if message is not next_own else ():
                    self._send(piece, right, self._payload_tag, message)
            self.entry.rounds += bool(rest)
            for message in coming if cut == self._body_pieces else ():
                if not message.is_all_head:
                    self._open(message, is_shared=False)
        self.confirm([left], [right])

    def relay(self, flats: Sequence[torch.Tensor], root: int) -> None:
        """Send flat tensors that all ranks agreed on, none empty, from ``root`` to all others."""
        place = parent, children, chunk_nbytes = self._place(sum(f.numel() for f in flats), root)
        self._relay([piece for flat in flats for piece in flat.split(chunk_nbytes)], place, flats)
        self.confirm([] if parent is None else [parent], children)

    def workspace(self, nbytes: int) -> Workspace | None:
        """Return memory that all ranks write and read; None if they are not all on one host.

        Also None if ``nbytes`` is too small to be worth it, or if the system has no such memory for
        some rank. Either every rank calls this in the same operation, or none does. On the first
        use in a lane, ranks hand the memory to each other.
        """
        others = list(self._others())
        is_worth_it = nbytes >= SHARED_MIN_NBYTES
        if not is_worth_it or any(self._link.sharing_with(peer) is None for peer in others):
            return None
        if not self.lane.has_asked:
            self.lane.has_asked = True
            self.lane.workspace = self._new_workspace(others)
        return self.lane.workspace

    def _new_workspace(self, others: Sequence[int]) -> Workspace | None:
        nbytes = part_nbytes(self.size)
        own, memories = None, []
        with contextlib.suppress(OSError):
            own = Share.fixed(nbytes)
        parts = {**self.swap(own, others), self.rank: own}
        with contextlib.suppress(OSError, ValueError):
            memories = [
                share.common(nbytes, is_own=rank == self.rank)
                for rank, share in sorted(parts.items())
                if share is not None
            ]
        has_all = torch.tensor([len(memories) == self.size], dtype=torch.uint8, device="cpu")
        answers = [(peer, self.arriving(empty(1), peer, is_ended=False)) for peer in others]
        for peer in others:
            self.send_flat(has_all, peer, is_ended=False)
        have_all = [bool(each.wait(peer).item()) for peer, each in answers]
        return Workspace(memories) if has_all.item() and all(have_all) else None

    def _place(self, nbytes: int, root: int) -> "_Place":
        """Return this rank's parent and children for ``root``'s bytes, and the size of pieces."""
        route, chunk_nbytes = topology.for_payload(nbytes, self.hosts)
        return *route(self.rank, root, self.size), chunk_nbytes

    def _others(self) -> Iterable[int]:
        return (peer for peer in range(self.size) if peer != self.rank)

    def _is_shared(self, message: Message, peer: int) -> bool:
        """Return whether large members are handed over in shared memory; the same on both ranks."""
        is_large = message.header.payload_nbytes >= SHARED_MIN_NBYTES
        can_be = is_large and self._link.sharing_with(peer) is not None
        return can_be and not is_paced(message) and not self.device.is_staged(message)

    def make_room(self, message: Message, peer: int) -> None:
        """Allocate memory for what follows ``peer``'s head, as far as the head describes it."""
        if message.header.is_inline:
            self._open(message, is_shared=self._is_shared(message, peer))

    def _open(self, message: Message, *, is_shared: bool) -> None:
        """Allocate memory, once, for what follows a body, except what arrives with its own."""
        if not message.is_open:
            mapped_from = MAPPED_MIN_NBYTES if is_shared else math.inf
            open_body(message, self.device.devices, mapped_from)

    def _hand_out(
        self, message: Message, root: int, place: "_Place", beside: Sequence[int]
    ) -> topology.Place:
        """Hand ``root``'s large members to every rank, once all have signaled that they accept.

        One rank of each host receives them, passes them on to other hosts, and shares the memory it
        received them in with the other ranks on its host, so each host has the bytes only once.

        Args:
            message: the root's message.
            root: the rank that sends it.
            place: this rank's place if nothing is handed over.
            beside: all other ranks on this host.

        Returns:
            The rank that they came from, and the ranks that this rank passed them on to.
        """
        parent, children, chunk_nbytes = place
        first = topology.firsts(self.hosts, root)[self.hosts[self.rank]]
        self.entry.rounds += 1
        if self.rank != first:
            loan = self.borrow(message.on_host, first)
            self.give_signal(first)
            message.replace(message.on_host, self.lent(loan))
            return first, []
        far = [child for child in children if child not in beside]
        await_ready = self.ready_signals_of([*far, *beside])
        place = parent, far, chunk_nbytes
        if parent is None:
            share = self._sent_and_copied(message, place, await_ready)
        else:
            share = self._arrived_in_share(message, place, await_ready)
        self.share(message.following_on_host, beside, share)
        return parent, [*far, *beside]

    def _sent_and_copied(
        self, message: Message, place: "_Place", await_ready: Callable[[], None]
    ) -> Share | None:
        """Send a root's large members to other hosts; meanwhile copy them to shared memory."""
        copies: list[Share | None] = []

        def are_all_ready() -> None:
            copies.append(share_of(message.following_on_host))
            await_ready()

        self._relay(self._pieces(message, place[2]), place, message, are_all_ready)
        return copies.pop()

    def _arrived_in_share(
        self, message: Message, place: "_Place", await_ready: Callable[[], None]
    ) -> Share | None:
        """Receive large members from another host into shared memory, and pass them on."""
        share = None
        with contextlib.suppress(OSError):  # no memory left, or the system refuses such files
            share = Share.with_room([buffer.flat.numel() for buffer in message.on_host])
        if share is None:
            message.replace(message.on_host, [with_memory(each) for each in message.on_host])
            self._relay(self._pieces(message, place[2]), place, message, await_ready)
            return None
        # No variable may hold a piece: its memory must be freed before this call ends.
        self._relay(
            [piece for flat in share.flats for piece in flat.split(place[2])],
            place,
            share,
            await_ready,
        )
        self.hand_over()  # none of it may still be written or sent
        try:
            share.seal()
        except OSError:
            own = [with_memory(each) for each in message.on_host]
            message.replace(message.on_host, taken_out(own, share))
            return None
        message.replace(message.on_host, taken_out(message.on_host, share))
        return share

    def _is_noticed(self, message: Message) -> bool:
        """Return whether so much follows the head that a receipt is due; the same on both ranks."""
        body_nbytes = 0 if message.header.is_inline else message.header.body_nbytes
        flats = self.device.not_carried(message)
        return body_nbytes + sum(flat.numel() for flat in flats) > _UNNOTICED_NBYTES

    def _body_units(self, message: Message) -> list[Unit]:
        body = [] if message.header.is_inline else [view(message.body)]
        return self.units(message, body, topology.CHUNK_MAX_NBYTES)

    def _payload_units(self, message: Message) -> list[Unit]:
        return self.units(message, self._pieces(message), topology.CHUNK_MAX_NBYTES)

    def _body_pieces(
        self, message: Message, chunk_nbytes: int = topology.CHUNK_MAX_NBYTES
    ) -> Sequence[torch.Tensor]:
        return () if message.header.is_inline else view(message.body).split(chunk_nbytes)

    def _pieces(
        self, message: Message, chunk_nbytes: int = topology.CHUNK_MAX_NBYTES
    ) -> list[torch.Tensor]:
        flats = self.device.not_carried(message)
        return [piece for flat in flats for piece in flat.split(chunk_nbytes)]

    def _relay(
        self,
        pieces: Sequence[torch.Tensor],
        place: "_Place",
        owner: object,
        are_all_ready: Callable[[], None] | None = None,
    ) -> None:
        """Pass bytes on; the root sends the last ones only when all receivers are ready.

        Args:
            pieces: the bytes, or the memory for them.
            place: this rank's place.
            owner: keeps the memory alive; if it is a paced message, each piece gets a receipt.
            are_all_ready: waits until the ranks that receive from this one are ready; None if more
                data will follow.
        """
        self.entry.rounds += bool(pieces)
        parent, children, _ = place
        has_receipts = isinstance(owner, Message) and is_paced(owner)
        relayed = [self.ended([piece]) for piece in pieces]
        self._meter.expect(nbytes_of(relayed))
        if has_receipts:
            self._expect_receipts(relayed, children, is_counted=parent is None)
        if parent is None:
            arriving = _held_back(relayed, are_all_ready or _are_ready)
        else:
            arriving = self._stream(relayed, parent, is_paced=has_receipts)
            if are_all_ready is not None:
                are_all_ready()
                self.give_signal(parent)
        for unit in arriving:
            for child in children:
                for piece in unit:
                    self._send(piece, child, self._payload_tag, owner)

    def _wait_for(self, arriving: Sequence[tuple[int, Message, list[Unit]]]) -> None:
        if not any(rest for _, _, rest in arriving):
            return
        self.entry.rounds += 1
        streams = [
            self._stream(rest, peer, is_paced=is_paced(message)) for peer, message, rest in arriving
        ]
        self._meter.expect(sum(nbytes_of(rest) for _, _, rest in arriving))
        # Alternate between peers, because they send at the same time.
        for _ in itertools.zip_longest(*streams):
            pass


def _held_back(units: Sequence[Unit], are_all_ready: Callable[[], None]) -> Iterator[Unit]:
    """Yield what a root sends; its end, a byte or a piece, only after all others are ready."""
    yield from units[:-1]
    yield from (unit[:-1] for unit in units[-1:])
    are_all_ready()
    yield from (unit[-1:] for unit in units[-1:])


def _are_ready() -> None:
    """Do nothing: only the last data waits for the receivers."""


#: See ``Exchange._place``.
_Place = tuple[int | None, list[int], int]
