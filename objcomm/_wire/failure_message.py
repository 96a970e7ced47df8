"""Sends one rank's failure as text, and raises the same error on all ranks that waited.

A status in the header distinguishes failures from values, so a value that is an exception stays a
value. Exceptions themselves are never sent: they may not be picklable, and their frames hold other
people's objects.
"""

import contextlib
import linecache
import traceback
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

import msgpack

from objcomm._codecs.nesting import check_nesting
from objcomm._config import shows_full_tracebacks
from objcomm._wire.header import Header, Status
from objcomm._wire.message import Message, compose
from objcomm.errors import (
    CaughtAs,
    CollectiveError,
    DecodeError,
    ObjcommError,
    RankFailure,
    UsageError,
    WireError,
    name_of,
    text_of,
)

# A rank's own failure fits into the window with its header, whatever characters it contains.
_TEXT_MAX_NBYTES = 8000
_NAME_MAX_NBYTES = 500
# Limit for all failures in one message; long texts are cut if over 60 ranks fail together.
_MESSAGE_MAX_NBYTES = 1 << 20
_ERRORS = "surrogatepass"

_REPORT_DEPTH = 2  # a list of lists of texts

_PACKAGE = f"{Path(__file__).parents[1]}/"
_DEMO = f"{_PACKAGE}demo/"  # treated as a user's program


class DisagreementError(Exception):
    """The ranks' arguments do not fit together; internal: it is turned into the ranks' failures.

    Attributes:
        reasons: what is wrong, by rank, for each rank that differs.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__(dict(reasons))
        self.reasons = dict(reasons)

    def failures(self, messages: Iterable[Message]) -> list[RankFailure]:
        """Return a failure for each rank that differs, although its code raised nothing.

        Args:
            messages: what the ranks sent in this call; their headers contain the users' lines.
        """
        kind = f"{UsageError.__module__}.{UsageError.__qualname__}"
        places = {each.header.sender: each.header.call_site for each in messages}
        return [
            RankFailure(
                rank,
                kind,
                _shortened(reason, _TEXT_MAX_NBYTES),
                line_of(places.get(rank, "")),
            )
            for rank, reason in self.reasons.items()
        ]


def failure_of(error: BaseException, rank: int, call_site: str = "") -> RankFailure:
    """Describe an exception that happened on ``rank``; never raises.

    Args:
        error: the exception.
        rank: this rank.
        call_site: the user's ``file:line``, if the error was caught inside a call: its own
            traceback does not extend to that line.
    """
    kind = type(error)
    shown = kind
    if isinstance(error, CaughtAs) and isinstance(error, UsageError):
        shown = error.kinds[-1]  # so that programs on other ranks can catch it as that type, too
    name = name_of(shown, "__qualname__")
    # Any user code may raise, or even exit: ``__str__``, a metaclass, ``__notes__``.
    with contextlib.suppress(BaseException):
        name = f"{shown.__module__}.{name}".removeprefix("builtins.")
    if isinstance(error, CollectiveError):
        message = error.summary  # the traceback has what other ranks reported
    else:
        message = text_of(error).removeprefix(f"{name_of(kind)}: ")
    try:
        remote = "".join(_folded(error).format())
    except BaseException as second:  # noqa: BLE001  # any user code may raise
        remote = f"<its traceback can't be formatted: {name_of(type(second))}>"
    return RankFailure(
        rank,
        _shortened(name, _NAME_MAX_NBYTES),
        _shortened(message, _TEXT_MAX_NBYTES),
        # Outside the text that may be cut, because this is the user's line.
        line_of(call_site, is_here=True) + _shortened(remote, _TEXT_MAX_NBYTES),
    )


def line_of(call_site: str, *, is_here: bool = False) -> str:
    """Return a user's ``file:line`` as a traceback shows it, with the code if it is this rank's.

    Another rank's file may differ from the one here, and its header has only the end of a long
    path.
    """
    if not call_site:
        return ""
    file, _, line = call_site.rpartition(":")
    code = linecache.getline(file, int(line)).strip() if is_here else ""
    shown = f'  File "{file}", line {line}\n' + f"    {code}\n" * bool(code)
    return _shortened(shown, _NAME_MAX_NBYTES)


class _Folded(traceback.StackSummary):
    """A stack that shows successive frames of objcomm as one line."""

    def format(self, **options: bool) -> list[str]:
        lines: list[str] = []
        for are_own, frames in groupby(self, lambda frame: is_own(frame.filename)):
            if are_own:
                places = [f"{each.filename[len(_PACKAGE) :]}:{each.lineno}" for each in frames]
                lines.append(f"  [objcomm: {' … '.join(dict.fromkeys((places[0], places[-1])))}]\n")
            else:
                lines += traceback.StackSummary.from_list(frames).format(**options)
        return lines


def is_own(file: str) -> bool:
    """Return whether a file belongs to objcomm, and not to a program."""
    return file.startswith(_PACKAGE) and not file.startswith(_DEMO)


def _folded(error: BaseException) -> traceback.TracebackException:
    """Return an exception, with its causes and contexts, ready to be formatted."""
    whole = traceback.TracebackException.from_exception(error)
    left = [whole]
    while left:
        each = left.pop()
        if not shows_full_tracebacks():
            each.stack = _Folded(each.stack)
        left += filter(None, (each.__cause__, each.__context__, *(each.exceptions or ())))
    return whole


def _shortened(text: str, nbytes: int) -> str:
    """Return the beginning and end of a text that is too long: a traceback's end says the most."""
    raw = text.encode("utf-8", _ERRORS)
    if len(raw) <= nbytes:
        return text
    half = nbytes // 2
    return raw[:half].decode("utf-8", "ignore") + " […] " + raw[-half:].decode("utf-8", "ignore")


def failure_message(header: Header, failures: Iterable[RankFailure]) -> Message:
    """Return a message that reports failures in place of a value."""
    listed = list(failures)
    most = _MESSAGE_MAX_NBYTES // max(2 * len(listed), 1)
    texts = [
        (
            each.rank,
            each.type_name,
            _shortened(each.message, most),
            _shortened(each.traceback, most),
        )
        for each in listed
    ]
    meta = msgpack.packb(texts, unicode_errors=_ERRORS)
    return compose(header, meta, status=Status.FAILURE, codec="")


def failures_in(messages: Iterable[Message]) -> dict[int, RankFailure]:
    """Return all failures that some messages report, by rank.

    Raises:
        WireError: a report can't be read, or is not what its sender signed.
    """
    failures: dict[int, RankFailure] = {}
    for message in messages:
        if message.header.status == Status.FAILURE:
            message.check()
            try:
                check_nesting(message.meta, _REPORT_DEPTH)
                texts = msgpack.unpackb(message.meta, unicode_errors=_ERRORS)
                found = [_checked(*fields) for fields in texts]
            except (ValueError, TypeError, DecodeError) as error:
                sender = message.header.sender
                raise WireError(f"rank {sender} sent a failure that can't be read") from error
            failures.update((each.rank, each) for each in found)
    return failures


def _checked(rank: object, *texts: object) -> RankFailure:
    """Return a failure from its received members.

    Raises:
        TypeError: their types or their number are wrong.
    """
    if type(rank) is not int or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"a rank and texts were expected, not {type(rank).__name__}")
    return RankFailure(rank, *map(str, texts))


def raise_together(
    operation: str, failures: Mapping[int, RankFailure], own: BaseException | None, rank: int
) -> None:
    """Raise what all ranks raise, if there is any failure.

    Args:
        operation: name of the collective.
        failures: by rank.
        own: the exception of this rank, if it has failed.
        rank: this rank.

    Raises:
        CollectiveError: from ``own`` if there is one. This rank's own KeyboardInterrupt or
            SystemExit is raised itself.
    """
    if own is not None and not isinstance(own, Exception):
        raise own
    if failures:
        raise on_rank(rank, CollectiveError(operation, failures)) from own


def on_rank(rank: int, error: ObjcommError) -> ObjcommError:
    """Return the error as this rank raises it, without repeating its own exception.

    This is a function, because a variable of the raising function would hold the error, whose
    traceback holds that function's frame.
    """
    if isinstance(error, CollectiveError):
        error.own_rank = rank
    return error


class DifferenceError(Exception):
    """Two ranks passed different structures; internal: it becomes the second rank's failure.

    Attributes:
        path: where they differ, such as ``obj['val'][2].loss``.
        ranks: the two ranks within the group; the second differs from the first.
        reason: what each of them has there.
    """

    def __init__(self, path: str, ranks: tuple[int, int], reason: str) -> None:
        super().__init__(path, ranks, reason)
        self.path = path
        self.ranks = ranks
        self.reason = reason

    def __str__(self) -> str:
        first, second = self.ranks
        return f"{self.path} differs between rank {first} and rank {second}: {self.reason}"
