"""Where one process is, on every lane it uses, as the other ranks read it in the store."""

from typing import NamedTuple, Self

from objcomm.frames import Operation
from objcomm.transport import record

#: The number of the call in which a group's ranks meet: before all others.
MEETING = -1


class Step(NamedTuple):
    """One call, as far as all ranks must agree on it."""

    sequence: int
    operation: int
    root: int
    fingerprint: int
    call_site: str
    operation_name: str = ""  # of the call that made the ranks meet, where operation is NONE
    name: str = ""  # of a barrier

    def agrees_with(self, other: "Step") -> bool:
        """Whether both can be the same call; a meeting serves any."""
        if Operation.NONE in (self.operation, other.operation):
            return True
        return self[1:4] == other[1:4]


class LaneState(NamedTuple):
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

    def is_over(self, step: Step) -> bool:
        """Whether a call of the lane's has returned."""
        is_last = self.is_inside and self.past[-1:] == (step,)
        return self.now is None and not is_last


class Conflict(NamedTuple):
    """Two or more ranks whose calls can't meet.

    Attributes:
        reason: what differs.
        found: each rank's lane and call.
        is_told: whether one of those ranks was sure of it, and has raised.
    """

    reason: str
    found: tuple[tuple[int, LaneState, Step], ...]
    is_told: bool = False

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

    def holds(self, rank: int, lane: LaneState) -> bool:
        """Whether ``lane`` of ``rank`` still waits where this was found."""
        wait = (rank, lane.group, lane.number, lane.since)
        return any(
            (other, state.group, state.number, state.since) == wait
            for other, state, _ in self.found
        )

    def pack(self) -> bytes:
        """As bytes for the store."""
        return record.pack(self)

    @classmethod
    def unpack(cls, raw: bytes) -> "Conflict":
        """The inverse of ``pack``.

        Raises:
            WireError: another program wrote it.
        """
        return record.unpack(raw, cls, "a circle")


class Whereabouts(NamedTuple):
    """One process.

    Attributes:
        asked: the latest question that it answers, so that a reader knows how fresh this is.
        main_thread: the number of its main thread.
        lanes: all of them.
        circles: the latest ones that it was in. It has raised and waits no more, so whoever comes
            later could not find them.
        is_single: whether no thread but the main one can make calls.
    """

    asked: int
    main_thread: int
    lanes: tuple[LaneState, ...]
    circles: tuple[Conflict, ...] = ()
    is_single: bool = False

    def waiting_since(self, group: str, number: int, since: float) -> LaneState | None:
        """The state of one lane in one wait; ``None`` if that wait is over."""
        for lane in self.lanes:
            if (lane.group, lane.number, lane.since) == (group, number, since) and lane.now:
                return lane
        return None

    def lane(self, group: str, number: int) -> LaneState | None:
        """The state of one lane; ``None`` if that process has not used it."""
        found = (lane for lane in self.lanes if (lane.group, lane.number) == (group, number))
        return next(found, None)

    def waiting_of(self, thread: int) -> LaneState | None:
        """The lane on which a thread waits just now."""
        found = (lane for lane in self.lanes if lane.waiter == thread and lane.now is not None)
        return next(found, None) if thread else None

    def pack(self) -> bytes:
        """As bytes for the store."""
        return record.pack(self)

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """The inverse of ``pack``.

        Raises:
            WireError: another program wrote it.
        """
        return record.unpack(raw, cls, "whereabouts")
