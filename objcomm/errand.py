"""One point-to-point call on this rank: encode and send, or find, receive and decode."""

import contextlib
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from objcomm.absence import acts_alone
from objcomm.admission import Gate
from objcomm.coding import Coding
from objcomm.errors import ObjcommError, TransportTimeout, UsageError
from objcomm.frames import Header, Operation
from objcomm.group import Timeout, whole_number
from objcomm.history import Entry, call_site
from objcomm.message import Message
from objcomm.outcome import failure_message, failure_of, failures_in, raise_together
from objcomm.recorder import conclude
from objcomm.spans import Span, span
from objcomm.transport.device import DevicePath
from objcomm.transport.exchange import Exchange
from objcomm.transport.lane import Lane
from objcomm.transport.mailbox import Arrival, Request
from objcomm.transport.mesh import Mesh
from objcomm.transport.order import Place
from objcomm.transport.pair import Pair
from objcomm.transport.regions import regions
from objcomm.transport.verdict import Cause, Verdict
from objcomm.transport.watch import end_elsewhere
from objcomm.turn import Turn
from objcomm.work import Work
from objcomm.world import GroupLike, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

_TAG_MAX = (1 << 32) - 1


class Errand:
    """See the module; constructing it checks the arguments and starts nothing.

    Attributes:
        group: where it takes place.
        entry: its record.
        peer: the other rank, within the group; None for any.
        tag: of the message; None for any.
    """

    def __init__(
        self,
        operation: Operation,
        *,
        group: GroupLike,
        timeout: Timeout,
        coding: Coding,
        tag: int | None,
        global_peer: int | None,
        group_peer: int | None,
        name: str = "",
    ) -> None:
        """Begin.

        Args:
            operation: SEND or RECV.
            group: as the user gave it, like the next.
            timeout: in seconds.
            coding: encodes or decodes.
            tag: of the message; None for any.
            global_peer: the other rank as a global rank.
            group_peer: the same as a rank within the group; neither for any.
            name: of the user's call, where it is another.

        Raises:
            UsageError: an argument is wrong, or this rank is in a region where the others make no
                such call.
            NotInGroupError: this rank is no member.
        """
        self._began = time.perf_counter()
        self._name = name or operation.name.lower()
        self.group = resolve(group)
        self._coding = coding
        self._deadline = self.group.deadline(self._name, timeout)
        self.tag = None if tag is None else _tag(self._name, tag)
        self.peer: int | None = None
        if global_peer is not None or group_peer is not None:
            self.peer = self.group.root(self._name, global_peer, group_peer)
        acts_alone(self._name, self.group.ranks, self.group.rank)
        header = Header(
            operation=operation,
            sender=self.group.rank,
            root=-1 if self.peer is None else self.peer,
            tag=self.tag or 0,
            call_site=call_site(),
        )
        self.entry = Entry(header, self._name, coding.codec_name)
        self.entry.awaits = header.root
        self._exchange: Exchange | None = None
        self._own_error: BaseException | None = None
        self._span: Span | None = None

    def begin(self) -> None:
        """Note that the call is under way: nothing is wrong with its arguments."""
        self.group.history.add(self.entry)

    def work(self) -> Work[Any]:
        """A work for what this errand gives."""
        return Work(self._name, self.entry.header.call_site, self.entry)

    # What is sent

    def message(self, obj: object) -> Message:
        """Encode; an error becomes a failure message, and is raised when that was sent."""
        try:
            return self._coding.message(self.entry.header, lambda: obj)
        except BaseException as error:  # noqa: BLE001  # raised by ``transmit``
            self._own_error = error
            return failure_message(self.entry.header, [failure_of(error, self.group.rank)])

    def keep(self, obj: object) -> None:
        """Send to this rank itself."""
        with self:
            tag, peer = self.entry.header.tag, self.group.rank
            self.group.mailbox.deliver(Arrival(peer, tag, 0, obj=self._coding.copy(obj)))

    def transmit(self, pair: Pair, place: Place, message: Message) -> None:
        """Send, after whatever was to be sent before; returns when the message was taken."""
        self._deadline.restart()
        with self, contextlib.ExitStack() as held:
            held.enter_context(place)
            if self._deadline.has_passed:  # while those before waited for the other rank
                raise TransportTimeout(self._name, (pair.peer,), self._deadline.seconds)
            mesh, lane = pair.enter(self._deadline, self.entry)
            exchange = self._joined(mesh, lane, lane.sequence)
            with Turn(mesh, lane, exchange, self._deadline):
                lane.sequence += 1
                header = exchange.header
                message.header = message.header._replace(
                    lane=header.lane, group=header.group, sequence=header.sequence
                )
                exchange.rounds += 1
                exchange.send_head(message, [pair.peer], destination=pair.peer)
                exchange.send_rest(message, [pair.peer])
                held.close()  # the next one may begin; this one ends when it was taken
            if self._own_error is not None:
                own = failure_of(self._own_error, self.group.rank)
                raise_together(self._name, {self.group.rank: own}, self._own_error)

    # What is received

    def ask(self, request: Request) -> "Waits":
        """Put a request to the mailbox; whoever may serve it is listened to from now on.

        Raises:
            ObjcommError: no message has come, and no rank that may serve it can send any more.
        """
        mailbox = self.group.mailbox
        if mailbox.meet(request):
            return Waits(self.entry, [])
        admitted = [(pair, *joined) for pair, joined in self._admitted()]
        self._deadline.apply(self.entry)
        self.entry.regions = regions.get()
        self.entry.withdraw = lambda verdict: self._withdraw(request, verdict)
        waits = Waits(self.entry, [lane for _, _, lane in admitted])
        mailbox.ask(request)
        if not admitted and not request.is_probe:  # from this rank itself: no lane, no watcher
            waits.limit(self._deadline.seconds, lambda: self._withdraw(request, self._too_late()))
        for pair, mesh, lane in admitted:
            if not pair.listen(mesh, lane):
                mailbox.withdraw(request, mesh.verdict)
        return waits

    def _admitted(self) -> list[tuple[Pair, tuple[Mesh, Lane]]]:
        """The connections to the ranks that may serve a request."""
        pairs = self.pairs()
        if len(pairs) == 1:
            return [(pairs[0], pairs[0].admit(self._name))]
        joined = [(pair, pair.admit_among(self._name)) for pair in pairs]
        admitted = [(pair, each) for pair, each in joined if each is not None]
        if pairs and not admitted:
            pairs[0].admit(self._name)  # raises: nobody is left
        return admitted

    def awaited(self, *, is_probe: bool = False) -> Arrival:
        """Wait for a message.

        Raises:
            UsageError: this rank waits for itself, which has sent nothing.
            ObjcommError: why nothing will come.
        """
        group = self.group
        is_alone = self.peer == group.rank or group.size == 1
        if is_alone and group.mailbox.look(self.peer, self.tag) is None:
            raise UsageError(
                f"{self._name}: rank {group.rank} waits for a message of its own, but has sent "
                "none; send it first"
            )
        signal = _Signal()
        request = Request(self.peer, self.tag, is_probe=is_probe, on_end=signal.set)
        self.entry.waiter = threading.get_ident()
        waits = self.ask(request)
        try:
            signal.wait()
        except BaseException:  # Ctrl-C
            is_met = not group.mailbox.withdraw(request, None)
            if is_met and request.arrival is not None and not is_probe:
                group.mailbox.give_back(request.arrival)
            raise
        finally:
            waits.end()
        return self.found(request)

    def _too_late(self) -> Verdict:
        seconds = self._deadline.seconds
        return Verdict.of(Cause.TIMEOUT, ranks=(self.group.rank,), seconds=seconds)

    def _withdraw(self, request: Request, verdict: Verdict) -> None:
        if request.src is None and verdict.cause is Cause.TIMEOUT:
            others = tuple(rank for rank in range(self.group.size) if rank != self.group.rank)
            verdict = verdict._replace(ranks=others)
        self.group.mailbox.withdraw(request, verdict)

    def pairs(self) -> list[Pair]:
        """Who may send to this rank or is to receive, this rank itself left out."""
        peers = range(self.group.size) if self.peer is None else [self.peer]
        return [self.group.pair(peer) for peer in peers if peer != self.group.rank]

    def found(self, request: Request) -> Arrival:
        """What a request that has ended found.

        Raises:
            ObjcommError: why nothing will come.
        """
        if request.verdict is not None:
            for pair in self.pairs():
                pair.absolve(request.verdict)
            end_elsewhere(request.verdict)
            raise request.verdict.error(self._name, self.entry.header.position)
        if request.arrival is None:
            raise UsageError(f"{self._name}: it was interrupted")
        return request.arrival

    def take_in(self, arrival: Arrival) -> Any:
        """The object of a message whose first part is here.

        Raises:
            CollectiveError: its sender could not encode it.
            DecodeError: it can't be rebuilt.
            ObjcommError: the rest of it did not come.
        """
        origin = arrival.origin
        if origin is None:
            return arrival.obj
        header, mesh, lane = origin
        self.entry.header = self.entry.header._replace(root=arrival.peer, tag=arrival.tag)
        exchange = self._joined(mesh, lane, header.sequence)
        exchange.rounds += 1
        exchange.received_nbytes += len(arrival.raw)
        if header.is_all_head:
            message = exchange.adopt(arrival.raw, header)
        else:
            self.entry.is_served = True
            if not self.entry.has_expired:
                self.entry.withdraw = None  # the sender waits, too: only both can end this
            with Turn(mesh, lane, exchange, self._deadline):
                message = exchange.adopt(arrival.raw, header)
                exchange.recv_rest([(arrival.peer, message)])
        raise_together(self._name, failures_in([message]), None)
        return self._coding.decode(message)

    def _joined(self, mesh: Mesh, lane: Lane, sequence: int) -> Exchange:
        self.entry.header = self.entry.header._replace(
            lane=lane.number, group=mesh.number, sequence=sequence
        )
        self._exchange = Exchange(
            link=mesh.connections,
            lane=lane,
            entry=self.entry,
            deadline=self._deadline,
            gate=Gate(self._coding.settings, mesh.nonce, self.group.rank),
            device=DevicePath(None),
        )
        return self._exchange

    def fail(self, error: ObjcommError) -> NoReturn:
        """End by an error."""
        with self:
            raise error

    def __enter__(self) -> Self:
        self._span = span(self._name)
        self._span.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._own_error = None  # its traceback holds the caller's object
        if self._span is not None:
            self._span.__exit__(kind, error, traceback)
        conclude(self.group, self.entry, self._exchange, error, self._began)


def _tag(operation: str, tag: object) -> int:
    """A tag as a number.

    Raises:
        UsageError: it is none, or too large.
    """
    number = whole_number(tag)
    if number is not None and 0 <= number <= _TAG_MAX:
        return number
    raise UsageError(f"{operation}: tag={tag!r} is no integer from 0 to {_TAG_MAX}")


class Waits:
    """The wait of one request, as the watcher sees it on every lane that may serve it."""

    def __init__(self, entry: Entry, lanes: list[Lane]) -> None:
        self._entry = entry
        self._lanes = lanes
        self._timer: threading.Timer | None = None
        for lane in lanes:
            lane.begin(entry)

    def limit(self, seconds: float, end: "Callable[[], None]") -> None:
        """Call ``end`` after so many seconds, unless the wait is over."""
        self._timer = threading.Timer(seconds, end)
        self._timer.daemon = True
        self._timer.name = "objcomm-limit"
        self._timer.start()

    def end(self) -> None:
        """It is over."""
        if self._timer is not None:
            self._timer.cancel()
        # The history keeps the entry, and this would keep the message.
        self._entry.withdraw = _nothing
        for lane in self._lanes:
            lane.end(self._entry)


def _nothing(_: object) -> None:
    """Withdraws what has ended."""


class _Signal:
    """Lets one thread wait for what another does; Ctrl-C ends the wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.set: Callable[[], None] = self._lock.release

    def wait(self) -> None:
        """Return when ``set`` was called; once."""
        self._lock.acquire()
