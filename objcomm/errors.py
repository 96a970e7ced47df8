"""Every error that objcomm raises on purpose.

Knows nothing of the other modules. The tree::

    ObjcommError
    ├─ UsageError (ValueError)               arguments that must agree; before traffic
    │  └─ NotInGroupError                    this rank is no member of the group
    ├─ MissingDependencyError (ImportError)  names the extra to install
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
    └─ CollectiveError                       one rank or more failed: ``.failures``

Each keeps its facts as attributes and survives pickling, because ``args`` holds exactly what
``__init__`` takes. Ranks in errors are ranks within the group.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


class ObjcommError(Exception):
    """The root: ``except objcomm.ObjcommError`` catches all that objcomm raises itself."""


class UsageError(ObjcommError, ValueError):
    """The call cannot be right on any rank; raised before any traffic."""


class NotInGroupError(UsageError):
    """This rank called an operation on a group that it is no member of."""


class MissingDependencyError(ObjcommError, ImportError):
    """An optional package is needed here.

    Attributes:
        package: the name to import.
        extra: the extra of objcomm that installs it.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(package, extra)
        self.package = package
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.package!r} is not installed; run: pip install 'objcomm[{self.extra}]'"


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
    """

    def __init__(self, codec: str, reason: str) -> None:
        super().__init__(codec, reason)
        self.codec = codec
        self.reason = reason

    def __str__(self) -> str:
        return f"codec {self.codec!r} cannot decode what arrived: {self.reason}"


def not_accepted(codec: str, accepted: Collection[str]) -> DecodeError:
    """The error of a message whose codec its receiver does not accept."""
    names = ", ".join(sorted(accepted)) or "no codec"
    return DecodeError(codec, f"this rank accepts only {names}")


class ForbiddenTypeError(DecodeError):
    """The sender used what this process did not admit; none of its code ran."""


class WireError(ObjcommError):
    """Received bytes are no message of objcomm's, or a damaged one."""


class AuthenticationError(WireError):
    """A message is not signed with this rank's key, or is an old one; nothing of it was decoded."""


@dataclass(frozen=True)
class Position:
    """Where one rank is in its program, as its message's header says.

    Attributes:
        rank: rank within the group.
        operation: name of the collective.
        sequence: how many operations the rank started on this lane before.
        root: group rank of source or destination, -1 where there is none.
        call_site: the user's ``file:line``.
    """

    rank: int
    operation: str
    sequence: int
    root: int
    call_site: str

    def __str__(self) -> str:
        root = "" if self.root < 0 else f" with root {self.root}"
        where = f" at {self.call_site}" if self.call_site else ""
        return f"rank {self.rank} is in {self.operation} (call {self.sequence}){root}{where}"


class DesyncError(WireError):
    """Two ranks are in different operations.

    Attributes:
        mine: what this rank waits in.
        theirs: what the message it received belongs to.
        reason: the first field that differs.
    """

    def __init__(self, mine: Position, theirs: Position, reason: str) -> None:
        super().__init__(mine, theirs, reason)
        self.mine = mine
        self.theirs = theirs
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"ranks are out of step ({self.reason}): {self.mine}, but {self.theirs}; "
            "every rank must make the same calls in the same order"
        )


class TransportError(ObjcommError, RuntimeError):
    """The connection to a peer ended: it died, exited or closed its sockets.

    Attributes:
        operation: the collective this rank was in.
        peers: group ranks of the peers concerned.
        reason: what the transport said.
    """

    def __init__(self, operation: str, peers: tuple[int, ...], reason: str) -> None:
        super().__init__(operation, peers, reason)
        self.operation = operation
        self.peers = peers
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.operation}: the connection to {_ranks(self.peers)} ended: it exited, or left "
            f"after an error of its own ({self.reason})"
        )


class TransportTimeout(TransportError, TimeoutError):
    """The time limit passed before every rank had taken part.

    Attributes:
        missing: group ranks that had not arrived, as far as this rank could tell.
        seconds: the limit.
    """

    def __init__(self, operation: str, missing: tuple[int, ...], seconds: float) -> None:
        super().__init__(operation, missing, "timed out")
        self.args = (operation, missing, seconds)
        self.missing = missing
        self.seconds = seconds

    def __str__(self) -> str:
        return (
            f"{self.operation}: {_ranks(self.missing)} did not arrive within {self.seconds:g} s; "
            "if the work before this call may take longer, pass a larger timeout="
        )


class BrokenGroupError(TransportError):
    """An earlier error ended objcomm's connections of this group.

    Attributes:
        reason: the error that ended it.
    """

    def __init__(self, operation: str, reason: str) -> None:
        super().__init__(operation, (), reason)
        self.args = (operation, reason)

    def __str__(self) -> str:
        return (
            f"{self.operation}: this group can carry no more objects since an earlier error "
            f"({self.reason}); make a new process group, or restart the job"
        )


@dataclass(frozen=True)
class RankFailure:
    """What happened on a rank that failed, as text: live exceptions never cross the wire.

    Attributes:
        rank: group rank where it happened.
        type_name: the exception's qualified type.
        message: ``str(exception)``.
        traceback: the formatted traceback on that rank.
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
    """

    def __init__(self, operation: str, failures: Mapping[int, RankFailure]) -> None:
        super().__init__(operation, dict(failures))
        self.operation = operation
        self.failures = dict(failures)

    def __str__(self) -> str:
        first = self.failures[min(self.failures)]
        summary = "; ".join(str(self.failures[rank]) for rank in sorted(self.failures))
        remote = first.traceback.rstrip()
        return f"{self.operation} failed on {summary}\n\nTraceback of rank {first.rank}:\n{remote}"


def text_of(error: BaseException) -> str:
    """``Type: message`` for an error's text, even where its own ``__str__`` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as second:  # noqa: BLE001  # any __str__ of a user's may raise
        return f"{type(error).__name__}: <its __str__ raised {type(second).__name__}>"


def _ranks(ranks: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}" if ranks else "a rank"
