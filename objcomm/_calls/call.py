"""One call of an operation on this rank: its group, codec and limits, and its failure if it fails.

What every operation does around its traffic, so that each can be read as its protocol: encode
before any traffic, send a failure instead of a value, raise alike, decode last.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from objcomm._algorithms import routes
from objcomm._algorithms.exchange import Exchange
from objcomm._calls.absence import acts_alone
from objcomm._calls.group import resolve, solo_group
from objcomm._calls.watched import Watched
from objcomm._calls.work import Work
from objcomm._codecs.base import codec_named, copy, decode, encode
from objcomm._codecs.buffers import readable
from objcomm._config import (
    Allowed,
    DeviceLike,
    GroupLike,
    Timeout,
    check_name,
    parse_device,
    settings_with,
    using,
)
from objcomm._observe.history import CallRecord, call_site
from objcomm._observe.progress import bar_for
from objcomm._observe.tracing import Span, begun, span
from objcomm._transport.threads import SerialExecutor, interrupted
from objcomm._wire.admission import Gate
from objcomm._wire.failure_message import (
    DifferenceError,
    DisagreementError,
    failure_message,
    failure_of,
    failures_in,
    raise_together,
)
from objcomm._wire.header import (
    Flag,
    Header,
    Operation,
    Status,
    fingerprint,
    operation_name,
    shown,
)
from objcomm._wire.message import Message, compose
from objcomm.errors import (
    CollectiveError,
    DecodeError,
    ObjcommError,
    UsageError,
    WireError,
    sent_at,
)

if TYPE_CHECKING:
    from objcomm._transport.lane import Lane


_DIGEST_NBYTES = 32


class Coding:
    """How one call encodes its objects and decodes what arrives: codec, options and device.

    Attributes:
        settings: the options that hold for the call.
        codec_name: of the codec that encodes.
        device: where tensors shall arrive, if the caller said so.
    """

    __slots__ = ("_codec", "codec_name", "device", "settings")

    def __init__(
        self,
        codec: str | None,
        device: DeviceLike,
        accept: Iterable[str] | None,
        allow: Iterable[Allowed] | None,
        operation: str = "",
    ) -> None:
        """Begin; the arguments are the caller's own, ``operation`` is their call.

        Raises:
            UsageError: one of them is wrong.
        """
        self.settings = settings_with(accept, allow, operation)
        self._codec = codec_named(codec or self.settings.codec, operation)
        self.codec_name = self._codec.name
        self.device = parse_device(device, operation)

    def message(
        self, header: Header, produce: Callable[[], object], device_type: str | None = None
    ) -> Message:
        """What ``produce`` returns, as a message; what it raises passes through.

        Args:
            header: of the message, but for its sizes.
            produce: gives the object.
            device_type: the types of memory that travel over device links, joined by commas; None
                if there are none.
        """
        obj = produce()
        with span("encode"):
            encoded = encode(self._codec, obj, device_type=device_type)
            return compose(
                header,
                encoded.meta,
                encoded.buffers,
                codec=self.codec_name,
                device_types=device_type or "",
            )

    def digest(self, obj: object) -> bytes:
        """Equal for two objects only if they would be sent as the same bytes."""
        with span("encode"):
            encoded = encode(self._codec, obj)
            digest = hashlib.blake2b(self.codec_name.encode(), digest_size=_DIGEST_NBYTES)
            for part in (encoded.meta, *(readable(each.flat) for each in encoded.buffers)):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
            return digest.digest()

    def copy(self, obj: object) -> Any:
        """An independent copy of an object."""
        return copy(self._codec, obj)

    def decode(self, message: Message) -> Any:
        """The object in a message that carries one.

        Raises:
            DecodeError: it can't be rebuilt here; it says whose it is.
            WireError: it carries none, or what its sender did not sign.
        """
        message.check()
        if message.header.status != Status.VALUE:
            raise WireError(f"{message.header.position} sent status {message.header.status}")
        owners = [buffer.owner for buffer in message.buffers]
        try:
            with span("decode"), using(self.settings):
                return decode(message.header.codec, message.meta, owners, device=self.device)
        except DecodeError as error:
            sent_at(error, message.header.position)
            raise


R = TypeVar("R")

_PAIR = 2  # so many swap what they have to tell, more let one of them tell all


class _Confirmation:
    """What ``Call.confirmation`` gives."""

    __slots__ = ("_acknowledge",)

    def __init__(self, acknowledge: Callable[[BaseException | None], None] | None) -> None:
        """Begin.

        Args:
            acknowledge: is given the block's error, if there is one, and raises what any rank's
                calls for; None where no rank waits to hear.
        """
        self._acknowledge = acknowledge

    def __enter__(self) -> None:
        """Nothing is to be done before."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._acknowledge is not None:
            self._acknowledge(error)


_UNCONFIRMED = _Confirmation(None)


class Call:
    """The context of one operation, which it begins.

    Constructing it checks the arguments, connects the group's ranks if this is their first call,
    for which it waits until the limit, and takes the next number on this thread's lane. So an error
    after that is told to the others: see ``Watched.give_up``.

    When it is entered it waits for the lane's earlier calls, and when it is left it is concluded,
    whatever has happened. An operation takes two steps in between: it encodes, on the caller's
    thread, and then ``run`` does the rest. An asynchronous call waits for earlier ones, and is
    concluded, where the rest is done: on the lane's thread.

    Attributes:
        call_site: the user's ``file:line``.
        operation: what the user has called.
        rank: this rank, within the group.
        size: number of ranks.
        ranks: the global ranks of the group.
        root: group rank of source or destination; 0 where the operation has none.
        device: where tensors shall arrive; None for where they were.
    """

    def __init__(  # an operation's own keywords, handed on
        self,
        operation: Operation,
        *,
        group: GroupLike,
        timeout: Timeout = None,
        codec: str | None = None,
        device: DeviceLike = None,
        global_root: int | None = None,
        group_root: int | None = None,
        root_argument: str = "src",
        has_root: bool = False,
        must_agree: str = "",
        confirm: bool = False,
        accept: Iterable[str] | None = None,
        allow: Iterable[Allowed] | None = None,
        progress: bool = False,
        name: str = "",
        called: str = "",
        async_op: bool = False,
        raises_later: bool = False,
        is_met: bool = False,
    ) -> None:
        """Begin.

        Args:
            operation: which one.
            group: as the user gave it, like all that follows.
            timeout: in seconds.
            codec: what encodes this rank's objects.
            device: where tensors shall arrive.
            global_root: source or destination as a global rank.
            group_root: the same as a rank within the group.
            root_argument: what the user's own call names ``global_root``, for errors.
            has_root: whether the operation has one.
            must_agree: text that must be the same on all ranks.
            confirm: whether a rank's decode error becomes everybody's.
            accept: codecs whose messages this rank decodes.
            allow: what a received pickle may name.
            progress: whether to show how far it has come.
            name: of this call, the same on all ranks; empty for a call that is known by its line.
            called: the user's function, where it is named otherwise than the operation.
            async_op: whether ``run`` returns before the rest is done.
            raises_later: whether it leaves to the next call what an asynchronous one leaves to its
                work: what has ended the connections, and this thread has yet to raise.
            is_met: whether all ranks meet first, as with ``objcomm.check``; alike on all of them.

        Raises:
            UsageError: an argument is wrong, or this rank is in a region where the others make no
                such call; nothing was sent.
            NotInGroupError: this rank is no member.
            BrokenGroupError: an earlier error ended the group.
            TransportTimeout: the group's first call, and not every rank came.
            MissingDependencyError: there is nothing to show progress with.
        """
        self._began = time.perf_counter()
        self._called_at = time.time()
        self.call_site = call_site()
        self.operation = called or operation_name(operation)
        if not isinstance(name, str):
            check_name(name, self.operation)
        whole = resolve(group, self.operation)
        self.root = whole.root(self.operation, global_root, group_root, root_argument)
        self._coding = Coding(codec, device, accept, allow, self.operation)
        self.device = self._coding.device
        self.ranks, self._deadline = whole.ranks, whole.deadline(self.operation, timeout)
        self._is_confined = acts_alone(self.operation, whole.ranks, whole.rank)
        self._group = solo_group() if self._is_confined else whole
        self.rank, self.size = self._group.rank, self._group.size
        self._bar = bar_for(self.operation, self.rank) if progress else None
        self._own_error: BaseException | None = None
        self._turn: Watched | None = None
        self._lane: Lane | None = None
        self._span: Span | None = None
        # Of an asynchronous call. Where Ctrl-C comes while the rest is handed over, both threads
        # have it, and the first to take this concludes it.
        self._claim = threading.Lock() if async_op else None
        root = self.root if has_root else -1
        if self.size > 1:
            is_met = is_met or self._coding.settings.is_checked
            must_agree += "\0confirm" * confirm + "\0check" * is_met
            self._turn = self._begin(
                operation,
                root,
                name,
                f"{name}\0{must_agree}" if must_agree else name,
                is_paced=progress,
                is_met=is_met,
                raises_later=async_op or raises_later,
            )
            self._turn.is_confirmed = confirm
            self._entry.is_confirmed = confirm or is_met
        else:
            number, place = self._group.recorder.history.next_number(), self.call_site
            header = Header(operation=operation, root=root, sequence=number, call_site=place)
            self._record(CallRecord(header, self.operation, self._coding.codec_name))

    def _begin(
        self,
        operation: Operation,
        root: int,
        name: str,
        must_agree: str,
        *,
        is_paced: bool,
        is_met: bool,
        raises_later: bool,
    ) -> Watched:
        """Take the next number on this thread's lane, last of all that can go wrong."""
        try:
            mesh, lane = self._group.enter(
                self.operation, self._deadline, self.call_site, raises_later=raises_later
            )
        except ObjcommError as error:
            self._group.recorder.attach(error)
            raise
        self._lane = lane
        link = mesh.connections_for(self.operation)
        if link.is_interrupted() and self._claim is None:
            raise UsageError(f"{self.operation}: {interrupted('a transfer of this group')}")
        # From here on, a handler that interrupts this call on its thread is refused: see
        # ``Lane.caller``.
        lane.begun_at = self.call_site
        try:
            path = self._group.device_path
            is_staged = self.device is not None and self.device.type == path.staging
            header = Header(
                status=Status.VALUE,
                flags=Flag.STAGED * is_staged | Flag.PACED * is_paced,
                operation=operation,
                sender=self.rank,
                root=root,
                lane=lane.number,
                group=mesh.number,
                sequence=lane.sequence,
                fingerprint=fingerprint(must_agree),
                call_site=self.call_site,
                name=shown(name) if name else "",
            )
            entry = CallRecord(header, self.operation, self._coding.codec_name, lane.name)
            exchange = Exchange(
                link=link,
                lane=lane,
                entry=entry,
                deadline=self._deadline,
                gate=Gate(self._coding.settings, mesh.session, self.rank),
                device=path,
                meter=self._bar,
                group=mesh.name,
            )
            lane.sequence += 1
            lane.past.append(entry)
            self._record(entry)
            meeting = compose(header, b"") if is_met else None
            return Watched(mesh, lane, exchange, self._deadline, meeting)
        except BaseException:
            lane.begun_at = ""
            raise

    def _record(self, entry: CallRecord) -> None:
        self._entry = entry
        entry.began = self._called_at  # a first call has waited for the ranks since
        self._group.recorder.history.add(entry)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank, and so no traffic."""
        return self._turn is None

    @property
    def is_root(self) -> bool:
        """Whether this rank is the source or destination."""
        return self.rank == self.root

    @property
    def place(self) -> str:
        """A name of this call that is the same on every rank and means no other call."""
        return "" if self._turn is None else self._turn.place

    @property
    def exchange(self) -> Exchange:
        """The traffic."""
        return self.traffic().exchange

    def message(self, produce: Callable[[], object], among: Sequence[Message] = ()) -> Message:
        """Encode what ``produce`` returns; an error of either becomes a failure message.

        Any exception is caught, KeyboardInterrupt included: this rank still takes part, and raises
        afterwards.

        Args:
            produce: gives the object.
            among: the messages of all ranks, if it looks whether these agree.
        """
        try:
            exchange = self.exchange
            return self._coding.message(exchange.header, produce, exchange.device.linked or None)
        except BaseException as error:  # noqa: BLE001  # see above
            return self.failure(error, among)

    def aside(self, produce: Callable[[], R]) -> R:
        """What the user's function returns, which may use the group: no rank waits yet."""
        lane = self._lane
        if lane is None:
            return produce()
        lane.begun_at = ""
        try:
            return produce()
        finally:
            lane.begun_at = self.call_site

    def failure(self, error: BaseException, among: Sequence[Message] = ()) -> Message:
        """The message that tells the others of this rank's error, or which of ``among`` differ."""
        if isinstance(error, DifferenceError):
            error = DisagreementError({error.ranks[1]: str(error)})
        if isinstance(error, DisagreementError):
            return failure_message(self.exchange.header, error.failures(among))
        self._own_error = error
        return failure_message(self.exchange.header, [failure_of(error, self.rank, self.call_site)])

    def failures(self, messages: Sequence[Message]) -> Message | None:
        """One message that tells of all the failures in some others, if there are any."""
        failures = failures_in(messages)
        return failure_message(self.exchange.header, failures.values()) if failures else None

    def alone(self, produce: Callable[[], R]) -> R:
        """What ``produce`` returns; in a world of one an error has the same form as in a group.

        In a region it is left as it is: the region's own end tells the others.
        """
        try:
            return produce()
        except BaseException as error:
            if not self._is_confined:
                raise_together(self.operation, {0: failure_of(error, 0, self.call_site)}, error, 0)
            raise

    def digest(self, obj: object) -> bytes:
        """Equal on two ranks only if their objects are sent as the same bytes."""
        return self._coding.digest(obj)

    def copy(self, obj: object) -> Any:
        """An independent copy of this rank's own operand, which an operator may change."""
        return self._coding.copy(obj)

    def announcement(self, status: Status) -> Message:
        """A message that says all with its status."""
        return compose(self.exchange.header, b"", status=status)

    def raise_failures(self, messages: Sequence[Message] = ()) -> None:
        """Raise what some messages, or this rank's own error, call for.

        Raises:
            CollectiveError: at least one rank failed.
        """
        failures = failures_in(messages)
        own = self._own_error
        if own is not None and not failures:
            failures = {self.rank: failure_of(own, self.rank, self.call_site)}
        if failures:
            raise_together(self.operation, failures, own, self.rank)

    def decode(self, message: Message) -> Any:
        """The object in a message that carries one.

        Raises:
            DecodeError: it can't be rebuilt here.
            WireError: it carries none, or what its sender did not sign.
        """
        return self._coding.decode(message)

    def decode_as(self, message: Message, fits: Callable[[Any], bool], what: str) -> Any:
        """The object in a message of objcomm's own, which can be of one kind only.

        Args:
            message: as for ``decode``.
            fits: whether an object is of that kind.
            what: the kind, for the error.

        Raises:
            DecodeError: it is of another kind; or as for ``decode``.
            WireError: as for ``decode``.
        """
        plain = self.decode(message)
        if not fits(plain):
            position = message.header.position
            raise sent_at(DecodeError(message.header.codec, f"it is no {what}"), position)
        return plain

    def confirm(self) -> None:
        """Let ``confirmation`` do as if the caller had said ``confirm=True``.

        Every rank calls this in its traffic, or none.
        """
        self.traffic().is_confirmed = self._entry.is_confirmed = True

    def confirmation(self) -> _Confirmation:
        """A block that raises or decodes; with ``confirm=True`` its errors become everybody's.

        Every rank enters it after the traffic.
        """
        return _Confirmation(self._acknowledge) if self.traffic().is_confirmed else _UNCONFIRMED

    def _acknowledge(self, error: BaseException | None) -> None:
        """Tell all ranks how this one's block has ended, and hear how theirs have.

        Where no rank has failed, but what they gave does not fit together, this returns, and so
        ``error`` is raised.

        Raises:
            CollectiveError: at least one rank failed.
        """
        # Of what a CollectiveError tells the ranks that failed say so themselves.
        if error is not None and not isinstance(error, CollectiveError):
            self._own_error = error
        own, turn = self._own_error, self.traffic()
        header = turn.exchange.header
        turn.exchange.header = header._replace(flags=header.flags | Flag.ACKNOWLEDGEMENT)
        mine = self.announcement(Status.VALUE) if own is None else self.failure(own)
        turn.is_confirmed = False
        with turn as exchange:
            if exchange.size == _PAIR:
                told = routes.all_gather(exchange, mine)
            else:
                all_told = routes.gather(exchange, mine, routes.HUB)
                done = self.announcement(Status.VALUE)
                answer = None if all_told is None else self.failures(all_told) or done
                told = [routes.broadcast(exchange, answer, routes.HUB)]
        self.raise_failures(told)

    def run(self, rest: Callable[[], R]) -> R | Work[R]:
        """Do the rest of the operation: here, or on the lane's thread if it is asynchronous.

        Args:
            rest: all that follows after what the caller may change was encoded.

        Returns:
            What ``rest`` returns, or a work that will.
        """
        if self._claim is None:
            return rest()
        # In a list, which is emptied: whoever hears that the work has ended finds the caller's
        # object let go.
        body, lane = partial(self._go_on, [rest]), self._lane
        if lane is None:
            return Work[R](self.operation, self.call_site).carry_out_here(body)
        if lane.line is None:
            lane.line = SerialExecutor(f"objcomm-line {lane.name}".strip())
        work: Work[R] = Work(self.operation, self.call_site, lane, on_error=self.traffic().hear)
        work.carry_out_on(lane.line, body)
        return work

    def _go_on(self, rests: list[Callable[[], R]]) -> R:
        """The rest of an asynchronous call, when its turn has come."""
        if not self._is_mine():
            raise CancelledError  # Ctrl-C: its caller has concluded it, and has no work to ask
        try:
            self._span = begun(self.operation)
            result = rests.pop()()
        except BaseException as error:
            self._conclude(error)
            raise
        self._conclude(None)
        return result

    def _is_mine(self) -> bool:
        """Whether this thread is the one to conclude the call, as the first that asks is."""
        return self._claim is None or self._claim.acquire(blocking=False)

    def traffic(self) -> Watched:
        """The part of a call during which ranks wait for each other; a context that gives it."""
        if self._turn is None:
            raise WireError(f"{self.operation}: a world of one has no traffic")
        return self._turn

    def __enter__(self) -> Self:
        if self._claim is not None:
            return self  # its turn comes on the lane's thread
        if self._lane is not None and self._lane.line is not None:
            try:
                self._lane.drain()  # calls before this one
            except BaseException as error:  # Ctrl-C: the others wait for a call of this number
                self.__exit__(type(error), error, None)
                raise
        self._span = begun(self.operation)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._claim is None or (error is not None and self._is_mine()):
                self._conclude(error)
        finally:
            if self._lane is not None:
                self._lane.begun_at = ""

    def _conclude(self, error: BaseException | None) -> None:
        turn = self._turn
        self._own_error = None  # its traceback holds this call, and so the caller's object
        if self._span is not None:
            self._span.__exit__(None, None, None)
        if self._bar is not None:
            self._bar.close()
        if turn is not None and error is not None:
            turn.give_up(error)
        exchange = None if turn is None else turn.exchange
        cost = (0, 0, 0) if exchange is None else exchange.cost
        self._group.recorder.conclude(self._entry, error, self._began, cost)
