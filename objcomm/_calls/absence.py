"""Regions: code that some ranks of a group run while the others make no call.

Knows which ranks those are, as global ranks, and what that means for a call: it acts locally, it
goes on, or it would wait for ever and is refused. Knows nothing of groups or of traffic.
"""

from collections.abc import Collection, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import NamedTuple

from objcomm.errors import UsageError, ranks_text

NOBODY: frozenset[int] = frozenset()

# What a rank does for itself in a region of its own. All else would give it one contribution, or
# one of several parts, where it expects those of all ranks.
_LOCAL = frozenset(
    {
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "compute_and_broadcast",
        "main_first",
        "main_process_only",
        "node_first",
        "once_per_node",
        "run_on_main",
        "run_once_per_node",
        "zero_first",
        "zero_only",
    }
)


class Region(NamedTuple):
    """What this rank is in.

    Attributes:
        operation: what the user has called.
        earlier: ranks that have been in it before, and wait for this one at its end.
        later: ranks that wait until this one has left it.
        is_local: whether calls that would need those ranks act locally where they can.
    """

    operation: str
    earlier: frozenset[int] = NOBODY
    later: frozenset[int] = NOBODY
    is_local: bool = False

    @property
    def absent(self) -> frozenset[int]:
        """Ranks that make no call meanwhile."""
        return self.earlier | self.later


#: The regions that this rank is in. A new thread starts without any: it is not part of what its
#: maker is doing.
around: ContextVar[tuple[Region, ...]] = ContextVar("objcomm_absence", default=())


class inside:  # noqa: N801  # used as a function, like contextlib's
    """Be in a region for as long as this context lasts, on this thread."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def __enter__(self) -> None:
        around.set((*around.get(), self._region))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Not by a token: generators leave regions in any order, and in other contexts.
        around.set(tuple(each for each in around.get() if each is not self._region))


def is_confined() -> bool:
    """Whether this rank is in any region whose calls act locally."""
    return any(region.is_local for region in around.get())


def acts_alone(operation: str, ranks: Sequence[int], rank: int) -> bool:
    """Whether a call acts locally, as in a world of one.

    Args:
        operation: what is called.
        ranks: the global ranks of its group.
        rank: this one, within the group.

    Raises:
        UsageError: it would wait for ranks that make no call meanwhile.
    """
    for region in reversed(around.get()):
        missing = region.absent.intersection(ranks)
        # In a world of one, too: what went wrong is told once, by the outermost.
        if (missing or len(ranks) == 1) and region.is_local and operation in _LOCAL:
            return True
        if missing:
            raise _refused(operation, region, missing, ranks[rank])
    return False


def is_in_order(operation: str, ranks: Sequence[int], rank: int, first: int = 0) -> bool:
    """Whether one of some ranks runs before the others already, so nobody need wait.

    Args:
        operation: what is called.
        ranks: the global ranks of its group.
        rank: this one, within the group.
        first: the one that shall run before the others, within the group.

    Raises:
        UsageError: as ``acts_alone``.
    """
    main = ranks[first]
    for region in reversed(around.get()):
        missing = region.absent.intersection(ranks)
        if len(ranks) == 1:
            return True
        if not missing:
            continue
        if region.is_local or main in region.earlier:
            return True
        if rank == first and missing <= region.later:
            return True
        raise _refused(operation, region, missing, ranks[rank])
    return False


def _refused(operation: str, region: Region, missing: Collection[int], own: int) -> UsageError:
    what = "only broadcast and barrier act locally there" if region.is_local else ""
    others = ranks_text(missing)
    because = what or f"{others} cannot answer before rank {own} has left it"
    return UsageError(
        f"{operation}: global rank {own} is inside {region.operation}, without {others}: "
        f"{because}; make this call outside it, on every rank"
    )
