"""This rank and one other rank of a group, for point-to-point messages.

The thread that moves the link puts the first part of each of the other rank's messages into the
mailbox. That is a dedicated thread if no other thread waits. A small message therefore never waits
for its receiver, and a receiver can wait for any sender, although a link has neither a probe nor a
receive from any source.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import struct
import threading
import weakref
from dataclasses import replace
from functools import partial
from hmac import compare_digest
from typing import TYPE_CHECKING, Self

from objcomm._config import FOREVER_SECONDS, process_settings, settings
from objcomm._failures.losses import end_by_loss
from objcomm._failures.mesh import PROOF_NBYTES, Mesh
from objcomm._failures.verdict import FAREWELLS, Cause, Verdict, open_blocks, proposal_for
from objcomm._failures.watchdog import end_elsewhere, expect
from objcomm._p2p.mailbox import Arrived, Mailbox
from objcomm._transport.link import Deadline, LinkError, head_tag
from objcomm._transport.threads import (
    AlarmClock,
    Alone,
    OnceThread,
    SerialQueue,
    ThreadPool,
    Ticket,
    TicketQueue,
    guard,
    interrupted,
)
from objcomm._wire.admission import Gate
from objcomm._wire.header import HEADER_NBYTES, Header, Operation
from objcomm._wire.signing import environment_secret
from objcomm.errors import (
    BrokenGroupError,
    ObjcommError,
    TransportError,
    UsageError,
    WireError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from objcomm._calls.group import Group
    from objcomm._failures.channel import Channel
    from objcomm._observe.history import CallRecord
    from objcomm._transport.lane import Lane
    from objcomm._transport.link import Awaitable


_LOOK_SECONDS = 0.5
_LISTENER = "objcomm-listen"

#: The tag of the answers that two ranks send each other about offers. Messages use lane 0.
ANSWER_TAG = head_tag(1)
# The kind of answer, and the number of the message that it refers to.
_ANSWER = struct.Struct("<BQ")
_ANSWERS = (Operation.TAKE, Operation.READY, Operation.START)

_SEND = int(Operation.SEND)


def answer(mesh: Mesh, of: Operation, number: int) -> bytes:
    """Encode an answer to the other rank about the message with this number."""
    content = _ANSWER.pack(of, number)
    return content + mesh.proof(mesh.rank, content)


class Offers:
    """One rank's offers to another over one connection, until the other answers them.

    The part of an offered message that follows its head stays with the sender until the receiver
    answers that it takes the message. No thread waits for that: a thread that waits for bytes of a
    connection waits for one message only, and the receiver may take the last one first. Answers
    have their own lane, so they get through when the other lane is full of messages that nothing
    receives. The answers by which the two ranks agree on transfers between their devices come here,
    too; see ``DeviceTurn``.

    Attributes:
        mesh: the connection.
        peer: the other rank.
        turns: the order of transfers between the two ranks' devices.
        is_interrupted: as in ``Link``; nothing can be offered while it returns True.
    """

    def __init__(self, mesh: Mesh, peer: int) -> None:
        """Create the offers of one connection.

        Args:
            mesh: the connection.
            peer: the other rank.
        """
        self.mesh = mesh
        self.peer = peer
        self.turns = TicketQueue()
        self._lock = guard()
        self.is_interrupted: Callable[[], bool] = self._lock._is_owned  # noqa: SLF001  # like Condition
        self._offered: dict[tuple[int, int], Callable[[bool], object]] = {}  # by answer and number
        self._is_over = False

    def put(
        self, number: int, on_end: Callable[[bool], object], kind: Operation = Operation.TAKE
    ) -> None:
        """Offer a message, or wait for another answer about one.

        Args:
            number: the message's number; the message is sent after this call.
            on_end: called once, with True when the other rank answers and with False when the
                connection has ended. May be called in a step of the link, and must not wait.
            kind: the kind of answer.
        """
        with self._lock:
            if not self._is_over:
                self._offered[kind, number] = on_end
                return
        on_end(False)  # noqa: FBT003  # a callback

    def withdraw(self, number: int, kind: Operation = Operation.TAKE) -> bool:
        """Take an offer back; return whether it still stood. If so, ``on_end`` is never called."""
        with self._lock:
            return self._offered.pop((kind, number), None) is not None

    def accept_answer(self, raw: bytes) -> bool:
        """Accept an answer of the other rank; always return True, because there is always room.

        Raises:
            WireError: it is not a valid answer.
        """
        content, proof = raw[: _ANSWER.size], raw[_ANSWER.size : _ANSWER.size + PROOF_NBYTES]
        is_known = len(raw) >= _ANSWER.size and content[0] in _ANSWERS
        if not is_known or not compare_digest(proof, self.mesh.proof(self.peer, content)):
            raise WireError(f"rank {self.peer} has sent an invalid answer")
        with self._lock:
            on_end = self._offered.pop(_ANSWER.unpack(content), None)
        if on_end is not None:  # else it was withdrawn
            on_end(True)  # noqa: FBT003  # a callback
        return True

    def fail(self) -> None:
        """Note that the connection has ended and no more answers will come."""
        with self._lock:
            self._is_over = True
            left = list(self._offered.values())
            self._offered.clear()
        for on_end in left:
            on_end(False)  # noqa: FBT003  # a callback

    def check(self) -> None:
        """Check that the connection has not ended.

        Raises:
            ObjcommError: it has ended; the error says why.
        """
        if self.mesh.verdict is not None:
            raise self.mesh.verdict.error("send")


class DeviceTurn:
    """The turn of one message to transfer its members from one rank's device to another's.

    A backend has one order for all transfers between two ranks, in both directions. If the two
    ranks begin with different transfers, both wait forever without an error. Therefore only one
    transfer runs at a time, and the lower rank chooses the next one. The receiver announces when it
    has room. If it is the lower rank, the transfer begins with that. Otherwise the sender answers
    that it begins. The higher rank takes its places in the order of these answers, on the thread
    that receives them.

    Use it as a context manager; leaving it ends the turn on this rank.
    """

    def __init__(
        self, offers: Offers, number: int, say: Callable[[Operation], None], *, is_sender: bool
    ) -> None:
        """Create the turn without queuing for it.

        Args:
            offers: the offers of the connection that the message uses.
            number: the message's number.
            say: sends the other rank an answer about this message.
            is_sender: whether this rank sends the message.
        """
        self._offers = offers
        self._number = number
        self._say = say
        self._is_sender = is_sender
        self._is_lower = offers.mesh.rank < offers.peer
        self._awaited = Operation.READY if is_sender else Operation.START
        self._is_over = threading.Event()  # the wait for that answer
        self._place = Ticket(offers.turns)

    def begin(self) -> None:
        """Accept answers from now on; call this before sending what the other rank may answer."""
        if self._is_sender or not self._is_lower:
            self._offers.put(self._number, self._on_answer, self._awaited)

    def move(self, transfer: Callable[[], None]) -> None:
        """Run ``transfer`` once both ranks have reached it; the receiver must have room for it.

        Raises:
            ObjcommError: the connection has ended; the error says why.
        """
        if not self._is_sender and not self._is_lower:
            self._say(Operation.READY)
        if self._is_sender or not self._is_lower:
            self._until(self._is_over.wait)
        if self._is_lower:
            self._place.take()
        self._until(self._place.enter)
        if self._is_lower:
            self._say(Operation.START if self._is_sender else Operation.READY)
        transfer()

    def _until(self, wait: Callable[[float], bool]) -> None:
        while not wait(_LOOK_SECONDS):
            self._offers.check()

    def _on_answer(self, is_answered: bool) -> None:  # noqa: FBT001  # a callback
        if is_answered and not self._is_lower:
            self._place.take()
        self._is_over.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._offers.withdraw(self._number, self._awaited)
        self._place.leave()


class Pair:
    """See the module docstring.

    Attributes:
        peer: the other rank.
        order: the order of the messages that this rank sends.
        departing: begins sends that no thread waits for, when their turn has come.
        leaving: sends what follows the heads of offered messages once they are taken.
        arriving: receives the rest of incomplete messages that no thread waits for.
    """

    def __init__(self, channel: Channel, peer: int, peers: Peers) -> None:
        """Create the pair; a connection is made later.

        Args:
            channel: connects the two ranks.
            peer: the other rank, within the group.
            peers: this rank's state for the group.
        """
        self.peer = peer
        self.order = TicketQueue()
        self.departing = SerialQueue(peers.pool)
        self.leaving = SerialQueue(peers.pool)
        self.arriving = SerialQueue(peers.pool)
        self._channel = channel
        self._mailbox = peers.mailbox
        self._lock = guard()
        self._change = Alone("a call with the same rank")
        self._arrivals: _Arrivals | None = None

    def admit(self, operation: str) -> tuple[Mesh, Lane]:
        """Return the mesh and lane for a call, connected or not; does not wait for the connection.

        Raises:
            BrokenGroupError: an earlier error has closed the connection permanently.
            ObjcommError: it was closed since the last call; the error says why. The next call
                works.
            UsageError: the group was destroyed.
        """
        mesh, lane = self._channel.admit(operation, "", self.order)
        arrivals = self._arrivals
        if arrivals is None or arrivals.mesh is not mesh:
            with self._lock, self._change:
                former = self._arrivals
                verdict = None if former is None else former.mesh.verdict
                if former is None or (former.mesh is not mesh and verdict is not None):
                    if former is not None:
                        former.fail()
                    self._arrivals = _Arrivals(mesh, lane, self.peer, self._mailbox, former)
        return mesh, lane

    def admit_among(self, operation: str) -> tuple[Mesh, Lane] | None:
        """Do what ``admit`` does for a call others can serve, too; None if this one never will.

        Raises:
            ObjcommError: the other rank has died since the last call.
        """
        try:
            return self.admit(operation)
        except BrokenGroupError:
            return None
        except UsageError:
            raise
        except ObjcommError:
            mesh = self._channel.mesh
            if mesh is None or mesh.verdict is None or _concerns_any(mesh.verdict):
                raise
            return self.admit(operation) if mesh.can_be_replaced else None

    def enter(self, deadline: Deadline, call: CallRecord) -> tuple[Mesh, Lane]:
        """Return the mesh and lane; wait until the other rank has connected.

        Raises:
            TransportTimeout: it did not connect in time.
            ObjcommError: as for ``admit``.
        """
        mesh, lane = self.admit(call.operation)
        self.listen(mesh)
        if mesh.link is None:
            place = call.header.call_site
            self._channel.connect(mesh, lane, call.operation, deadline, place, caller=call)
        return mesh, lane

    def listen(self, mesh: Mesh) -> Verdict | None:
        """Make sure that the other rank's messages are received, or reported as lost.

        Returns:
            Why that mesh has ended, if another one has replaced it.

        Raises:
            RuntimeError: this process can start no more threads; the next call tries again.
        """
        arrivals = self._arrivals
        if arrivals is None or arrivals.mesh is not mesh:
            return mesh.verdict  # its replacement has ended the requests for that rank
        if not arrivals.is_begun:
            mesh.begin_meeting(self._channel.store(), Deadline(FOREVER_SECONDS))
            arrivals.begin()
        elif mesh.verdict is not None:
            arrivals.fail()
        return None

    def signal(self) -> Awaitable | None:
        """Return an event to wait for while moving the connection; None without a connection."""
        mesh = self._channel.mesh
        return None if mesh is None or mesh.link is None else mesh.link.signal()

    def offers(self, mesh: Mesh) -> Offers:
        """Return the offers of the two ranks over a connection."""
        arrivals = self._arrivals
        if arrivals is not None and arrivals.mesh is mesh:
            return arrivals.offers
        ended = Offers(mesh, self.peer)
        ended.fail()
        return ended

    def check_uninterrupted(self, operation: str) -> None:
        """Check that a call on this thread can send and receive.

        Raises:
            UsageError: the caller is a handler or destructor that interrupted a send or receive.
        """
        arrivals = self._arrivals
        link = None if arrivals is None else arrivals.mesh.link
        if (
            (link is not None and link.is_interrupted())
            or (arrivals is not None and arrivals.offers.is_interrupted())
            or self._lock._is_owned()  # noqa: SLF001  # like Condition
        ):
            raise UsageError(f"{operation}: {interrupted('a call with the same rank')}")

    def leave(self, error: BaseException) -> None:
        """End the connection, because ``error`` made a call leave in the middle of a message."""
        mesh = self._channel.mesh
        if mesh is not None:
            verdict = mesh.settle(proposal_for(error, mesh.rank))
            self.mark_raised(verdict)
            end_elsewhere(verdict)

    def mark_raised(self, verdict: Verdict) -> None:
        """Note that a call has raised a verdict, so that the next call need not."""
        mesh = self._channel.mesh
        if mesh is not None and mesh.verdict is not None and mesh.verdict.name == verdict.name:
            mesh.mark_raised(threading.current_thread())


class Peers:
    """This rank's point-to-point messages in one group.

    Attributes:
        mailbox: the messages that have arrived here.
        pool: threads for calls that no thread waits for; their number per pair does not grow with
            the number of calls.
        ending: completes receives of complete messages that no thread waits for.
        limits: ends calls at their time limits where the watchdog does not see them wait.
    """

    def __init__(self, group: Group) -> None:
        self.mailbox = Mailbox(group.rank, group.size)
        self.pool = ThreadPool()
        self.ending = SerialQueue(self.pool)
        self.limits = AlarmClock("objcomm-limit")
        self._pairs: dict[int, Pair] = {}  # by the other rank

    def pair(self, group: Group, peer: int) -> Pair:
        """Return this rank's pair with another rank of the group."""
        pair = self._pairs.get(peer)
        if pair is None:
            channel = group.channel((min(peer, group.rank), max(peer, group.rank)))
            made = Pair(channel, peer, self)
            pair = self._pairs.setdefault(peer, made)
        return pair


def peers_of(group: Group) -> Peers:
    """Return this rank's point-to-point messages in a group."""
    found: Peers | None = group.peers
    if found is None:
        # One step without a lock. Otherwise a process forked while another thread held the lock
        # would wait for that thread forever, instead of getting an error that it can't use the
        # group.
        made = Peers(group)
        found = group.__dict__.setdefault("peers", made)
        if found is made:
            group.at_end(made.pool.close)
    return found


class _Arrivals:
    """What one peer sends over one connection: messages for the mailbox, and answers to offers.

    Attributes:
        mesh: the connection.
        offers: what this rank has offered to the peer.
        is_begun: whether a thread attends to the connection.
    """

    def __init__(
        self, mesh: Mesh, lane: Lane, peer: int, mailbox: Mailbox, former: _Arrivals | None
    ) -> None:
        """Register with the mailbox; ``begin`` starts to receive.

        Args:
            mesh: the connection.
            lane: the lane of the messages.
            peer: the sender.
            mailbox: where messages are put.
            former: the arrivals of the previous connection.
        """
        self.mesh = mesh
        self.offers = Offers(mesh, peer)
        self.is_begun = False
        self._lane = lane
        self._peer = peer
        self._mailbox = mailbox
        self._thread = OnceThread(_LISTENER)
        self._former = None if former is None else former._thread  # noqa: SLF001  # its own class
        self._settings = chosen = settings()
        self._keyless = Gate(replace(chosen, secret=None), "", mesh.rank)
        # Not a bound method: the mailbox would hold this object, and the cycle would keep
        # connections open.
        mailbox.expect(peer, mesh, partial(_prompt, weakref.ref(mesh), peer), lane)

    def begin(self) -> None:
        """Start an attending thread, unless there is one; it does not keep the group alive.

        Raises:
            RuntimeError: this process can start no more threads; the next call tries again.
        """
        self._thread.start(partial(self._attend, open_blocks.get()))

    def fail(self) -> None:
        """End whatever waits for the peer if the connection has ended."""
        verdict = self.mesh.verdict
        if verdict is not None:
            is_for_any = _concerns_any(verdict)
            self._mailbox.fail(self._peer, self.mesh, verdict, is_for_any=is_for_any)
            self.offers.fail()

    def _attend(self, blocks: tuple[str, ...]) -> None:
        """Attend until the connection has ended and everything received over it is in the mailbox.

        Args:
            blocks: the blocks around the call that began this.
        """
        mesh, lane, peer = self.mesh, self._lane, self._peer
        self.is_begun = True
        expect(mesh, threading.current_thread())
        try:
            link = mesh.connections_for("recv")
            verdict = mesh.met_too_late(blocks)
            if verdict is not None:  # new messages are not for calls that wait in the block
                for entry in lane.waits():
                    if entry.withdraw is not None and set(blocks) & set(entry.blocks):
                        entry.withdraw(verdict)
            if self._former is not None:
                self._former.join()  # messages of the previous connection come first
            link.attend(peer, {lane.tag: self._accept, ANSWER_TAG: self.offers.accept_answer})
        except LinkError as error:
            lost = proposal_for(TransportError("recv", (peer,), error.reason), mesh.rank)
            end_by_loss(mesh, lost)
            with contextlib.suppress(LinkError, ObjcommError):  # take messages held back so far
                while mesh.link is not None:
                    self._accept(mesh.link.take(peer, lane.tag, 0.0))
        except BaseException as error:  # noqa: BLE001  # this thread must not end silently
            mesh.settle(proposal_for(error, mesh.rank))
        self.fail()

    def _accept(self, raw: bytes) -> bool:
        """Put a message into the mailbox; return False if there is no room.

        Raises:
            ObjcommError: it is not the peer's next message to this rank.
        """
        mesh, peer, lane, mailbox = self.mesh, self._peer, self._lane, self._mailbox
        if mesh.verdict is None and not mailbox.has_room(peer):
            return False
        gate = self._keyless
        # A key set only for a block is known only if listening began in that block.
        current = process_settings()
        chosen = self._settings if current.secret is None else current
        if chosen.secret is not None or environment_secret() is not None:
            gate = Gate(chosen, mesh.session, mesh.rank)
        header = gate.header_in(raw, peer)
        # The fields that must agree are consecutive, from the operation to the fingerprint.
        due = _SEND, peer, mesh.rank, lane.number, 0, mesh.number, lane.taken, 0
        if gate.signer is not None or header[2:10] != due:
            gate.check_call(Header(0, 0, *due), header, peer)
            gate.check_addressed(header)
        raw, nbytes = raw[: header.head_nbytes], HEADER_NBYTES + header.nbytes
        lane.taken += 1
        mailbox.deliver(Arrived(peer, header.tag, nbytes, header, raw, mesh, lane))
        return True


def _prompt(of: weakref.ref[Mesh], peer: int) -> None:
    """Make the thread that attends to a peer, if any, retry a message that was held back."""
    mesh = of()
    if mesh is not None and mesh.link is not None:
        mesh.link.prompt(peer)


def _concerns_any(verdict: Verdict) -> bool:
    """Return whether a verdict ends a wait for any rank.

    The remaining ranks can still serve it after a program has ended normally, or after a failure
    that concerned only two ranks.
    """
    is_grave = verdict.cause in (Cause.LOST, Cause.LEFT, Cause.FAILED)
    return is_grave and verdict.reason not in FAREWELLS
