"""Snapshots of what each process waits for, and the search for waits that can never end.

A wait can never end if the awaited rank makes a different call instead, or if following the chain
of awaited ranks leads back to its start. A rank that computes outside objcomm may still make the
call, so waiting for it is not a deadlock. This module causes no traffic itself.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from objcomm._observe.stacks import Running
from objcomm._wire.header import Operation
from objcomm.errors import CYCLE, NO_MATCH, OTHER_OPTIONS, Position

#: The sequence number of the rendezvous of a group's ranks, which precedes all calls.
MEETING = -1

# In these operations each rank first waits for its children in the tree.
_GATHERED_FIRST = frozenset({Operation.BARRIER, Operation.ALL_GATHER})

# If a deadlock was found up to this long ago, other waits on its groups are assumed to be about to
# end. Threads that were a second late have been observed.
_ENDING_WITHIN_SECONDS = 5.0


class Step(NamedTuple):
    """The properties of one call on which all ranks must agree, and how to show it."""

    sequence: int
    operation: int
    root: int
    fingerprint: int
    call_site: str
    operation_name: str = ""  # of the call that started the rendezvous, if operation is NONE
    name: str = ""  # the start of the call's name
    unmatched: str = ""  # description of the messages that a receive does not match

    def agrees_with(self, other: "Step") -> bool:
        """Whether both can be the same call; a rendezvous agrees with any call."""
        if Operation.NONE in (self.operation, other.operation):
            return True
        return self[1:4] == other[1:4]


class LaneWait(NamedTuple):
    """The state of one lane of one group in one process.

    Attributes:
        group: the group's name, the same on every rank.
        nonce: the nonce of the group's mesh; empty before its ranks have met.
        number: the lane's number.
        thread: ident of the thread that owns the lane, meaningful in that process only.
        waiter: ident of the thread that is blocked until the current call ends; 0 if none.
        next_sequence: number of calls begun; on a shared lane, of messages sent or queued.
        taken: on a shared lane, the number of messages received; -1 on other lanes.
        now: the current call, if the lane is waiting.
        awaits: the global rank without which it cannot continue; -1 if there is none, for example
            if the caller gave a receive its own timeout.
        since: when the wait began, by that process's clock; unique among the lane's waits.
        seconds: time since the wait began, or since the last call ended.
        past: the latest calls including the current one, oldest first.
        is_inside: whether the last call has not returned although the lane is not waiting: it
            is encoding, or in a callback.
        has_ended: whether there is a verdict on the mesh, so its waits are about to end.
        name: the lane's name, if the program has given it one.
        waits_for: the global rank that it waits for, even if ``awaits`` is -1 because the wait ends
            in any case; -1 if there is none.
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
    waits_for: int = -1

    def is_over(self, step: Step) -> bool:
        """Whether a call on the lane has returned."""
        is_last = self.is_inside and self.past[-1:] == (step,)
        return self.now is None and not is_last


class Deadlock(NamedTuple):
    """Two or more ranks whose calls can never match.

    Attributes:
        reason: what differs.
        found: rank, lane state and call of each.
        is_published: whether another rank has confirmed and published it, and has raised.
        known_seconds: how long the publishing process had known it when it published.
        known_since: since when it knew it, by that process's clock.
    """

    reason: str
    found: tuple[tuple[int, LaneWait, Step], ...]
    is_published: bool = False
    known_seconds: float = 0.0
    known_since: float = 0.0

    @property
    def is_of_one_lane(self) -> bool:
        """Whether it consists of calls with the same sequence number on one lane of one mesh.

        False for point-to-point messages and for rendezvous.
        """
        calls = {(state.nonce, state.number, step.sequence) for _, state, step in self.found}
        is_numbered = all(
            state.taken < 0 and step.sequence != MEETING for _, state, step in self.found
        )
        return len(calls) == 1 and is_numbered

    @property
    def waits(self) -> frozenset[tuple[int, str, int, float]]:
        """The waits it consists of, independent of which rank found it and when."""
        return frozenset(
            (rank, state.group, state.number, state.since) for rank, state, _ in self.found
        )

    def holds(self, rank: int, lane: LaneWait) -> bool:
        """Whether the current wait of ``lane`` on ``rank`` is one of the waits found."""
        return (rank, lane.group, lane.number, lane.since) in self.waits

    def ends(self, rank: int, wait: LaneWait, there: "WaitSnapshot") -> bool:
        """Whether a wait of ``rank`` is about to end together with the waits of this deadlock.

        A wait that began after the deadlock was reported is not. If that process knows of the
        deadlock, its own clock decides. Otherwise only the durations can be compared, and
        processes publish them at different moments.
        """
        is_recent = self.known_seconds <= min(wait.seconds, _ENDING_WITHIN_SECONDS)
        is_beside = any(wait.group == state.group for _, state, _ in self.found)
        return is_recent and is_beside and not self._is_before(rank, wait, there)

    def _is_before(self, rank: int, wait: LaneWait, there: "WaitSnapshot") -> bool:
        """Whether ``wait`` certainly began after its thread or process learned of the deadlock."""
        if any(
            other == rank and state.waiter == wait.waiter != 0 and state.since < wait.since
            for other, state, _ in self.found
        ):
            return True
        return any(
            each.known_since < wait.since for each in there.deadlocks if each.waits == self.waits
        )


class WaitSnapshot(NamedTuple):
    """What one process waits for, as published in the store.

    Attributes:
        asked: the number of the latest question that it answers, which shows how fresh it is.
        main_thread: ident of its main thread.
        lanes: the states of all its lanes.
        deadlocks: the latest deadlocks that it was part of. It has raised and no longer waits, so a
            rank that searches later could not find them.
        is_single: whether no thread but the main one can make calls.
        running: where its main thread, and those that own its lanes or wait on them, are in the
            program.
        taken_at: when it was taken, by that process's clock.
        calls: number of calls that the process has completed, on all groups.
        sent_nbytes: bytes that these calls have sent.
        received_nbytes: bytes that these calls have received.
    """

    asked: int
    main_thread: int
    lanes: tuple[LaneWait, ...]
    deadlocks: tuple[Deadlock, ...] = ()
    is_single: bool = False
    running: tuple[Running, ...] = ()
    taken_at: float = 0.0
    calls: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0

    def waiting_since(self, group: str, number: int, since: float) -> LaneWait | None:
        """Return the state of a lane during one wait; ``None`` if that wait is over."""
        for lane in self.lanes:
            if (lane.group, lane.number, lane.since) == (group, number, since) and lane.now:
                return lane
        return None

    def lane(self, group: str, number: int) -> LaneWait | None:
        """Return the state of a lane; ``None`` if that process has not used it."""
        found = (lane for lane in self.lanes if (lane.group, lane.number) == (group, number))
        return next(found, None)

    def waiting_of(self, thread: int) -> LaneWait | None:
        """Return the state of the lane on which a thread is waiting, if any."""
        found = (lane for lane in self.lanes if lane.waiter == thread and lane.now is not None)
        return next(found, None) if thread else None


Fetch = Callable[[int], WaitSnapshot | None]


def find_deadlock(  # noqa: PLR0911  # each step of the search may end it
    rank: int, mine: WaitSnapshot, start: LaneWait, fetch: Fetch
) -> Deadlock | None:
    """Search for a deadlock that ``start``, a waiting lane of ``rank``, is part of.

    Args:
        rank: this process. All ranks here are global ranks.
        mine: its snapshot.
        start: one of its lanes, which waits.
        fetch: reads another rank's snapshot; returns ``None`` if that rank does not answer.
    """
    holder, here, lane = rank, mine, start
    path: list[tuple[int, LaneWait, Step]] = []
    deadlocks = list(mine.deadlocks)
    while lane.now is not None:
        path.append((holder, lane, lane.now))
        theirs = fetch(lane.awaits) if lane.awaits >= 0 else None
        if theirs is None:
            return None
        published = next(
            (deadlock for deadlock in theirs.deadlocks if deadlock.holds(rank, start)), None
        )
        if published is not None:
            return published._replace(is_published=True)
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
        deadlocks += theirs.deadlocks
        if (
            following is None
            or _meet_each_other(holder, lane, following)
            or _is_ending(lane, lane.now, following, theirs, deadlocks)
        ):
            return None
        holder, here, lane = lane.awaits, theirs, following
        met = [(other, each.group, each.number, each.since) for other, each, _ in path]
        wait = (holder, lane.group, lane.number, lane.since)
        if wait in met:
            deadlock = path[met.index(wait) :]
            if any(each.group == start.group for _, each, _ in deadlock):
                are_messages = all(_is_shared(each) for _, each, _ in deadlock)
                return Deadlock(NO_MATCH if are_messages else CYCLE, tuple(deadlock))
            return None  # the ranks of that cycle will raise, and may then make this call
    return None


def _serving(
    lane: LaneWait, here: WaitSnapshot, theirs: LaneWait | None, there: WaitSnapshot
) -> int:
    """Return the thread of the awaited process that would make the call that ``lane`` awaits.

    0 if that is unknown.
    """
    if _is_shared(lane):
        return there.main_thread if there.is_single else 0
    if theirs is not None:
        return theirs.thread
    return there.main_thread if lane.thread == here.main_thread else 0


def _is_of_one_mesh(lane: LaneWait, theirs: LaneWait, there: WaitSnapshot) -> bool:
    """Whether two ranks' states belong to one mesh. One of them may not know its nonce yet."""
    if lane.nonce == theirs.nonce:
        return True
    if _is_shared(lane):
        # The host of the rendezvous of two ranks knows the nonce first. A nonce known to a rank
        # that is not in a rendezvous may be that of an earlier mesh.
        return not theirs.nonce or (not lane.nonce and _is_meeting(theirs, there))
    calls = [each.now is not None and each.now.sequence for each in (lane, theirs)]
    return calls == [MEETING, MEETING] and "" in (lane.nonce, theirs.nonce)


def _is_meeting(lane: LaneWait, there: WaitSnapshot) -> bool:
    """Whether a call waits on that lane for the rendezvous."""
    return any(
        each.now is not None and each.now.sequence == MEETING
        for each in there.lanes
        if (each.group, each.number) == (lane.group, lane.number)
    )


def _is_under_way(lane: LaneWait, call: Step, theirs: LaneWait, fetch: Fetch) -> bool:
    """Whether the awaited rank has sent, or may be sending, the message that ``lane`` awaits."""
    if _is_shared(lane):
        return call.operation == Operation.RECV and theirs.next_sequence > lane.taken
    return theirs.next_sequence > call.sequence and not _has_sent_nothing(call, theirs, fetch)


def _has_sent_nothing(call: Step, theirs: LaneWait, fetch: Fetch) -> bool:
    """Whether the awaited rank is in the same call, and waits for a rank that has not begun it.

    In an operation that first gathers up a tree and then sends results down, such a rank has not
    sent anything that a rank in the call still waits for: its children wait for the results, and
    its parent for the contribution of the whole subtree.
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
    deadlocks: Iterable[Deadlock],
) -> bool:
    """Whether one of two consecutive waits is about to end because its mesh has ended.

    A group has one mesh at a time. If two ranks wait on different meshes of a group, one of them
    has not heard of the verdict yet; a busy rank may hear of it only after others have asked for
    its snapshot twice. The same holds for a wait beside a known deadlock: a mesh whose ranks have
    not met does not have a nonce that distinguishes it from the next one.
    """
    if any(deadlock.ends(lane.awaits, following, there) for deadlock in deadlocks):
        return True
    are_known = bool(lane.nonce and following.nonce)
    if lane.group == following.group and are_known and lane.nonce != following.nonce:
        return True
    theirs = next((each for each in there.lanes if each.group == lane.group), None)
    if theirs is None or not lane.nonce or call.sequence == MEETING:
        return False
    return theirs.has_ended or theirs.nonce != lane.nonce


def _meet_each_other(holder: int, lane: LaneWait, following: LaneWait) -> bool:
    """Whether two ranks wait for each other only because both are in the same rendezvous."""
    if lane.group != following.group or following.awaits != holder:
        return False
    return all(each.now and each.now.sequence == MEETING for each in (lane, following))


def _is_shared(lane: LaneWait) -> bool:
    """Whether any thread may use the lane, as for point-to-point messages."""
    return lane.taken >= 0


def _first_difference(mine: LaneWait, theirs: LaneWait) -> tuple[Step, Step] | None:
    by_sequence = {step.sequence: step for step in theirs.past}
    for step in mine.past:
        other = by_sequence.get(step.sequence)
        if other is not None and not step.agrees_with(other):
            return step, other
    return None


def difference(mine: Step | Position, theirs: Step | Position) -> str:
    """Return how two calls differ that should have been the same."""
    if mine.operation != theirs.operation:
        return "different operations"
    if mine.root != theirs.root:
        return "different roots"
    return "different names" if mine.name != theirs.name else OTHER_OPTIONS
