"""This rank and one other of a group, for messages from rank to rank.

The first part of each message of the other rank is put into the mailbox by the thread that moves
the link: one of its own if no other thread waits. So a small message never waits for its receiver,
and a receiver can wait for any sender: a link has neither a probe nor a receive from any source.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import math
import threading
import weakref
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

from objcomm._algorithms.device import DevicePath
from objcomm._algorithms.exchange import Exchange
from objcomm._config import FOREVER_SECONDS, process_settings, settings
from objcomm._failures.losses import end_by_loss
from objcomm._failures.verdict import FAREWELLS, Cause, Verdict, proposal_for, regions
from objcomm._failures.watchdog import expect
from objcomm._observe.history import CallRecord
from objcomm._p2p.mailbox import Arrived, Mailbox
from objcomm._transport.lane import Lane
from objcomm._transport.link import Deadline, LinkError
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
from objcomm._wire.message import compose
from objcomm._wire.signing import environment_secret
from objcomm.errors import BrokenGroupError, ObjcommError, TransportError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from objcomm._calls.group import Group
    from objcomm._failures.channel import Channel
    from objcomm._failures.mesh import Mesh


_LOOK_SECONDS = 0.5
_LISTENER = "objcomm-listen"

# Of the lane on which two ranks tell each other what they take. The other one has 0.
_TAKE_LANE = 1

# What can be told there.
_WORDS = (Operation.TAKE, Operation.READY, Operation.START)


class Offers:
    """Messages that one of two ranks has offered, over one connection, and the other one takes.

    What follows the head of such a message stays with its sender, and no thread waits there until
    the receiver says that it takes it: whoever waits for a connection's bytes waits for one
    message only, and the receiver may take the last one first. That word has a lane of its own, so
    that it comes through where the other one is full of messages that nobody takes. So have those
    by which the two agree on transfers between their devices, see ``DeviceTurn``.

    Attributes:
        mesh: the connection.
        peer: the other rank.
        turns: of transfers between the two ranks' devices.
        is_interrupted: as of ``Link``; then nothing can be said.
    """

    def __init__(self, mesh: Mesh, peer: int, pool: ThreadPool) -> None:
        """Begin.

        Args:
            mesh: the connection; the two have met.
            peer: the other rank.
            pool: lends a thread as long as this rank has offered something.
        """
        self.mesh = mesh
        self.peer = peer
        self.turns = TicketQueue()
        self._pool = pool
        self._apart = ThreadPool()
        self._lane = Lane("taken", _TAKE_LANE, threading.current_thread(), TicketQueue())
        self._judge = _Judge(mesh, self._lane, peer, _WORDS)
        self._lock = guard()
        self.is_interrupted: Callable[[], bool] = self._lock._is_owned  # noqa: SLF001  # as Condition asks
        self._offered: dict[tuple[int, int], Callable[[bool], object]] = {}  # by word and number
        self._is_heard = False

    def put(
        self, number: int, on_end: Callable[[bool], object], word: Operation = Operation.TAKE
    ) -> None:
        """Offer a message, or wait for another word on one.

        Args:
            number: the message's; what the other rank answers with that word is sent after this.
            on_end: called once, on a thread of the pool, when the other rank says so, or when the
                connection has ended; with whether it has said so. Must not raise.
            word: what the other rank is to say.

        Raises:
            RuntimeError: this process can start no more threads; nothing was offered.
        """
        with self._lock:
            self._offered[word, number] = on_end
            if self._is_heard:
                return
            self._is_heard = True
            try:
                self._pool.submit(self._hear)
            except BaseException:
                self._is_heard = False
                del self._offered[word, number]
                raise

    def withdraw(self, number: int, word: Operation = Operation.TAKE) -> bool:
        """Take an offer back; returns whether it stood: ``on_end`` is never called then."""
        with self._lock:
            return self._offered.pop((word, number), None) is not None

    def say(
        self, word: Operation, number: int, call: CallRecord, deadline: Deadline, gate: Gate
    ) -> Exchange:
        """Begin to tell the other rank, for instance that its message is taken.

        Args:
            word: what to tell.
            number: the message's.
            call: sends or receives it.
            deadline: the call's.
            gate: the call's.

        Returns:
            What has begun, for the caller to finish.

        Raises:
            ObjcommError: the connection has ended.
        """
        with self._lock:
            header = Header(
                operation=word,
                sender=self.mesh.rank,
                root=self.peer,
                lane=_TAKE_LANE,
                group=self.mesh.number,
                sequence=self._lane.sequence,
                call_site=call.header.call_site,
                tag=number,
            )
            link = self.mesh.connections_for(call.operation)
            said = CallRecord(header, call.operation)
            exchange = Exchange(link, self._lane, said, deadline, gate, device=DevicePath())
            exchange.send_head(compose(header, b""), [self.peer], destination=self.peer)
            self._lane.sequence += 1
        return exchange

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

    def _hear(self) -> None:
        """Until all that was offered is taken, or the connection has ended."""
        with _ends_settled(self.mesh, self.peer):
            link = self.mesh.connections_for("send")
            while self._is_any_offered():
                raw = link.take(self.peer, self._lane.tag, math.inf)
                header = self._judge.header_of(raw)
                self._lane.taken += 1
                self._end([(header.operation, header.tag)], is_said=True)
        if self.mesh.verdict is not None:
            with self._lock:
                self._is_heard = False
                left = list(self._offered)
            self._end(left, is_said=False)

    def _is_any_offered(self) -> bool:
        with self._lock:
            self._is_heard = bool(self._offered) and self.mesh.verdict is None
            return self._is_heard

    def _end(self, awaited: list[tuple[int, int]], *, is_said: bool) -> None:
        with self._lock:
            ended = [self._offered.pop(each, None) for each in awaited]
        for on_end in ended:
            if on_end is not None:  # else it was withdrawn
                on_end(is_said)


class DeviceTurn:
    """The transfer of one message's members from one rank's device to another's, in its turn.

    A backend has one order for all that moves between two ranks, in both directions: where one of
    them begins with another transfer, both wait for ever, and nothing tells them. So one transfer
    moves at a time, and the lower rank says which is the next. The receiver says when it has room.
    Where that is the lower rank, its word is the beginning; else the sender answers that it begins.
    The higher rank takes its places in the order of these words, as the thread that hears them.

    A context, at whose end this rank is through with it.
    """

    def __init__(
        self, offers: Offers, number: int, say: Callable[[Operation], None], *, is_sender: bool
    ) -> None:
        """Begin.

        Args:
            offers: of the connection that the message travels over.
            number: the message's.
            say: tells the other rank a word on this message.
            is_sender: whether it is this rank's.
        """
        self._offers = offers
        self._number = number
        self._say = say
        self._is_sender = is_sender
        self._is_lower = offers.mesh.rank < offers.peer
        self._awaited = Operation.READY if is_sender else Operation.START
        self._is_over = threading.Event()  # the wait for that word
        self._place = Ticket(offers.turns)

    def begin(self) -> None:
        """Hear the other rank's word from now on: before anything is sent that it may answer.

        Raises:
            RuntimeError: this process can start no more threads.
        """
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
        self._pool = peers.pool
        self._offers: Offers | None = None
        self._channel = channel
        self._rank = rank
        self._mailbox = peers.mailbox
        self._lock = guard()
        self._change = Alone("a call with the same rank")
        self._inlet: _Inlet | None = None

    def admit(self, operation: str) -> tuple[Mesh, Lane]:
        """The connection, made or not, for a call that can wait for it elsewhere.

        Raises:
            BrokenGroupError: an earlier error has closed it for good.
            ObjcommError: what has closed it since the last call; the next call is served.
            UsageError: the group is destroyed.
        """
        mesh, lane = self._channel.admit(operation, "", self.order)
        inlet = self._inlet
        if inlet is None or inlet.mesh is not mesh:
            with self._lock, self._change:
                former = self._inlet
                verdict = None if former is None else former.mesh.verdict
                if former is None or (former.mesh is not mesh and verdict is not None):
                    if former is not None:
                        former.fail()
                    self._inlet = _Inlet(mesh, lane, self.peer, self._mailbox, former)
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
        inlet = self._inlet
        if inlet is None or inlet.mesh is not mesh:
            return mesh.verdict  # the inlet that replaced it has ended all requests
        if not inlet.is_begun:
            mesh.begin_meeting(self._channel.store(), Deadline(FOREVER_SECONDS))
            inlet.begin()
        elif mesh.verdict is not None:
            inlet.fail()
        return None

    def offers(self, mesh: Mesh) -> Offers:
        """What the two have offered each other over a connection on which they have met."""
        with self._lock, self._change:
            found = self._offers
            if found is None or found.mesh is not mesh:
                found = Offers(mesh, self.peer, self._pool)
                inlet = self._inlet
                # Else it has ended, and so has all that is offered.
                if inlet is not None and inlet.mesh is mesh:
                    self._offers = found
            return found

    def check_uninterrupted(self, operation: str) -> None:
        """See that a call of this thread can send and receive.

        Raises:
            UsageError: it is a handler's or a destructor's, and has interrupted one that does.
        """
        inlet, offers = self._inlet, self._offers
        link = None if inlet is None else inlet.mesh.link
        if (
            (link is not None and link.is_interrupted())
            or (offers is not None and offers.is_interrupted())
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


class _Inlet:
    """Takes in the first parts of what one rank sends over one connection, on any thread.

    Attributes:
        mesh: the connection.
        is_begun: whether there is a thread that attends to it.
    """

    def __init__(
        self, mesh: Mesh, lane: Lane, peer: int, mailbox: Mailbox, former: _Inlet | None
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
        self.is_begun = False
        self._lane = lane
        self._peer = peer
        self._mailbox = mailbox
        self._thread = OnceThread(_LISTENER)
        self._former = None if former is None else former._thread  # noqa: SLF001  # its own class
        self._judge = _Judge(mesh, lane, peer, (Operation.SEND,))
        self._error: Exception | None = None
        # By no method: the mailbox would hold this, and a cycle would keep connections open.
        self._prompt = partial(_prompt, weakref.ref(mesh), peer, lane.tag)
        mailbox.expect(peer, mesh, self._prompt)

    def begin(self) -> None:
        """Let a thread attend, unless one does; keeps no group alive.

        Raises:
            RuntimeError: this process can start no more threads; the next call tries again.
        """
        self._thread.start(partial(self._attend, regions.get()))

    def fail(self) -> None:
        """End the requests that wait for the peer, which is gone."""
        verdict = self.mesh.verdict
        if verdict is not None:
            is_for_any = _concerns_any(verdict)
            self._mailbox.fail(self._peer, self.mesh, verdict, is_for_any=is_for_any)

    def _accept(self, raw: bytes) -> bool:
        """Put a message into the mailbox; returns False if there is no room, or was an error."""
        mesh, peer, lane, mailbox = self.mesh, self._peer, self._lane, self._mailbox
        if self._error is not None or (mesh.verdict is None and not mailbox.has_room(peer)):
            return False
        try:
            header = self._judge.header_of(raw)
        except Exception as error:  # noqa: BLE001  # raised by ``_is_awaited``
            self._error = error
            self._prompt()
            return False
        raw, nbytes = raw[: header.head_nbytes], HEADER_NBYTES + header.nbytes
        lane.taken += 1
        mailbox.deliver(Arrived(peer, header.tag, nbytes, header, raw, mesh, lane))
        return True

    def _is_awaited(self) -> bool:
        """Whether a message is awaited that no thread moves.

        Raises:
            ObjcommError: what has come is not the peer's next message to this rank.
        """
        if self._error is not None:
            raise self._error
        return self._mailbox.is_awaited(self._peer)

    def _attend(self, blocks: tuple[str, ...]) -> None:
        """Until the connection ends, and what has come over it is taken in.

        Args:
            blocks: those in which it was begun.
        """
        mesh, lane, peer = self.mesh, self._lane, self._peer
        self.is_begun = True
        expect(mesh, threading.current_thread())
        with _ends_settled(mesh, peer):
            link = mesh.connections_for("recv")
            told = mesh.met_too_late(blocks)
            if told is not None:  # what comes is not for who still waits in the block
                for entry in lane.waits():
                    if entry.withdraw is not None and set(blocks) & set(entry.regions):
                        entry.withdraw(told)
            if self._former is not None:
                self._former.join()  # what came over the last connection comes first
            link.attend(peer, lane.tag, self._accept, self._is_awaited)
        if mesh.link is not None:
            with contextlib.suppress(LinkError):  # what had no room has some now
                while self._accept(mesh.link.take(peer, lane.tag, 0.0)):
                    pass
        self.fail()


@contextlib.contextmanager
def _ends_settled(mesh: Mesh, peer: int) -> Iterator[None]:
    """A block on a thread of objcomm's own: what ends it ends the connection, and is told."""
    try:
        yield
    except ObjcommError as error:
        mesh.settle(proposal_for(error, mesh.rank))
    except LinkError as error:
        lost = proposal_for(TransportError("recv", (peer,), error.reason), mesh.rank)
        end_by_loss(mesh, lost)
    except BaseException as error:  # noqa: BLE001  # this thread's end must not be silent
        mesh.settle(proposal_for(error, mesh.rank))


class _Judge:
    """Holds the messages that come on one lane of a connection against what is due there."""

    def __init__(self, mesh: Mesh, lane: Lane, peer: int, operations: tuple[int, ...]) -> None:
        self._mesh = mesh
        self._lane = lane
        self._peer = peer
        self._operations = operations
        self._settings = chosen = settings()
        self._keyless = Gate(replace(chosen, secret=None), "", mesh.rank)

    def header_of(self, raw: bytes) -> Header:
        """The header of what arrived.

        Raises:
            ObjcommError: it is not the peer's next message to this rank.
        """
        mesh, lane, peer, gate = self._mesh, self._lane, self._peer, self._keyless
        # A key set for a block only is known only if listening began in that block.
        current = process_settings()
        chosen = self._settings if current.secret is None else current
        if chosen.secret is not None or environment_secret() is not None:
            gate = Gate(chosen, mesh.session, mesh.rank)
        header = gate.header_in(raw, peer)
        found = header.operation
        operation = found if found in self._operations else self._operations[0]
        # The fields that must agree are consecutive, from the operation to the fingerprint.
        due = operation, peer, mesh.rank, lane.number, 0, mesh.number, lane.taken, 0
        if gate.signer is not None or header[2:10] != due:
            gate.check_call(Header(0, 0, *due), header, peer)
            gate.check_addressed(header)
        return header


def _prompt(of: weakref.ref[Mesh], peer: int, tag: int) -> None:
    """Let the thread that attends to a peer's messages, if there is one, look again."""
    mesh = of()
    if mesh is not None and mesh.link is not None:
        mesh.link.prompt(peer, tag)


def _concerns_any(verdict: Verdict) -> bool:
    """Whether it ends a wait for any rank.

    The others can still serve it after a program's regular end, and after what concerned two ranks
    only.
    """
    is_grave = verdict.cause in (Cause.LOST, Cause.LEFT, Cause.FAILED)
    return is_grave and verdict.reason not in FAREWELLS
