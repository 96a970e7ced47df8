"""Every error that objcomm raises on purpose.

Knows nothing of the other modules. The tree::

    ObjcommError
    ├─ UsageError (ValueError)               arguments that must agree; before traffic
    │  └─ NotInGroupError                    this rank is no member of the group
    ├─ MissingDependencyError (ImportError)  names what to install
    ├─ CodecError
    │  ├─ EncodeError                        a codec refused an object; nothing was sent
    │  └─ DecodeError                        received bytes did not become an object
    │     └─ ForbiddenTypeError              a class or function that is not admitted
    ├─ WireError                             bytes break the layout
    │  ├─ AuthenticationError                a message's origin is not proved
    │  └─ DesyncError                        ranks are in different operations
    ├─ TransportError (RuntimeError)         a peer died, a connection closed
    │  ├─ TransportTimeout (TimeoutError)    names who did not arrive
    │  └─ BrokenGroupError                   an earlier error ended this group
    ├─ StartError (RuntimeError)             ranks could not meet when the program began
    ├─ LaunchError (RuntimeError)            ranks that ``launch`` started failed: ``.failures``
    └─ CollectiveError                       one rank or more failed: ``.failures``

Each keeps its facts as attributes and survives pickling, because ``args`` holds exactly what
``__init__`` takes. Its text stays short however many ranks it is of: what is the same of several is
told once. Ranks in errors are ranks within the group. Where objcomm stands in for another
library, ``caught_as`` makes an error of the tree one that the other library raised there as well.
"""

import functools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

E = TypeVar("E", bound="ObjcommError")

_PAIR = 2

# Of so many ranks each is told by itself where it is, as a reader of a small job expects it, and of
# so many different tracebacks each is shown.
_FEW = 4
# Of many ranks so many places, and so many failures that differ.
_MOST_LINES = 8
_MOST_RANGES = 16
# How the other rank of a message is named; in calls of all ranks there is a root.
_PEER = {
    **dict.fromkeys(("send", "isend", "ssend", "issend"), "to rank"),
    **dict.fromkeys(("recv", "irecv", "probe", "mprobe"), "from rank"),
}
# Why a rank may not answer though its process is there.
_SILENT = "stopped, out of reach, or in C code that holds Python's lock"
# As much as one rank tells of a failure; several that differ share it.
_LETTERS_OF_FAILURES = 8000
_LETTERS_OF_A_LINE = 1000

# What a process calls the program that it runs; the second one, if multiprocessing started it.
_PROGRAMS = ("__main__", "__mp_main__")

# Of what was received, so much stands in an error.
_SHOWN_LETTERS = 100
_SHOWN_MAX = 1 << 64


class ObjcommError(Exception):
    """The root: ``except objcomm.ObjcommError`` catches all that objcomm raises itself.

    Attributes:
        recent: this rank's last calls on the group, oldest first; empty where none was made.
        recorded: the file with this rank's last calls on all groups; empty where none was written.
    """

    recent: tuple["Position", ...] = ()
    recorded: str = ""


class UsageError(ObjcommError, ValueError):
    """The call cannot be right on any rank; raised before any traffic."""


class NotInGroupError(UsageError):
    """This rank called an operation on a group that it is no member of."""


class MissingDependencyError(ObjcommError, ImportError):
    """An optional package is needed here.

    Attributes:
        package: the name to import.
        wanted: what pip is to install: that package and others that are needed here and missing.
    """

    def __init__(self, package: str, wanted: str) -> None:
        super().__init__(package, wanted)
        self.package = package
        self.wanted = wanted

    def __str__(self) -> str:
        return f"{self.package!r} is not installed; run: pip install {self.wanted}"


class CodecError(ObjcommError):
    """An object could not be turned into bytes, or bytes into an object."""


class EncodeError(CodecError):
    """A codec refused an object; nothing of it was sent.

    Attributes:
        codec: the codec's name.
        type_name: the type of the member that was refused.
        path: where it sits, for example ``obj['model'].head``.
        reason: what the codec said.
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
    """Received bytes could not be turned back into an object.

    Attributes:
        codec: the codec's name.
        reason: what went wrong.
        lacking: what this process does not have, as ``module`` or ``module:name``; empty where
            that is not what went wrong.
        path: the member that could not be rebuilt, for example ``obj['model'].head``; empty where
            that is not known.
        made_by: the name of the class, or of the function, that was to rebuild it; likewise.
        origin: which rank gave the object, to which operation, and at which line of its program;
            None where no rank sent it, as in ``from_tensor``.
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
        told = f"codec {self.codec!r} cannot decode {what}: {self.reason}"
        return told + _cure_of(self.lacking, sender)


def _cure_of(lacking: str, sender: str) -> str:
    """What makes a module, or a name in it, known to this process as it is to the sender."""
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
    """The error, which now says whose object it is of; what names a rank already stays."""
    if error.origin is None:
        error.origin = origin
    return error


def not_accepted(codec: str, accepted: Collection[str]) -> DecodeError:
    """The error of a message whose codec its receiver does not accept."""
    names = ", ".join(sorted(accepted)) or "no codec"
    cure = "give both ranks the same codec=, or name this one in accept= here"
    return DecodeError(codec, f"this rank accepts only {names}; {cure}")


class ForbiddenTypeError(DecodeError):
    """The sender used what this process did not admit; none of its code ran."""


class WireError(ObjcommError):
    """Received bytes are no message of objcomm's, or a damaged one."""


class AuthenticationError(WireError):
    """A message is not signed with this rank's key, or is an old one; nothing of it was decoded."""


class Position(NamedTuple):
    """Where one rank is in its program.

    Attributes:
        rank: rank within the group.
        operation: name of the collective.
        sequence: how many operations the rank started on this lane before.
        root: group rank of source or destination, -1 where there is none.
        call_site: the user's ``file:line``.
        seconds: how long ago the call began, or ended if it is over; 0 where nobody measured it.
        is_over: whether the rank has left that call, its last one.
        group: the group's name, where it is not the one whose error this is.
        name: of the call, as far as it is shown.
        line: where the rank is in its program meanwhile, as ``file:line in function``, if it is
            computing; empty where it waits in the call, or where nobody asked.
        line_seconds: since when the rank was found there each time it was asked.
        unmatched: what has come to a receive that it does not match, in words.
        fingerprint: of what must agree besides, such as a named operator; 0 where nothing must.
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
        """The call in words, with its number and its line."""
        root = "" if self.root < 0 else f" {_PEER.get(self.operation, 'with root')} {self.root}"
        group = f" of group {self.group!r}" if self.group else ""
        lane = f" on lane {self.lane!r}" if self.lane else ""
        where = f" at {self.call_site}" if self.call_site else ""
        name = f" {self.name!r}" if self.name else ""
        return f"{self.operation}{name} (call {self.sequence}){root}{group}{lane}{where}"

    def _with_others(self, others: "Collection[Position]", *, is_past: bool = False) -> str:
        """The text for this rank and others that are at the same place.

        Args:
            others: their positions; only ranks and seconds differ from this one's.
            is_past: whether the text says what they called: they may have left that since.
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
    """How long something has taken on each of some ranks; empty where nobody measured it."""
    if not any(seconds):
        return ""
    texts = dict.fromkeys(f"{each:.1f}" for each in (min(seconds), max(seconds)))
    return f"{' to '.join(texts)} s"


def whereabouts(
    positions: Iterable[Position],
    silent: Collection[int] = (),
    foremost: Collection[int] = (),
    silent_seconds: float = 0.0,
    *,
    is_past: bool = False,
) -> list[str]:
    """Where ranks are, in their order: many that are at the same place are listed together.

    Args:
        positions: of those that could be asked.
        silent: ranks that did not answer.
        foremost: ranks whose places come first, if there are too many places to list all.
        silent_seconds: for how long they have not answered.
        is_past: whether to say what they called, and first what the fewest did.
    """
    known = sorted(positions)
    is_few = len(known) + len(silent) <= _FEW and not is_past
    places: defaultdict[Hashable, list[Position]] = defaultdict(list)
    for each in known:
        rank = each.rank if is_few else -1
        places[each._replace(rank=rank, seconds=0.0, line_seconds=0.0)].append(each)
    told = [
        (
            [each.rank for each in of],
            of[0]._with_others(of[1:], is_past=is_past),  # noqa: SLF001  # of this module
        )
        for of in places.values()
    ]
    unheard = [[rank] for rank in silent] if is_few else [sorted(silent)] * bool(silent)
    since = f" for {silent_seconds:.1f} s" * bool(silent_seconds)
    told += [(ranks, f"{ranks_text(ranks)}: no answer{since} ({_SILENT})") for ranks in unheard]
    told.sort(key=lambda each: (len(each[0]) if is_past else 0, each[0]))
    if len(told) > _MOST_LINES:
        told.sort(key=lambda each: set(foremost).isdisjoint(each[0]))
    rest = [rank for ranks, _ in told[_MOST_LINES:] for rank in ranks]
    texts = [text for _, text in told[:_MOST_LINES]]
    return texts + [f"{ranks_text(rest)}: elsewhere"] * bool(rest)


#: Why a DesyncError is raised for two calls that differ in nothing else.
OTHER_LINES = "other lines"

#: Why one is raised for two calls that differ in nothing that is shown.
OTHER_OPTIONS = "other op=, confirm=, check= or function"

#: Why one is raised for ranks that wait for each other in calls that can't meet.
CIRCLE = "each waits for another"

#: Why one is raised for ranks that wait for each other's messages, or for those to be received.
NO_MATCH = "each waits for another to send or receive"


class DesyncError(WireError):
    """Ranks are in different operations; raised once by every rank, and the group works on.

    A rank that had nothing to wait for in its call has returned from it, and raises this in its
    next one.

    Attributes:
        reason: what differs.
        positions: what each rank called, by rank, as far as it could be asked; where ranks wait
            for each other, the calls in which they do.
    """

    def __init__(self, reason: str, positions: Iterable[Position]) -> None:
        listed = tuple(positions)
        super().__init__(reason, listed)
        self.reason = reason
        self.positions = {position.rank: position for position in listed}

    def __str__(self) -> str:
        is_past = self.reason not in (CIRCLE, NO_MATCH)
        each = whereabouts(self.positions.values(), is_past=is_past)
        where = ", but ".join(each) if len(each) <= _PAIR else "; ".join(each)
        advice = "; every rank must make the same calls in the same order"
        if self.reason == NO_MATCH or any(each.unmatched for each in self.positions.values()):
            advice = "; let one send first, with the tag that the other takes, or use sendrecv"
        if self.reason == OTHER_LINES:
            advice += ", or give two lines that belong together the same name="
        return f"ranks are out of step ({self.reason}): {where}{advice}"


class TransportError(ObjcommError, RuntimeError):
    """A peer is gone: it died, exited, or left this operation after an error of its own.

    Attributes:
        operation: the collective this rank was in.
        peers: group ranks of the peers that are gone.
        reason: what is known of it.
    """

    def __init__(self, operation: str, peers: tuple[int, ...], reason: str) -> None:
        super().__init__(operation, peers, reason)
        self.operation = operation
        self.peers = peers
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.operation}: the connection to {ranks_text(self.peers)} ended: {self.reason}"


class TransportTimeout(TransportError, TimeoutError):
    """The time limit passed before every rank had taken part.

    Attributes:
        missing: group ranks that had not arrived, as far as this rank could tell.
        seconds: the limit that passed first, on whichever rank.
        positions: where the ranks that could be asked are, by rank.
        silent: group ranks that did not answer: stopped, dead or unreachable.
        is_store_silent: whether the process group's store did not answer, so nobody was asked.
        silent_seconds: for how long the silent ranks have not answered; 0 where nobody measured it.
    """

    def __init__(  # noqa: PLR0917  # what is known of all ranks, as args holds it
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
        where = whereabouts(answered, self.silent, self.missing, self.silent_seconds)
        where += ["store: no answer"] * self.is_store_silent
        told = f"; {'; '.join(where)}" if where else ""
        return (
            f"{self.operation}: {ranks_text(self.missing)} did not arrive within {self.seconds:g} s"
            f"{told}; if the work before this call may take longer, pass a larger timeout="
        )


class BrokenGroupError(TransportError):
    """objcomm's connections of this group ended before: by an error, or because a rank left.

    Attributes:
        reason: the error that reported it first.
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
    """What happened on a rank that failed, as text: live exceptions never cross the wire.

    Attributes:
        rank: group rank where it happened.
        type_name: the exception's qualified type.
        message: ``str(exception)``, without other ranks' tracebacks.
        traceback: the line of the call on that rank, and its formatted traceback, in which
            objcomm's own frames are folded; the line alone where no code of it raised, because what
            it gave does not fit to what the others gave.
    """

    rank: int
    type_name: str
    message: str
    traceback: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.type_name}: {self.message}"


class CollectiveError(ObjcommError):
    """At least one rank could not contribute; raised on every rank that waited for it.

    On a failing rank its own exception is the ``__cause__``.

    Attributes:
        operation: the collective's name.
        failures: what happened, by group rank.
        own_rank: this rank, so that the text leaves out what Python shows as the cause; None where
            the error has no such cause.
    """

    own_rank: int | None = None

    def __init__(self, operation: str, failures: Mapping[int, RankFailure]) -> None:
        super().__init__(operation, dict(failures))
        self.operation = operation
        self.failures = dict(failures)

    @property
    def summary(self) -> str:
        """The text without a traceback."""
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
        """Whether Python shows this above, as the cause: this rank's own, or heard by it, too."""
        cause = self.__cause__
        if isinstance(cause, CollectiveError) and failure.message == cause.summary:
            return True
        return cause is not None and failure.rank == self.own_rank


class StartError(ObjcommError, RuntimeError):
    """The ranks of a job could not meet in ``init``.

    Attributes:
        rank: of this process.
        world_size: how many were to come.
        address: ``host:port`` where they were to meet.
        reason: who has not come, or what torch said.
        missing: ranks that are known not to have come; empty where that was not the reason.
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
    """Ranks that ``launch`` had started failed; the others were ended.

    Attributes:
        name: of the function that they ran.
        failures: what happened, by rank, on each that did not return; the first failure first,
            what ranks heard of others' after it, and last those that had to be ended.
    """

    def __init__(self, name: str, failures: Mapping[int, RankFailure]) -> None:
        super().__init__(name, dict(failures))
        self.name = name
        self.failures = dict(failures)

    def __str__(self) -> str:
        told = list(self.failures.values())
        first_lines = [replace(each, message=each.message.partition("\n")[0]) for each in told]
        return f"launch: {self.name} failed on {_summary(first_lines)}{_tracebacks(told)}"


class CaughtAs:
    """What ``caught_as`` gives an error besides its own class.

    Attributes:
        kinds: the error's own class, and then the other ones.
    """

    kinds: tuple[type[Any], ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.kinds, getattr(self, "args", ()), vars(self))


def caught_as(error: E, other: type[Exception]) -> E:
    """The same error, for programs that catch it as ``other``, which another library raised.

    It is named as before, has the same facts and cause, and pickles.

    Args:
        error: one of objcomm's own.
        other: a builtin exception. Its ``__init__`` is not called, for what it takes is not here.
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
    made.args = args  # an OSError's ``__new__`` leaves them to its ``__init__``
    vars(made).update(facts)
    return made


@functools.cache
def _joined(kinds: tuple[type[Any], ...]) -> type[Any]:
    own = kinds[0]
    names = {each: vars(own)[each] for each in ("__module__", "__doc__")}
    return type(own.__name__, (CaughtAs, *kinds), {**names, "kinds": kinds})


def name_of(kind: type, attribute: str = "__name__") -> str:
    """A class's name, whatever its metaclass would answer; never raises.

    Args:
        kind: the class.
        attribute: which name, ``__name__`` or ``__qualname__``.
    """
    name: str = type.__dict__[attribute].__get__(kind)
    return name


def text_of(error: BaseException) -> str:
    """``Type: message``, or the type alone; never raises, whatever its own ``__str__`` does."""
    kind = name_of(type(error))
    try:
        text = str(error)
    except BaseException as second:  # noqa: BLE001  # a user's __str__ may even exit
        text = f"<its __str__ raised {name_of(type(second))}>"
    return f"{kind}: {text}" if text else kind


def brief_text_of(error: BaseException) -> str:
    """The first line of ``text_of``, or its beginning and end: to stand in another error's text."""
    first, _, more = text_of(error).partition("\n")
    return _excerpt(first, _LETTERS_OF_A_LINE) + " […]" * bool(more)


def shown(received: object) -> str:
    """How an error names what a stranger sent: itself where it is short, its type elsewhere.

    The ``repr`` of a tensor of 50 bytes may ask for gigabytes.
    """
    kind = type(received)
    if kind is str:
        return repr(received[:_SHOWN_LETTERS])  # type: ignore[index]  # a str by its type
    if kind is int and -_SHOWN_MAX < received < _SHOWN_MAX:  # type: ignore[operator]  # likewise
        return repr(received)
    return repr(received) if received is None or kind in {bool, float} else f"a {name_of(kind)}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in words: ``rank 5``, ``ranks 0-511, 513``, or ``a rank`` where none is known."""
    listed = tuple(ranks)
    if not listed:
        return "a rank"
    return f"{'rank' if len(listed) == 1 else 'ranks'} {ranges_text(listed)}"


def ranges_text(ranks: Iterable[int]) -> str:
    """Numbers in order, those that follow one another as a range: ``0-511, 513``.

    Of more than 16 ranges the last are only counted.
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


def _summary(failures: Sequence[RankFailure]) -> str:
    """What failed where: ranks that failed alike are told together."""
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for each in failures:
        alike[f"{each.type_name}: {each.message}"].append(each.rank)
    most = _LETTERS_OF_FAILURES // min(max(len(alike), 1), _MOST_LINES)
    told = [f"{ranks_text(ranks)}: {_excerpt(text, most)}" for text, ranks in alike.items()]
    rest = [rank for ranks in list(alike.values())[_MOST_LINES:] for rank in ranks]
    return "; ".join([*told[:_MOST_LINES], *[f"{ranks_text(rest)}: other errors"] * bool(rest)])


def _tracebacks(failures: Sequence[RankFailure]) -> str:
    """The tracebacks below a summary, each once; of many that differ the first ones."""
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for each in failures:
        if each.traceback.strip():
            alike[each.traceback.rstrip()].append(each.rank)
    told = []
    for text, ranks in list(alike.items())[:_FEW]:
        # Where nothing was raised there is the line of the call alone.
        is_call = text.startswith("  File ") and "Traceback (" not in text
        told.append(f"\n\n{'Call' if is_call else 'Traceback'} of {ranks_text(ranks)}:\n{text}")
    rest = [rank for ranks in list(alike.values())[_FEW:] for rank in ranks]
    more = f"\n\nThe tracebacks of {ranks_text(rest)} differ from these; see .failures"
    return "".join(told) + more * bool(rest)


def _excerpt(text: str, letters: int) -> str:
    """Beginning and end of a text that is too long."""
    half = letters // 2
    return text if len(text) <= letters else f"{text[:half]} […] {text[-half:]}"
