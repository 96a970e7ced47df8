"""An ordered sequence of operations on one link."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from objcomm._transport.link import Link, head_tag

if TYPE_CHECKING:
    from objcomm._observe.history import CallRecord
    from objcomm._transport.link import Deadline
    from objcomm._transport.threads import SerialExecutor, TicketQueue
    from objcomm._transport.workspace import Workspace


#: The lane of threads that take turns; its owner is the thread whose turn it is.
IN_TURNS = "in turns"

# How many calls are reported to other ranks: a rank that only sends can be 16 ahead.
_PAST = 20


class Lane:
    """The calls of one thread at a time, kept apart from those of the link's other lanes.

    Attributes:
        name: as passed to ``objcomm.lane``.
        number: identifies the lane in tags and headers.
        order: the order of sends on a lane that joins two ranks for point-to-point calls, which any
            thread may make at any time; None where calls run one after another.
        sequence: number of operations started on the lane, or of messages sent if it has an
            ``order``.
        taken: number of messages received from the other rank, if the lane has an ``order``.
        tag: of its first messages.
        taken_of: by peer, the number of the call whose first message was taken last.
        owner: the thread that uses the lane.
        entry: the call whose ranks are waiting for each other, if there is one.
        p2p_calls: the calls that are waiting, if the lane has an ``order``: there may be several.
        past: its latest calls.
        begun_at: the line of the call that the owner is in; empty if it is in none.
        runner: identifier of the thread that runs ``entry``: the owner's or the line's.
        waiter: identifier of the thread that waits for a call run by the line; 0 if there is none.
        line: runs asynchronous calls; None before the first one.
        owes: whether the lane's thread has yet to raise the verdict that ended the link.
        workspace: memory shared by ranks that are all on one host, once they have asked for it.
        has_asked: whether they have asked for it; they may not have received any.
        device_path: moves members between the ranks' accelerators; None before the first call.
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
        self.device_path: Any = None
        self.past: deque[CallRecord] = deque(maxlen=_PAST)

    def begin(self, entry: CallRecord, deadline: Deadline) -> None:
        """Show the watchdog that this thread waits in ``entry``, and start its time limit."""
        now = entry.waits_since = time.monotonic()
        deadline.until = entry.waits_until = now + deadline.remaining
        entry.limit_seconds = deadline.seconds
        entry.report_at = now + deadline.settings.report_after
        entry.has_expired = False  # it was set by an earlier wait of the same call
        if self.order is None:
            self.runner = threading.get_ident()
            self.entry = entry
        else:
            self.p2p_calls.add(entry)

    def end(self, entry: CallRecord, deadline: Deadline) -> None:
        """End the wait, and leave what remains of the time limit to the next one."""
        deadline.remaining = max(0.0, deadline.until - time.monotonic())
        if self.order is None:
            self.entry = None
        else:
            self.p2p_calls.discard(entry)

    def is_of(self, thread: threading.Thread) -> bool:
        """Return whether a thread may use the lane and must raise the error that ended the link."""
        return self.order is not None or self.owner is thread

    def waits(self) -> list[CallRecord]:
        """Return all calls that are waiting."""
        entry = self.entry
        return [*self.p2p_calls.copy(), *([] if entry is None else [entry])]

    def has_waiting(self, entry: CallRecord) -> bool:
        """Return whether a call is waiting."""
        return entry is self.entry or entry in self.p2p_calls

    @property
    def is_busy(self) -> bool:
        """Whether a call is waiting or outstanding on the lane."""
        return bool(self.waits()) or (self.line is not None and not self.line.is_idle)

    def drain(self) -> None:
        """Wait until no asynchronous call is outstanding."""
        if self.line is not None and not self.line.is_idle:
            self.waiter = threading.get_ident()
            try:
                self.line.drain()
            finally:
                self.waiter = 0

    @property
    def caller(self) -> str:
        """The call that the calling thread is inside; empty if there is none.

        A thread is inside a call while it runs a callback, or a signal handler or destructor that
        interrupted the call. The call can't continue until that returns.
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
        """The thread that is blocked until ``entry`` has ended; 0 if there is none."""
        return self.runner if self.runner == self.owner.ident else self.waiter

    def has_head_of(self, link: Link, peer: int, sequence: int) -> bool:
        """Return whether a peer's first message for a call is known to have arrived."""
        return self.taken_of.get(peer) == sequence or link.has_come(peer, self.tag)


def _name_of(entry: CallRecord) -> str:
    return f"{entry.operation} at {entry.header.call_site}"
