"""Shared by the tests of which rank computes what, and in which order."""

from collections.abc import Callable
from typing import Any

import objcomm
from objcomm import CollectiveError
from objcomm._training import once
from tests.group.helpers import error_in

__all__ = ["BLOCKS", "ORDERED", "SHARES", "OwnExit", "OwnInterrupt", "fail", "raised_together"]


class OwnInterrupt(KeyboardInterrupt):
    """A user's subclass."""


class OwnExit(SystemExit):
    """Another user's subclass."""


def fail(error: BaseException) -> Any:
    raise error


def raised_together(
    call: Callable[[], object], *failing: int, operation: str, group: Any = None
) -> CollectiveError:
    """The error that every rank raises from a call, whose origin is on these ranks of the group."""
    error: CollectiveError = error_in(CollectiveError, call)
    assert (error.operation, sorted(error.failures)) == (operation, sorted(failing))
    assert "in fail" in error.failures[failing[0]].traceback
    # The cause of a wait that was ended from outside is torch's error.
    own = None if isinstance(error.__cause__, objcomm.TransportError) else error.__cause__
    assert (own is not None) == (objcomm.rank(group) in failing)
    return error


SHARES: dict[str, Callable[..., Any]] = {
    "run_on_main": objcomm.run_on_main,
    "compute_and_broadcast": objcomm.compute_and_broadcast,
    "main_process_only": lambda func, **options: objcomm.main_process_only(**options)(func)(),
    "run_once_per_node": objcomm.run_once_per_node,
    "once_per_node": lambda func, **options: objcomm.once_per_node(**options)(func)(),
}


BLOCKS: dict[str, Callable[..., Any]] = {
    "main_first": objcomm.main_first,
    "node_first": objcomm.node_first,
}

#: Blocks that all ranks enter, by the names that their errors show.
ORDERED: dict[str, Callable[..., Any]] = {
    **BLOCKS,
    "zero_first": once.zero_first,
    "zero_only": once.zero_only,
}
