"""Whether all ranks made matching calls, checked by ranks that are not waiting for each other.

A rank that only sends, such as the source of a broadcast, never looks at what came. What another
rank has sent for a call lies unread on the connection then, and shows that the two made different
calls: the watchdog compares it with this rank's own calls while they go on, and once more when this
rank needs the connections no longer. At that time ranks compare how many calls each has made, too:
each leaves that in the store, with who it is.

Nothing here blames a rank that may still call: one that is ahead, a thread that the end of its
program cuts off, or a call that is under way.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
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

#: What was found at an end and that this process has yet to raise, by the mesh's name.
_found: dict[str, DesyncError] = {}

_compared: weakref.WeakSet[Mesh] = weakref.WeakSet()


def contradiction(mesh: Mesh) -> tuple[Lane, Verdict] | None:
    """What to say where a rank has sent something for a call that this rank has made otherwise.

    Costs nothing where no message waits. A rank that is ahead contradicts nothing.
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


def retire(mesh: Mesh, reason: str) -> None:
    """Close connections that nothing uses any more, and note what came and was never asked for.

    What comes later is refused, so its sender raises: no message is missed between the check and
    the close.

    Args:
        mesh: which; nothing is done where it joins two ranks, or has ended.
        reason: why this rank needs it no longer.
    """
    link = mesh.link
    if link is None or mesh.whole is not None:
        return
    if mesh.verdict is None:
        link.refuse()
        left = Verdict.of(Cause.LEFT, ranks=(mesh.rank,), reason=reason, is_store_silent=True)
        mesh.stop(left)
        contradicted = contradiction(mesh)
        found = contradicted[1] if contradicted else _unmade(mesh)
    else:
        found = mesh.verdict
    if found is not None and found.cause is Cause.DESYNC and _is_owed(mesh):
        _note(mesh, found)
    if reason == PROGRAM_ENDED:  # an exit handler from before objcomm was imported may call
        for lane in tuple(mesh.lanes.values()):
            lane.owes = False


class Comparison(NamedTuple):
    """What a rank that needs a mesh no longer compares with those that have ended before.

    Attributes:
        mesh: of the calls.
        mine: what this rank publishes of them.
        is_any_closed: whether another rank has closed its connections by then.
    """

    mesh: Mesh
    mine: GroupCalls
    is_any_closed: bool


def comparison(mesh: Mesh, left_by: str = "", failure: str = "") -> Comparison | None:
    """What to give to ``compare``; None where there is nothing, or this was done before.

    Args:
        mesh: of the calls.
        left_by: how and at which line this rank leaves it.
        failure: the error by which it does.
    """
    link = mesh.link
    has_left = mesh.verdict is None or mesh.verdict.reason in FAREWELLS
    if link is None or mesh.whole is not None or not has_left or mesh in _compared:
        return None
    _compared.add(mesh)
    mine = _calls(mesh)._replace(left_by=left_by, failure=failure)
    return Comparison(mesh, mine, bool(link.closed()))


def compare(comparisons: Sequence[Comparison], board: Board) -> None:
    """Publish this rank's calls and compare them with those of ranks that ended before.

    Every rank that ends well compares; the lowest one is compared with all others. Each first
    publishes and then looks, so of two that end at the same time one sees the other. A rank that
    ends by an error only publishes, for those that wait for it.
    """
    board.tell_calls([each.mine for each in comparisons])
    for mesh, mine, is_any_closed in comparisons:
        if mine.failure:
            continue
        silent = contextlib.suppress(StoreSilentError, RuntimeError)  # it may have ended
        with logged("could not check whether all ranks made the same calls"), silent:
            found = _difference_to_others(board, mesh, mine, is_any_closed=is_any_closed)
            if found is not None:
                _note(mesh, found)


def _difference_to_others(
    board: Board, mesh: Mesh, mine: GroupCalls, *, is_any_closed: bool
) -> Verdict | None:
    told = board.look(mesh.nonce) if is_any_closed else None
    if told is not None and told.reason not in FAREWELLS:
        return told if told.cause is Cause.DESYNC else None
    lowest = mesh.members[0]
    peers = mesh.others if mesh.rank == lowest else (lowest,)
    board.learn(mesh.ranks[peer] for peer in peers)
    processes = mesh.board_thread.processes
    theirs = [processes.calls_of(mesh.ranks[peer], mesh.number) for peer in peers]
    ended = [each for each in theirs if each is not None and not each.failure]
    return next(filter(None, (difference(mine, each) for each in ended)), None)


def difference(mine: GroupCalls, theirs: GroupCalls) -> Verdict | None:
    """What to say where two ranks that have ended did not make the same calls."""
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


def taken() -> DesyncError | None:
    """What was found at an end, which the caller raises; None where all calls went together."""
    errors = list(_found.values())
    _found.clear()
    return errors[0] if errors else None


def _unused(calls: GroupCalls, number: int) -> LaneCalls:
    is_open = _may_be_begun(number) and not calls.is_single
    return LaneCalls(number, 0, (), _nowhere(calls.rank), is_open)


def _note(mesh: Mesh, found: Verdict) -> None:
    error = found.error("")
    if not isinstance(error, DesyncError) or mesh.nonce in _found:
        return
    _found[mesh.nonce] = error
    if threading.main_thread().is_alive():  # else the program ends, and says so
        log.error("group %r: %s", mesh.name, error, extra=mesh.labels)


def _unread(mesh: Mesh) -> Iterator[tuple[Lane | None, Header]]:
    """Headers of first messages that have come and that no call has taken, with their lanes."""
    if mesh.link is None or mesh.whole is not None:
        return
    lanes = {lane.number: lane for lane in tuple(mesh.lanes.values())}
    for head in mesh.link.unread():
        with contextlib.suppress(WireError):  # damaged, or being filled: its call will say so
            header = Header.unpack(head)
            if header.group == mesh.number:
                yield lanes.get(header.lane), header


def _call(mesh: Mesh, lane: Lane, sequence: int) -> CallRecord | None:
    """This rank's call of that number, as far as it is remembered."""
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
    """What to say where another rank has made a call that this rank never will."""
    for lane, theirs in sorted(_unread(mesh), key=lambda each: each[1].sequence):
        is_made = lane is not None and theirs.sequence < lane.sequence
        is_open = _may_be_begun(theirs.lane) and not is_single() if lane is None else _is_open(lane)
        if not is_made and not is_open:
            positions = _last(mesh, lane), theirs.position
            return Verdict.of(Cause.DESYNC, reason=_UNMADE, positions=positions)
    return None


def _calls(mesh: Mesh) -> GroupCalls:
    lanes = [lane for lane in tuple(mesh.lanes.values()) if lane.past]
    told = [
        LaneCalls(lane.number, lane.sequence, _step(lane), _last(mesh, lane), _is_open(lane))
        for lane in lanes
    ]
    members = mesh.ranks if len(mesh.ranks) <= _MOST_LISTED else ()
    return GroupCalls(mesh.number, mesh.rank, members, tuple(told), is_single())


def _step(lane: Lane) -> tuple[int, ...]:
    header = lane.past[-1].header
    return header.operation, header.root, header.fingerprint


def _may_be_begun(number: int) -> bool:
    """Whether another thread than the main one may begin to use a lane: one that has a name."""
    return number != fingerprint("") % (1 << LANE_BITS)


def _is_open(lane: Lane) -> bool:
    """Whether a thread may have been about to make the next call when the end cut it off."""
    here = threading.main_thread(), threading.current_thread()
    return lane.is_busy or (lane.owner not in here and lane.owner.is_alive())


def _is_owed(mesh: Mesh) -> bool:
    """Whether some thread that still can raise what ended the mesh has yet to do so."""
    main = threading.main_thread()  # not alive any more where the interpreter ends
    lanes = tuple(mesh.lanes.values())
    return not lanes or any(
        lane.owes and (lane.owner is main or lane.owner.is_alive()) for lane in lanes
    )


def _last(mesh: Mesh, lane: Lane | None) -> Position:
    if lane is None or not lane.past:
        return _nowhere(mesh.rank)
    return lane.past[-1].position()


def _nowhere(rank: int) -> Position:
    return Position(rank, "", 0, -1, "", is_over=True)
