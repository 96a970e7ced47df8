"""One rank's failure as text on the wire, and raising it alike on every rank that waited.

A status in the header tells failures from values, so a value that is an exception stays a value.
Live exceptions never travel: they may not pickle, and their frames hold other people's objects.
"""

import contextlib
import traceback
from collections.abc import Iterable, Mapping, Sequence

import msgpack

from objcomm.codecs.nesting import check_nesting
from objcomm.errors import (
    CollectiveError,
    DecodeError,
    RankFailure,
    UsageError,
    WireError,
    name_of,
    text_of,
)
from objcomm.frames import Header, Status
from objcomm.message import Message, compose

# A rank's own failure fits into the window with its header, whatever its characters are.
_TEXT_MAX_NBYTES = 8000
_NAME_MAX_NBYTES = 500
_ERRORS = "surrogatepass"

_REPORT_DEPTH = 2  # a list of lists of texts


class DisagreementError(Exception):
    """What ranks gave does not fit together; it becomes their failures, and never leaves here.

    Attributes:
        reasons: what is wrong with each rank's that differs, by rank.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__(dict(reasons))
        self.reasons = dict(reasons)

    def failures(self) -> list[RankFailure]:
        """One for each rank that differs, in whose code nothing was raised."""
        kind = f"{UsageError.__module__}.{UsageError.__qualname__}"
        return [
            RankFailure(rank, kind, _shortened(reason, _TEXT_MAX_NBYTES), "")
            for rank, reason in self.reasons.items()
        ]


def named(ranks: Sequence[int]) -> str:
    """Ascending ranks in words, such as ``ranks 0, 2–7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    texts = ["–".join(map(str, run)) for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(texts)}"


def failure_of(error: BaseException, rank: int) -> RankFailure:
    """Describe an exception that happened on ``rank``; never raises."""
    kind = type(error)
    name = name_of(kind, "__qualname__")
    # Any code of a user's may raise, and even exit: ``__str__``, a metaclass, ``__notes__``.
    with contextlib.suppress(BaseException):
        name = f"{kind.__module__}.{name}".removeprefix("builtins.")
    message = text_of(error).removeprefix(f"{name_of(kind)}: ")
    try:
        remote = "".join(traceback.format_exception(error))
    except BaseException as second:  # noqa: BLE001  # see above
        remote = f"<its traceback can't be formatted: {name_of(type(second))}>"
    return RankFailure(
        rank,
        _shortened(name, _NAME_MAX_NBYTES),
        _shortened(message, _TEXT_MAX_NBYTES),
        _shortened(remote, _TEXT_MAX_NBYTES),
    )


def _shortened(text: str, nbytes: int) -> str:
    """Beginning and end of a text that is too long: the end of a traceback tells most."""
    raw = text.encode("utf-8", _ERRORS)
    if len(raw) <= nbytes:
        return text
    half = nbytes // 2
    return raw[:half].decode("utf-8", "ignore") + " […] " + raw[-half:].decode("utf-8", "ignore")


def failure_message(header: Header, failures: Iterable[RankFailure]) -> Message:
    """A message that says: these ranks failed, there is no value."""
    texts = [(each.rank, each.type_name, each.message, each.traceback) for each in failures]
    meta = msgpack.packb(texts, unicode_errors=_ERRORS)
    return compose(header, meta, status=Status.FAILURE, codec="")


def failures_in(messages: Iterable[Message]) -> dict[int, RankFailure]:
    """All failures that some messages report, by rank.

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
    """A failure from the members that arrived.

    Raises:
        TypeError: they are of other types, or not as many.
    """
    if type(rank) is not int or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"a rank and texts were expected, not {type(rank).__name__}")
    return RankFailure(rank, *map(str, texts))


def raise_together(
    operation: str, failures: Mapping[int, RankFailure], own: BaseException | None
) -> None:
    """Raise what all ranks raise, if there is anything.

    Args:
        operation: the collective's name.
        failures: by rank.
        own: what happened on this rank, if it is one of them.

    Raises:
        CollectiveError: from ``own`` where there is one. A KeyboardInterrupt or SystemExit of this
            rank's own is raised itself.
    """
    if own is not None and not isinstance(own, Exception):
        raise own
    if failures:
        raise CollectiveError(operation, failures) from own
