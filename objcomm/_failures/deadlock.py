"""Where each process is, on every lane it uses, and whether a wait can ever end: no traffic.

A wait can't end if the awaited rank makes another call where this one is made, or if following who
waits for whom leads in a circle. Whoever computes outside of objcomm may still come, so waiting
for that is no conflict.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from objcomm._observe.stacks import Running
from objcomm._wire.header import Operation
from objcomm.errors import CIRCLE, NO_MATCH, OTHER_OPTIONS, Position

#: The number of the call in which a group's ranks meet: before all others.
MEETING = -1

# In these each rank's first wait is for those that come to it along the tree.
_GATHERED_FIRST = frozenset({Operation.BARRIER, Operation.ALL_GATHER})

# Who waited where a circle was found is told; threads that were late by a second were seen.
_HEARD_WITHIN_SECONDS = 5.0


class Step(NamedTuple):
    """One call, as far as all ranks must agree on it."""

    sequence: int
    operation: int
    root: int
    fingerprint: int
    call_site: str
    operation_name: str = ""  # of the call that made the ranks meet, where operation is NONE
    name: str = ""  # of the call, as far as it is shown
    unmatched: str = ""  # messages that a receive does not match, in words

    def agrees_with(self, other: "Step") -> bool:
        """Whether both can be the same call; a meeting serves any."""
        if Operation.NONE in (self.operation, other.operation):
            return True
        return self[1:4] == other[1:4]


class LaneWait(NamedTuple):
    """One lane of one group in one process.

    Attributes:
        group: its name, the same on every rank.
        nonce: which mesh of the group's; empty before its ranks have met.
        number: the lane's.
        thread: whoever owns the lane, as a number that means something in that process only.
        waiter: the thread that can do nothing else before the call under way has ended.
        next_sequence: calls begun so far; where any thread may send, messages sent or to be sent.
        taken: where any thread may send, messages that have arrived; -1 on other lanes.
        now: the call under way, if the lane is waiting.
        awaits: the global rank that it can't go on without; -1 if none, as where the caller gave a
            message's wait a limit of its own.
        since: when the wait began, by that process's clock: no two waits of a lane's have the same.
        seconds: since the wait began, or since the last call ended.
        past: the latest calls, the one under way included, oldest first.
        is_inside: whether the last of them has not returned though the lane does not wait: it
            encodes, or is in a callback.
        has_ended: whether there is a verdict on that mesh: who waits on it will be told.
        name: the lane's, if the program has given it one.
    """

    group: str
    nonce: str
    number: int
    thread: int
    waiter: int
    next_sequence: int
    taken: int
    now: Step | None
    awaits: int
    since: float
    seconds: float
    past: tuple[Step, ...]
    is_inside: bool = False
    has_ended: bool = False
    name: str = ""

    def is_over(self, step: Step) -> bool:
        """Whether a call of the lane's has returned."""
        is_last = self.is_inside and self.past[-1:] == (step,)
        return self.now is None and not is_last


class Deadlock(NamedTuple):
    """Two or more ranks whose calls can't meet.

    Attributes:
        reason: what differs.
        found: each rank's lane and call.
        is_told: whether one of those ranks was sure of it, and has raised.
        told_seconds: for how long the process that published it had known it by then.
        told_at: since when, by that process's clock.
    """

    reason: str
    found: tuple[tuple[int, LaneWait, Step], ...]
    is_told: bool = False
    told_seconds: float = 0.0
    told_at: float = 0.0

    @property
    def is_of_one_lane(self) -> bool:
        """Whether it is two calls with the same number on one lane, which both ranks remember.

        Messages from rank to rank are no such calls, nor are meetings.
        """
        calls = {(state.nonce, state.number, step.sequence) for _, state, step in self.found}
        is_numbered = all(
            state.taken < 0 and step.sequence != MEETING for _, state, step in self.found
        )
        return len(calls) == 1 and is_numbered

    @property
    def waits(self) -> frozenset[tuple[int, str, int, float]]:
        """Which waits it consists of, the same whoever has found it, and when."""
        return frozenset(
            (rank, state.group, state.number, state.since) for rank, state, _ in self.found
        )

    def holds(self, rank: int, lane: LaneWait) -> bool:
        """Whether ``lane`` of ``rank`` still waits where this was found."""
        return (rank, lane.group, lane.number, lane.since) in self.waits

    def ends(self, rank: int, wait: LaneWait, there: "WaitSnapshot") -> bool:
        """Whether a wait of ``rank`` is about to end with those where this was found.

        A wait that began later is not. That process's own clock tells which is, where it knows of
        this; else only how long each has lasted, which processes publish at different moments.
        """
        is_recent = self.told_seconds <= min(wait.seconds, _HEARD_WITHIN_SECONDS)
        is_beside = any(wait.group == state.group for _, state, _ in self.found)
        return is_recent and is_beside and not self._is_before(rank, wait, there)

    def _is_before(self, rank: int, wait: LaneWait, there: "WaitSnapshot") -> bool:
        """Whether ``wait`` surely began after the thread, or the process, had been told of this."""
        if any(
            other == rank and state.waiter == wait.waiter != 0 and state.since < wait.since
            for other, state, _ in self.found
        ):
            return True
        return any(each.told_at < wait.since for each in there.circles if each.waits == self.waits)


class WaitSnapshot(NamedTuple):
    """One process.

    Attributes:
        asked: the latest question that it answers, so that a reader knows how fresh this is.
        main_thread: the number of its main thread.
        lanes: all of them.
        circles: the latest ones that it was in. It has raised and waits no more, so whoever comes
            later could not find them.
        is_single: whether no thread but the main one can make calls.
        running: where its main thread and the owners of its lanes are in the program.
    """

    asked: int
    main_thread: int
    lanes: tuple[LaneWait, ...]
    circles: tuple[Deadlock, ...] = ()
    is_single: bool = False
    running: tuple[Running, ...] = ()

    def waiting_since(self, group: str, number: int, since: float) -> LaneWait | None:
        """The state of one lane in one wait; ``None`` if that wait is over."""
        for lane in self.lanes:
            if (lane.group, lane.number, lane.since) == (group, number, since) and lane.now:
                return lane
        return None

    def lane(self, group: str, number: int) -> LaneWait | None:
        """The state of one lane; ``None`` if that process has not used it."""
        found = (lane for lane in self.lanes if (lane.group, lane.number) == (group, number))
        return next(found, None)

    def waiting_of(self, thread: int) -> LaneWait | None:
        """The lane on which a thread waits just now."""
        found = (lane for lane in self.lanes if lane.waiter == thread and lane.now is not None)
        return next(found, None) if thread else None


Fetch = Callable[[int], WaitSnapshot | None]


def find_deadlock(  # noqa: PLR0911  # each step of the search may end it
    rank: int, mine: WaitSnapshot, start: LaneWait, fetch: Fetch
) -> Deadlock | None:
    """Whether ``start``, a waiting lane of ``rank``, waits in vain.

    Args:
        rank: this process, as a global rank like all others here.
        mine: its whereabouts.
        start: one of its lanes, which waits.
        fetch: reads another rank's whereabouts; ``None`` if it does not answer.
    """
    holder, here, lane = rank, mine, start
    path: list[tuple[int, LaneWait, Step]] = []
    circles = list(mine.circles)
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
                reason = difference(*differing)
                ours, other = differing
                return Deadlock(reason, ((holder, lane, ours), (lane.awaits, their_lane, other)))
            if _is_under_way(lane, lane.now, their_lane, fetch):
                return None
        following = theirs.waiting_of(_serving(lane, here, their_lane, theirs))
        circles += theirs.circles
        if (
            following is None
            or _meet_each_other(holder, lane, following)
            or _is_ending(lane, lane.now, following, theirs, circles)
        ):
            return None
        holder, here, lane = lane.awaits, theirs, following
        met = [(other, each.group, each.number, each.since) for other, each, _ in path]
        wait = (holder, lane.group, lane.number, lane.since)
        if wait in met:
            circle = path[met.index(wait) :]
            if any(each.group == start.group for _, each, _ in circle):
                are_messages = all(_is_shared(each) for _, each, _ in circle)
                return Deadlock(NO_MATCH if are_messages else CIRCLE, tuple(circle))
            return None  # those ranks will raise, and may come here then
    return None


def _serving(
    lane: LaneWait, here: WaitSnapshot, theirs: LaneWait | None, there: WaitSnapshot
) -> int:
    """The thread of the awaited process that would make the call that ``lane`` waits for."""
    if _is_shared(lane):
        return there.main_thread if there.is_single else 0
    if theirs is not None:
        return theirs.thread
    return there.main_thread if lane.thread == here.main_thread else 0


def _is_of_one_mesh(lane: LaneWait, theirs: LaneWait, there: WaitSnapshot) -> bool:
    """Whether two ranks' states are of one mesh, whose name not both may know yet."""
    if lane.nonce == theirs.nonce:
        return True
    if _is_shared(lane):
        # The host of two that meet knows the name first. A name that is known where nobody meets
        # may be that of an earlier mesh.
        return not theirs.nonce or (not lane.nonce and _is_meeting(theirs, there))
    calls = [each.now is not None and each.now.sequence for each in (lane, theirs)]
    return calls == [MEETING, MEETING] and "" in (lane.nonce, theirs.nonce)


def _is_meeting(lane: LaneWait, there: WaitSnapshot) -> bool:
    """Whether some call waits on that lane for its ranks to meet."""
    return any(
        each.now is not None and each.now.sequence == MEETING
        for each in there.lanes
        if (each.group, each.number) == (lane.group, lane.number)
    )


def _is_under_way(lane: LaneWait, call: Step, theirs: LaneWait, fetch: Fetch) -> bool:
    """Whether the awaited rank has sent what ``lane`` waits for, or may be sending it."""
    if _is_shared(lane):
        return call.operation == Operation.RECV and theirs.next_sequence > lane.taken
    return theirs.next_sequence > call.sequence and not _has_sent_nothing(call, theirs, fetch)


def _has_sent_nothing(call: Step, theirs: LaneWait, fetch: Fetch) -> bool:
    """Whether the awaited rank is in the same call, and waits for one that has not begun it.

    A call that gathers along a tree, and then goes back along it, has sent nothing by then to ranks
    that are in it: below such a rank they wait for the way back, and above it for all below it.
    """
    now = theirs.now
    if now is None or now.sequence != call.sequence or call.operation not in _GATHERED_FIRST:
        return False
    third = fetch(theirs.awaits) if theirs.awaits >= 0 else None
    lane = None if third is None else third.lane(theirs.group, theirs.number)
    is_of_the_mesh = lane is not None and lane.nonce == theirs.nonce
    return is_of_the_mesh and lane is not None and lane.next_sequence <= call.sequence


def _is_ending(
    lane: LaneWait,
    call: Step,
    following: LaneWait,
    there: WaitSnapshot,
    circles: Iterable[Deadlock],
) -> bool:
    """Whether the mesh of one of two waits in a row has ended, so that who waits there is told.

    A group has one mesh at a time: who waits on another one than this rank has yet to hear, or this
    one has. A busy rank may hear later than others have asked it twice where it is. So may who
    waits beside a circle, where a mesh that has not met has no name to tell it from the next.
    """
    if any(circle.ends(lane.awaits, following, there) for circle in circles):
        return True
    are_known = bool(lane.nonce and following.nonce)
    if lane.group == following.group and are_known and lane.nonce != following.nonce:
        return True
    theirs = next((each for each in there.lanes if each.group == lane.group), None)
    if theirs is None or not lane.nonce or call.sequence == MEETING:
        return False
    return theirs.has_ended or theirs.nonce != lane.nonce


def _meet_each_other(holder: int, lane: LaneWait, following: LaneWait) -> bool:
    """Whether two ranks wait for each other only because they are connecting."""
    if lane.group != following.group or following.awaits != holder:
        return False
    return all(each.now and each.now.sequence == MEETING for each in (lane, following))


def _is_shared(lane: LaneWait) -> bool:
    """Whether any thread may use the lane, for messages from rank to rank."""
    return lane.taken >= 0


def _first_difference(mine: LaneWait, theirs: LaneWait) -> tuple[Step, Step] | None:
    by_sequence = {step.sequence: step for step in theirs.past}
    for step in mine.past:
        other = by_sequence.get(step.sequence)
        if other is not None and not step.agrees_with(other):
            return step, other
    return None


def difference(mine: Step | Position, theirs: Step | Position) -> str:
    """In what two calls differ that should be the same one."""
    if mine.operation != theirs.operation:
        return "other operations"
    if mine.root != theirs.root:
        return "other roots"
    return "other names" if mine.name != theirs.name else OTHER_OPTIONS
