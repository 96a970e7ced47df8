"""The end of the program: no thread of objcomm's, nor one that calls it, stays inside of torch.

A thread that comes back from C++ while the interpreter ends would abort the process.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from objcomm.errors import text_of
from objcomm.transport.blame import by_name
from objcomm.transport.bulletin import Bulletin
from objcomm.transport.line import are_lines_busy
from objcomm.transport.mesh import Mesh
from objcomm.transport.order import are_hands_busy
from objcomm.transport.outage import hang_up
from objcomm.transport.verdict import FAREWELLS, PROGRAM_ENDED, Cause, Verdict

#: Usually threads end at once; a machine that is busy gets its time, and a slow store does.
FAREWELL_SECONDS = 2.0
_PAUSE_SECONDS = 0.01

# Names of threads that connect a mesh, or listen on one.
_OF_A_MESH = frozenset({"objcomm-connect", "objcomm-listen"})

_Look: TypeAlias = Callable[[], tuple[list[Mesh], list[tuple[Mesh, threading.Thread]]]]


def bring_back(look: _Look, bulletins: Sequence[Bulletin]) -> None:
    """End what threads do in C++, and the bulletins'.

    A store that is stopped, or behind a network that fails, holds a thread for as long as it gives
    no answer; one that came while the interpreter ends would abort the process. So who has not come
    back in time is cut off from the store.

    Args:
        look: as ``end_waits`` takes it.
        bulletins: all of this process's.
    """
    if not _are_all_back(look, bulletins):
        hang_up({address for bulletin in bulletins for address in bulletin.addresses})
        _are_all_back(look, bulletins)


def _are_all_back(look: _Look, bulletins: Sequence[Bulletin]) -> bool:
    are_back = [end_waits(look)]
    are_back += [bulletin.close(FAREWELL_SECONDS, _ending()) for bulletin in bulletins]
    return all(are_back)


def end_waits(look: _Look) -> bool:
    """Let threads come back from C++: connections close, and the other ranks are told why.

    Args:
        look: gives all of this process's meshes, and the threads that wait for messages, each with
            its mesh; asked again and again, because a thread may just be about to begin.

    Returns:
        Whether all have come back in time.
    """
    until = time.monotonic() + FAREWELL_SECONDS
    while True:
        meshes, listeners = look()
        occupied = {mesh for mesh in meshes if _is_occupied(mesh)}
        occupied |= {mesh for mesh, listener in listeners if listener.is_alive()}
        for mesh in occupied:
            leaves = Verdict.of(Cause.LEFT, ranks=(mesh.rank,), reason=_ending())
            # Who ends by an error because of another's death is not the one to be named.
            mesh.settle(leaves if leaves.reason in FAREWELLS else by_name(mesh, leaves))
        is_any_away = bool(occupied) or are_hands_busy() or are_lines_busy() or _are_any_leaving()
        if not is_any_away or time.monotonic() > until:
            return not is_any_away
        time.sleep(_PAUSE_SECONDS)


def _are_any_leaving() -> bool:
    """Whether threads live that belong to a mesh.

    One whose mesh is no more may be in that mesh's destructor, in C++.
    """
    return any(each.name in _OF_A_MESH for each in threading.enumerate())


def _is_occupied(mesh: Mesh) -> bool:
    """Whether a thread is, or soon will be, in C++ on its behalf."""
    return mesh.is_meeting or any(lane.is_busy for lane in tuple(mesh.lanes.values()))


def _ending() -> str:
    """How the program ends; Python keeps an exception that nobody caught."""
    failed = getattr(sys, "last_value", None)
    return PROGRAM_ENDED if failed is None else f"its program ended by {text_of(failed)}"
