"""The latest calls of one group on this rank, finished or in progress, and the cost of all calls.

There is one record per call. The watchdog compares it with other ranks' calls, errors carry it, and
``objcomm.recorder.dump`` writes it. This module knows about headers, but not about other ranks, and
does not write files.
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


#: Refused connections are counted under this name.
REFUSED = "refused"

#: Number of calls remembered per group: 140 KiB.
LENGTH = 256

#: The outcome of a call that returned.
RETURNED = "returned"

#: The outcome of a call that has not ended.
UNDER_WAY = "under way"

#: Version of the dump format; a reader refuses other versions.
DUMP_VERSION = 1

# Number of rendezvous remembered per group: the first, and those after errors.
_MEETINGS = 16


class CallRecord:
    """One call of an operation on this rank.

    Times marked as monotonic are in seconds of ``time.monotonic``.

    Attributes:
        header: the header of its messages.
        operation: the name of the operation.
        codec: the name of the codec that this rank encodes with.
        lane: the name of the lane.
        began: when it was called, in seconds of ``time.time``.
        seconds: how long it took; negative while it is in progress.
        sent_nbytes: bytes sent, to all ranks together.
        received_nbytes: bytes received.
        rounds: number of waits for a message that depended on an earlier one.
        outcome: ``"returned"``, or the type name of the error that it raised.
        waits_since: when it began to wait for other ranks, monotonic.
        waits_until: when its timeout expires, monotonic.
        limit_seconds: the timeout.
        has_own_limit: whether the caller set a timeout for this wait, so that it will end anyway.
        report_at: when it will have waited long enough to be logged, monotonic.
        awaits: the rank that it currently waits for; -1 if none.
        first_asked: the number of its first question for other ranks' snapshots; 0 if none.
        first_asked_at: when it asked that question, monotonic.
        unanswered: for ranks that seem lost, by global rank: the number of the first unanswered
            question, when it was asked (monotonic), and how many checks have found no answer.
        suspicion: a possible deadlock, found once and still to be confirmed.
        has_expired: whether the watchdog has seen the timeout of this wait expire.
        blocks: the keys of the ``fail_together`` blocks around it.
        waiter: ident of the thread that is blocked until it ends; 0 if there is none.
        is_served: whether the message that it waits for is being transferred.
        caller: the call that this one is part of; None if there is none.
        is_confirmed: whether the ranks exchange their outcomes, so that it needs all of them.
        is_on_devices: whether it waits for a transfer between devices, which needs all ranks.
        unmatched: for a waiting receive, returns sender and tag of messages that are available but
            do not match.
        withdraw: ends only this call, by a verdict; None if it cannot be ended alone.
    """

    # Initial values as class attributes, so that only values that differ are stored per call.
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
    blocks: tuple[str, ...] = ()
    waiter = 0
    is_served = False
    caller: "CallRecord | None" = None
    is_confirmed = False
    is_on_devices = False
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
        """Record that the call has returned, or raised ``error``, after ``seconds``."""
        self.outcome = RETURNED if error is None else name_of(type(error))
        self.seconds = seconds

    def position(self) -> Position:
        """Return where this rank was or is, for error messages."""
        age = time.time() - self.began - max(self.seconds, 0.0)
        position = self.header.position
        if position.sequence < 0:  # a rendezvous, which precedes the first call
            position = position._replace(operation=self.operation, sequence=0)
        return position._replace(seconds=max(age, 0.0), is_over=self.is_over)

    def plain(self) -> dict[str, Any]:
        """Return the fields that belong in a dump, as JSON types."""
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
    """A ring buffer of call records. Appending is atomic, so threads do not need a lock.

    Attributes:
        add: appends a call.
        add_meeting: appends a rendezvous, which is part of a call and not a call itself.
        next_number: returns the next sequence number in a group of one rank, which has no lanes.
        refused: how many connections were refused, and why the last one was.
    """

    def __init__(self, counters: "Counters | None" = None) -> None:
        """Create an empty history.

        Args:
            counters: the counters for refused connections.
        """
        self._counters = counters or Counters()
        self.refused = 0, ""
        self._entries: deque[CallRecord] = deque(maxlen=LENGTH)
        self._meetings: deque[CallRecord] = deque(maxlen=_MEETINGS)
        self.add = self._entries.append
        self.add_meeting = self._meetings.append
        self.next_number = itertools.count().__next__

    def refuse(self, why: str) -> None:
        """Count a refused connection. The count may be too low if several threads call this."""
        self._counters.add(REFUSED, (0, 0, 0), 0.0)
        self.refused = self.refused[0] + 1, why

    def entries(self) -> list[CallRecord]:
        """Return all remembered calls, oldest first."""
        return list(self._entries)

    def plain(self) -> list[dict[str, Any]]:
        """Return calls and rendezvous as JSON types, in the order in which they began."""
        # Merged, not sorted: a clock may be set back, and is read late if the process is preempted.
        # Copied, because other threads keep adding calls.
        both = heapq.merge(self._meetings.copy(), self._entries.copy(), key=lambda each: each.began)
        return [entry.plain() for entry in both]


def call_site() -> str:
    """Return the innermost ``file:line`` outside objcomm."""
    frame = sys._getframe(1)  # noqa: SLF001  # inspect.stack() reads source files: a thousand times slower
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        is_inner = module.startswith("objcomm.") and not module.startswith("objcomm.demo")
        # A generator-based context manager is called through frames of contextlib.
        if not is_inner and module != "contextlib":
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@dataclass(frozen=True, slots=True)
class OperationStats:
    """The counters of one operation on this rank, summed over its calls.

    Attributes:
        calls: number of calls.
        exchanges: rounds of messages, each of which had to wait for the one before.
        sent_nbytes: bytes sent, to all ranks together.
        received_nbytes: bytes received.
        seconds: time spent in the operation, including waits for other ranks.
    """

    calls: int = 0
    exchanges: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0
    seconds: float = 0.0


class Counters:
    """The counters of one group, which several threads may add to.

    There is no lock, because a signal handler or destructor may interrupt its own thread here. Each
    thread has its own totals, and nothing can run between reading and writing a number.
    """

    def __init__(self) -> None:
        self._by_operation: dict[tuple[str, int], list[float]] = {}

    def add(self, operation: str, cost: tuple[int, int, int], seconds: float) -> None:
        """Add the cost of one call.

        Args:
            operation: the name of the operation.
            cost: number of message rounds, bytes sent, and bytes received.
            seconds: how long the call took.
        """
        # A list updated in place, because an object per call would cost 3 µs.
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
        """Add the totals of threads that have ended to this thread's totals.

        Otherwise a program that starts threads again and again would leak their totals.
        """
        alive = {each.ident for each in threading.enumerate()}
        for key in tuple(self._by_operation):
            if key[0] == operation and key[1] not in alive:
                for at, each in enumerate(self._by_operation.pop(key, ())):
                    totals[at] += each

    def snapshot(self) -> dict[str, OperationStats]:
        """Return the counters so far, by operation."""
        found: dict[str, list[float]] = {}
        for (operation, _), totals in self._by_operation.copy().items():
            before = found.get(operation, (0, 0, 0, 0, 0.0))
            found[operation] = [sum(each) for each in zip(before, totals.copy(), strict=True)]
        return {
            operation: OperationStats(int(calls), int(rounds), int(sent), int(received), seconds)
            for operation, (calls, rounds, sent, received, seconds) in found.items()
        }

    def clear(self) -> None:
        """Reset all counters to zero."""
        self._by_operation.clear()
