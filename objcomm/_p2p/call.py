"""One point-to-point call on this rank: a send, or a receive, and what the two have in common.

A send is encoded, queues for its receiver, and is transmitted. A receive asks for a message, waits,
takes it in and decodes it. A call that no thread waits for does not occupy a thread while it waits:
a send waits in the queue, or is offered to its receiver, and a receive waits in the mailbox. The
event that ends the wait hands the rest of the call to a thread that runs one job after another.
"""

import contextlib
import contextvars
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar, NoReturn, Self

import torch

from objcomm._algorithms.device import DevicePath, DevicePlace, stream_beside
from objcomm._calls.call import Coding
from objcomm._calls.exclusive_regions import acts_alone
from objcomm._calls.group import Group, resolve
from objcomm._calls.watched import Watched
from objcomm._calls.work import Envelope, Work
from objcomm._codecs.buffers import BufferKind
from objcomm._config import (
    FOREVER_SECONDS,
    Allowed,
    DeviceLike,
    GroupLike,
    Timeout,
    whole_number,
)
from objcomm._failures.mesh import Mesh
from objcomm._failures.verdict import Cause, Verdict, open_blocks
from objcomm._failures.watchdog import died_in, end_elsewhere, hurry
from objcomm._observe.history import CallRecord, call_site
from objcomm._observe.tracing import Span, begun, profiler
from objcomm._p2p.mailbox import Arrived, RecvRequest
from objcomm._p2p.peer import ANSWER_TAG, DeviceTurn, Offers, Pair, answer, peers_of
from objcomm._transport.lane import Lane
from objcomm._transport.threads import (
    SUSPICIOUS_SECONDS,
    Alarm,
    SerialQueue,
    Signal,
    Ticket,
    check_uninterrupted,
)
from objcomm._wire.admission import Gate
from objcomm._wire.failure_message import failure_message, failure_of, failures_in, raise_together
from objcomm._wire.header import BLANK, EVERYONE, NAMES, Flag, Header, Operation, Status, made
from objcomm._wire.message import Message
from objcomm.errors import ObjcommError, RankFailure, TransportTimeout, UsageError

_TAG_MAX = (1 << 32) - 1
_OFFERED, _ON_DEVICE = int(Flag.OFFERED), int(Flag.ON_DEVICE)  # ``&`` on an IntFlag costs 0.7 µs
_FAILURE = int(Status.FAILURE)


class P2PCall:
    """The common part of a send and a receive; creating it checks arguments and starts nothing.

    As a context manager, it records the call before its body runs, and its outcome afterwards.

    Attributes:
        operation: SEND or RECV.
        group: the group of the call.
        entry: its record.
        peer: the other rank, within the group; None for any.
        tag: the message's tag; None for any.
        envelopes: the envelope of the received message, once there is one.
    """

    operation: ClassVar[Operation]

    def __init__(
        self,
        global_peer: int | None,
        group_peer: int | None,
        tag: int | None,
        group: GroupLike | Group,
        timeout: Timeout = None,
        *,
        codec: str | None = None,
        device: DeviceLike = None,
        accept: Iterable[str] | None = None,
        allow: Iterable[Allowed] | None = None,
        name: str = "",
        reported_as: str = "",
    ) -> None:
        """Check the arguments.

        Args:
            global_peer: the other rank as a global rank.
            group_peer: the other rank as a rank within the group. If neither is given, any rank.
            tag: the message's tag; None for any.
            group: as given by the user, as is ``timeout``; or objcomm's own group.
            timeout: in seconds.
            codec: the codec that encodes the object.
            device: the device on which tensors arrive.
            accept: codecs whose messages this rank decodes.
            allow: what a received pickle may name.
            name: the name of the user's call, if it differs from the operation's.
            reported_as: the name of that call in errors about arguments, if it differs from
                ``name``, which records use.

        Raises:
            UsageError: an argument is wrong, or this process can't use the group, or this rank is
                in a region in which the other ranks don't make this call.
            NotInGroupError: this rank is not a member.
        """
        self._began = time.perf_counter()
        self._name = name = name or NAMES[self.operation]
        self._reported_as = reported_as = reported_as or name
        self.group = whole = resolve(group, reported_as)
        self._peers = peers = peers_of(whole)
        if whole.size > 1:
            whole.check_process(reported_as)
        peers.mailbox.check_uninterrupted()
        self._devices = tuple(whole.device_backends) if whole.size > 1 else ()
        self._coding = coding = Coding.of(codec, device, accept, allow, reported_as)
        self._deadline = deadline = whole.deadline(reported_as, timeout, coding.settings)
        self.tag = tag = None if tag is None else checked_tag(reported_as, tag)
        self.peer = peer = None
        if global_peer is not None or group_peer is not None:
            argument = "dst" if self.operation is Operation.SEND else "src"
            self.peer = peer = whole.root(reported_as, global_peer, group_peer, argument)
        acts_alone(reported_as, whole.ranks, whole.rank)
        root = -1 if peer is None else peer
        fields = 0, 0, self.operation, whole.rank, root, 0, 0, 0, 0, 0, "", call_site()
        header = made(Header, (*fields, 0, 0, 0, 0, tag or 0, EVERYONE, 0, BLANK, BLANK, 0, ""))
        self.entry = entry = CallRecord(header, name, coding.codec_name)
        entry.awaits = root
        # A limit of ``inf`` is cut to 115 days. A polling caller does not set such a limit.
        entry.has_own_limit = timeout is not None and deadline.seconds < FOREVER_SECONDS
        self.envelopes: list[Envelope] = []
        self._rest: list[Callable[[], None]] = []  # of a work: the job that completes it
        self._claim = threading.Lock()

    _own_error: BaseException | None = None
    _ended_by: BaseException | None = None
    _alarm: Alarm | None = None
    _is_wait_over = False
    _span: Span | None = None
    _has_begun = False

    def begin(self) -> None:
        """Record that the call has begun: its arguments are valid."""
        if not self._has_begun:
            self._has_begun = True
            self.group.recorder.history.add(self.entry)

    def work(self) -> Work[Any]:
        """Return a work for the result of this call."""
        work: Work[Any] = Work(self._name, self.entry.header.call_site, self.entry, self.envelopes)
        if self.peer not in {None, self.group.rank}:
            work.moved_by(self._peers.pair(self.group, self.peer).signal)
        return work

    def claim(self) -> bool:
        """Return whether this thread is to conclude the call; only the first to ask is.

        If Ctrl-C interrupts the handover to another thread, both threads ask.
        """
        return self._claim.acquire(blocking=False)

    def conclude(self, error: BaseException | None) -> None:
        """Record how the call has ended."""
        # The traceback of ``_own_error`` holds the caller's object; that of ``_ended_by`` holds
        # this call.
        self._own_error = self._ended_by = None
        self.group.recorder.conclude(self.entry, error, self._began)

    def _finish(self, error: BaseException | None) -> None:
        """Run the rest of a work on this thread; the work raises ``error`` if there is one.

        Args:
            error: has no traceback, which would hold the work and so the error itself.
        """
        self._ended_by = error
        del error  # as in ``Work.carry_out_here``
        if self._rest:
            # Not stored in a variable: an error's traceback would hold that, and so the work.
            self._rest.pop()()

    def _limit(self, seconds: float, end: Callable[[], object]) -> None:
        """Call ``end`` after so many seconds, unless the wait is over by then."""
        self._alarm = self._peers.limits.set(seconds, end)
        if self._is_wait_over:
            self._peers.limits.cancel(self._alarm)

    def _lift_limit(self) -> None:
        self._is_wait_over = True
        if self._alarm is not None:
            self._peers.limits.cancel(self._alarm)

    def __enter__(self) -> Self:
        self.begin()
        if profiler._is_profiler_enabled:  # noqa: SLF001  # see ``tracing``
            self._span = begun(self._name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._span is not None:
            self._span.__exit__(kind, error, traceback)
        self.conclude(error)

    def _joined(self, mesh: Mesh, lane: Lane, sequence: int) -> Watched:
        """Return the traffic of the message with this number."""
        entry = self.entry
        entry.header = _numbered(entry.header, mesh, lane, sequence)
        link, gate = mesh.link or mesh.connections_for(entry.operation), self._gate(mesh)
        path = self.group.device_path(mesh, lane)
        return Watched(mesh, link, lane, entry, self._deadline, gate=gate, device=path)

    def _gate(self, mesh: Mesh) -> Gate:
        """Return the gate that checks the messages of this call."""
        return Gate(self._coding.settings, mesh.session, self.group.rank, self._devices)

    def _turn(self, offers: Offers, exchange: Watched, *, is_sender: bool) -> DeviceTurn:
        def say(of: Operation) -> None:
            self._say(of, exchange)

        return DeviceTurn(offers, exchange.header.sequence, say, is_sender=is_sender)

    def _say(self, of: Operation, exchange: Watched) -> None:
        """Begin to send the other rank an answer about a message."""
        header = exchange.header
        exchange.send_raw(answer(exchange.mesh, of, header.sequence), header.root, ANSWER_TAG)


def _numbered(header: Header, mesh: Mesh, lane: Lane, sequence: int) -> Header:
    """Return a message's header with the message's number on a lane."""
    return made(Header, (*header[:5], lane.number, 0, mesh.number, sequence, *header[9:]))


def checked_tag(operation: str, tag: object, argument: str = "tag") -> int:
    """Check a tag and return it as an int.

    Args:
        operation: the call's name, for errors.
        tag: as given by the user.
        argument: the argument's name, for errors.

    Raises:
        UsageError: it is not a tag, or is out of range.
    """
    number = tag if type(tag) is int else whole_number(tag)
    if number is not None and 0 <= number <= _TAG_MAX:
        return number
    raise UsageError(f"{operation}: {argument}={tag!r} must be an integer from 0 to {_TAG_MAX}")


class Send(P2PCall):
    """A message from this rank to another: encode it, queue for the receiver, transmit it."""

    operation = Operation.SEND

    is_synchronous = False  # whether it ends only when its message has been received
    _may_change = False  # whether it sends memory of the caller that the caller may change
    # For a work. The message is queued; then it is sent, or it is offered and sent when taken.
    _refusal: RuntimeError | None = None  # the system can't start a thread for it
    _offering: Callable[[], None] | None = None  # offers the message when its turn comes
    _offered: Watched | None = None
    _halves: Iterator[int]  # counts two events: the head was sent, and the offer was answered
    _is_taken = False
    _verdict: Verdict | None = None  # has ended the offer, and nothing else
    # For a message with large members on a device.
    _device_turn: DeviceTurn | None = None  # once the message was offered
    _stream: torch.Stream | None = None  # the stream on which they leave the device

    def run(self, obj: object) -> None:
        """Send, and return when the message has been taken."""
        pair = self._pair()
        if pair is None:
            with self:
                self._keep(obj)
            return
        message = None
        types = self._device_types
        if types:
            self.begin()
            message = self._message(obj, types)
            if message.following_on_device:
                self._wait_for(self._launched(pair, obj, message))
                return
        with self, Ticket(pair.order) as place:
            self.entry.waiter = threading.get_ident()
            message = self._message(obj, types) if message is None else message
            self._deadline.restart()
            place.take()
            self._transmit(pair, place, message)

    def launch(self, obj: object, *, is_kept: bool = True) -> Work[None]:
        """Encode, and let other threads do the rest; ``obj`` must not change until the work ends.

        Args:
            obj: the object to send.
            is_kept: whether the part of a large message after its head stays here until the
                receiver answers that it takes the message. This costs one more answer between the
                two ranks, and no thread waits meanwhile.
        """
        pair = self._pair()
        if pair is None and self.is_synchronous:
            return self._launch_to_itself(obj)
        if pair is None:
            return self.work().carry_out_here(lambda: self.run(obj))
        self.begin()
        return self._launched(pair, obj, is_kept=is_kept)

    def _launched(
        self, pair: Pair, obj: object, message: Message | None = None, *, is_kept: bool = True
    ) -> Work[None]:
        """Launch a call that has begun; ``message`` is None if it is not encoded yet."""
        place = None
        try:
            if message is None:
                message = self._message(obj, self._device_types)
            self._may_change = any(each.kind is not BufferKind.BYTES for each in message.large)
            work = self.work()
            # Data on a device always stays here first, because both ranks must be ready to transfer
            # it.
            on_device = message.following_on_device
            is_synchronous = self.is_synchronous and self._own_error is None
            is_all_head = message.is_all_head
            is_offered = is_synchronous or bool(on_device) or (is_kept and not is_all_head)
            # Whether the turn is short: nothing follows the head, or the rest stays here for now.
            is_brief = is_offered or is_all_head
            place = Ticket(pair.order, functools.partial(self._hand_over, pair, is_brief))
            rest = functools.partial(self._carry_out, pair, place, message, is_offered)
            if is_offered:
                header = message.header
                flags = header.flags | Flag.OFFERED | Flag.ON_DEVICE * bool(on_device)
                message.header = header._replace(flags=flags)
                if on_device:
                    self._stream = stream_beside(after_current=True)
                self._halves = itertools.count()
                # The context of ``rest`` can't be entered twice.
                context = contextvars.copy_context()
                self._offering = functools.partial(context.run, self._offer, pair, place, message)
            self._rest = [work.job(rest)]
            self._deadline.restart()
            place.take()
            if not place.turn.is_set:
                self._limit(self._deadline.seconds_left, lambda: self._give_up(pair))
        except BaseException as error:  # Ctrl-C, or no more threads can start
            if self.claim():
                self._lift_limit()
                if place is not None:
                    place.leave()
                self._offering = None
                self._rest.clear()
                self.conclude(error)
            raise
        if self._refusal is not None:
            work.disown()
            raise self._refusal
        return work

    def leave(self, work: Work[None], error: BaseException) -> None:
        """End a send that ``error`` made its caller leave, if it sends what may change from now on.

        Any other message is sent all the same.
        """
        if not self._may_change or work.done():
            return
        if self.claim():  # its turn has not come
            self._lift_limit()
            self._finish(CancelledError())  # nobody has the work
        else:
            self._peers.pair(self.group, self.entry.header.root).leave(error)
        with contextlib.suppress(ObjcommError, CancelledError):
            work.wait()

    def run_until_received(self, obj: object) -> None:
        """Send, and return when the message has been received.

        Raises:
            UsageError: the receiver is this rank, and it has no receive waiting.
        """
        rank, tag = self.group.rank, self.entry.header.tag
        if self._pair() is None and not self._peers.mailbox.is_wanted(rank, tag):
            raise UsageError(
                f"{self._name}: rank {rank} would wait for itself to receive the message; "
                "start the receive first, or use issend"
            )
        self._wait_for(self.launch(obj))

    def _wait_for(self, work: Work[None]) -> None:
        try:
            work.wait()
        except ObjcommError:
            raise
        except BaseException as error:  # Ctrl-C, or what a signal's handler raises
            self.leave(work, error)
            raise
        finally:
            del work  # it holds the error, whose traceback holds this frame

    def _launch_to_itself(self, obj: object) -> Work[None]:
        """Launch a send to this rank; the work ends when this rank receives the message."""
        self.begin()
        work = self.work()
        self._rest = [work.job(self._go_on_taken)]
        try:
            try:
                self._keep(obj, lambda: self._end_own(None))
            except Exception as error:  # noqa: BLE001  # raised by the work's ``wait``
                self._finish(error.with_traceback(None))
            else:
                seconds = self._deadline.seconds
                late = TransportTimeout(self._name, (self.group.rank,), seconds)
                self._limit(seconds, lambda: self._end_own(late))
            return work
        finally:
            del work  # as in ``Work.carry_out_here``

    def _end_own(self, error: TransportTimeout | None) -> None:
        """End a send of this rank to itself: it was received, or its limit has passed."""
        if self.claim():
            self._lift_limit()
            self._finish(error)

    def _go_on_taken(self) -> None:
        with self:
            if self._ended_by is not None:
                raise self._ended_by

    def _hand_over(self, pair: Pair, is_brief: bool) -> None:  # noqa: FBT001  # a callback
        """Have another thread continue when the turn has come; the calling thread must not."""
        line = pair.departing if is_brief else self._peers.pool
        try:
            line.submit(self._take_turn)
        except RuntimeError as error:
            if self.claim():
                self._refusal = error.with_traceback(None)
                self._finish(self._refusal)

    def _take_turn(self) -> None:
        if self.claim():
            self._lift_limit()
            if self._offering is None:
                self._finish(None)
            else:
                self._offering()

    def _give_up(self, pair: Pair) -> None:
        """End the call because its limit passed before its turn came."""
        if self.claim():
            self._finish(TransportTimeout(self._name, (pair.peer,), self._deadline.seconds))

    def _offer(self, pair: Pair, place: Ticket, message: Message) -> None:
        """Send the head; the rest follows the receiver's answer, without a waiting thread."""
        is_awaited = False
        try:
            with place:
                exchange = self._offered = self._entered(pair, place)
                lane = exchange.lane
                offers, number = pair.offers(exchange.mesh), lane.sequence
                with exchange:
                    offers.put(number, functools.partial(self._take_up, pair, message))
                    is_awaited = True
                    if message.header.flags & _ON_DEVICE:
                        self._device_turn = self._turn(offers, exchange, is_sender=True)
                        self._device_turn.begin()
                    self._send_head(exchange, message)
                if message.is_all_head:  # the receiver needs nothing more
                    end = functools.partial(self._withdraw, pair, message, offers, number)
                    self.entry.withdraw = end
                lane.begin(self.entry, self._deadline)
        except BaseException as error:  # noqa: BLE001  # raised by the work's ``wait``
            self._ended_by = error.with_traceback(None)
            if not is_awaited or offers.withdraw(number):
                self._take_up(pair, message)
        self._take_up(pair, message)

    def _withdraw(
        self, pair: Pair, message: Message, offers: Offers, number: int, verdict: Verdict
    ) -> None:
        """End an offer by a verdict, unless it was taken."""
        if offers.withdraw(number):
            self._verdict = verdict
            self._take_up(pair, message)

    def _take_up(self, pair: Pair, message: Message, is_taken: bool = False) -> None:  # noqa: FBT001, FBT002  # a callback
        """Note that the head was sent, or how the offer ended; the second call starts the rest."""
        self._is_taken |= is_taken
        self.entry.is_served |= is_taken
        if next(self._halves):
            rest = functools.partial(self._finish, self._ended_by)
            if self._is_taken and message.is_all_head:  # nothing follows
                rest()
                return
            # A message that waits for a device turn must not block the one that would end that
            # turn.
            line = pair.leaving if self._stream is None else self._peers.pool
            try:
                line.submit(rest)
            except RuntimeError as error:  # no more threads can start
                if is_taken:  # in a step of the link, which must not wait, and ends with this error
                    self._finish(error.with_traceback(None))
                    raise
                rest()

    def _carry_out(self, pair: Pair, place: Ticket, message: Message, is_offered: bool) -> None:  # noqa: FBT001  # likewise
        """Send the message or the rest of it in its turn, or raise the error that has ended it."""
        exchange, turn = self._offered, self._device_turn
        self._offered = self._offering = None
        if exchange is not None:
            exchange.lane.end(self.entry, self._deadline)
            self.entry.withdraw = None
        with self, place, turn or contextlib.nullcontext():
            if self._ended_by is not None:
                raise self._ended_by
            if self._verdict is not None:
                pair.mark_raised(self._verdict)
                end_elsewhere(self._verdict)
                raise self._verdict.error(self._name, self.entry.header.position)
            if not is_offered:
                self._transmit(pair, place, message)
            elif exchange is not None and not (self._is_taken and message.is_all_head):
                with exchange:
                    exchange.send_rest(message, [pair.peer])
                    if turn is not None:
                        send = functools.partial(DevicePath.send, message=message, peer=pair.peer)
                        exchange.hand_over()
                        turn.move(functools.partial(exchange.on_devices, send, self._stream))

    @property
    def _device_types(self) -> str:
        """The device types from which large members may be sent directly, comma-separated."""
        # Data that travels outside messages is not signed.
        is_plain = self._coding.settings.secret is None
        return ",".join(each.type for each in self._devices) if is_plain else ""

    def _pair(self) -> Pair | None:
        """Return this rank's pair with the receiver; None if the receiver is this rank.

        Raises:
            UsageError: there is no receiver or no tag; only a receive may omit them.
        """
        if self.peer is None:
            raise UsageError(f"{self._reported_as}: pass dst= or group_dst=")
        if self.tag is None:
            raise UsageError(
                f"{self._reported_as}: tag=None is for receives; a message must have a tag"
            )
        return None if self.peer == self.group.rank else self._peers.pair(self.group, self.peer)

    def _keep(self, obj: object, on_taken: Callable[[], object] | None = None) -> None:
        """Send to this rank itself; errors have the same form as between two ranks."""
        tag, rank = self.entry.header.tag, self.group.rank
        try:
            own = self._coding.copy(obj)
        except BaseException as error:
            raise_together(self._name, {rank: self._failure_of(error)}, error, rank)
            raise
        self._peers.mailbox.deliver(Arrived(rank, tag, 0, obj=own, on_taken=on_taken))

    def _message(self, obj: object, types: str) -> Message:
        """Encode; an error becomes a failure message, and is raised after that has been sent."""
        try:
            return self._coding.message(self.entry.header, obj, types or None)
        except BaseException as error:  # noqa: BLE001  # raised by ``_transmit``
            self._own_error = error
            return failure_message(self.entry.header, [self._failure_of(error)])

    def _failure_of(self, error: BaseException) -> RankFailure:
        return failure_of(error, self.group.rank, self.entry.header.call_site)

    def _transmit(self, pair: Pair, place: Ticket, message: Message) -> None:
        """Send after all earlier messages; leave the place as soon as the next one may begin."""
        with self._entered(pair, place) as exchange:
            self._send_head(exchange, message)
            exchange.send_rest(message, [pair.peer])
            place.leave()  # ``exchange`` ends when the message has been taken
        if self._own_error is not None:
            rank, own = self.group.rank, self._own_error
            raise_together(self._name, {rank: self._failure_of(own)}, own, rank)

    def _entered(self, pair: Pair, place: Ticket) -> Watched:
        """Return this message's traffic once its turn has come.

        Raises:
            TransportTimeout: earlier messages waited for the receiver, or it did not connect.
            ObjcommError: the connection has ended; the error says why.
        """
        pair.check_uninterrupted(self._name)
        deadline = self._deadline
        if not place.turn.is_set:
            place.enter(deadline.seconds_left)
        if time.monotonic() >= deadline.until:
            raise TransportTimeout(self._name, (pair.peer,), deadline.seconds)
        mesh, lane = pair.enter(self._deadline, self.entry)
        return self._joined(mesh, lane, lane.sequence)

    def _send_head(self, exchange: Watched, message: Message) -> None:
        """Number the message, and begin to send its first part."""
        exchange.lane.sequence += 1
        theirs, own = message.header, exchange.header
        message.header = made(Header, (*theirs[:5], *own[5:9], *theirs[9:]))
        peer = own.root
        self.entry.rounds += 1
        exchange.send_head(message, [peer], destination=peer, may_be_whole=True)


# A short limit is meant for finding a message. Ending a transfer that has begun would end the
# connection, too, so it gets at least this long.
_TRANSFER_SECONDS = 2.0


class Receive(P2PCall):
    """A message from another rank: ask, wait, take it in and decode it; or look, and leave it."""

    operation = Operation.RECV

    has_envelope = False  # whether the result includes the envelope
    _lanes: Mapping[int, Lane] = MappingProxyType({})  # by peer: where the watchdog sees it wait

    def run(self) -> Any:
        """Wait for a message; return its object."""
        with self:
            arrival = self.awaited()
            obj = self.take_in(arrival)
            return (obj, self.envelope_of(arrival)) if self.has_envelope else obj

    def launch(self) -> Work[Any]:
        """Ask for a message; another thread takes it in when it has arrived."""
        self.begin()
        work = self.work()
        request = RecvRequest(self.peer, self.tag)
        request.on_end = functools.partial(self._hand_over, request)
        self._rest = [work.job(lambda: self._go_on(request))]
        work.cancelled_by(lambda: self._cancel(request))
        try:
            if not self._meet(request):
                self._ask(request, self._admitted())
        except BaseException as error:
            if self.claim():
                self._peers.mailbox.cancel(request)
                self._finish(error.with_traceback(None))
            if not isinstance(error, Exception):  # Ctrl-C
                work.disown()
                raise
        try:
            return work
        finally:
            del work  # as in ``Work.carry_out_here``

    def _cancel(self, request: RecvRequest) -> bool:
        """Take the request back unless its wait is over; return whether it was taken back."""
        if not self._peers.mailbox.take_back(request) or not self.claim():
            return False
        place = f"{self._name} at {self.entry.header.call_site}"
        self._finish(CancelledError(f"{place} was cancelled before a message arrived"))
        return True

    def _hand_over(self, request: RecvRequest) -> bool:
        """Have another thread continue when the wait has ended; the calling thread must not.

        Returns:
            False if no more threads can start: the work has ended with that error, and the message
            is not taken.
        """
        # Earlier messages may take long to come in, and this one's sender waits meanwhile.
        self.entry.is_served = request.arrival is not None
        try:
            self._line_for(request.arrival).submit(self._end)
        except RuntimeError as error:
            if self.claim():
                self._finish(error.with_traceback(None))
                return False
        return True

    def _line_for(self, arrival: Arrived | None) -> SerialQueue:
        """Return the queue for taking a message in; an incomplete message may take long."""
        if arrival is None or arrival.is_whole:
            return self._peers.ending
        return self._peers.pair(self.group, arrival.peer).arriving

    def _end(self) -> None:
        if self.claim():
            self._finish(None)

    def _go_on(self, request: RecvRequest) -> Any:
        with self:
            self._end_wait()
            if self._ended_by is not None:
                raise self._ended_by
            arrival = self._found(request)
            self.envelopes.append(self.envelope_of(arrival))
            obj = self.take_in(arrival)
            return (obj, self.envelopes[0]) if self.has_envelope else obj

    def envelope_of(self, arrival: Arrived) -> Envelope:
        """Return what is known about a message."""
        src = self.group.ranks[arrival.peer]
        return Envelope(src, arrival.peer, arrival.tag, arrival.nbytes)

    def check_can_come(self, own: Send | None = None) -> None:
        """Check that a message that only this rank can send has been sent.

        Args:
            own: a message that this rank sends before it waits; it checks its own arguments.

        Raises:
            UsageError: it has not.
        """
        group, peer, tag = self.group, self.peer, self.tag
        if peer != group.rank and group.size > 1:
            return
        is_sent = own is not None and own.peer in {None, group.rank} and tag in {None, own.tag}
        if not is_sent and self._peers.mailbox.look(peer, tag) is None:
            raise UsageError(
                f"{self._reported_as}: rank {group.rank} waits for a message from itself, but has "
                "sent none; send it first"
            )

    def awaited(self, *, is_probe: bool = False) -> Arrived:
        """Wait for a message.

        Raises:
            UsageError: this rank waits for itself, and has sent nothing.
            ObjcommError: no message will come; the error says why.
        """
        self.check_can_come()
        self.entry.waiter = threading.get_ident()
        request = RecvRequest(self.peer, self.tag, is_probe=is_probe)
        try:
            if not self._peers.mailbox.meet(request):
                self._wait(request)
        except BaseException:  # Ctrl-C, or no more threads can start
            self._peers.mailbox.cancel(request)
            raise
        finally:
            self._end_wait()
        return self._found(request)

    def _wait(self, request: RecvRequest) -> None:
        """Put a request to the mailbox, and wait until it has ended; this thread moves the link."""
        admitted = self._admitted()
        link = admitted[0][1].link if len(admitted) == 1 else None
        signal = Signal() if link is None else link.signal()
        try:
            request.on_end = signal.set
            self._ask(request, admitted)
            if not signal.wait(SUSPICIOUS_SECONDS):
                check_uninterrupted(self._name)
                signal.wait()
        finally:
            del admitted, link, signal  # an error's traceback holds this frame

    def peek(self, *, is_probe: bool) -> Arrived | None:
        """Return the message that a receive would take now; if none, listen to possible senders.

        Args:
            is_probe: whether the message stays in the mailbox.
        """
        mailbox = self._peers.mailbox
        request = RecvRequest(self.peer, self.tag, is_probe=is_probe)
        try:
            if mailbox.poll(request) is None:
                admitted = self._admitted()
                self._raise_known_failure(admitted)
                for pair, mesh, _ in admitted:
                    pair.listen(mesh)
                    if mesh.link is not None:
                        mesh.link.move()
                mailbox.meet(request)
        except BaseException:  # Ctrl-C, or no more threads can start
            mailbox.cancel(request)
            raise
        return request.arrival

    def _raise_known_failure(self, admitted: Sequence[tuple[Pair, Mesh, Lane]]) -> None:
        """Raise the verdict if a block around this call has failed, or one of its ranks has died.

        Only failures that are already known count. The watchdog reports them to calls that wait. A
        polling caller waits too briefly for that, or not at all.
        """
        for _, mesh, _ in admitted[:1]:  # all have the same world
            for key in open_blocks.get():
                verdict = mesh.board_thread.known_verdict(key) or died_in(key)
                if verdict is not None:
                    self._raise(verdict)

    def _meet(self, request: RecvRequest) -> bool:
        """Give a request a message that has arrived; return whether there was one."""
        return self._peers.mailbox.meet(request)

    def _ask(self, request: RecvRequest, admitted: Sequence[tuple[Pair, Mesh, Lane]]) -> None:
        """Put a request to the mailbox, and listen to all possible senders from now on.

        Raises:
            ObjcommError: no message has come, and none of the ranks that may send one still can.
            RuntimeError: this process can start no more threads.
        """
        mailbox, entry = self._peers.mailbox, self.entry
        entry.blocks = blocks = open_blocks.get()
        if blocks:
            self._raise_known_failure(admitted)
        entry.withdraw = functools.partial(self._withdraw, request)
        entry.unmatched = functools.partial(mailbox.unmatched, request)
        self._lanes = {pair.peer: lane for pair, _, lane in admitted}
        if request.src is None:
            request.on_lane = self._wait_on
            request.among = frozenset(pair.peer for pair, _, _ in admitted)
        for lane in self._lanes.values():
            lane.begin(entry, self._deadline)
        hurry(self._deadline.remaining)
        mailbox.ask(request)  # from here the wait may end on another thread
        if not admitted:  # the sender is this rank: no lane, no watchdog
            seconds = self._deadline.seconds
            late = Verdict.of(Cause.TIMEOUT, ranks=(self.group.rank,), seconds=seconds)
            self._limit(seconds, functools.partial(self._withdraw, request, late))
        for pair, mesh, _ in admitted:
            ended = pair.listen(mesh)
            if ended is not None:
                mailbox.withdraw(request, ended)

    def _wait_on(self, peer: int, lane: Lane) -> None:
        """Show the watchdog the wait on a new connection's lane instead of the previous one's."""
        former = self._lanes.get(peer)
        if former is not None:
            former.p2p_calls.discard(self.entry)
        self._lanes = {**self._lanes, peer: lane}
        lane.p2p_calls.add(self.entry)

    def _admitted(self) -> list[tuple[Pair, Mesh, Lane]]:
        """Return the connections to the ranks that may serve a request."""
        if self.peer not in {None, self.group.rank}:
            pair = self._peers.pair(self.group, self.peer)
            return [(pair, *pair.admit(self._name))]
        pairs = self._pairs()
        joined = [(pair, pair.admit_among(self._name)) for pair in pairs]
        admitted = [(pair, *each) for pair, each in joined if each is not None]
        if pairs and not admitted:
            pairs[0].admit(self._name)  # raises: no rank is left
        return admitted

    def _pairs(self) -> list[Pair]:
        """Return this rank's pair with each possible sender except itself."""
        peers = range(self.group.size) if self.peer is None else [self.peer]
        return [self._peers.pair(self.group, peer) for peer in peers if peer != self.group.rank]

    def _withdraw(self, request: RecvRequest, verdict: Verdict) -> None:
        if request.src is None and verdict.cause is Cause.TIMEOUT:
            others = tuple(rank for rank in range(self.group.size) if rank != self.group.rank)
            verdict = verdict._replace(ranks=others)
        self._peers.mailbox.withdraw(request, verdict)

    def _end_wait(self) -> None:
        self._lift_limit()
        # The history keeps the entry; these functions would keep the message.
        self.entry.withdraw, self.entry.unmatched = _ignore, None
        for lane in self._lanes.values():
            lane.end(self.entry, self._deadline)

    def _found(self, request: RecvRequest) -> Arrived:
        """Return the message that an ended request has found.

        Raises:
            ObjcommError: no message will come; the error says why.
        """
        if request.verdict is not None:
            self._raise(request.verdict)
        return request.arrival  # type: ignore[return-value]  # one of the two is set

    def _raise(self, verdict: Verdict) -> NoReturn:
        for pair in self._pairs():
            pair.mark_raised(verdict)
        end_elsewhere(verdict)
        raise verdict.error(self._name, self.entry.header.position)

    def take_in(self, arrival: Arrived) -> Any:
        """Return the object of a message whose first part has arrived.

        Raises:
            CollectiveError: its sender could not encode it.
            DecodeError: it can't be rebuilt.
            ObjcommError: the rest of it did not arrive.
        """
        header, mesh, lane, raw = arrival.header, arrival.mesh, arrival.lane, arrival.raw
        if header is None or mesh is None or lane is None:  # sent by this rank
            if arrival.on_taken is not None:
                arrival.on_taken()
            return arrival.obj
        is_offered, is_all_head = bool(header.flags & _OFFERED), header.is_all_head
        if is_offered or not is_all_head:
            try:
                self._peers.pair(self.group, arrival.peer).check_uninterrupted(self._name)
            except UsageError:
                self._peers.mailbox.give_back(arrival)
                raise
        mine = self.entry.header
        fields = *mine[:4], arrival.peer, *mine[5:16], arrival.tag, *mine[17:]
        self.entry.header = _numbered(made(Header, fields), mesh, lane, header.sequence)
        self.entry.rounds += 1
        self.entry.received_nbytes += len(raw)
        if is_all_head:
            if is_offered and mesh.verdict is None:
                self._report_received(mesh, lane)
            message = self._gate(mesh).take_in(raw, header)
        else:
            message = self._taken_in(raw, header, arrival.peer, mesh, lane)
        if header.status == _FAILURE:
            raise_together(self._name, failures_in([message]), None, self.group.rank)
        return self._coding.decode(message)

    def _report_received(self, mesh: Mesh, lane: Lane) -> None:
        """Report to a waiting sender that its message, which is complete, has been received.

        This happens before anything else can fail, because the sender waits for nothing else.
        """
        self.entry.withdraw = None
        self._extend_limit()
        exchange = self._joined(mesh, lane, self.entry.header.sequence)
        try:
            with exchange:
                self._say(Operation.TAKE, exchange)
        except ObjcommError:
            # The message is here all the same; the next call raises what ended the connection.
            lane.owes |= mesh.can_be_replaced

    def _extend_limit(self) -> None:
        """Give a message that has begun to arrive the call's time again."""
        self._deadline.leave(max(self._deadline.seconds, _TRANSFER_SECONDS))

    def _taken_in(self, raw: bytes, header: Header, peer: int, mesh: Mesh, lane: Lane) -> Message:
        """Take in the rest of a message whose first part has arrived."""
        self.entry.is_served = True
        self.entry.withdraw = None  # the sender waits, too: only both together can end this
        self._extend_limit()
        exchange = self._joined(mesh, lane, header.sequence)
        stream = stream_beside(after_current=False) if header.flags & _ON_DEVICE else None
        # Memory for the received data belongs to that stream, so using it waits for no other one.
        place = contextlib.nullcontext() if stream is None else DevicePlace(stream)
        with place, exchange:
            message = exchange.gate.take_in(raw, header)
            if header.flags & _ON_DEVICE:
                self._recv_on_device(peer, exchange, message, stream)
            else:
                if header.flags & _OFFERED:
                    self._say(Operation.TAKE, exchange)
                exchange.recv_rest([(peer, message)])
        _hand_to_current(message.buffers_on_device, stream)
        return message

    def _recv_on_device(
        self,
        peer: int,
        exchange: Watched,
        message: Message,
        stream: torch.Stream | None,
    ) -> None:
        """Take in the rest of a message with large members that arrive on a device."""
        pair = self._peers.pair(self.group, peer)
        recv = functools.partial(DevicePath.recv, message=message, peer=peer)
        with self._turn(pair.offers(exchange.mesh), exchange, is_sender=False) as turn:
            turn.begin()
            self._say(Operation.TAKE, exchange)
            exchange.recv_rest([(peer, message)])
            exchange.hand_over()
            turn.move(functools.partial(exchange.on_devices, recv, stream))


def _hand_to_current(flats: Sequence[torch.Tensor], stream: torch.Stream | None) -> None:
    """Make received data usable on the current stream; another stream allocated its memory."""
    if stream is None or not flats:
        return
    here = torch.accelerator.current_stream()
    here.wait_stream(stream)
    for flat in flats:
        # Keeps the memory from being reused before this stream has finished with it. A device whose
        # memory does not need this has no such operator.
        with contextlib.suppress(NotImplementedError):
            flat.record_stream(here)


class HeldReceive(Receive):
    """A receive of a specific message that was already taken out of the mailbox.

    Attributes:
        arrival: the message.
    """

    arrival: Arrived

    def awaited(self, *, is_probe: bool = False) -> Arrived:  # noqa: ARG002  # as in ``Receive``
        """Return the message.

        Raises:
            ObjcommError: it was lost with its connection.
        """
        mesh = self.arrival.mesh
        verdict = None if mesh is None else mesh.verdict
        if verdict is not None and self.arrival.is_lost(verdict):
            self._raise(verdict)
        return self.arrival

    def _meet(self, request: RecvRequest) -> bool:
        request.arrival = self.arrival
        if not request.notify():
            self._peers.mailbox.give_back(self.arrival)
        return True

    def _found(self, request: RecvRequest) -> Arrived:  # noqa: ARG002  # likewise
        return self.awaited()


def _ignore(_: object) -> None:
    """Do nothing: the request has already ended."""
