"""Finds out from the ranks' whereabouts whether a wait can ever end: pure reasoning, no traffic.

A wait can't end if the awaited rank makes another call where this one is made, or if following who
waits for whom leads in a circle. Whoever computes outside of objcomm may still come, so waiting
for that is no conflict.
"""

from collections.abc import Callable

from objcomm.frames import Operation
from objcomm.transport.whereabouts import MEETING, Conflict, LaneState, Step, Whereabouts

Fetch = Callable[[int], Whereabouts | None]


def find_conflict(  # noqa: PLR0911  # each step of the search may end it
    rank: int, mine: Whereabouts, start: LaneState, fetch: Fetch
) -> Conflict | None:
    """Whether ``start``, a waiting lane of ``rank``, waits in vain.

    Args:
        rank: this process, as a global rank like all others here.
        mine: its whereabouts.
        start: one of its lanes, which waits.
        fetch: reads another rank's whereabouts; ``None`` if it does not answer.
    """
    holder, here, lane = rank, mine, start
    path: list[tuple[int, LaneState, Step]] = []
    while lane.now is not None:
        path.append((holder, lane, lane.now))
        theirs = fetch(lane.awaits) if lane.awaits >= 0 else None
        if theirs is None:
            return None
        told = next((circle for circle in theirs.circles if circle.holds(rank, start)), None)
        if told is not None:
            return told._replace(is_told=True)
        their_lane = theirs.lane(lane.group, lane.number)
        if their_lane is not None and _is_of_one_mesh(lane, their_lane, theirs):
            differing = _first_difference(lane, their_lane)
            if differing is not None and lane.group == start.group:
                reason = _difference(*differing)
                ours, other = differing
                return Conflict(reason, ((holder, lane, ours), (lane.awaits, their_lane, other)))
            if _is_under_way(lane, lane.now, their_lane):
                return None
        following = theirs.waiting_of(_serving(lane, here, their_lane, theirs))
        if following is None or _is_ending(lane, lane.now, theirs):
            return None
        holder, here, lane = lane.awaits, theirs, following
        met = [(other, each.group, each.number, each.since) for other, each, _ in path]
        wait = (holder, lane.group, lane.number, lane.since)
        if wait in met:
            circle = path[met.index(wait) :]
            if any(each.group == start.group for _, each, _ in circle):
                return Conflict("each waits for another", tuple(circle))
            return None  # those ranks will raise, and may come here then
    return None


def _serving(
    lane: LaneState, here: Whereabouts, theirs: LaneState | None, there: Whereabouts
) -> int:
    """The thread of the awaited process that would make the call that ``lane`` waits for."""
    if _is_shared(lane):
        return there.main_thread if there.is_single else 0
    if theirs is not None:
        return theirs.thread
    return there.main_thread if lane.thread == here.main_thread else 0


def _is_of_one_mesh(lane: LaneState, theirs: LaneState, there: Whereabouts) -> bool:
    """Whether two ranks' states are of one mesh, whose name not both may know yet."""
    if lane.nonce == theirs.nonce:
        return True
    if _is_shared(lane):
        # The host of two that meet knows the name first. A name that is known where nobody meets
        # may be that of an earlier mesh.
        return not theirs.nonce or (not lane.nonce and _is_meeting(theirs, there))
    calls = [each.now is not None and each.now.sequence for each in (lane, theirs)]
    return calls == [MEETING, MEETING] and "" in (lane.nonce, theirs.nonce)


def _is_meeting(lane: LaneState, there: Whereabouts) -> bool:
    """Whether some call waits on that lane for its ranks to meet."""
    return any(
        each.now is not None and each.now.sequence == MEETING
        for each in there.lanes
        if (each.group, each.number) == (lane.group, lane.number)
    )


def _is_under_way(lane: LaneState, call: Step, theirs: LaneState) -> bool:
    """Whether the awaited rank has sent what ``lane`` waits for, or is sending it."""
    if _is_shared(lane):
        return call.operation == Operation.RECV and theirs.next_sequence > lane.taken
    return theirs.next_sequence > call.sequence


def _is_ending(lane: LaneState, call: Step, there: Whereabouts) -> bool:
    """Whether the awaited rank knows that this wait's mesh has ended, and may be in the next one.

    A busy rank may be told of that later than the other one has asked twice where it is.
    """
    theirs = next((each for each in there.lanes if each.group == lane.group), None)
    if theirs is None or not lane.nonce or call.sequence == MEETING:
        return False
    return theirs.has_ended or theirs.nonce != lane.nonce


def _is_shared(lane: LaneState) -> bool:
    """Whether any thread may use the lane, for messages from rank to rank."""
    return lane.taken >= 0


def _first_difference(mine: LaneState, theirs: LaneState) -> tuple[Step, Step] | None:
    by_sequence = {step.sequence: step for step in theirs.past}
    for step in mine.past:
        other = by_sequence.get(step.sequence)
        if other is not None and not step.agrees_with(other):
            return step, other
    return None


def _difference(mine: Step, theirs: Step) -> str:
    if mine.operation != theirs.operation:
        return "other operations"
    return "other roots" if mine.root != theirs.root else "other names"
