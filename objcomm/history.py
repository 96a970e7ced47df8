"""The last operations of one group on this rank, and which of them is under way.

One entry per call, kept whole: what the watcher compares with other ranks, what an error carries
and what ``objcomm.recorder.dump`` writes are all read from here. Knows headers; knows no ranks but
this one, and writes nothing anywhere.
"""

import time
from collections import deque

from objcomm.errors import Position
from objcomm.frames import Header

#: Older ones are forgotten: about 200 KiB for a group.
LENGTH = 256

#: How an operation that returned is recorded.
RETURNED = "returned"


class Entry:
    """One call of an operation on this rank.

    Attributes:
        header: what its messages carry.
        operation: its name.
        codec: what this rank sends with.
        began: when it was called, in seconds of ``time.time``.
        seconds: how long it took, negative while it is under way.
        sent_nbytes: bytes sent, to all ranks together.
        received_nbytes: bytes received.
        outcome: ``"returned"``, or the type of the error that it raised.
        waits_since: when it began to wait for other ranks, in seconds of ``time.monotonic``.
        waits_until: when its time limit passes.
        limit_seconds: that limit.
        awaits: the rank that it can't go on without just now; -1 if none.
        first_asked: the number of the first question where the others are that it made; 0 if none.
        suspicion: what may keep it from ever ending, found once and to be confirmed.
        has_expired: whether its limit has been seen to pass.
    """

    __slots__ = (
        "awaits",
        "began",
        "codec",
        "first_asked",
        "has_expired",
        "header",
        "limit_seconds",
        "operation",
        "outcome",
        "received_nbytes",
        "seconds",
        "sent_nbytes",
        "suspicion",
        "waits_since",
        "waits_until",
    )

    def __init__(self, header: Header, operation: str, codec: str = "") -> None:
        self.header = header
        self.operation = operation
        self.codec = codec
        self.began = time.time()
        self.seconds = -1.0
        self.sent_nbytes = 0
        self.received_nbytes = 0
        self.outcome = ""
        self.waits_since = 0.0
        self.waits_until = 0.0
        self.limit_seconds = 0.0
        self.awaits = -1
        self.first_asked = 0
        self.suspicion: object = None
        self.has_expired = False

    @property
    def is_over(self) -> bool:
        """Whether the call has returned or raised."""
        return self.seconds >= 0

    def position(self) -> Position:
        """Where this rank was or is, for an error's text."""
        age = time.time() - self.began - max(self.seconds, 0.0)
        return self.header.position._replace(seconds=max(age, 0.0), is_over=self.is_over)


class History:
    """A ring of entries; appending is atomic, so threads need no lock."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=LENGTH)
        self.add = self._entries.append

    def entries(self) -> list[Entry]:
        """All that are remembered, oldest first."""
        return list(self._entries)

    def last(self) -> Entry | None:
        """The latest call."""
        return self._entries[-1] if self._entries else None
