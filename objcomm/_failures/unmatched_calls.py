"""Check that all ranks made matching calls, even where no rank waits for another.

A rank that only sends, such as the source of a broadcast, never reads what its peers sent. If a
peer made a different call, its message stays unread on the connection. The watchdog compares such
messages with this rank's own calls while the program runs, and once more when this rank no longer
needs the connections. At that point the ranks also compare how many calls each has made; each rank
publishes its count in its process record in the store.

No rank is blamed if the missing call might still have come: from a rank that is behind, from a
thread that the end of the program cut off, or after a call in progress.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import sys
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

from objcomm._failures import deadlock
from objcomm._failures.inquiry import is_single
from objcomm._failures.liveness import GroupCalls, LaneCalls
from objcomm._failures.noticeboard import StoreSilentError
from objcomm._failures.verdict import FAREWELLS, PROGRAM_ENDED, Cause, Verdict, proposal_for
from objcomm._observe.log import log, logged
from objcomm._transport.link import LANE_BITS
from objcomm._wire.header import Header, check_same_call, fingerprint
from objcomm.errors import DesyncError, Position, WireError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from objcomm._failures.mesh import Mesh
    from objcomm._failures.noticeboard import Board
    from objcomm._observe.history import CallRecord
    from objcomm._transport.lane import Lane

_UNMADE = "one rank made a call that another never made"

# Larger groups' members are not published with their calls.
_MOST_LISTED = 64

#: Mismatches found at the end of a mesh that have not been raised yet, by the mesh's nonce.
_mismatches: dict[str, DesyncError] = {}

#: For each mesh whose calls were published: the error that made this rank leave; empty if none.
_published: weakref.WeakKeyDictionary[Mesh, str] = weakref.WeakKeyDictionary()


def mismatch_in_unread(mesh: Mesh) -> tuple[Lane, Verdict] | None:
    """Return a verdict if an unread message belongs to a call that this rank made differently.

    Costs nothing if no message is unread. A message from a rank that is ahead is not a mismatch.
    """
    for lane, theirs in _unread(mesh):
        mine = None if lane is None else _call(mesh, lane, theirs.sequence)
        if lane is None or mine is None:
            continue
        try:
            check_same_call(mine.header, theirs, theirs.sender)
        except DesyncError as error:
            return lane, proposal_for(error, mesh.rank)
        except WireError:
            continue
    return None


def close_and_check(mesh: Mesh, reason: str) -> None:
    """Close connections that are no longer needed, and record messages that no call received.

    Later messages are refused, so their senders raise. No message can slip between the check and
    the close. Nothing is recorded if this rank left because of an error: it may have made fewer
    calls.

    Args:
        mesh: the mesh to close. A mesh of two ranks, or one that never connected, is left alone.
        reason: why this rank no longer needs it.
    """
    link = mesh.link
    if link is None or mesh.whole is not None:
        return
    if mesh.verdict is None:
        link.refuse()
        left = Verdict.of(Cause.LEFT, ranks=(mesh.rank,), reason=reason, is_store_silent=True)
        mesh.stop(left)
        mismatch = mismatch_in_unread(mesh)
        found = mismatch[1] if mismatch else _unmade(mesh)
    else:
        found = mesh.verdict
    is_failing = bool(_published.get(mesh))
    if not is_failing and found is not None and found.cause is Cause.DESYNC and _is_owed(mesh):
        _note(mesh, found)
    # An exit handler registered before objcomm was imported runs later and may still make calls.
    if reason == PROGRAM_ENDED:
        for lane in tuple(mesh.lanes.values()):
            lane.owes = False


class Comparison(NamedTuple):
    """Calls that a leaving rank compares with those of the ranks that left before it.

    Attributes:
        mesh: the mesh over which the calls were made.
        mine: the summary of this rank's calls that it publishes.
        is_any_closed: whether another rank had already closed its connections.
    """

    mesh: Mesh
    mine: GroupCalls
    is_any_closed: bool


def comparison(mesh: Mesh, left_by: str = "", failure: str = "") -> Comparison | None:
    """Return what ``publish_and_compare`` compares; None if that is done or not needed.

    Args:
        mesh: the mesh over which the calls were made.
        left_by: how this rank leaves it, and at which line.
        failure: the error that makes this rank leave, if any.
    """
    link = mesh.link
    has_left = mesh.verdict is None or mesh.verdict.reason in FAREWELLS
    if link is None or mesh.whole is not None or not has_left or mesh in _published:
        return None
    _published[mesh] = failure
    mine = _calls(mesh)._replace(left_by=left_by, failure=failure)
    return Comparison(mesh, mine, bool(link.closed()))


def publish_and_compare(comparisons: Sequence[Comparison], board: Board) -> None:
    """Publish this rank's calls and compare them with those of ranks that left before it.

    The lowest rank compares itself with all others, and every other rank with the lowest. Each rank
    publishes before it reads, so if two ranks leave at the same time, at least one sees the other.
    A rank that leaves because of an error only publishes, for the ranks that wait for it.
    """
    board.publish_calls([each.mine for each in comparisons])
    compared = [each for each in comparisons if not each.mine.failure]
    silent = contextlib.suppress(StoreSilentError, RuntimeError)  # the store may be gone
    unable = "could not check whether all ranks made the same calls"
    with logged(unable), silent:  # once for all: the records contain the calls on all groups
        board.learn({mesh.ranks[peer] for mesh, _, _ in compared for peer in _compared_to(mesh)})
    for mesh, mine, is_any_closed in compared:
        with logged(unable), silent:
            found = _difference_to_others(board, mesh, mine, is_any_closed=is_any_closed)
            if found is not None:
                _note(mesh, found)


def _difference_to_others(
    board: Board, mesh: Mesh, mine: GroupCalls, *, is_any_closed: bool
) -> Verdict | None:
    verdict = board.look(mesh.nonce) if is_any_closed else None
    if verdict is not None and verdict.reason not in FAREWELLS:
        return verdict if verdict.cause is Cause.DESYNC else None
    processes = mesh.board_thread.processes
    theirs = [processes.calls_of(mesh.ranks[peer], mesh.number) for peer in _compared_to(mesh)]
    ended = [each for each in theirs if each is not None and not each.failure]
    return next(filter(None, (difference(mine, each) for each in ended)), None)


def _compared_to(mesh: Mesh) -> Sequence[int]:
    """Return the members whose calls this rank compares with its own."""
    lowest = mesh.members[0]
    return mesh.others if mesh.rank == lowest else (lowest,)


def difference(mine: GroupCalls, theirs: GroupCalls) -> Verdict | None:
    """Return the verdict on two ranks that have left after different calls; None if they match."""
    own, other = ({each.number: each for each in calls.lanes} for calls in (mine, theirs))
    for number in sorted({*own, *other}):
        here, there = own.get(number), other.get(number)
        if here is None:
            here = _unused(mine, number)
        if there is None:
            there = _unused(theirs, number)
        if here.is_open or there.is_open or here[:3] == there[:3]:
            continue
        if here.calls != there.calls:
            reason = f"rank {mine.rank} made {here.calls}, rank {theirs.rank} made {there.calls}"
        else:
            reason = deadlock.difference(here.last, there.last)
        return Verdict.of(Cause.DESYNC, reason=reason, positions=(here.last, there.last))
    return None


def failure_here() -> BaseException | None:
    """Return the exception that this thread handles, unless it is an exit with status 0."""
    error = sys.exc_info()[1]
    is_normal = isinstance(error, SystemExit) and (error.code is None or error.code == 0)
    return None if is_normal else error


def take_mismatch() -> DesyncError | None:
    """Remove and return a recorded mismatch, for the caller to raise; None if all calls matched."""
    errors = list(_mismatches.values())
    _mismatches.clear()
    return errors[0] if errors else None


def _unused(calls: GroupCalls, number: int) -> LaneCalls:
    is_open = _may_be_begun(number) and not calls.is_single
    return LaneCalls(number, 0, (), _nowhere(calls.rank), is_open)


def _note(mesh: Mesh, found: Verdict) -> None:
    error = found.error("")
    if not isinstance(error, DesyncError) or mesh.nonce in _mismatches:
        return
    _mismatches[mesh.nonce] = error
    if threading.main_thread().is_alive():  # otherwise the program is ending and reports it itself
        log.error("group %r: %s", mesh.name, error, extra=mesh.labels)


def _unread(mesh: Mesh) -> Iterator[tuple[Lane | None, Header]]:
    """Yield each unread message's lane, None if this rank has not used it, and header."""
    if mesh.link is None or mesh.whole is not None:
        return
    lanes = {lane.number: lane for lane in tuple(mesh.lanes.values())}
    for head in mesh.link.unread():
        # A header may be damaged or incomplete; the call that receives it reports that.
        with contextlib.suppress(WireError):
            header = Header.unpack(head)
            if header.group == mesh.number:
                yield lanes.get(header.lane), header


def _call(mesh: Mesh, lane: Lane, sequence: int) -> CallRecord | None:
    """Return this rank's call with that sequence number; None if it is no longer remembered."""
    for each in tuple(lane.past):
        if each.header.sequence == sequence:
            return each
    if sequence >= lane.sequence:
        return None
    wanted = mesh.number, lane.number, sequence
    for each in mesh.history.entries():
        header = each.header
        if (header.group, header.lane, header.sequence) == wanted:
            return each
    return None


def _unmade(mesh: Mesh) -> Verdict | None:
    """Return a verdict if another rank has made a call that this rank will never make."""
    for lane, theirs in sorted(_unread(mesh), key=lambda each: each[1].sequence):
        is_made = lane is not None and theirs.sequence < lane.sequence
        is_open = _may_be_begun(theirs.lane) and not is_single() if lane is None else _is_open(lane)
        if not is_made and not is_open:
            positions = _last(mesh, lane), theirs.position
            return Verdict.of(Cause.DESYNC, reason=_UNMADE, positions=positions)
    return None


def _calls(mesh: Mesh) -> GroupCalls:
    lanes = [lane for lane in tuple(mesh.lanes.values()) if lane.past]
    calls = [
        LaneCalls(lane.number, lane.sequence, _step(lane), _last(mesh, lane), _is_open(lane))
        for lane in lanes
    ]
    members = mesh.ranks if len(mesh.ranks) <= _MOST_LISTED else ()
    return GroupCalls(mesh.number, mesh.rank, members, tuple(calls), is_single())


def _step(lane: Lane) -> tuple[int, ...]:
    header = lane.past[-1].header
    return header.operation, header.root, header.fingerprint


def _may_be_begun(number: int) -> bool:
    """Whether a thread other than the main one may start using the lane: only a named lane."""
    return number != fingerprint("") % (1 << LANE_BITS)


def _is_open(lane: Lane) -> bool:
    """Whether the end of the program may have cut off a thread before its next call."""
    here = threading.main_thread(), threading.current_thread()
    return lane.is_busy or (lane.owner not in here and lane.owner.is_alive())


def _is_owed(mesh: Mesh) -> bool:
    """Whether the verdict has yet to be raised: by any thread, or by one that still can."""
    main = threading.main_thread()  # no longer alive while the interpreter shuts down
    lanes = tuple(mesh.lanes.values())
    return all(lane.owes for lane in lanes) or any(
        lane.owes and (lane.owner is main or lane.owner.is_alive()) for lane in lanes
    )


def _last(mesh: Mesh, lane: Lane | None) -> Position:
    if lane is None or not lane.past:
        return _nowhere(mesh.rank)
    return lane.past[-1].position()


def _nowhere(rank: int) -> Position:
    return Position(rank, "", 0, -1, "", is_over=True)
