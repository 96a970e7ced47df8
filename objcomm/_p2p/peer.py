"""This rank and one other of a group, for messages from rank to rank.

A thread takes in the first part of whatever the other rank sends and puts it into the mailbox, so
a small message never waits for its receiver, and a receiver can wait for any sender: a link has
neither a probe nor a receive from any source.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import math
import threading
import weakref
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Self

from objcomm._algorithms.device import DevicePath
from objcomm._algorithms.exchange import Exchange
from objcomm._config import FOREVER_SECONDS, Settings, settings
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
from objcomm._wire.header import Header, Operation
from objcomm._wire.message import compose
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
        self._settings = settings()
        self._lane = Lane("taken", _TAKE_LANE, threading.current_thread(), TicketQueue())
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
            exchange = Exchange(
                link=self.mesh.connections_for(call.operation),
                lane=self._lane,
                entry=CallRecord(header, call.operation),
                deadline=deadline,
                gate=gate,
                device=DevicePath(),
            )
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
                header = _judged(self.mesh, self._lane, self.peer, raw, self._settings, _WORDS)
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
        self._current: Mesh | None = None
        self._listener = OnceThread(_LISTENER)
        self._former = OnceThread(_LISTENER)  # of the last connection

    def admit(self, operation: str) -> tuple[Mesh, Lane]:
        """The connection, made or not, for a call that can wait for it elsewhere.

        Raises:
            BrokenGroupError: an earlier error has closed it for good.
            ObjcommError: what has closed it since the last call; the next call is served.
            UsageError: the group is destroyed.
        """
        mesh, lane = self._channel.admit(operation, "", self.order)
        with self._lock, self._change:
            former = self._current
            if former is None or (former is not mesh and former.verdict is not None):
                if former is not None and former.verdict is not None:
                    _fail(self._mailbox, self.peer, former, former.verdict)
                self._current = mesh
                self._former, self._listener = self._listener, OnceThread(_LISTENER)
                self._mailbox.expect(self.peer, mesh)
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
        self.listen(mesh, lane)
        if mesh.link is None:
            place = call.header.call_site
            self._channel.connect(mesh, lane, call.operation, deadline, place, caller=call)
        return mesh, lane

    def listen(self, mesh: Mesh, lane: Lane) -> Verdict | None:
        """See to it that what the other rank sends is taken in, or said to be lost.

        Returns:
            What has ended that mesh, if another one stands in its place.

        Raises:
            RuntimeError: this process can start no more threads; the next call tries again.
        """
        with self._lock:
            is_current, listener, former = self._current is mesh, self._listener, self._former
        if is_current and not listener.has_begun:
            mesh.begin_meeting(self._channel.store(), Deadline(FOREVER_SECONDS))
            told = (settings(), regions.get())
            listener.start(partial(_listen, mesh, lane, self.peer, self._mailbox, former, *told))
        elif mesh.verdict is not None:
            _fail(self._mailbox, self.peer, mesh, mesh.verdict)
        return None if is_current else mesh.verdict

    def offers(self, mesh: Mesh) -> Offers:
        """What the two have offered each other over a connection on which they have met."""
        with self._lock, self._change:
            found = self._offers
            if found is None or found.mesh is not mesh:
                found = Offers(mesh, self.peer, self._pool)
                if self._current is mesh:  # else it has ended, and so has all that is offered
                    self._offers = found
            return found

    def check_uninterrupted(self, operation: str) -> None:
        """See that a call of this thread can send and receive.

        Raises:
            UsageError: it is a handler's or a destructor's, and has interrupted one that does.
        """
        mesh, offers = self._current, self._offers
        link = None if mesh is None else mesh.link
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


_by_group: weakref.WeakKeyDictionary[Group, Peers] = weakref.WeakKeyDictionary()


def peers_of(group: Group) -> Peers:
    """This rank's messages from rank to rank on a group."""
    found = _by_group.get(group)
    if found is None:
        # One step, and no lock: a process that was forked while another thread had it would wait
        # for that thread for ever, instead of being told that it can't use the group.
        made = Peers(group)
        found = _by_group.setdefault(group, made)
        if found is made:
            group.at_end(made.pool.close)
    return found


def _listen(  # noqa: PLR0917  # a thread's arguments
    mesh: Mesh,
    lane: Lane,
    peer: int,
    mailbox: Mailbox,
    former: OnceThread,
    chosen: Settings,
    blocks: tuple[str, ...],
) -> None:
    """Until the connection ends, and what has come over it is taken in; keeps no group alive."""
    expect(mesh, threading.current_thread())
    with _ends_settled(mesh, peer):
        link = mesh.connections_for("recv")
        told = mesh.met_too_late(blocks)
        if told is not None:  # what comes is not for who still waits in the block
            for entry in lane.waits():
                if entry.withdraw is not None and set(blocks) & set(entry.regions):
                    entry.withdraw(told)
        former.join()  # what came over the last connection comes first
        while True:  # until no more comes
            mailbox.await_room(peer, lambda: mesh.verdict is not None, _LOOK_SECONDS)
            raw = link.take(peer, lane.tag, math.inf)
            header = _judged(mesh, lane, peer, raw, chosen, (Operation.SEND,))
            raw = raw[: header.head_nbytes]
            nbytes = header.head_nbytes + header.payload_nbytes
            nbytes += 0 if header.is_inline else header.body_nbytes
            lane.taken += 1
            mailbox.deliver(Arrived(peer, header.tag, nbytes, header, raw, mesh, lane))
    if mesh.verdict is not None:
        _fail(mailbox, peer, mesh, mesh.verdict)


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


def _judged(  # noqa: PLR0917  # as above
    mesh: Mesh,
    lane: Lane,
    peer: int,
    raw: bytes,
    chosen: Settings,
    operations: tuple[Operation, ...],
) -> Header:
    """The header of what arrived, which is of one of some operations.

    Raises:
        ObjcommError: it is not the peer's next message to this rank.
    """
    # A key that holds in a block only is known to the thread that began to listen in it.
    current = settings()
    gate = Gate(chosen if current.secret is None else current, mesh.session, mesh.rank)
    header = gate.header_in(raw, peer)
    is_one = header.operation in operations
    expected = Header(
        operation=header.operation if is_one else operations[0],
        sender=peer,
        root=mesh.rank,
        lane=lane.number,
        group=mesh.number,
        sequence=lane.taken,
    )
    gate.check_call(expected, header, peer)
    gate.check_addressed(header)
    return header


def _fail(mailbox: Mailbox, peer: int, mesh: Mesh, verdict: Verdict) -> None:
    """End the requests that wait for a peer that is gone."""
    mailbox.fail(peer, mesh, verdict, is_for_any=_concerns_any(verdict))


def _concerns_any(verdict: Verdict) -> bool:
    """Whether it ends a wait for any rank.

    The others can still serve it after a program's regular end, and after what concerned two ranks
    only.
    """
    is_grave = verdict.cause in (Cause.LOST, Cause.LEFT, Cause.FAILED)
    return is_grave and verdict.reason not in FAREWELLS
