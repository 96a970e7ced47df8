"""Where this process is: what each of its lanes waits for, as the other ranks are told it."""

import sys
import threading
import time
from collections.abc import Iterable

from objcomm.history import Entry
from objcomm.transport.lane import Lane
from objcomm.transport.mesh import Mesh
from objcomm.transport.whereabouts import LaneState, Step, Whereabouts

# Most training scripts have a thread of these, which must not keep a circle from being found.
_SERVING = frozenset({"torch", "tqdm"})

# An executor's thread waits in this function itself (its queue is written in C), and does its
# work further down.
_IDLE = ("concurrent.futures.thread", "_worker")


def whereabouts(meshes: Iterable[Mesh], asked: int) -> Whereabouts:
    """Where this process is.

    Args:
        meshes: all that it has; one that has ended counts where its group has no other.
        asked: the number of the question.
    """
    in_order = sorted(meshes, key=lambda mesh: mesh.verdict is not None)
    lanes = [
        _state(mesh, lane, entry)
        for mesh in in_order
        for lane in tuple(mesh.lanes.values())
        for entry in (lane.waits() or (None,))
    ]
    main = threading.main_thread().ident or 0
    return Whereabouts(asked, main, tuple(lanes), is_single=_is_single())


def _is_single() -> bool:
    """Whether no thread but the main one can make calls."""
    return all(
        each is threading.main_thread()
        or each.name.startswith("objcomm-")
        or serves_a_library(each)
        or is_idle_in_a_pool(each)
        for each in threading.enumerate()
    )


def serves_a_library(thread: threading.Thread) -> bool:
    """Whether a thread is one that makes no calls: a progress bar's, a data loader's."""
    target = getattr(thread, "_target", None)
    modules = (type(thread).__module__, getattr(target, "__module__", None) or "")
    return any(module.partition(".")[0] in _SERVING for module in modules)


def is_idle_in_a_pool(thread: threading.Thread) -> bool:
    """Whether an executor's thread has nothing to do: only another thread can give it something.

    torch.compile and many libraries keep such threads for as long as the program runs.
    """
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001  # documented by CPython
    if frame is None:
        return False
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) == _IDLE


def _state(mesh: Mesh, lane: Lane, entry: Entry | None) -> LaneState:
    entries = list(lane.past)
    order = lane.order
    if order is not None:
        next_sequence = lane.sequence + order.waiting
        waiter = 0 if entry is None else (entry.caller or entry).waiter
    elif entry is not None:
        next_sequence, waiter = entry.header.sequence + 1, lane.waiting_thread
    else:
        next_sequence, waiter = lane.sequence, 0
    # A wait that is meant to end by itself is no part of a circle, on whichever rank that closes.
    is_free = entry is None or entry.is_served or (entry.caller or entry).has_own_limit
    awaits = -1 if entry is None or is_free else entry.awaits
    last = entries[-1] if entries else None
    if entry is not None:
        seconds = time.monotonic() - entry.waits_since
    else:
        seconds = last.position().seconds if last is not None else 0.0
    is_idle = last is None or last.is_over
    return LaneState(
        group=mesh.name,
        nonce=mesh.nonce,
        number=lane.number,
        thread=lane.owner.ident or 0,
        waiter=waiter,
        next_sequence=next_sequence,
        taken=-1 if order is None else lane.taken,
        now=None if entry is None else _step(entry),
        awaits=mesh.ranks[awaits] if awaits >= 0 else -1,
        since=0.0 if entry is None else entry.waits_since,
        seconds=seconds,
        past=tuple(_step(each) for each in entries),
        is_inside=entry is None and order is None and not is_idle,
        has_ended=mesh.verdict is not None,
    )


def _step(entry: Entry) -> Step:
    header = entry.header
    return Step(
        header.sequence,
        header.operation,
        header.root,
        header.fingerprint,
        header.call_site,
        entry.operation,
        header.name,
    )
