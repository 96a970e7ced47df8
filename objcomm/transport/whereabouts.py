"""Where one process is, on every lane it uses, as the other ranks read it in the store."""

from collections.abc import Iterable
from typing import NamedTuple, Self

import msgpack

from objcomm.errors import WireError
from objcomm.frames import Operation

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
        next_sequence: calls begun so far.
        now: the call under way, if the lane is waiting.
        awaits: the global rank that it can't go on without; -1 if none.
        seconds: since the wait began, or since the last call ended.
        past: the latest calls, the one under way included, oldest first.
    """

    group: str
    nonce: str
    number: int
    thread: int
    next_sequence: int
    now: Step | None
    awaits: int
    seconds: float
    past: tuple[Step, ...]


class Whereabouts(NamedTuple):
    """One process.

    Attributes:
        asked: the latest question that it answers, so that a reader knows how fresh this is.
        main_thread: the number of its main thread.
        lanes: all of them.
    """

    asked: int
    main_thread: int
    lanes: tuple[LaneState, ...]

    def lane(self, group: str, number: int) -> LaneState | None:
        """The state of one lane; ``None`` if that process has not used it."""
        found = (lane for lane in self.lanes if (lane.group, lane.number) == (group, number))
        return next(found, None)

    def waiting_of(self, thread: int) -> LaneState | None:
        """The lane on which a thread waits just now."""
        found = (lane for lane in self.lanes if lane.thread == thread and lane.now is not None)
        return next(found, None)

    def pack(self) -> bytes:
        """As bytes for the store."""
        packed: bytes = msgpack.packb(self, unicode_errors="surrogatepass")
        return packed

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """The inverse of ``pack``.

        Raises:
            WireError: another program wrote it.
        """
        try:
            asked, main_thread, lanes = msgpack.unpackb(raw, unicode_errors="surrogatepass")
            return cls(asked, main_thread, tuple(_lane(fields) for fields in lanes))
        except (ValueError, TypeError) as error:
            raise WireError("the store holds whereabouts that can't be read") from error


def _lane(fields: Iterable[object]) -> LaneState:
    lane = LaneState(*fields)  # type: ignore[arg-type]  # checked by use; it is only compared
    now = None if lane.now is None else Step(*lane.now)
    return lane._replace(now=now, past=tuple(Step(*step) for step in lane.past))
