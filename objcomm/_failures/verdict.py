"""Verdicts: why a mesh ended, as all of its ranks agree, and the error each rank raises for it.

A verdict is written to the store before the connections are closed, so a rank that finds a closed
connection can look up the reason. The first verdict written wins. Ranks in a verdict are group
ranks. A rank whose wait fails proposes a verdict. A rank that fails in a ``fail_together`` block
posts its verdict under the block's key, too.
"""

import dataclasses
import uuid
from collections.abc import Sequence
from contextvars import ContextVar
from enum import IntEnum
from typing import Any, NamedTuple, Self

from objcomm._wire.failure_message import failure_of
from objcomm.errors import (
    CollectiveError,
    DesyncError,
    ObjcommError,
    Position,
    RankFailure,
    TransportError,
    TransportTimeout,
    brief_text_of,
    ranks_text,
)


class Cause(IntEnum):
    """What happened."""

    DESYNC = 1  # ranks are in different operations
    REFUSED = 2  # a rank refused a message after its header, or failed while others waited for it
    FAILED = 3  # an error inside fail_together
    TIMEOUT = 4  # a timeout expired
    LOST = 5  # a connection closed, and no rank had given a reason
    LEFT = 6  # a rank gave up its call, for example by Ctrl-C, and may be gone
    APART = 7  # two ranks could not connect to each other; both may be healthy


#: The reason given by a rank whose program has ended normally.
PROGRAM_ENDED = "its program has ended"

#: The reason given by a rank that has destroyed its process group.
DESTROYED = "it destroyed its process group"

_OF_SEVERAL = {
    PROGRAM_ENDED: "their programs have ended",
    DESTROYED: "they destroyed their process groups",
}

#: Reasons of ranks that left normally: nothing is wrong.
FAREWELLS = frozenset(_OF_SEVERAL)

#: After these, all ranks know that all are alive, so they can reconnect.
_RECOVERABLE = frozenset({Cause.DESYNC, Cause.REFUSED, Cause.FAILED})


class Verdict(NamedTuple):
    """Why a mesh ended.

    Attributes:
        cause: what happened.
        name: a unique identifier.
        ranks: the ranks concerned: missing, dead or departed ranks, or the two that are apart.
        reason: an explanation in words.
        seconds: the timeout that expired.
        positions: where the ranks are; for ranks that have left, where they made their last call.
        left_by: how the first of these left, and at which line, if it published that.
        elsewhere: global ranks of a group in which ``ranks`` made calls without this rank, which
            waits for all ranks.
        failures: the failure of each rank that failed.
        silent: ranks that did not answer when asked for their position.
        silent_seconds: how long they have been silent.
        is_store_silent: whether the store did not answer; the verdict is posted once it does.
        operation: the operation that failed, if it is not the one that the raising rank is in.
        meshes: the nonces of all meshes that the verdict ends, if there are several.
        deadlock: a packed ``Deadlock`` that lists which rank waited for which.
        is_final: whether no rank may try again in its next call, even if its own ranks had not
            connected: a rank is known to be gone, or another rank had connected and lost its
            connections.
        block: the key of the block in which a rank failed.
    """

    cause: Cause
    name: str
    ranks: tuple[int, ...] = ()
    reason: str = ""
    seconds: float = 0.0
    positions: tuple[Position, ...] = ()
    left_by: str = ""
    elsewhere: tuple[int, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    silent: tuple[int, ...] = ()
    silent_seconds: float = 0.0
    is_store_silent: bool = False
    operation: str = ""
    meshes: tuple[str, ...] = ()
    deadlock: bytes = b""
    is_final: bool = False
    block: str = ""

    @classmethod
    def of(cls, cause: Cause, **fields: Any) -> Self:
        """Create a verdict with a new name."""
        return cls(cause, uuid.uuid4().hex, **fields)

    @property
    def is_recoverable(self) -> bool:
        """Whether the group's next call may reconnect its ranks."""
        return self.cause in _RECOVERABLE

    def seen_by(self, rank: int, others: tuple[int, ...]) -> Self:
        """Return the verdict from the point of view of one rank.

        A rank that the others have lost reports that it lost the others: no error lists the rank
        that raises it as gone.

        Args:
            rank: the rank that will raise the verdict.
            others: all other members of the mesh.
        """
        if self.cause not in {Cause.LOST, Cause.APART} or rank not in self.ranks:
            return self
        there = tuple(each for each in others if each not in self.ranks)
        here = tuple(each for each in self.ranks if each != rank)
        if self.cause is Cause.APART:
            return self._replace(ranks=here or there)
        reason = f"this rank was cut off; the other ranks report: {self.reason}"
        return self._replace(ranks=there or here, reason=reason)

    def within(self, members: Sequence[int]) -> Self:
        """Return this verdict, which is on some ranks of a group, as one on the whole group.

        Args:
            members: the group rank of each of these ranks, in the order of their own numbers.
        """
        return self._replace(
            name=uuid.uuid4().hex,
            ranks=tuple(members[rank] for rank in self.ranks),
            positions=tuple(each._replace(rank=members[each.rank]) for each in self.positions),
            failures=tuple(
                dataclasses.replace(each, rank=members[each.rank]) for each in self.failures
            ),
            silent=tuple(members[rank] for rank in self.silent),
            meshes=(),
            deadlock=b"",
        )

    def error(self, operation: str, own: Position | None = None) -> ObjcommError:
        """Return the error that a rank raises for this verdict.

        Args:
            operation: the operation that the rank is in.
            own: the position of the rank.
        """
        if self.cause is Cause.DESYNC:
            known = {each.rank for each in self.positions}
            added = () if own is None or own.rank in known else (own,)
            return DesyncError(self.reason, (*self.positions, *added))
        if self.cause in (Cause.REFUSED, Cause.FAILED):
            return CollectiveError(
                self.operation or operation, {each.rank: each for each in self.failures}
            )
        if self.cause is Cause.TIMEOUT:
            return TransportTimeout(
                operation,
                self.ranks,
                self.seconds,
                self.positions,
                self.silent,
                self.is_store_silent,
                self.silent_seconds,
            )
        reason = f"it has left ({self.left_by})" if self.left_by else self.reason
        if len(self.ranks) > 1 and (self.left_by or self.reason in FAREWELLS):
            reason = f"they have left ({self.left_by})" if self.left_by else _OF_SEVERAL[reason]
        reason += self._unmade(own)
        if self.elsewhere:
            reason += (
                f"; calls were made in a group of {ranks_text(self.elsewhere)}, without this rank: "
                "group=None means all ranks"
            )
        reason += "; store: no answer" * self.is_store_silent
        return TransportError(operation, self.ranks, reason)

    def _unmade(self, own: Position | None) -> str:
        """Return a suffix for the reason: how many calls ranks made before they left.

        Empty if they had made this rank's call as well, or if that is unknown.

        Args:
            own: the position of this rank.
        """
        last = next((each for each in self.positions if each.rank in self.ranks), None)
        if last is None or own is None:
            return ""
        if not last.operation:
            whose = "their" if len(self.ranks) > 1 else "its"
            return f" before {whose} first call; this is call {own.sequence}"
        if own.sequence <= last.sequence:
            return ""
        calls = f"{last.sequence + 1} call{'s' * (last.sequence > 0)}"
        return f" after {calls}, the last {last.call}; this is call {own.sequence}"


def proposal_for(error: BaseException, rank: int) -> Verdict:
    """Return the verdict to propose after ``error`` on ``rank``."""
    if isinstance(error, DesyncError):
        positions = tuple(error.positions.values())
        return Verdict.of(Cause.DESYNC, reason=error.reason, positions=positions)
    if isinstance(error, TransportTimeout):
        return Verdict.of(Cause.TIMEOUT, ranks=error.missing, seconds=error.seconds)
    if isinstance(error, TransportError) and error.peers:
        return Verdict.of(Cause.LOST, ranks=error.peers, reason=error.reason)
    if isinstance(error, Exception):
        # A refused message, a device whose backend has failed, or a lack of memory, which torch
        # reports as a RuntimeError. Failures of the connections never get here: they have been
        # turned into TransportErrors with peers.
        return Verdict.of(Cause.REFUSED, failures=(failure_of(error, rank),))
    reason = f"it left after {brief_text_of(error)}"
    return Verdict.of(Cause.LEFT, ranks=(rank,), reason=reason)


#: The store keys of the ``fail_together`` blocks around the current call. The first rank that
#: fails in a block posts its verdict under that key.
open_blocks: ContextVar[tuple[str, ...]] = ContextVar("objcomm_open_blocks", default=())


def nonce_of(block: str) -> str:
    """Return the nonce of the mesh in which a block began."""
    return block.partition("/")[0]
