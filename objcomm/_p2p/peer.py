"""This rank and one other of a group, for messages from rank to rank.

The first part of each message of the other rank is put into the mailbox by the thread that moves
the link: one of its own if no other thread waits. So a small message never waits for its receiver,
and a receiver can wait for any sender: a link has neither a probe nor a receive from any source.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import struct
import threading
import weakref
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from hmac import compare_digest
from typing import TYPE_CHECKING, Self

from objcomm._config import FOREVER_SECONDS, process_settings, settings
from objcomm._failures.losses import end_by_loss
from objcomm._failures.mesh import PROOF_NBYTES, Mesh
from objcomm._failures.verdict import FAREWELLS, Cause, Verdict, proposal_for, regions
from objcomm._failures.watchdog import expect
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
    carried_out,
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

#: The tag of what two ranks answer each other on what is offered. Messages have lane 0.
ANSWER_TAG = head_tag(1)
# Which answer, and the number of the message that it is about.
_ANSWER = struct.Struct("<BQ")
_ANSWERS = (Operation.TAKE, Operation.READY, Operation.START)

_SEND = int(Operation.SEND)


def answer(mesh: Mesh, of: Operation, number: int) -> bytes:
    """What answers the other rank on the message with a number."""
    said = _ANSWER.pack(of, number)
    return said + mesh.proof(mesh.rank, said)


class Offers:
    """What one of two ranks has offered over one connection, and the other one has yet to answer.

    What follows the head of a message that is offered stays with its sender, and no thread waits
    there until the receiver answers that it takes it: a thread that waits for a connection's bytes
    waits for one message only, and the receiver may take the last one first. Answers have a lane of
    their own, so that they come through where the other one is full of messages that nobody takes.
    Others are those by which the two agree on transfers between their devices, see ``DeviceTurn``.

    Attributes:
        mesh: the connection.
        peer: the other rank.
        turns: of transfers between the two ranks' devices.
        is_interrupted: as of ``Link``; then nothing can be offered.
    """

    def __init__(self, mesh: Mesh, peer: int) -> None:
        """Begin.

        Args:
            mesh: the connection.
            peer: the other rank.
        """
        self.mesh = mesh
        self.peer = peer
        self.turns = TicketQueue()
        self._apart = ThreadPool()
        self._lock = guard()
        self.is_interrupted: Callable[[], bool] = self._lock._is_owned  # noqa: SLF001  # as Condition asks
        self._offered: dict[tuple[int, int], Callable[[bool], object]] = {}  # by answer and number
        self._is_over = False

    def put(
        self, number: int, on_end: Callable[[bool], object], kind: Operation = Operation.TAKE
    ) -> None:
        """Offer a message, or wait for another answer on one.

        Args:
            number: the message's; it is sent after this.
            on_end: called once when the other rank says so, or when the connection has ended; with
                whether it has said so. May be called in a step of the link, and must not wait.
            kind: which answer.
        """
        with self._lock:
            if not self._is_over:
                self._offered[kind, number] = on_end
                return
        on_end(False)  # noqa: FBT003  # a callback's

    def withdraw(self, number: int, kind: Operation = Operation.TAKE) -> bool:
        """Take an offer back; returns whether it stood: ``on_end`` is never called then."""
        with self._lock:
            return self._offered.pop((kind, number), None) is not None

    def hear(self, raw: bytes) -> bool:
        """Take in an answer of the other rank's; always returns True, as there is room for it.

        Raises:
            WireError: it is none.
        """
        said, proof = raw[: _ANSWER.size], raw[_ANSWER.size : _ANSWER.size + PROOF_NBYTES]
        is_known = len(raw) >= _ANSWER.size and said[0] in _ANSWERS
        if not is_known or not compare_digest(proof, self.mesh.proof(self.peer, said)):
            raise WireError(f"rank {self.peer} has sent an invalid answer")
        with self._lock:
            on_end = self._offered.pop(_ANSWER.unpack(said), None)
        if on_end is not None:  # else it was withdrawn
            on_end(True)  # noqa: FBT003  # a callback's
        return True

    def fail(self) -> None:
        """The connection has ended: nothing is said any more."""
        with self._lock:
            self._is_over = True
            left = list(self._offered.values())
            self._offered.clear()
        for on_end in left:
            on_end(False)  # noqa: FBT003  # a callback's

    def carry_out(self, transfer: Callable[[], None]) -> None:
        """Let another thread do a transfer between the devices, and wait until it is over.

        A backend hears of no death, and its waits can't be ended. So that thread is left behind
        when the connection has ended.

        Raises:
            ObjcommError: what has ended the connection.
            RuntimeError: this process can start no more threads.
        """
        done: Future[None] = Future()
        self.check()
        self._apart.submit(partial(carried_out, transfer, done))
        try:
            while not wait([done], _LOOK_SECONDS).done:
                if self.mesh.verdict is not None:
                    self._apart.close()
                    self._apart.give_up()
                    self.check()
            done.result()
        finally:
            del done  # an error's traceback holds this frame, and its future the error

    def check(self) -> None:
        """See whether the connection has ended.

        Raises:
            ObjcommError: what has ended it.
        """
        if self.mesh.verdict is not None:
            raise self.mesh.verdict.error("send")


class DeviceTurn:
    """The transfer of one message's members from one rank's device to another's, in its turn.

    A backend has one order for all that moves between two ranks, in both directions: where one of
    them begins with another transfer, both wait for ever, and nothing tells them. So one transfer
    moves at a time, and the lower rank says which is the next. The receiver says when it has room.
    Where that is the lower rank, this is the beginning; else the sender answers that it begins. The
    higher rank takes its places in the order of these answers, as the thread that hears them.

    A context, at whose end this rank is through with it.
    """

    def __init__(
        self, offers: Offers, number: int, say: Callable[[Operation], None], *, is_sender: bool
    ) -> None:
        """Begin.

        Args:
            offers: of the connection that the message travels over.
            number: the message's.
            say: gives the other rank an answer on this message.
            is_sender: whether it is this rank's.
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
        """Hear the other rank from now on: before anything is sent that it may answer."""
        if self._is_sender or not self._is_lower:
            self._offers.put(self._number, self._hear, self._awaited)

    def move(self, transfer: Callable[[], None]) -> None:
        """Do it when both ranks are at this one; on the receiver there is room for it now.

        Raises:
            ObjcommError: what has ended the connection.
            RuntimeError: this process can start no more threads.
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
        self._offers.carry_out(transfer)

    def _until(self, wait: Callable[[float], bool]) -> None:
        while not wait(_LOOK_SECONDS):
            self._offers.check()

    def _hear(self, is_said: bool) -> None:  # noqa: FBT001  # a callback's
        if is_said and not self._is_lower:
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
    """See the module.

    Attributes:
        peer: the other rank.
        order: of what this rank sends.
        departing: sends what nobody waits to send, when its turn has come.
        leaving: sends what follows the heads of offered messages, when they are taken.
        arriving: takes in what nobody waits to take in, and has not come whole.
        has_device_path: whether large members may go from device to device; not after a transfer
            that did not end: what a backend has begun stands in the way of what follows.
    """

    def __init__(self, channel: Channel, peer: int, rank: int, peers: Peers) -> None:
        """Begin.

        Args:
            channel: joins the two.
            peer: the other rank, within the group like ``rank``.
            rank: this one.
            peers: the group's on this rank.
        """
        self.peer = peer
        self.order = TicketQueue()
        self.departing = SerialQueue(peers.pool)
        self.leaving = SerialQueue(peers.pool)
        self.arriving = SerialQueue(peers.pool)
        self.has_device_path = True
        self._channel = channel
        self._rank = rank
        self._mailbox = peers.mailbox
        self._lock = guard()
        self._change = Alone("a call with the same rank")
        self._arrivals: _Arrivals | None = None

    def admit(self, operation: str) -> tuple[Mesh, Lane]:
        """The connection, made or not, for a call that can wait for it elsewhere.

        Raises:
            BrokenGroupError: an earlier error has closed it for good.
            ObjcommError: what has closed it since the last call; the next call is served.
            UsageError: the group is destroyed.
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
        """As ``admit`` for a call that others can serve, too; None if this one never will.

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
        """The connection; waits until the other rank has come.

        Raises:
            TransportTimeout: it did not come.
            ObjcommError: as ``admit``.
        """
        mesh, lane = self.admit(call.operation)
        self.listen(mesh)
        if mesh.link is None:
            place = call.header.call_site
            self._channel.connect(mesh, lane, call.operation, deadline, place, caller=call)
        return mesh, lane

    def listen(self, mesh: Mesh) -> Verdict | None:
        """See to it that what the other rank sends is taken in, or said to be lost.

        Returns:
            What has ended that mesh, if another one stands in its place.

        Raises:
            RuntimeError: this process can start no more threads; the next call tries again.
        """
        arrivals = self._arrivals
        if arrivals is None or arrivals.mesh is not mesh:
            return mesh.verdict  # what replaced them has ended all requests
        if not arrivals.is_begun:
            mesh.begin_meeting(self._channel.store(), Deadline(FOREVER_SECONDS))
            arrivals.begin()
        elif mesh.verdict is not None:
            arrivals.fail()
        return None

    def signal(self) -> Awaitable | None:
        """What a thread can wait for while it moves the connection; None if there is none."""
        mesh = self._channel.mesh
        return None if mesh is None or mesh.link is None else mesh.link.signal()

    def offers(self, mesh: Mesh) -> Offers:
        """What the two have offered each other over a connection."""
        arrivals = self._arrivals
        if arrivals is not None and arrivals.mesh is mesh:
            return arrivals.offers
        ended = Offers(mesh, self.peer)
        ended.fail()
        return ended

    def check_uninterrupted(self, operation: str) -> None:
        """See that a call of this thread can send and receive.

        Raises:
            UsageError: it is a handler's or a destructor's, and has interrupted one that does.
        """
        arrivals = self._arrivals
        link = None if arrivals is None else arrivals.mesh.link
        if (
            (link is not None and link.is_interrupted())
            or (arrivals is not None and arrivals.offers.is_interrupted())
            or self._lock._is_owned()  # noqa: SLF001  # as Condition asks
        ):
            raise UsageError(f"{operation}: {interrupted('a call with the same rank')}")

    def absolve(self, verdict: Verdict) -> None:
        """A call has raised a verdict: the next one need not."""
        mesh = self._channel.mesh
        if mesh is not None and mesh.verdict is not None and mesh.verdict.name == verdict.name:
            mesh.absolve(threading.current_thread())


class Peers:
    """This rank's messages from rank to rank on one group.

    Attributes:
        mailbox: those that have come here.
        pool: threads for calls that nobody waits for; so many for a pair, however many calls.
        ending: ends receives that nobody waits for, of what is here whole.
        limits: ends calls whose limits pass where the watchdog does not see them wait.
    """

    def __init__(self, group: Group) -> None:
        self.mailbox = Mailbox(group.rank, group.size)
        self.pool = ThreadPool()
        self.ending = SerialQueue(self.pool)
        self.limits = AlarmClock("objcomm-limit")
        self._pairs: dict[int, Pair] = {}  # by the other rank

    def pair(self, group: Group, peer: int) -> Pair:
        """This rank and another one of the group."""
        pair = self._pairs.get(peer)
        if pair is None:
            channel = group.channel((min(peer, group.rank), max(peer, group.rank)))
            made = Pair(channel, peer, group.rank, self)
            pair = self._pairs.setdefault(peer, made)
        return pair


def peers_of(group: Group) -> Peers:
    """This rank's messages from rank to rank on a group."""
    found: Peers | None = group.peers
    if found is None:
        # One step, and no lock: a process that was forked while another thread had it would wait
        # for that thread for ever, instead of being told that it can't use the group.
        made = Peers(group)
        found = group.__dict__.setdefault("peers", made)
        if found is made:
            group.at_end(made.pool.close)
    return found


class _Arrivals:
    """What one rank sends over one connection: messages for the mailbox, and answers to offers.

    Attributes:
        mesh: the connection.
        offers: what this rank has offered the other one.
        is_begun: whether there is a thread that attends to it.
    """

    def __init__(
        self, mesh: Mesh, lane: Lane, peer: int, mailbox: Mailbox, former: _Arrivals | None
    ) -> None:
        """Begin.

        Args:
            mesh: the connection.
            lane: on which the messages come.
            peer: who sends them.
            mailbox: where they go.
            former: takes in what came over the last connection.
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
        # By no method: the mailbox would hold this, and a cycle would keep connections open.
        mailbox.expect(peer, mesh, partial(_prompt, weakref.ref(mesh), peer))

    def begin(self) -> None:
        """Let a thread attend, unless one does; keeps no group alive.

        Raises:
            RuntimeError: this process can start no more threads; the next call tries again.
        """
        self._thread.start(partial(self._attend, regions.get()))

    def fail(self) -> None:
        """End what waits for the peer, which is gone."""
        verdict = self.mesh.verdict
        if verdict is not None:
            is_for_any = _concerns_any(verdict)
            self._mailbox.fail(self._peer, self.mesh, verdict, is_for_any=is_for_any)
            self.offers.fail()

    def _attend(self, blocks: tuple[str, ...]) -> None:
        """Until the connection ends, and what has come over it is taken in.

        Args:
            blocks: those in which it was begun.
        """
        mesh, lane, peer = self.mesh, self._lane, self._peer
        self.is_begun = True
        expect(mesh, threading.current_thread())
        try:
            link = mesh.connections_for("recv")
            told = mesh.met_too_late(blocks)
            if told is not None:  # what comes is not for a call that still waits in the block
                for entry in lane.waits():
                    if entry.withdraw is not None and set(blocks) & set(entry.regions):
                        entry.withdraw(told)
            if self._former is not None:
                self._former.join()  # what came over the last connection comes first
            link.attend(peer, {lane.tag: self._accept, ANSWER_TAG: self.offers.hear})
        except LinkError as error:
            lost = proposal_for(TransportError("recv", (peer,), error.reason), mesh.rank)
            end_by_loss(mesh, lost)
            with contextlib.suppress(LinkError, ObjcommError):  # what had no room has some now
                while mesh.link is not None:
                    self._accept(mesh.link.take(peer, lane.tag, 0.0))
        except BaseException as error:  # noqa: BLE001  # this thread's end must not be silent
            mesh.settle(proposal_for(error, mesh.rank))
        self.fail()

    def _accept(self, raw: bytes) -> bool:
        """Put a message into the mailbox; returns False if there is no room.

        Raises:
            ObjcommError: it is not the peer's next message to this rank.
        """
        mesh, peer, lane, mailbox = self.mesh, self._peer, self._lane, self._mailbox
        if mesh.verdict is None and not mailbox.has_room(peer):
            return False
        gate = self._keyless
        # A key set for a block only is known only if listening began in that block.
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
    """Let the thread that attends to a peer's messages, if there is one, look again."""
    mesh = of()
    if mesh is not None and mesh.link is not None:
        mesh.link.prompt(peer)


def _concerns_any(verdict: Verdict) -> bool:
    """Whether it ends a wait for any rank.

    The others can still serve it after a program's regular end, and after what concerned two ranks
    only.
    """
    is_grave = verdict.cause in (Cause.LOST, Cause.LEFT, Cause.FAILED)
    return is_grave and verdict.reason not in FAREWELLS
