"""The last calls of one group on this rank, which of them is under way, and what all have cost.

One entry per call, kept whole: what the watchdog compares with other ranks, what an error carries
and what ``objcomm.recorder.dump`` writes are all read from here. Knows headers; knows no ranks but
this one, and writes nothing anywhere.
"""

import heapq
import itertools
import math
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from objcomm._wire.header import Header
from objcomm.errors import Position, name_of

if TYPE_CHECKING:
    from collections.abc import Callable


#: Connections that were refused count under this name.
REFUSED = "refused"

#: Older ones are forgotten: 140 KiB for a group.
LENGTH = 256

#: How an operation that returned is recorded.
RETURNED = "returned"

#: How one that has not ended is.
UNDER_WAY = "under way"

#: Of the form in which a history is written down; a reader refuses others.
DUMP_VERSION = 1

# One for each time that the group's ranks met, so the first and some that failed.
_MEETINGS = 16


class CallRecord:
    """One call of an operation on this rank.

    Attributes:
        header: what its messages carry.
        operation: its name.
        codec: what this rank sends with.
        lane: its lane's name.
        began: when it was called, in seconds of ``time.time``.
        seconds: how long it took, negative while it is under way.
        sent_nbytes: bytes sent, to all ranks together.
        received_nbytes: bytes received.
        rounds: how often it had to wait for what depended on an earlier message.
        outcome: ``"returned"``, or the type of the error that it raised.
        waits_since: when it began to wait for other ranks, in seconds of ``time.monotonic``.
        waits_until: when its time limit passes.
        limit_seconds: that limit.
        has_own_limit: whether its caller gave it that limit, so that its wait is meant to end.
        report_at: when it will have waited long enough to be logged.
        awaits: the rank that it can't go on without just now; -1 if none.
        first_asked: the number of the first question where the others are that it made; 0 if none.
        first_asked_at: when that was, in seconds of ``time.monotonic``.
        unanswered: of ranks that seem lost, by global rank: the number of the first question since,
            when that was (seconds of ``time.monotonic``), and how many looks have found no answer.
        suspicion: what may keep it from ever ending, found once and to be confirmed.
        has_expired: whether its limit has been seen to pass in this wait.
        regions: the keys of the ``fail_together`` blocks around it.
        waiter: the thread that can do nothing else before it ends; 0 if there is none.
        is_served: whether what it waits for is under way.
        caller: the call that this one is part of; None if it is none's.
        is_confirmed: whether ranks tell each other how it went, so that it needs all of them.
        unmatched: gives sender and tag of messages that have come and that it does not match, of a
            receive that waits.
        withdraw: ends it by a verdict that ends nothing else; None where there is no such way.
    """

    # What a call begins with, so that only what differs is set.
    seconds = -1.0
    sent_nbytes = 0
    received_nbytes = 0
    rounds = 0
    outcome = ""
    waits_since = 0.0
    waits_until = 0.0
    limit_seconds = 0.0
    has_own_limit = False
    report_at = math.inf
    awaits = -1
    first_asked = 0
    first_asked_at = 0.0
    unanswered: dict[int, tuple[int, float, int]] | None = None
    suspicion: tuple[int, Any] | None = None
    has_expired = False
    regions: tuple[str, ...] = ()
    waiter = 0
    is_served = False
    caller: "CallRecord | None" = None
    is_confirmed = False
    unmatched: "Callable[[], list[tuple[int, int]]] | None" = None
    withdraw: "Callable[[Any], object] | None" = None

    def __init__(self, header: Header, operation: str, codec: str = "", lane: str = "") -> None:
        self.header = header
        self.operation = operation
        self.codec = codec
        self.lane = lane
        self.began = time.time()

    @property
    def is_over(self) -> bool:
        """Whether the call has returned or raised."""
        return self.seconds >= 0

    def end(self, error: BaseException | None, seconds: float) -> None:
        """The call has returned, or raised ``error``, after so many seconds."""
        self.outcome = RETURNED if error is None else name_of(type(error))
        self.seconds = seconds

    def position(self) -> Position:
        """Where this rank was or is, for an error's text."""
        age = time.time() - self.began - max(self.seconds, 0.0)
        position = self.header.position
        if position.sequence < 0:  # before its first call of all, the ranks meet
            position = position._replace(operation=self.operation, sequence=0)
        return position._replace(seconds=max(age, 0.0), is_over=self.is_over)

    def plain(self) -> dict[str, Any]:
        """All that is worth keeping, in JSON's types."""
        header, seconds = self.header, self.seconds
        return {
            "operation": self.operation,
            "sequence": header.sequence,
            "mesh": header.group,
            "lane": header.lane,
            "lane_name": self.lane,
            "root": header.root,
            "fingerprint": header.fingerprint,
            "codec": self.codec,
            "call_site": header.call_site,
            "began": self.began,
            "ms": None if seconds < 0 else round(seconds * 1e3, 4),
            "sent_nbytes": self.sent_nbytes,
            "received_nbytes": self.received_nbytes,
            "outcome": UNDER_WAY if seconds < 0 else self.outcome,
            "awaits": self.awaits if seconds < 0 else -1,
        }


class History:
    """A ring of entries; appending is atomic, so threads need no lock.

    Attributes:
        add: takes the latest call.
        add_meeting: takes a wait for the ranks to meet, which is part of a call and none itself.
        next_number: the number of the next call, in a group of one rank, which has no lanes.
        refused: how many connections were refused, and why the last one was.
    """

    def __init__(self, counters: "Counters | None" = None) -> None:
        """Begin.

        Args:
            counters: where refused connections count.
        """
        self._counters = counters or Counters()
        self.refused = 0, ""
        self._entries: deque[CallRecord] = deque(maxlen=LENGTH)
        self._meetings: deque[CallRecord] = deque(maxlen=_MEETINGS)
        self.add = self._entries.append
        self.add_meeting = self._meetings.append
        self.next_number = itertools.count().__next__

    def refuse(self, why: str) -> None:
        """Count a connection that was refused; several threads at once may lose one."""
        self._counters.add(REFUSED, (0, 0, 0), 0.0)
        self.refused = self.refused[0] + 1, why

    def entries(self) -> list[CallRecord]:
        """All that are remembered, oldest first."""
        return list(self._entries)

    def plain(self) -> list[dict[str, Any]]:
        """Calls in their order, with the meetings at the times when they began."""
        # Merged, not sorted: a clock may be set back, and is read a moment too late where another
        # process gets the processor in between. Copied first: other threads go on calling.
        both = heapq.merge(self._meetings.copy(), self._entries.copy(), key=lambda each: each.began)
        return [entry.plain() for entry in both]


def call_site() -> str:
    """The innermost ``file:line`` outside of objcomm."""
    frame = sys._getframe(1)  # noqa: SLF001  # inspect.stack() reads source files: a thousand times slower
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        is_inner = module.startswith("objcomm.") and not module.startswith("objcomm.demo")
        # contextlib stands between a ``with`` and a block that is a generator.
        if not is_inner and module != "contextlib":
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@dataclass(frozen=True, slots=True)
class OperationStats:
    """One operation's figures on this rank, summed over its calls.

    Attributes:
        calls: how often it was called.
        exchanges: rounds of messages, each of which had to wait for the one before.
        sent_nbytes: bytes sent, to all ranks together.
        received_nbytes: bytes received.
        seconds: time spent in it, waiting for other ranks included.
    """

    calls: int = 0
    exchanges: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0
    seconds: float = 0.0


class Counters:
    """The figures of one group, which several threads may add to.

    No lock: a signal's handler, or a destructor, may run here in the middle of its own thread's
    call. Each thread has totals of its own, and nothing gets a turn between a number's reading and
    writing.
    """

    def __init__(self) -> None:
        self._by_operation: dict[tuple[str, int], list[float]] = {}

    def add(self, operation: str, cost: tuple[int, int, int], seconds: float) -> None:
        """Add one call's cost.

        Args:
            operation: its name.
            cost: its rounds of messages, the bytes sent, and those received.
            seconds: how long it took.
        """
        # A list that is added to in place: an object per call would cost 3 µs.
        key = operation, threading.get_ident()
        totals = self._by_operation.get(key)
        if totals is None:
            totals = self._by_operation.setdefault(key, [0, 0, 0, 0, 0.0])
            self._inherit(operation, totals)
        exchanges, sent_nbytes, received_nbytes = cost
        totals[0] += 1
        totals[1] += exchanges
        totals[2] += sent_nbytes
        totals[3] += received_nbytes
        totals[4] += seconds

    def _inherit(self, operation: str, totals: list[float]) -> None:
        """Add the totals of threads that have ended to this thread's own, which only it changes.

        A program may start any number of threads, and must not keep something of each.
        """
        alive = {each.ident for each in threading.enumerate()}
        for key in tuple(self._by_operation):
            if key[0] == operation and key[1] not in alive:
                for at, each in enumerate(self._by_operation.pop(key, ())):
                    totals[at] += each

    def snapshot(self) -> dict[str, OperationStats]:
        """The figures so far, by operation."""
        found: dict[str, list[float]] = {}
        for (operation, _), totals in self._by_operation.copy().items():
            before = found.get(operation, (0, 0, 0, 0, 0.0))
            found[operation] = [sum(each) for each in zip(before, totals.copy(), strict=True)]
        return {
            operation: OperationStats(int(calls), int(rounds), int(sent), int(received), seconds)
            for operation, (calls, rounds, sent, received, seconds) in found.items()
        }

    def clear(self) -> None:
        """Begin at zero."""
        self._by_operation.clear()
