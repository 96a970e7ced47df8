"""The end of the program: no thread of objcomm's, nor one that calls it, stays inside of torch.

A thread that comes back from C++ while the interpreter ends would abort the process.
"""

import sys
import threading
import time
from collections.abc import Iterable

from objcomm.errors import text_of
from objcomm.transport.mesh import Mesh
from objcomm.transport.order import are_hands_busy
from objcomm.transport.verdict import PROGRAM_ENDED, Cause, Verdict

#: Usually threads end at once; a machine that is busy gets its time, a stopped store no more.
FAREWELL_SECONDS = 2.0
_PAUSE_SECONDS = 0.01


def end_waits(meshes: Iterable[Mesh], listeners: Iterable[tuple[Mesh, threading.Thread]]) -> None:
    """Let threads come back from C++: connections close, and the other ranks are told why.

    Args:
        meshes: all of this process's.
        listeners: threads that wait for messages, each with its mesh.
    """
    lanes = [(mesh, lane) for mesh in meshes for lane in tuple(mesh.lanes.values())]
    waiting = [(mesh, lane, entry) for mesh, lane in lanes for entry in lane.waits()]
    busy = [(mesh, lane.line) for mesh, lane in lanes if lane.line and not lane.line.is_idle]
    meeting = [mesh for mesh in meshes if mesh.is_meeting]
    ending = {mesh for mesh, _, _ in waiting} | {mesh for mesh, _ in (*listeners, *busy)}
    ending.update(meeting)
    for mesh in ending:
        mesh.settle(Verdict.of(Cause.LEFT, ranks=(mesh.rank,), reason=_ending()))
    until = time.monotonic() + FAREWELL_SECONDS
    for _, listener in listeners:
        listener.join(max(0.0, until - time.monotonic()))
    while time.monotonic() < until and (
        any(entry in lane.waits() for _, lane, entry in waiting)
        or not all(line.is_idle for _, line in busy)
        or any(mesh.is_meeting for mesh in meeting)
        or are_hands_busy()
    ):
        time.sleep(_PAUSE_SECONDS)


def _ending() -> str:
    """How the program ends; Python keeps an exception that nobody caught."""
    failed = getattr(sys, "last_value", None)
    return PROGRAM_ENDED if failed is None else f"its program ended by {text_of(failed)}"
