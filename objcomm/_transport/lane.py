"""An ordered sequence of operations over one link."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from objcomm._transport.link import Link, head_tag

if TYPE_CHECKING:
    from objcomm._observe.history import CallRecord
    from objcomm._transport.link import Deadline
    from objcomm._transport.threads import SerialExecutor, TicketQueue
    from objcomm._transport.workspace import Workspace


#: The lane of threads that take turns: it has no owner but whoever's turn it is.
IN_TURNS = "in turns"

# How many calls are reported to other ranks: a rank that only sends can be 16 ahead.
_PAST = 20


class Lane:
    """The calls of one thread at a time; other lanes of the same link can't mix with it.

    Attributes:
        name: as given to ``objcomm.lane``.
        number: what its tags and headers carry.
        order: of what is sent on a lane that joins two ranks for point-to-point calls, which any
            thread may make at any time; None where calls come one after another.
        sequence: operations started on it so far; messages sent, where there is an order.
        taken: messages of the other rank's that arrived, where there is an order.
        tag: of its first messages.
        taken_of: by peer: the number of the call in which its last first message was taken.
        owner: the thread that uses it.
        entry: the call whose ranks wait for each other just now, if there is one.
        p2p_calls: the same where there is an order, and so may be many.
        past: its latest calls.
        begun_at: the line of the call that its owner has begun and not left; empty without one.
        runner: the thread that carries ``entry`` out, as a number; its owner, or the line's.
        waiter: the thread that waits for a call which the line carries out; 0 if none does.
        line: carries out asynchronous calls, if there ever was one.
        owes: whether its thread has yet to raise the verdict that ended the link.
        workspace: of ranks that all share a host, once they have asked for one.
        has_asked: whether they have; there may be none.
    """

    def __init__(
        self, name: str, number: int, owner: threading.Thread, order: TicketQueue | None = None
    ) -> None:
        self.name = name
        self.number = number
        self.order = order
        self.sequence = 0
        self.taken = 0
        self.tag = head_tag(number)
        self.taken_of: dict[int, int] = {}
        self.owner = owner
        self.entry: CallRecord | None = None
        self.p2p_calls: set[CallRecord] = set()
        self.begun_at = ""
        self.runner = 0
        self.waiter = 0
        self.line: SerialExecutor | None = None
        self.owes = True
        self.workspace: Workspace | None = None
        self.has_asked = False
        self.past: deque[CallRecord] = deque(maxlen=_PAST)

    def begin(self, entry: CallRecord, deadline: Deadline) -> None:
        """Let the watchdog see that the calling thread waits in ``entry``, and start its limit."""
        now = entry.waits_since = time.monotonic()
        deadline.until = entry.waits_until = now + deadline.remaining
        entry.limit_seconds = deadline.seconds
        entry.report_at = now + deadline.settings.report_after
        entry.has_expired = False  # that was an earlier wait of the same call
        if self.order is None:
            self.runner = threading.get_ident()
            self.entry = entry
        else:
            self.p2p_calls.add(entry)

    def end(self, entry: CallRecord, deadline: Deadline) -> None:
        """The wait is over; the next one has what is left of the limit."""
        deadline.remaining = max(0.0, deadline.until - time.monotonic())
        if self.order is None:
            self.entry = None
        else:
            self.p2p_calls.discard(entry)

    def is_of(self, thread: threading.Thread) -> bool:
        """Whether a thread may use it, and raises what ended the link for it."""
        return self.order is not None or self.owner is thread

    def waits(self) -> list[CallRecord]:
        """All calls that wait just now."""
        entry = self.entry
        return [*self.p2p_calls.copy(), *([] if entry is None else [entry])]

    def has_waiting(self, entry: CallRecord) -> bool:
        """Whether a call waits just now."""
        return entry is self.entry or entry in self.p2p_calls

    @property
    def is_busy(self) -> bool:
        """Whether a call waits on it, or is in flight."""
        return bool(self.waits()) or (self.line is not None and not self.line.is_idle)

    def drain(self) -> None:
        """Wait until no asynchronous call is left."""
        if self.line is not None and not self.line.is_idle:
            self.waiter = threading.get_ident()
            try:
                self.line.drain()
            finally:
                self.waiter = 0

    @property
    def caller(self) -> str:
        """The call in which the calling thread is, which waits for it; empty if there is none.

        A callback's, or one that a signal's handler or a destructor has interrupted.
        """
        entry = self.entry
        if self.line is not None and self.line.is_here:
            return "an asynchronous call" if entry is None else _name_of(entry)
        if self.begun_at and self.owner is threading.current_thread():
            return f"the call at {self.begun_at}" if entry is None else _name_of(entry)
        is_inside = entry is not None and self.runner == threading.get_ident()
        return _name_of(entry) if entry is not None and is_inside else ""

    @property
    def waiting_thread(self) -> int:
        """The thread that can do nothing else before ``entry`` has ended; 0 if there is none."""
        return self.runner if self.runner == self.owner.ident else self.waiter

    def has_head_of(self, link: Link, peer: int, sequence: int) -> bool:
        """Whether a peer's first message for a call has come; False where the link can't tell."""
        return self.taken_of.get(peer) == sequence or link.has_come(peer, self.tag)


def _name_of(entry: CallRecord) -> str:
    return f"{entry.operation} at {entry.header.call_site}"
