"""Asks where the other ranks are, and ends a mesh whose waits can't end.

All of it runs on a bulletin's thread, because it talks to the store.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from objcomm.errors import Position
from objcomm.frames import operation_name
from objcomm.history import Entry
from objcomm.transport.bulletin import Board
from objcomm.transport.conflict import find_conflict
from objcomm.transport.lane import Lane
from objcomm.transport.mesh import Mesh
from objcomm.transport.verdict import Cause, Verdict
from objcomm.transport.whereabouts import MEETING, Conflict, LaneState, Step, Whereabouts

#: A call of one lane that waits for other ranks.
Waiting = tuple[Mesh, Lane, Entry]

# Most training scripts have a thread of these, which must not keep a circle from being found.
_SERVING = frozenset({"torch", "tqdm"})

# An executor's thread waits in this function itself (its queue is written in C), and does its
# work further down.
_IDLE = ("concurrent.futures.thread", "_worker")

# Ranks that are not waiting look three times a second whether they are asked.
_ANSWERS_WITHIN_SECONDS = 0.4
_PAUSE_SECONDS = 0.02


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
    awaits = -1 if entry is None or entry.is_served else entry.awaits
    if entry is not None:
        seconds = time.monotonic() - entry.waits_since
    else:
        last = entries[-1] if entries else None
        seconds = last.position().seconds if last is not None else 0.0
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
    )


def investigate(board: Board, meshes: Sequence[Mesh], waiting: Sequence[Waiting]) -> None:
    """For each call that waits: has anybody ended it, and can it ever end?"""
    asked = board.ask()
    mine = whereabouts(meshes, asked)
    board.publish(mine)
    for mesh, lane, entry in waiting:
        if mesh.verdict is not None or entry not in lane.waits():
            continue
        entry.first_asked = entry.first_asked or asked
        if not _heed(board, mesh, entry) and not _is_deserted(board, mesh):
            _look_for_conflict(board, mine, meshes, (mesh, lane, entry))


def _heed(board: Board, mesh: Mesh, entry: Entry) -> bool:
    """End the mesh if another rank has said so, or has failed in a block around this call."""
    posted = board.look(mesh.nonce) if mesh.nonce else None
    if posted is not None:
        settle(board, mesh, posted)
        return True
    for region in entry.regions:
        posted = posted or board.look(region)
    if posted is not None:
        end(board, mesh, entry, posted)
    return posted is not None


def _is_deserted(board: Board, mesh: Mesh) -> bool:
    """End a mesh whose ranks have not met, if one of them can't come any more."""
    missing = mesh.missing(board)
    if missing:
        mesh.is_deserted = True
        reason = "it died, exited or lost its network before it sent to or received from this rank"
        settle(board, mesh, Verdict.of(Cause.LOST, ranks=missing, reason=reason))
    return bool(missing)


def _look_for_conflict(
    board: Board, mine: Whereabouts, meshes: Sequence[Mesh], waiting: Waiting
) -> None:
    mesh, lane, entry = waiting
    start = mine.waiting_since(mesh.name, lane.number, entry.waits_since)
    if start is None:
        return
    asked, suspected = entry.suspicion or (entry.first_asked, None)
    conflict = find_conflict(board.rank, mine, start, lambda rank: board.read(rank, asked))
    # What ranks have done does not change, but whereabouts are read one after another, and a busy
    # rank's are old: who waits for whom must look the same twice, in answers to a later question.
    calls = conflict and [(rank, *state[:3], step.sequence) for rank, state, step in conflict.found]
    is_sure = conflict is not None and (
        conflict.is_told or conflict.is_of_one_lane or suspected == calls
    )
    entry.suspicion = (mine.asked, calls) if calls else None
    if conflict is not None and is_sure and entry in lane.waits():
        verdict = _desync(mesh, conflict)
        if not conflict.is_of_one_lane:
            board.tell_circle(conflict)
            board.publish(mine)
        for other in meshes:  # before any connection closes: the others look there
            if other is not mesh and other.verdict is None and other.nonce in verdict.meshes:
                board.propose(other.nonce, _desync(other, conflict))
        settle(board, mesh, verdict)


def _desync(mesh: Mesh, conflict: Conflict) -> Verdict:
    positions = [
        _position(mesh, mesh.ranks.index(rank), state, step, is_over=state.now is None)
        for rank, state, step in conflict.found
        if rank in mesh.ranks
    ]
    meshes = {state.nonce for _, state, _ in conflict.found if state.nonce}
    return Verdict.of(
        Cause.DESYNC,
        reason=conflict.reason,
        positions=tuple(positions),
        meshes=tuple(sorted(meshes)),
    )


def settle(board: Board, mesh: Mesh, proposal: Verdict) -> None:
    """End a mesh by ``proposal``, or by what another rank has posted before."""
    mesh.stop(board.propose(mesh.nonce, proposal) if mesh.nonce else proposal)


def expire(board: Board, meshes: Sequence[Mesh], expiring: deque[Waiting]) -> None:
    """End meshes because the limits of calls have passed, and say where everybody is.

    Args:
        board: the store.
        meshes: all of this process's.
        expiring: the calls; is emptied, and more may come meanwhile.
    """
    if not expiring:
        return
    asked = board.ask()
    waiting = _taken(expiring)
    answers = {board.rank: whereabouts(meshes, asked)}
    board.publish(answers[board.rank])
    since = min(entry.first_asked or asked for _, _, entry in waiting)
    until = time.monotonic() + _ANSWERS_WITHIN_SECONDS
    while True:
        waiting += _taken(expiring)
        waiting = [each for each in waiting if _still_waits(board, *each)]
        members = {mesh.ranks[each] for mesh, _, _ in waiting for each in mesh.members}
        missing = members - answers.keys()
        found = {rank: board.read(rank, since) for rank in missing}
        answers |= {rank: answer for rank, answer in found.items() if answer is not None}
        if missing <= answers.keys() or time.monotonic() > until:
            break
        time.sleep(_PAUSE_SECONDS)
        if board.asked() > board.answered:  # another rank's limit has passed as well
            board.publish(whereabouts(meshes, board.asked()))
    for mesh, lane, entry in waiting:
        global_ranks = {rank: mesh.ranks[rank] for rank in mesh.members}
        known = {rank: answers[each] for rank, each in global_ranks.items() if each in answers}
        end(board, mesh, entry, timeout_verdict(mesh, lane, entry, known))


def end(board: Board, mesh: Mesh, entry: Entry, verdict: Verdict) -> None:
    """End one call, and with it its mesh unless it can be withdrawn."""
    if entry.withdraw is None:
        settle(board, mesh, verdict)
    else:
        entry.withdraw(verdict)


def _taken(expiring: deque[Waiting]) -> list[Waiting]:
    return [expiring.popleft() for _ in range(len(expiring))]


def _still_waits(board: Board, mesh: Mesh, lane: Lane, entry: Entry) -> bool:
    return mesh.verdict is None and entry in lane.waits() and not _heed(board, mesh, entry)


def timeout_verdict(
    mesh: Mesh, lane: Lane, entry: Entry, answers: dict[int, Whereabouts] | None
) -> Verdict:
    """What to raise when a limit has passed.

    Args:
        mesh: whose.
        lane: which waits.
        entry: its call.
        answers: whereabouts by rank; ``None`` if the store did not answer.
    """
    awaited = (entry.awaits,) if entry.awaits >= 0 else ()
    if answers is None:
        return Verdict.of(
            Cause.TIMEOUT, ranks=awaited, seconds=entry.limit_seconds, is_store_silent=True
        )
    missing = tuple(
        rank
        for rank in (mesh.others if lane.order is not None else mesh.members)
        if rank not in answers or not _has_arrived(mesh, lane, entry, answers[rank])
    )
    return Verdict.of(
        Cause.TIMEOUT,
        ranks=missing or awaited,
        seconds=entry.limit_seconds,
        positions=tuple(_where(mesh, lane, rank, answers[rank]) for rank in sorted(answers)),
        silent=tuple(rank for rank in mesh.members if rank not in answers),
    )


def _has_arrived(mesh: Mesh, lane: Lane, entry: Entry, answer: Whereabouts) -> bool:
    state = answer.lane(mesh.name, lane.number)
    if state is None or state.nonce != mesh.nonce or lane.order is not None:
        return False
    return state.next_sequence > entry.header.sequence


def _where(mesh: Mesh, lane: Lane, rank: int, answer: Whereabouts) -> Position:
    state = answer.lane(mesh.name, lane.number)
    thread = answer.main_thread if state is None or lane.order is not None else state.thread
    waiting = answer.waiting_of(thread)
    if waiting is None and state is not None and state.now is not None:
        waiting = state  # an asynchronous call, whose thread goes on meanwhile
    if waiting is not None and waiting.now is not None:
        return _position(mesh, rank, waiting, waiting.now, is_over=False)
    if state is not None and state.past:
        return _position(mesh, rank, state, state.past[-1], is_over=True)
    return Position(rank, "", 0, -1, "", is_over=True)


def _position(mesh: Mesh, rank: int, state: LaneState, step: Step, *, is_over: bool) -> Position:
    is_meeting = step.sequence == MEETING
    return Position(
        rank=rank,
        operation=step.operation_name or operation_name(step.operation),
        sequence=0 if is_meeting else step.sequence,
        root=step.root,
        call_site=step.call_site,
        seconds=state.seconds,
        is_over=is_over,
        group="" if state.group == mesh.name else state.group,
    )
