"""One call of an operation on this rank: its group, codec, timeout and failure.

This module contains the steps common to all operations, so that each operation reads as its
protocol: encode before any traffic, send a failure in place of a value, raise the same error on all
ranks, decode last.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Self, TypeVar, overload

from objcomm._algorithms import routes
from objcomm._calls.exclusive_regions import acts_alone, open_regions
from objcomm._calls.group import resolve, solo_group
from objcomm._calls.watched import Watched
from objcomm._calls.work import Work
from objcomm._codecs.base import codec_named, copy, decode, encode, registry
from objcomm._codecs.buffers import readable
from objcomm._config import (
    Allowed,
    DeviceLike,
    GroupLike,
    Timeout,
    check_name,
    environment_check,
    parse_device,
    settings,
    settings_with,
)
from objcomm._observe.history import CallRecord, call_site
from objcomm._observe.progress import bar_for
from objcomm._observe.tracing import Span, begun, profiler, span
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
    BLANK,
    EVERYONE,
    NAMES,
    Flag,
    Header,
    Operation,
    Status,
    fingerprint,
    made,
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

# Looking up members of an enum takes longer than everything else that is done with them.
_VALUE, _FAILURE = int(Status.VALUE), int(Status.FAILURE)


class Coding:
    """How a call encodes its objects and decodes received ones: codec, options and device.

    Attributes:
        settings: the options that apply to the call.
        codec: the codec that encodes.
        codec_name: the name of the codec.
        device: the device for received tensors, if the caller gave one.
    """

    __slots__ = ("codec", "codec_name", "device", "settings")

    #: Shared by calls without options of their own. Replaced as a whole, never changed.
    _latest: ClassVar["Coding | None"] = None

    def __init__(
        self,
        codec: str | None,
        device: DeviceLike,
        accept: Iterable[str] | None,
        allow: Iterable[Allowed] | None,
        operation: str,
    ) -> None:
        """Check the arguments, given as the user passed them to ``operation``.

        Raises:
            UsageError: one of them is wrong.
        """
        self.settings = settings_with(accept, allow, operation)
        self.codec = codec_named(codec or self.settings.codec, operation)
        self.codec_name = self.codec.name
        self.device = None if device is None else parse_device(device, operation)

    @classmethod
    def of(
        cls,
        codec: str | None,
        device: DeviceLike,
        accept: Iterable[str] | None,
        allow: Iterable[Allowed] | None,
        operation: str,
    ) -> "Coding":
        """Return the coding of a call. Calls without options of their own share one.

        Raises:
            UsageError: as for the constructor.
        """
        if not (codec is device is accept is allow is None):
            return cls(codec, device, accept, allow, operation)
        latest, chosen = cls._latest, settings()
        if (
            latest is None
            or latest.settings is not chosen
            or latest.codec is not registry.codecs.get(chosen.codec)
        ):
            latest = cls._latest = cls(None, None, None, None, operation)
        return latest

    def message(self, header: Header, obj: object, device_type: str | None = None) -> Message:
        """Encode an object into a message. Exceptions of the codec pass through.

        Args:
            header: the header of the message; its sizes are filled in.
            obj: the object.
            device_type: the device types whose memory travels over device links, joined by commas;
                None if there are none.
        """
        shown = begun("encode") if profiler._is_profiler_enabled else None  # noqa: SLF001  # see ``tracing``
        try:
            encoded = encode(self.codec, obj, device_type=device_type)
            return compose(
                header,
                encoded.meta,
                encoded.buffers,
                codec=self.codec_name,
                device_types=device_type or "",
            )
        finally:
            if shown is not None:
                shown.__exit__(None, None, None)

    def digest(self, obj: object) -> bytes:
        """Return a digest that is equal for two objects only if both encode to the same bytes."""
        with span("encode"):
            encoded = encode(self.codec, obj)
            digest = hashlib.blake2b(self.codec_name.encode(), digest_size=_DIGEST_NBYTES)
            for part in (encoded.meta, *(readable(each.flat) for each in encoded.buffers)):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
            return digest.digest()

    def copy(self, obj: object) -> Any:
        """Return an independent copy of an object."""
        return copy(self.codec, obj)

    def decode(self, message: Message) -> Any:
        """Decode the object in a message.

        Raises:
            DecodeError: the object cannot be rebuilt here. The error names its sender.
            WireError: the message does not contain an object, or its signature is wrong.
        """
        header = message.header
        if message.refusal is not None or message.signer is not None:
            message.check()
        if header.status != _VALUE:
            raise WireError(f"{header.position} sent status {header.status}")
        owners = [buffer.owner for buffer in message.buffers] if message.buffers else ()
        meta = message.meta if header.buffer_count else memoryview(message.body)
        shown = begun("decode") if profiler._is_profiler_enabled else None  # noqa: SLF001  # see ``tracing``
        try:
            return decode(header.codec, meta, owners, device=self.device, chosen=self.settings)
        except DecodeError as error:
            sent_at(error, header.position)
            raise
        finally:
            if shown is not None:
                shown.__exit__(None, None, None)


A = TypeVar("A")
R = TypeVar("R")
P = ParamSpec("P")

_PAIR = 2  # a pair swaps its outcomes; larger groups collect them on one rank


class Call:
    """Context manager for one call of an operation.

    The constructor checks the arguments, connects the group's ranks if this is their first call,
    waiting up to the timeout, and takes the next sequence number of this thread's lane. The other
    ranks wait for that number, so any later error is reported to them; see ``Watched.give_up``.

    Entering the context waits for the lane's earlier calls. Leaving it concludes the call, whatever
    has happened. In between, an operation takes two steps on the caller's thread: it encodes, and
    does the rest. An asynchronous call passes the rest to ``later``. The lane's thread then runs it
    after earlier calls, and concludes the call.

    Attributes:
        call_site: the user's ``file:line``.
        operation: the name of the function that the user called.
        rank: this rank's group rank.
        size: number of ranks.
        ranks: the global ranks of the group.
        root: group rank of source or destination; 0 if the operation has none.
        is_alone: whether there is no other rank, and so no traffic.
        is_root: whether this rank is the source or destination.
        exchange: the traffic, a context manager in which ranks wait for each other. Not set in a
            world of one.
        decode: decodes the object in a message; see ``Coding.decode``.
        device: the device for received tensors; None to keep their device type.
    """

    def __init__(  # noqa: PLR0915  # one linear sequence of steps
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
        """Begin the call.

        Args:
            operation: the operation.
            group: the group as the user gave it. The same holds for the arguments below.
            timeout: in seconds or as a timedelta.
            codec: the name of the codec that encodes this rank's objects.
            device: the device for received tensors.
            global_root: source or destination as a global rank.
            group_root: the same as a group rank.
            root_argument: the user's name for ``global_root``, for errors.
            has_root: whether the operation has a root.
            must_agree: text that must be the same on all ranks.
            confirm: whether a decode error on one rank is raised on all.
            accept: codecs whose messages this rank decodes.
            allow: what a received pickle may refer to.
            progress: whether to show a progress bar.
            name: the name of this call, the same on all ranks; empty to identify it by its line.
            called: the name of the function that the user called, if not the operation's.
            async_op: whether the rest is passed to ``later``.
            raises_later: whether a verdict that this thread has yet to raise is left to its next
                call, as an asynchronous call leaves it to its ``Work``.
            is_met: whether all ranks first agree on the call, as with ``objcomm.check``; must be
                the same on all ranks.

        Raises:
            UsageError: an argument is wrong, or this rank is in a region in which the other ranks
                do not make this call. Nothing was sent.
            NotInGroupError: this rank is not a member of the group.
            BrokenGroupError: an earlier error has closed the group's connections for good.
            TransportTimeout: in the group's first call, not every rank joined in time.
            MissingDependencyError: no package to show progress with is installed.
        """
        self._began = time.perf_counter()
        called_at = time.time()
        self.call_site = place = call_site()
        self.operation = called = called or NAMES[operation]
        if not isinstance(name, str):
            check_name(name, called)
        whole = resolve(group, called)
        root = 0
        if global_root is not None or group_root is not None:
            root = whole.root(called, global_root, group_root, root_argument)
        self.root = root
        self._coding = coding = Coding.of(codec, device, accept, allow, called)
        self.decode, self.device, chosen = coding.decode, coding.device, coding.settings
        self._deadline = deadline = whole.deadline(called, timeout, chosen)
        self.ranks = whole.ranks
        self._is_confined = bool(open_regions.get()) and acts_alone(called, whole.ranks, whole.rank)
        self._group = solo_group() if self._is_confined else whole
        self.rank, self.size = self._group.rank, self._group.size
        self.is_root = self.rank == root
        self._bar = bar_for(called, self.rank) if progress else None
        # For asynchronous calls. If Ctrl-C hits while the rest is handed over, both threads have
        # it, and the first one to take this lock concludes the call.
        self._claim = threading.Lock() if async_op else None
        recorder = self._group.recorder
        if self.size == 1:
            self.is_alone = True
            header = Header(
                operation=operation,
                root=root if has_root else -1,
                sequence=recorder.history.next_number(),
                call_site=place,
            )
            self._entry = entry = CallRecord(header, called, coding.codec_name)
            entry.began = called_at
            recorder.history.add(entry)
            return
        is_met |= (environment_check() if chosen.check is None else chosen.check) is True
        if must_agree or confirm or is_met:
            must_agree = f"{name}\0{must_agree}" + "\0confirm" * confirm + "\0check" * is_met
        # Takes the next sequence number of this thread's lane, after all other checks.
        try:
            mesh, lane = whole.enter(called, deadline, place, raises_later=async_op or raises_later)
        except ObjcommError as error:
            recorder.attach(error)
            raise
        link = mesh.link or mesh.connections_for(called)
        if link.is_interrupted() and self._claim is None:
            raise UsageError(f"{called}: {interrupted('a transfer of this group')}")
        self._lane = lane
        # From here on, calls by a signal handler that interrupts this one are refused; see
        # ``Lane.caller``.
        lane.begun_at = place
        try:
            path = whole.device_path(mesh, lane)
            flags = Flag.PACED if progress else 0
            if coding.device is not None and coding.device.type == path.staging:
                flags |= Flag.STAGED
            agreed = must_agree or name
            fields = (
                *(_VALUE, flags, operation, self.rank, root if has_root else -1, lane.number, 0),
                *(mesh.number, lane.sequence, fingerprint(agreed) if agreed else 0),
                *("", place, 0, 0, 0, 0, 0, EVERYONE, 0, BLANK, BLANK, 0),
                shown(name) if name else "",
            )
            header = made(Header, fields)
            self._entry = entry = CallRecord(header, called, coding.codec_name, lane.name)
            entry.began = called_at  # to include a first call's wait for the other ranks
            entry.is_confirmed = confirm or is_met
            gate = Gate(chosen, mesh.session, self.rank, path.devices)
            self.exchange = Watched(
                mesh, link, lane, entry, deadline, gate=gate, device=path, meter=self._bar
            )
            self.exchange.is_confirmed = confirm
            if is_met:
                self.exchange.meet_first()
            lane.sequence += 1
            lane.past.append(entry)
            recorder.history.add(entry)
        except BaseException:
            lane.begun_at = ""
            raise

    is_alone = False
    exchange: Watched
    decode: Callable[[Message], Any]
    _lane: "Lane | None" = None
    _own_error: BaseException | None = None
    _span: Span | None = None

    @property
    def place(self) -> str:
        """A unique identifier of this call, the same on every rank; empty in a world of one."""
        return "" if self.is_alone else self.exchange.place

    def message(
        self,
        obj: A,
        make: Callable[[A], object] | None = None,
        among: Sequence[Message] = (),
    ) -> Message:
        """Encode an object; an error becomes a failure message.

        Any exception is caught, including KeyboardInterrupt: this rank still takes part in the
        traffic, and raises afterwards.

        Args:
            obj: the object.
            make: converts ``obj`` into the object to encode, or raises.
            among: the messages of all ranks, if ``make`` checks whether they agree.
        """
        try:
            exchange = self.exchange
            made = obj if make is None else make(obj)
            return self._coding.message(exchange.header, made, exchange.device.linked or None)
        except BaseException as error:  # noqa: BLE001  # see above
            return self.failure(error, among)

    def aside(self, produce: Callable[[], R]) -> R:
        """Call the user's function, which may use the group, because no rank waits yet."""
        lane = self._lane
        if lane is None:
            return produce()
        lane.begun_at = ""
        try:
            return produce()
        finally:
            lane.begun_at = self.call_site

    def failure(self, error: BaseException, among: Sequence[Message] = ()) -> Message:
        """Return a message that reports this rank's error, or which of ``among`` differ."""
        if isinstance(error, DifferenceError):
            error = DisagreementError({error.ranks[1]: str(error)})
        if isinstance(error, DisagreementError):
            return failure_message(self.exchange.header, error.failures(among))
        self._own_error = error
        return failure_message(self.exchange.header, [failure_of(error, self.rank, self.call_site)])

    def failures(self, messages: Sequence[Message]) -> Message | None:
        """Return one message with all failures in ``messages``; None if there are none."""
        failures = failures_in(messages)
        return failure_message(self.exchange.header, failures.values()) if failures else None

    def alone(self, produce: Callable[[], R]) -> R:
        """Return what ``produce`` returns; wrap its errors as a group of several ranks would.

        In a region, errors are not wrapped, because the end of the region reports them.
        """
        try:
            return produce()
        except BaseException as error:
            if not self._is_confined:
                raise_together(self.operation, {0: failure_of(error, 0, self.call_site)}, error, 0)
            raise

    def digest(self, obj: object) -> bytes:
        """Return a digest that is equal on two ranks only if both encode to the same bytes."""
        return self._coding.digest(obj)

    def copy(self, obj: object) -> Any:
        """Return an independent copy of this rank's operand, which an operator may modify."""
        return self._coding.copy(obj)

    def announcement(self, status: Status) -> Message:
        """Return a message with a status but no body."""
        return compose(self.exchange.header, b"", status=status)

    def raise_failures(self, messages: Sequence[Message] = ()) -> None:
        """Raise if any of the messages reports a failure, or if this rank has failed.

        Raises:
            CollectiveError: at least one rank failed.
        """
        failures = failures_in(messages)
        own = self._own_error
        if own is not None and not failures:
            failures = {self.rank: failure_of(own, self.rank, self.call_site)}
        if failures:
            raise_together(self.operation, failures, own, self.rank)

    def decode_as(self, message: Message, fits: Callable[[Any], bool], what: str) -> Any:
        """Decode an object that objcomm itself sent and that must be of a certain kind.

        Args:
            message: as for ``decode``.
            fits: returns whether an object is of that kind.
            what: the name of the kind, for the error.

        Raises:
            DecodeError: the object is of another kind; or as for ``decode``.
            WireError: as for ``decode``.
        """
        plain = self.decode(message)
        if not fits(plain):
            position = message.header.position
            raise sent_at(DecodeError(message.header.codec, f"it is not {what}"), position)
        return plain

    def confirm(self) -> None:
        """Make ``result`` behave as with ``confirm=True``.

        Either every rank calls this during the traffic, or none does.
        """
        self.exchange.is_confirmed = self._entry.is_confirmed = True

    @overload
    def result(self, messages: Sequence[Message]) -> None: ...
    @overload
    def result(
        self,
        messages: Sequence[Message],
        read: Callable[P, R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R: ...
    def result(
        self,
        messages: Sequence[Message],
        read: Callable[..., R] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> R | None:
        """Return what ``read`` returns, unless a rank failed; every rank calls this after traffic.

        With ``confirm=True``, an error raised here is raised on all ranks.

        Args:
            messages: messages that may report failures.
            read: computes the call's result, for example by decoding; None if there is none, so
                this rank cannot fail here.
            args: for ``read``.
            kwargs: for ``read``.

        Raises:
            CollectiveError: at least one rank failed.
        """
        if self.exchange.is_confirmed:
            try:
                self.raise_failures(messages)
                result = None if read is None else read(*args, **kwargs)
            except BaseException as error:
                self._acknowledge(error)
                raise
            self._acknowledge(None)
            return result
        if self._own_error is not None:
            self.raise_failures(messages)
        for each in messages:
            if each.header.status == _FAILURE:
                self.raise_failures(messages)
        return None if read is None else read(*args, **kwargs)

    def _acknowledge(self, error: BaseException | None) -> None:
        """Exchange the outcomes of all ranks.

        Returns if no rank failed by itself: then the caller raises ``error``, if there is one.

        Raises:
            CollectiveError: at least one rank failed.
        """
        # Failures of other ranks in a CollectiveError are reported by those ranks themselves.
        if error is not None and not isinstance(error, CollectiveError):
            self._own_error = error
        own, exchange = self._own_error, self.exchange
        header = exchange.header
        exchange.header = header._replace(flags=header.flags | Flag.ACKNOWLEDGEMENT)
        mine = self.announcement(Status.VALUE) if own is None else self.failure(own)
        exchange.is_confirmed = False
        with exchange:
            if exchange.size == _PAIR:
                outcomes = routes.all_gather(exchange, mine)
            else:
                all_outcomes = routes.gather(exchange, mine, routes.HUB)
                done = self.announcement(Status.VALUE)
                answer = None if all_outcomes is None else self.failures(all_outcomes) or done
                outcomes = [routes.broadcast(exchange, answer, routes.HUB)]
        self.raise_failures(outcomes)

    def later(self, rest: Callable[[], R]) -> Work[R]:
        """Hand the rest of an asynchronous operation to the lane's thread.

        Args:
            rest: everything after the encoding of objects that the caller may change.

        Returns:
            A ``Work`` with the result of ``rest``.
        """
        # In a list that ``_go_on`` empties, so the caller's object is freed before the work ends.
        body, lane = partial(self._go_on, [rest]), self._lane
        if lane is None:
            return Work[R](self.operation, self.call_site).carry_out_here(body)
        if lane.line is None:
            lane.line = SerialExecutor(f"objcomm-line {lane.name}".strip())
        work: Work[R] = Work(
            self.operation, self.call_site, lane, on_error=self.exchange.mark_retrieved
        )
        work.carry_out_on(lane.line, body)
        return work

    def _go_on(self, rests: list[Callable[[], R]]) -> R:
        """Run the rest of an asynchronous call when its turn has come."""
        if not self._is_mine():
            raise CancelledError  # after Ctrl-C the caller has concluded it and has no Work
        try:
            self._span = begun(self.operation)
            result = rests.pop()()
        except BaseException as error:
            self._conclude(error)
            raise
        self._conclude(None)
        return result

    def _is_mine(self) -> bool:
        """Whether this thread must conclude the call: true for the first thread that asks."""
        return self._claim is None or self._claim.acquire(blocking=False)

    def __enter__(self) -> Self:
        if self._claim is not None:
            return self  # the lane's thread waits for earlier calls
        if self._lane is not None and self._lane.line is not None:
            try:
                self._lane.drain()  # calls before this one
            except BaseException as error:  # after Ctrl-C the others still wait for this call
                self.__exit__(type(error), error, None)
                raise
        if profiler._is_profiler_enabled:  # noqa: SLF001  # see ``tracing``
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
        self._own_error = None  # its traceback holds this call, and so the caller's object
        if self._span is not None:
            self._span.__exit__(None, None, None)
        if self._bar is not None:
            self._bar.close()
        if error is not None and not self.is_alone:
            self.exchange.give_up(error)
        self._group.recorder.conclude(self._entry, error, self._began)


#: Creates a call that sends only plain data. Every rank decodes that, whatever codecs the program
#: accepts, so none can refuse it.
plain_call = partial(Call, codec="msgpack", accept=("msgpack",))
