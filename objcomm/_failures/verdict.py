"""Why a mesh ended: one finding, the same on every rank, and the error that it means there.

A verdict is first written to the store (the first one wins), then the connections are closed, so
whoever finds a closed connection can look up why. Ranks in it are ranks within the mesh's group.
Who ends a wait by an error proposes one; a ``fail_together`` block gives those within it a name.
"""

import uuid
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
    REFUSED = 2  # a rank refused a message after its header, or failed while others wait for it
    FAILED = 3  # an error inside of fail_together
    TIMEOUT = 4  # a limit passed
    LOST = 5  # a connection closed, and nobody had said why
    LEFT = 6  # a rank gave its call up, by Ctrl-C for instance, and may be gone
    APART = 7  # two ranks could not connect to each other, and both may be well


#: The reason of a rank that has left because it had nothing more to do.
PROGRAM_ENDED = "its program has ended"

#: The reason of one that has destroyed its process group.
DESTROYED = "it destroyed its process group"

_OF_SEVERAL = {
    PROGRAM_ENDED: "their programs have ended",
    DESTROYED: "they destroyed their process groups",
}

#: After these a rank has nothing more to say, and nothing is wrong.
FAREWELLS = frozenset(_OF_SEVERAL)

#: After these all ranks live and know it, so they can meet again.
_RECOVERABLE = frozenset({Cause.DESYNC, Cause.REFUSED, Cause.FAILED})


class Verdict(NamedTuple):
    """Why a mesh ended.

    Attributes:
        cause: what happened.
        name: unlike any other verdict's.
        ranks: whom it concerns: the missing, the dead, the one that left, the two that are apart.
        reason: in words.
        seconds: the limit that passed.
        positions: where ranks are; of ranks that have left, where they made their last calls.
        left_by: how and at which line the first of these has left, where that was said.
        elsewhere: global ranks of a group in which these have made calls without this rank, which
            waits for all ranks.
        failures: what went wrong on which rank.
        silent: ranks that did not answer when asked where they are.
        silent_seconds: for how long they have not.
        is_store_silent: whether the store did not answer; it is told this verdict when it does.
        operation: what failed, where it is not the operation that a rank is in.
        meshes: the nonces of all meshes that it ends, where there are several.
        circle: who waited for whom, a packed ``Deadlock``, where ranks waited in a circle.
        is_final: whether no rank's next call may try again, though its own ranks had not met: one
            is known to be gone, or another rank has connected and lost what it had.
        block: the key of the block in which a rank has failed.
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
    circle: bytes = b""
    is_final: bool = False
    block: str = ""

    @classmethod
    def of(cls, cause: Cause, **fields: Any) -> Self:
        """A new verdict."""
        return cls(cause, uuid.uuid4().hex, **fields)

    @property
    def is_recoverable(self) -> bool:
        """Whether the group's next call may connect its ranks anew."""
        return self.cause in _RECOVERABLE

    def seen_by(self, rank: int, others: tuple[int, ...]) -> Self:
        """The same as one rank sees it: a rank that others have lost has lost the others.

        No rank names itself in an error as one that is gone.

        Args:
            rank: which.
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

    def error(self, operation: str, own: Position | None = None) -> ObjcommError:
        """What a rank raises.

        Args:
            operation: the one that the rank is in.
            own: where it is.
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
        """What to add to the reason of ranks that have left, and never made the call of this one.

        Args:
            own: where this rank is.
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
    """The verdict that ``error`` on ``rank`` calls for."""
    if isinstance(error, DesyncError):
        positions = tuple(error.positions.values())
        return Verdict.of(Cause.DESYNC, reason=error.reason, positions=positions)
    if isinstance(error, TransportTimeout):
        return Verdict.of(Cause.TIMEOUT, ranks=error.missing, seconds=error.seconds)
    if isinstance(error, TransportError):
        return Verdict.of(Cause.LOST, ranks=error.peers, reason=error.reason)
    if isinstance(error, Exception):
        # A message was refused, or memory is missing, of which torch says so by a RuntimeError: the
        # connections are at fault in none of these, because what they raise has its name by now.
        return Verdict.of(Cause.REFUSED, failures=(failure_of(error, rank),))
    reason = f"it left after {brief_text_of(error)}"
    return Verdict.of(Cause.LEFT, ranks=(rank,), reason=reason)


#: Each block's key in the store, where the first rank that fails in it posts its verdict.
regions: ContextVar[tuple[str, ...]] = ContextVar("objcomm_regions", default=())


def nonce_of(block: str) -> str:
    """The name of the mesh in which a block began."""
    return block.partition("/")[0]
