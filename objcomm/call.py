"""One call of an operation on this rank: its group, codec and limits, and its failure if it fails.

What every operation does around its traffic, so that each can be read as its protocol: encode
before any traffic, send a failure instead of a value, raise alike, decode last.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.autograd.profiler

from objcomm.admission import Gate
from objcomm.codecs import codec_named, copy, decode, encode
from objcomm.config import Allowed, settings_with, using
from objcomm.errors import (
    CodecError,
    CollectiveError,
    DesyncError,
    ObjcommError,
    Position,
    TransportError,
    TransportTimeout,
    WireError,
    text_of,
)
from objcomm.frames import Flag, Header, Operation, Status, fingerprint
from objcomm.group import Timeout
from objcomm.history import Entry, call_site
from objcomm.memory import parse_device
from objcomm.message import Message, compose
from objcomm.outcome import failure_message, failure_of, failures_in, raise_together
from objcomm.recorder import attach
from objcomm.transport import routes
from objcomm.transport.device import DevicePath
from objcomm.transport.exchange import Exchange
from objcomm.transport.regions import regions
from objcomm.transport.verdict import Cause, Verdict
from objcomm.transport.watch import end_elsewhere, interruptible
from objcomm.world import GroupLike, resolve

R = TypeVar("R")

_profiler = torch.autograd.profiler


class Call:
    """The context of one operation; constructing it checks the arguments and starts nothing.

    Attributes:
        rank: this rank, within the group.
        size: number of ranks.
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
        device: torch.device | str | int | None = None,
        global_root: int | None = None,
        group_root: int | None = None,
        has_root: bool = False,
        must_agree: str = "",
        confirm: bool = False,
        accept: Iterable[str] | None = None,
        allow: Iterable[Allowed] | None = None,
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
            has_root: whether the operation has one.
            must_agree: text that must be the same on all ranks.
            confirm: whether a rank's decode error becomes everybody's.
            accept: codecs whose messages this rank decodes.
            allow: what a received pickle may name.

        Raises:
            UsageError: an argument is wrong; nothing was sent.
            NotInGroupError: this rank is no member.
            BrokenGroupError: an earlier error ended the group.
            TransportTimeout: the group's first call, and not every rank came.
        """
        self._began = time.perf_counter()
        self.name = operation.name.lower()
        self._group = resolve(group)
        self.rank, self.size = self._group.rank, self._group.size
        self.root = self._group.root(self.name, global_root, group_root)
        self._settings = settings_with(accept, allow)
        self._codec = codec_named(codec or self._settings.codec)
        self.device = parse_device(device)
        self._deadline = self._group.deadline(self.name, timeout)
        self._confirm = confirm
        self._own_error: BaseException | None = None
        self._exchange: Exchange | None = None
        self._has_met = False
        self._span: torch.autograd.profiler.record_function | None = None
        root = self.root if has_root else -1
        self._must_meet = self._settings.is_checked
        if self.size > 1:
            self._exchange = self._begin(operation, root, must_agree)
        else:
            number = self._group.history.next_number()
            header = Header(operation=operation, root=root, sequence=number, call_site=call_site())
            self._record(Entry(header, self.name, self._codec.name))

    def _begin(self, operation: Operation, root: int, must_agree: str) -> Exchange:
        """Take the next number on this thread's lane, last of all that can go wrong."""
        place = call_site()
        try:
            mesh, lane = self._group.enter(self.name, self._deadline, place)
        except ObjcommError as error:
            attach(error, self._group)
            raise
        self._mesh, self._lane = mesh, lane
        device_link = self._group.device_link
        self._device_type = None if device_link is None else device_link.device.type
        gate = Gate(self._settings, mesh.nonce, self.rank)
        is_staged = self.device is not None and self.device.type == self._device_type
        header = Header(
            status=Status.VALUE,
            flags=Flag.STAGED if is_staged else 0,
            operation=operation,
            sender=self.rank,
            root=root,
            lane=lane.number,
            group=mesh.number,
            sequence=lane.sequence,
            fingerprint=fingerprint(
                must_agree + "\0confirm" * self._confirm + "\0check" * self._must_meet
            ),
            call_site=place,
        )
        entry = Entry(header, self.name, self._codec.name, lane.name)
        exchange = Exchange(
            link=mesh.connections,
            lane=lane,
            entry=entry,
            deadline=self._deadline,
            gate=gate,
            device=DevicePath(device_link),
        )
        lane.sequence += 1
        lane.past.append(entry)
        self._record(entry)
        return exchange

    def _record(self, entry: Entry) -> None:
        self._entry = entry
        entry.began -= time.perf_counter() - self._began  # a first call has waited for the ranks
        self._group.history.add(entry)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank, and so no traffic."""
        return self._exchange is None

    @property
    def is_root(self) -> bool:
        """Whether this rank is the source or destination."""
        return self.rank == self.root

    @property
    def place(self) -> str:
        """A name of this call that is the same on every rank and means no other call."""
        if self._exchange is None:
            return ""
        header = self._exchange.header
        return f"{self._mesh.nonce}/{header.lane}/{header.sequence}"

    @property
    def exchange(self) -> Exchange:
        """The traffic."""
        if self._exchange is None:
            raise WireError(f"{self.name}: a world of one has no traffic")
        return self._exchange

    def message(self, produce: Callable[[], object]) -> Message:
        """Encode what ``produce`` returns; an error of either becomes a failure message.

        Any exception is caught, KeyboardInterrupt included: this rank still takes part, and raises
        afterwards.
        """
        try:
            encoded = encode(self._codec, produce(), device_type=self._device_type)
            header = self.exchange.header._replace(codec=self._codec.name)
            return compose(header, encoded.meta, encoded.buffers)
        except BaseException as error:  # noqa: BLE001  # see above
            return self.failure(error)

    def failure(self, error: BaseException) -> Message:
        """The message that tells the others of this rank's error."""
        self._own_error = error
        return failure_message(self.exchange.header, [failure_of(error, self.rank)])

    def failures(self, messages: Sequence[Message]) -> Message | None:
        """One message that tells of all the failures in some others, if there are any."""
        failures = failures_in(messages)
        return failure_message(self.exchange.header, failures.values()) if failures else None

    def alone(self, produce: Callable[[], R]) -> R:
        """What ``produce`` returns; in a world of one an error has the same form as in a group."""
        try:
            return produce()
        except BaseException as error:  # raised in the next line
            raise_together(self.name, {0: failure_of(error, 0)}, error)
            raise

    def copy(self, obj: object) -> Any:
        """An independent copy of this rank's own operand, which an operator may change."""
        return copy(self._codec, obj)

    def announcement(self, status: Status) -> Message:
        """A message that says all with its status."""
        return compose(self.exchange.header._replace(status=status), b"")

    def raise_failures(self, messages: Sequence[Message] = ()) -> None:
        """Raise what some messages, or this rank's own error, call for.

        Raises:
            CollectiveError: at least one rank failed.
        """
        failures = failures_in(messages)
        own = self._own_error
        if own is not None and not failures:
            failures = {self.rank: failure_of(own, self.rank)}
        raise_together(self.name, failures, own)

    def decode(self, message: Message) -> Any:
        """The object in a message that carries one.

        Raises:
            DecodeError: it can't be rebuilt here.
            WireError: it carries none, or what its sender did not sign.
        """
        message.check()
        if message.header.status != Status.VALUE:
            raise WireError(f"{message.header.position} sent status {message.header.status}")
        owners = [buffer.owner for buffer in message.buffers]
        with using(self._settings):
            return decode(message.header.codec, message.meta, owners, device=self.device)

    def settle(self, conclude: Callable[[], R]) -> R:
        """Raise or decode; with ``confirm=True`` every rank then learns of every rank's error.

        Every rank calls this after the traffic.
        """
        if not self._confirm:
            return conclude()
        try:
            result = conclude()
        except CollectiveError:
            pass  # the ranks that failed say so themselves
        except BaseException as error:  # noqa: BLE001  # raised by raise_failures
            self._own_error = error
        own = self._own_error
        blank = self.exchange.header
        self.exchange.header = blank._replace(flags=blank.flags | Flag.ACKNOWLEDGEMENT)
        mine = self.announcement(Status.VALUE) if own is None else self.failure(own)
        with self.traffic() as exchange:
            acknowledged = routes.all_gather(exchange, mine)
        self.raise_failures(acknowledged)
        return result

    @contextlib.contextmanager
    def traffic(self) -> Iterator[Exchange]:
        """The part of a call during which ranks wait for each other, and Ctrl-C ends a wait.

        After an error in it nobody knows what the other ranks wait for, so all are told, and every
        connection is closed: they raise too, instead of waiting.
        """
        lane, entry = self._lane, self._entry
        lane.regions = regions.get()
        self._deadline.apply(entry)  # a limit is for waiting, not for encoding or callbacks
        lane.entry = entry
        try:
            with interruptible(self._mesh):
                if self._must_meet:
                    routes.all_meet(self.exchange, self.announcement(Status.VALUE))
                    self._must_meet = False
                yield self.exchange
                self.exchange.finish()
            self._has_met = True
        except BaseException as error:
            self._raise_verdict(error)
            raise
        finally:
            lane.entry = None

    def _raise_verdict(self, error: BaseException) -> None:
        """Tell all ranks of an error, and raise what they raise; return if it is ``error``."""
        self._lane.owes = False
        proposal = self._proposal(error)
        if proposal.cause is Cause.LOST:
            proposal = self._mesh.blamed(proposal)
        verdict = self._mesh.settle(proposal)
        end_elsewhere(verdict)
        if isinstance(error, TransportError):
            raise self._mesh.local(verdict, error).error(self.name, self._position()) from error
        if verdict.name != proposal.name and isinstance(error, Exception):
            raise verdict.error(self.name, self._position()) from error

    def _position(self) -> Position:
        return self.exchange.header.position

    def _proposal(self, error: BaseException) -> Verdict:
        """What this rank says of an error, if nobody has said anything before."""
        if isinstance(error, DesyncError):
            positions = tuple(error.positions.values())
            return Verdict.of(Cause.DESYNC, reason=error.reason, positions=positions)
        if isinstance(error, TransportTimeout):
            return Verdict.of(Cause.TIMEOUT, ranks=error.missing, seconds=error.seconds)
        if isinstance(error, TransportError):
            return Verdict.of(Cause.LOST, ranks=error.peers, reason=error.reason)
        if isinstance(error, (WireError, CodecError)):
            return Verdict.of(Cause.REFUSED, failures=(failure_of(error, self.rank),))
        reason = f"it left after {text_of(error)}"
        return Verdict.of(Cause.LEFT, ranks=(self.rank,), reason=reason)

    def __enter__(self) -> Self:
        # A span costs 6 µs even if nobody looks; asking whether anybody does costs 0.01.
        if _profiler._is_profiler_enabled:  # noqa: SLF001  # torch.optim's own way to ask
            self._span = _profiler.record_function(f"objcomm::{self.name}")
            self._span.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        exchange = self._exchange
        seconds = time.perf_counter() - self._began
        self._own_error = None  # its traceback holds this call, and so the caller's object
        if self._span is not None:
            self._span.__exit__(kind, error, traceback)
        if exchange is not None:
            if error is not None:
                self._end_by(error)
            self._entry.sent_nbytes = exchange.sent_nbytes
            self._entry.received_nbytes = exchange.received_nbytes
        self._entry.end(error, seconds)
        if isinstance(error, ObjcommError):
            attach(error, self._group)
        self._group.counters.add(
            self.name,
            exchanges=exchange.rounds if exchange else 0,
            sent_nbytes=exchange.sent_nbytes if exchange else 0,
            received_nbytes=exchange.received_nbytes if exchange else 0,
            seconds=seconds,
        )

    def _end_by(self, error: BaseException) -> None:
        if not self._has_met:
            # Ctrl-C between two steps: the others wait for a call that this rank has numbered.
            self._mesh.settle(self._proposal(error))
