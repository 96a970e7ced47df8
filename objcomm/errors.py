"""Every error that objcomm raises on purpose.

This module does not depend on any other module of objcomm. The hierarchy::

    ObjcommError
    ├─ UsageError (ValueError)               the call is wrong; raised before any traffic
    │  └─ NotInGroupError                    this rank is not a member of the group
    ├─ MissingDependencyError (ImportError)  an optional package is not installed
    ├─ CodecError
    │  ├─ EncodeError                        a codec refused an object; nothing was sent
    │  └─ DecodeError                        received bytes did not become an object
    │     └─ ForbiddenTypeError              a class or function that is not allowed
    ├─ WireError                             received bytes are not a valid message
    │  ├─ AuthenticationError                a message has a bad signature
    │  └─ DesyncError                        ranks are in different operations
    ├─ TransportError (RuntimeError)         a peer died, or a connection closed
    │  ├─ TransportTimeout (TimeoutError)    some ranks did not arrive in time
    │  └─ BrokenGroupError                   an earlier error ended this group
    ├─ StartError (RuntimeError)             the ranks could not connect in ``init``
    ├─ LaunchError (RuntimeError)            ranks started by ``launch`` failed: ``.failures``
    └─ CollectiveError                       at least one rank failed: ``.failures``

Errors keep their facts as attributes and can be pickled, because ``args`` holds exactly the
arguments of ``__init__``. Their text stays short for any number of ranks: what several ranks have
in common is shown once. Ranks in errors are group ranks. Where objcomm replaces another library,
``caught_as`` turns an error into one that is also an instance of the type that library raised.
"""

import functools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

E = TypeVar("E", bound="ObjcommError")
K = TypeVar("K")
V = TypeVar("V")

_PAIR = 2

# Up to this many ranks are listed one by one, as users of a small job expect. Also the maximum
# number of different tracebacks shown.
_FEW = 4
# The maximum number of different positions, and of different failures, that are shown.
_MOST_LINES = 8
_MOST_RANGES = 16
# How to refer to the other rank of a message; collectives have a root instead.
_PEER = {
    **dict.fromkeys(("send", "isend", "ssend", "issend"), "to rank"),
    **dict.fromkeys(("recv", "irecv", "probe", "mprobe"), "from rank"),
}
# Why a rank may not answer although its process exists.
_SILENT = "stopped, out of reach, or in C code that holds Python's lock"
# The maximum length of a failure's text; different failures share it.
_LETTERS_OF_FAILURES = 8000
_LETTERS_OF_A_LINE = 1000

# The module names of the running program; the second one is used in multiprocessing's children.
_PROGRAMS = ("__main__", "__mp_main__")

# The maximum length of received text that is shown in an error.
_SHOWN_LETTERS = 100
_SHOWN_MAX = 1 << 64


class ObjcommError(Exception):
    """Base class of objcomm's errors.

    Attributes:
        recent: this rank's latest calls on the group, oldest first; empty if there were none.
        recorded: the file with this rank's latest calls on all groups; empty if none was written.
    """

    recent: tuple["Position", ...] = ()
    recorded: str = ""


class UsageError(ObjcommError, ValueError):
    """The call or its arguments are wrong; raised before any traffic."""


class NotInGroupError(UsageError):
    """This rank called an operation on a group of which it is not a member."""


class MissingDependencyError(ObjcommError, ImportError):
    """An optional package is required but not installed.

    Attributes:
        package: the name under which it is imported.
        wanted: what to install with pip: that package, and others that are required and missing.
    """

    def __init__(self, package: str, wanted: str) -> None:
        super().__init__(package, wanted)
        self.package = package
        self.wanted = wanted

    def __str__(self) -> str:
        return f"{self.package!r} is not installed; run: pip install {self.wanted}"


class CodecError(ObjcommError):
    """An object could not be encoded into bytes, or bytes could not be decoded into an object."""


class EncodeError(CodecError):
    """A codec refused an object; no part of the object was sent.

    Attributes:
        codec: the name of the codec.
        type_name: the type of the member that was refused.
        path: the path of that member, for example ``obj['model'].head``.
        reason: the reason given by the codec.
    """

    def __init__(self, codec: str, type_name: str, path: str, reason: str) -> None:
        super().__init__(codec, type_name, path, reason)
        self.codec = codec
        self.type_name = type_name
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"codec {self.codec!r} cannot encode {self.path}, a {self.type_name!r}: {self.reason}"
        )


class DecodeError(CodecError):
    """Received bytes could not be decoded into an object.

    Attributes:
        codec: the name of the codec.
        reason: what went wrong.
        lacking: what is missing in this process, as ``module`` or ``module:name``; empty if nothing
            is missing.
        path: the member that could not be rebuilt, for example ``obj['model'].head``; empty if
            unknown.
        made_by: the name of the class or function that should have rebuilt it; empty if unknown.
        origin: the rank that sent the object, its operation, and the line of its program; None if
            no rank sent it, as in ``from_tensor``.
    """

    origin: "Position | None" = None

    def __init__(
        self, codec: str, reason: str, lacking: str = "", path: str = "", made_by: str = ""
    ) -> None:
        super().__init__(codec, reason, lacking, path, made_by)
        self.codec = codec
        self.reason = reason
        self.lacking = lacking
        self.path = path
        self.made_by = made_by

    def __str__(self) -> str:
        what, sender = "what arrived", "the sender"
        if self.origin is not None:
            where = f" at {self.origin.call_site}" if self.origin.call_site else ""
            sender = f"rank {self.origin.rank}"
            what = f"what {sender} gave to {self.origin.operation}{where}"
        if self.path:
            what += f", at {self.path}, made by {self.made_by!r}"
        text = f"codec {self.codec!r} cannot decode {what}: {self.reason}"
        return text + _cure_of(self.lacking, sender)


def _cure_of(lacking: str, sender: str) -> str:
    """Return advice on how to make a missing module or name available in this process."""
    module, _, name = lacking.partition(":")
    if not lacking:
        return ""
    if not name:
        return (
            f"; {sender} can import the module {module!r}, this process cannot: install it here, "
            "or add its folder to PYTHONPATH"
        )
    if module in _PROGRAMS:
        return (
            f"; {sender} defines {name!r} in its program or notebook, this process does not: "
            "define it on every rank, best in a module that all of them import"
        )
    return (
        f"; {sender} has {name!r} in the module {module!r}, this process does not: install the "
        f"same version of {module.partition('.')[0]!r} on every rank"
    )


def sent_at(error: "DecodeError", origin: "Position") -> "DecodeError":
    """Add the origin of the object to an error, unless it already has one; return the error."""
    if error.origin is None:
        error.origin = origin
    return error


def not_accepted(codec: str, accepted: Collection[str]) -> DecodeError:
    """Return the error for a message with a codec that its receiver does not accept."""
    names = ", ".join(sorted(accepted)) or "no codec"
    cure = "give both ranks the same codec=, or name this one in accept= here"
    return DecodeError(codec, f"this rank accepts only {names}; {cure}")


class ForbiddenTypeError(DecodeError):
    """The message needs a class or function that is not allowed here; none of its code ran."""


class WireError(ObjcommError):
    """Received bytes are not an objcomm message, or the message is damaged."""


class AuthenticationError(WireError):
    """A message has a bad signature, or is a replay; no part of it was decoded."""


class Position(NamedTuple):
    """Where one rank is in its program.

    Attributes:
        rank: the group rank.
        operation: the name of the operation; empty if the rank has made no call.
        sequence: the number of operations that the rank started on this lane before this one.
        root: group rank of source or destination; -1 if there is none.
        call_site: the user's ``file:line``.
        seconds: how long ago the call began, or ended if it is over; 0 if not measured.
        is_over: whether the rank has returned from that call, its last one.
        group: the name of the group, if it is not the group of the error.
        name: the start of the call's name.
        line: where the rank is in its program, as ``file:line in function``, if it is computing;
            empty if it waits in the call, or if that is unknown.
        line_seconds: for how long consecutive snapshots have found the rank there.
        unmatched: description of messages that a receive does not match.
        fingerprint: hash of further properties that must agree, such as a named operator; 0 if
            there are none.
        lane: the name of the ``objcomm.lane`` on which the call was made.
    """

    rank: int
    operation: str
    sequence: int
    root: int
    call_site: str
    seconds: float = 0.0
    is_over: bool = False
    group: str = ""
    name: str = ""
    line: str = ""
    line_seconds: float = 0.0
    unmatched: str = ""
    fingerprint: int = 0
    lane: str = ""

    def __str__(self) -> str:
        return self._with_others(())

    @property
    def call(self) -> str:
        """Description of the call, with its number and its line."""
        root = "" if self.root < 0 else f" {_PEER.get(self.operation, 'with root')} {self.root}"
        group = f" of group {self.group!r}" if self.group else ""
        lane = f" on lane {self.lane!r}" if self.lane else ""
        where = f" at {self.call_site}" if self.call_site else ""
        name = f" {self.name!r}" if self.name else ""
        return f"{self.operation}{name} (call {self.sequence}){root}{group}{lane}{where}"

    def _with_others(self, others: "Collection[Position]", *, is_past: bool = False) -> str:
        """Return the text for this rank and others at the same position.

        Args:
            others: their positions, which differ from this one only in ranks and seconds.
            is_past: whether to describe what the ranks called; they may have returned since.
        """
        together = (self, *others)
        listed = ranks_text([each.rank for each in together])
        spent = _seconds_text([each.seconds for each in together])
        verb, whose = ("are", "their") if others else ("is", "its")
        now = ""
        if self.line:
            seen = _seconds_text([each.line_seconds for each in together])
            now = f", now at {self.line}" + f" (seen there for {seen})" * bool(seen)
        if is_past and not self.operation:
            return f"{listed} made no call{now}"
        if is_past:
            ago = f", {spent} ago" * bool(self.is_over and spent)
            return f"{listed} {'last ' * self.is_over}called {self.call}{ago}{now}"
        if self.is_over and not self.operation:
            return f"{listed} {verb} in no call{now}"
        if self.is_over:
            last = f"{self.call}, {spent or '0.0 s'} ago"
            return f"{listed} {verb} in no call{now}; {whose} last was {last}"
        unmatched = f" ({self.unmatched})" if self.unmatched else ""
        return f"{listed} {verb} in {self.call}" + f" for {spent}" * bool(spent) + now + unmatched


def _seconds_text(seconds: Sequence[float]) -> str:
    """Return a range of durations as text; empty if none was measured."""
    if not any(seconds):
        return ""
    texts = dict.fromkeys(f"{each:.1f}" for each in (min(seconds), max(seconds)))
    return f"{' to '.join(texts)} s"


def position_texts(
    positions: Iterable[Position],
    silent: Collection[int] = (),
    foremost: Collection[int] = (),
    silent_seconds: float = 0.0,
    *,
    is_past: bool = False,
) -> list[str]:
    """Describe where ranks are, in rank order; ranks at the same position are grouped.

    Args:
        positions: the positions of ranks that answered.
        silent: ranks that did not answer.
        foremost: ranks to list first, if there are too many positions to list all.
        silent_seconds: for how long ``silent`` ranks have not answered.
        is_past: whether to describe what the ranks called, starting with the rarest call.
    """
    known = sorted(positions)
    is_few = len(known) + len(silent) <= _FEW and not is_past
    places: defaultdict[Hashable, list[Position]] = defaultdict(list)
    for each in known:
        rank = each.rank if is_few else -1
        places[each._replace(rank=rank, seconds=0.0, line_seconds=0.0)].append(each)
    lines = [
        (
            [each.rank for each in of],
            of[0]._with_others(of[1:], is_past=is_past),  # noqa: SLF001  # of this module
        )
        for of in places.values()
    ]
    unheard = [[rank] for rank in silent] if is_few else [sorted(silent)] * bool(silent)
    since = f" for {silent_seconds:.1f} s" * bool(silent_seconds)
    lines += [(ranks, f"{ranks_text(ranks)}: no answer{since} ({_SILENT})") for ranks in unheard]
    lines.sort(key=lambda each: (len(each[0]) if is_past else 0, each[0]))
    if len(lines) > _MOST_LINES:
        lines.sort(key=lambda each: set(foremost).isdisjoint(each[0]))
    rest = [rank for ranks, _ in lines[_MOST_LINES:] for rank in ranks]
    texts = [text for _, text in lines[:_MOST_LINES]]
    return texts + [f"{ranks_text(rest)}: elsewhere"] * bool(rest)


#: Reason for a DesyncError about two calls that differ only in their lines.
OTHER_LINES = "other lines"

#: Reason for two calls that differ only in properties that are not shown.
OTHER_OPTIONS = "different op=, to=, confirm=, depth=, batch=, scatter=, check= or function"

#: Reason for a deadlock: ranks that wait for each other in calls that do not match.
CYCLE = "each waits for another"

#: Reason for a deadlock of ranks that all wait for a message, or for one to be received.
NO_MATCH = "each waits for another to send or receive"


class DesyncError(WireError):
    """Ranks are in different operations, or wait for each other.

    Every rank raises this error once, and the group keeps working. A rank whose call did not have
    to wait has already returned from it, and raises the error in its next call.

    Attributes:
        reason: what differs.
        positions: by rank, the calls of the ranks that answered; for a deadlock, the calls in which
            ranks wait for each other.
    """

    def __init__(self, reason: str, positions: Iterable[Position]) -> None:
        listed = tuple(positions)
        super().__init__(reason, listed)
        self.reason = reason
        self.positions = {position.rank: position for position in listed}

    def __str__(self) -> str:
        is_past = self.reason not in (CYCLE, NO_MATCH)
        each = position_texts(self.positions.values(), is_past=is_past)
        where = ", but ".join(each) if len(each) <= _PAIR else "; ".join(each)
        advice = "; every rank must make the same calls in the same order"
        if self.reason == NO_MATCH or any(each.unmatched for each in self.positions.values()):
            advice = "; let one send first, with the tag that the other takes, or use sendrecv"
        if self.reason == OTHER_LINES:
            advice += ", or give two lines that belong together the same name="
        return f"ranks are out of step ({self.reason}): {where}{advice}"


class TransportError(ObjcommError, RuntimeError):
    """A peer is gone: it died, exited, or left this operation after its own error.

    Attributes:
        operation: the operation that this rank was in.
        peers: group ranks of the peers that are gone; empty if the backend of this rank's device
            has failed. The other ranks then raise ``CollectiveError``, and the next call works.
        reason: what is known about the cause.
    """

    def __init__(self, operation: str, peers: tuple[int, ...], reason: str) -> None:
        super().__init__(operation, peers, reason)
        self.operation = operation
        self.peers = peers
        self.reason = reason

    def __str__(self) -> str:
        if not self.peers:
            return f"{self.operation}: {self.reason}"
        return f"{self.operation}: the connection to {ranks_text(self.peers)} ended: {self.reason}"


class TransportTimeout(TransportError, TimeoutError):
    """The timeout expired before every rank had joined the operation.

    Attributes:
        missing: group ranks that had not arrived, as far as this rank knows.
        seconds: the timeout that expired first, on any rank.
        positions: by rank, the positions of the ranks that answered.
        silent: group ranks that did not answer: stopped, dead or unreachable.
        is_store_silent: whether the process group's store did not answer, so no rank could be
            asked.
        silent_seconds: for how long the silent ranks have not answered; 0 if not measured.
    """

    def __init__(  # noqa: PLR0917  # positional, as in args
        self,
        operation: str,
        missing: tuple[int, ...],
        seconds: float,
        positions: Iterable[Position] = (),
        silent: tuple[int, ...] = (),
        is_store_silent: bool = False,  # noqa: FBT001, FBT002  # args is positional
        silent_seconds: float = 0.0,
    ) -> None:
        listed = tuple(positions)
        super().__init__(operation, missing, "timed out")
        self.args = (operation, missing, seconds, listed, silent, is_store_silent, silent_seconds)
        self.missing = missing
        self.seconds = seconds
        self.positions = {position.rank: position for position in listed}
        self.silent = silent
        self.is_store_silent = is_store_silent
        self.silent_seconds = silent_seconds

    def __str__(self) -> str:
        answered = [each for rank, each in self.positions.items() if rank not in self.silent]
        where = position_texts(answered, self.silent, self.missing, self.silent_seconds)
        where += ["store: no answer"] * self.is_store_silent
        positions = f"; {'; '.join(where)}" if where else ""
        return (
            f"{self.operation}: {ranks_text(self.missing)} did not arrive within {self.seconds:g} s"
            f"{positions}; if the work before this call may take longer, pass a larger timeout="
        )


class BrokenGroupError(TransportError):
    """The group's connections ended earlier, because of an error or because a rank left.

    Attributes:
        reason: the text of the error that reported it first.
    """

    def __init__(self, operation: str, reason: str) -> None:
        super().__init__(operation, (), reason)
        self.args = (operation, reason)

    def __str__(self) -> str:
        return (
            f"{self.operation}: this group can no longer carry objects because its connections "
            f"ended ({self.reason}); make a new process group, or restart the job"
        )


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank as text, because exceptions are not sent between ranks.

    Attributes:
        rank: group rank that failed.
        type_name: qualified name of the exception's type.
        message: ``str(exception)``, without other ranks' tracebacks.
        traceback: the line of the call on that rank, followed by the formatted traceback without
            objcomm's own frames. Only the line if nothing was raised on that rank, whose object
            merely did not fit the others'.
    """

    rank: int
    type_name: str
    message: str
    traceback: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.type_name}: {self.message}"


class CollectiveError(ObjcommError):
    """At least one rank failed in an operation; raised on every rank that waited for it.

    On a rank that failed, its own exception is the ``__cause__``.

    Attributes:
        operation: the name of the operation.
        failures: the failures by group rank.
        own_rank: this rank, whose traceback Python shows as the cause and the text leaves out; None
            if there is no such cause.
    """

    own_rank: int | None = None

    def __init__(self, operation: str, failures: Mapping[int, RankFailure]) -> None:
        super().__init__(operation, dict(failures))
        self.operation = operation
        self.failures = dict(failures)

    @property
    def summary(self) -> str:
        """The text without tracebacks."""
        return f"{self.operation} failed on {_summary(self._in_order())}"

    def __str__(self) -> str:
        failures = self._in_order()
        shown = {each.traceback for each in failures if self._is_cause(each)}
        return self.summary + _tracebacks(
            [each for each in failures if each.traceback not in shown]
        )

    def _in_order(self) -> list[RankFailure]:
        return [self.failures[rank] for rank in sorted(self.failures)]

    def _is_cause(self, failure: RankFailure) -> bool:
        """Whether Python already shows this failure as the cause of the error."""
        cause = self.__cause__
        if isinstance(cause, CollectiveError) and failure.message == cause.summary:
            return True
        return cause is not None and failure.rank == self.own_rank


class StartError(ObjcommError, RuntimeError):
    """The ranks of a job could not connect in ``init``.

    Attributes:
        rank: rank of this process.
        world_size: the expected number of ranks.
        address: ``host:port`` of the rendezvous.
        reason: which ranks are missing, or the message of torch's error.
        missing: ranks known to be missing; empty if that was not the reason.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str,
        reason: str,
        missing: tuple[int, ...] = (),
    ) -> None:
        super().__init__(rank, world_size, address, reason, missing)
        self.rank = rank
        self.world_size = world_size
        self.address = address
        self.reason = reason
        self.missing = missing

    def __str__(self) -> str:
        return (
            f"init: rank {self.rank} of {self.world_size} did not meet the others at "
            f"{self.address}: {self.reason}; see that all ranks are started, that the host can be "
            "reached, and that no other program has this port, or set MASTER_ADDR and MASTER_PORT "
            "to others on every rank"
        )


class LaunchError(ObjcommError, RuntimeError):
    """Ranks started by ``launch`` failed; the remaining ranks were terminated.

    Attributes:
        name: the name of the function that they ran.
        failures: by rank, the failure of each rank that did not return: the first failure, then
            failures that it caused on other ranks, then ranks that had to be terminated.
    """

    def __init__(self, name: str, failures: Mapping[int, RankFailure]) -> None:
        super().__init__(name, dict(failures))
        self.name = name
        self.failures = dict(failures)

    def __str__(self) -> str:
        failures = list(self.failures.values())
        first_lines = [replace(each, message=each.message.partition("\n")[0]) for each in failures]
        return f"launch: {self.name} failed on {_summary(first_lines)}{_tracebacks(failures)}"


class CaughtAs:
    """Mixin of the classes that ``caught_as`` creates.

    Attributes:
        kinds: the error's own class, followed by the additional ones.
    """

    kinds: tuple[type[Any], ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.kinds, getattr(self, "args", ()), vars(self))


def caught_as(error: E, other: type[Exception]) -> E:
    """Return an error that programs can also catch as ``other``, which another library raised.

    Its name, attributes and cause do not change, and it can be pickled.

    Args:
        error: an error of objcomm.
        other: a builtin exception. Its ``__init__`` is not called, because its arguments are not
            known here.
    """
    if isinstance(error, other):
        return error
    before = getattr(error, "kinds", (type(error),))
    made: E = _made((*before, other), error.args, vars(error))
    if error.__cause__ is not None:
        made.__cause__ = error.__cause__
    return made.with_traceback(error.__traceback__)


def _made(kinds: tuple[type[Any], ...], args: tuple[Any, ...], facts: Mapping[str, Any]) -> Any:
    kind = _joined(kinds)
    made = kind.__new__(kind, *args)
    made.args = args  # OSError's ``__new__`` leaves this to ``__init__``
    vars(made).update(facts)
    return made


@functools.cache
def _joined(kinds: tuple[type[Any], ...]) -> type[Any]:
    own = kinds[0]
    names = {each: vars(own)[each] for each in ("__module__", "__doc__")}
    return type(own.__name__, (CaughtAs, *kinds), {**names, "kinds": kinds})


def name_of(kind: type, attribute: str = "__name__") -> str:
    """Return a class's name without consulting its metaclass; never raises.

    Args:
        kind: the class.
        attribute: ``__name__`` or ``__qualname__``.
    """
    name: str = type.__dict__[attribute].__get__(kind)
    return name


def text_of(error: BaseException) -> str:
    """Return ``Type: message``, or the type alone; never raises, even if ``__str__`` does."""
    kind = name_of(type(error))
    try:
        text = str(error)
    except BaseException as second:  # noqa: BLE001  # a user's __str__ may even exit
        text = f"<its __str__ raised {name_of(type(second))}>"
    return f"{kind}: {text}" if text else kind


def brief_text_of(error: BaseException) -> str:
    """Return the first line of ``text_of``, shortened to fit into another error's text."""
    first, _, more = text_of(error).partition("\n")
    return _excerpt(first, _LETTERS_OF_A_LINE) + " […]" * bool(more)


def shown(received: object) -> str:
    """Return a safe text for a received object: a short value's ``repr``, otherwise its type.

    The ``repr`` of a tensor that was sent as 50 bytes may allocate gigabytes.
    """
    kind = type(received)
    if kind is str:
        return repr(received[:_SHOWN_LETTERS])  # type: ignore[index]  # a str by its type
    if kind is int and -_SHOWN_MAX < received < _SHOWN_MAX:  # type: ignore[operator]  # likewise
        return repr(received)
    return repr(received) if received is None or kind in {bool, float} else f"a {name_of(kind)}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks in words: ``rank 5``, ``ranks 0-511, 513``, or ``a rank`` for none."""
    listed = tuple(ranks)
    if not listed:
        return "a rank"
    return f"{'rank' if len(listed) == 1 else 'ranks'} {ranges_text(listed)}"


def ranges_text(ranks: Iterable[int]) -> str:
    """Return numbers in ascending order, consecutive ones as a range: ``0-511, 513``.

    Numbers after the first 16 ranges are only counted.
    """
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    more = sum(last - first + 1 for first, last in ranges[_MOST_RANGES:])
    return ", ".join(texts[:_MOST_RANGES]) + f" and {more} more" * bool(more)


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, keys and values in the order in which they first occur."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _summary(failures: Sequence[RankFailure]) -> str:
    """Describe what failed on which ranks; ranks with the same failure are grouped."""
    alike = grouped((f"{each.type_name}: {each.message}", each.rank) for each in failures)
    most = _LETTERS_OF_FAILURES // min(max(len(alike), 1), _MOST_LINES)
    texts = [f"{ranks_text(ranks)}: {_excerpt(text, most)}" for text, ranks in alike.items()]
    rest = [rank for ranks in list(alike.values())[_MOST_LINES:] for rank in ranks]
    return "; ".join([*texts[:_MOST_LINES], *[f"{ranks_text(rest)}: other errors"] * bool(rest)])


def _tracebacks(failures: Sequence[RankFailure]) -> str:
    """Return the different tracebacks to show below a summary, up to four of them."""
    traced = [each for each in failures if each.traceback.strip()]
    alike = grouped((each.traceback.rstrip(), each.rank) for each in traced)
    texts = []
    for text, ranks in list(alike.items())[:_FEW]:
        # If nothing was raised, there is only the line of the call.
        is_call = text.startswith("  File ") and "Traceback (" not in text
        texts.append(f"\n\n{'Call' if is_call else 'Traceback'} of {ranks_text(ranks)}:\n{text}")
    rest = [rank for ranks in list(alike.values())[_FEW:] for rank in ranks]
    more = f"\n\nThe tracebacks of {ranks_text(rest)} differ from these; see .failures"
    return "".join(texts) + more * bool(rest)


def _excerpt(text: str, letters: int) -> str:
    """Cut out the middle of a text that is too long."""
    half = letters // 2
    return text if len(text) <= letters else f"{text[:half]} […] {text[-half:]}"
