"""Exclusive regions: code that some ranks of a group run while the others make no calls.

A region knows the absent ranks, as global ranks, and decides what a call inside it does: the call
acts locally, proceeds normally, or is refused because it would wait forever. This module knows
nothing about groups or traffic.
"""

from collections.abc import Collection, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import NamedTuple

from objcomm.errors import UsageError, ranks_text

NOBODY: frozenset[int] = frozenset()

# Operations that act locally in a region. Any other would return only this rank's contribution, or
# one of several parts, where the caller expects those of all ranks.
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
    """A region that this rank is in.

    Attributes:
        operation: the name of the call that opened the region.
        earlier: ranks that were in the region before, and wait for this rank at its end.
        later: ranks that wait until this rank has left the region.
        is_local: whether calls that would need those ranks act locally where possible.
    """

    operation: str
    earlier: frozenset[int] = NOBODY
    later: frozenset[int] = NOBODY
    is_local: bool = False

    @property
    def absent(self) -> frozenset[int]:
        """The ranks that do not make calls while this rank is in the region."""
        return self.earlier | self.later


#: The regions that this rank is in, outermost first. A new thread starts outside all regions,
#: because its work is not part of the region in which it was created.
open_regions: ContextVar[tuple[Region, ...]] = ContextVar("objcomm_exclusive_regions", default=())


class inside:  # noqa: N801  # used like a function, as in contextlib
    """Context manager that puts the calling thread inside a region."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def __enter__(self) -> None:
        open_regions.set((*open_regions.get(), self._region))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Not with a token: generators may leave regions in any order, and in another context.
        open_regions.set(tuple(each for each in open_regions.get() if each is not self._region))


def is_confined() -> bool:
    """Whether this rank is in a region whose calls act locally."""
    return any(region.is_local for region in open_regions.get())


def acts_alone(operation: str, ranks: Sequence[int], rank: int) -> bool:
    """Whether a call acts locally, as in a world of one.

    Args:
        operation: the name of the operation.
        ranks: the global ranks of its group.
        rank: this rank's group rank.

    Raises:
        UsageError: the call would wait for ranks that do not make calls meanwhile.
    """
    for region in reversed(open_regions.get()):
        missing = region.absent.intersection(ranks)
        # Also in a world of one, so that only the outermost region reports a failure.
        if (missing or len(ranks) == 1) and region.is_local and operation in _LOCAL:
            return True
        if missing:
            raise _refused(operation, region, missing, ranks[rank])
    return False


def is_in_order(operation: str, ranks: Sequence[int], rank: int, first: int = 0) -> bool:
    """Whether regions already make ``first`` run before the other ranks, so none has to wait.

    Args:
        operation: the name of the operation.
        ranks: the global ranks of its group.
        rank: this rank's group rank.
        first: the group rank that must run before the others.

    Raises:
        UsageError: as for ``acts_alone``.
    """
    main = ranks[first]
    for region in reversed(open_regions.get()):
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
