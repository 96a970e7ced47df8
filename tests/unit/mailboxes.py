"""Mailboxes, and requests for their messages."""

import threading
from dataclasses import dataclass, field
from typing import Any

from objcomm._failures.verdict import Cause, Verdict
from objcomm._p2p.mailbox import Arrived, Mailbox, RecvRequest
from objcomm._transport.lane import Lane

LOST = Verdict.of(Cause.LOST, ranks=(1,), reason="it died")
DESYNC = Verdict.of(Cause.DESYNC, reason="each waits for another")
FAILED = Verdict.of(Cause.FAILED)
#: Represents a connection to rank 1.
FIRST = object()
LANE = Lane("", 0, threading.main_thread())


def arrival(peer: int, tag: int = 0, obj: Any = None) -> Arrived:
    return Arrived(peer, tag, 0, obj=obj)


@dataclass
class Asked:
    """A request that records how often it was ended."""

    src: int | None = None
    tag: int | None = 0
    is_probe: bool = False
    ends: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.request = RecvRequest(
            self.src, self.tag, is_probe=self.is_probe, on_end=lambda: self.ends.append(1)
        )

    @property
    def arrived(self) -> Arrived:
        assert len(self.ends) == 1
        assert self.request.arrival is not None
        return self.request.arrival

    @property
    def got(self) -> Any:
        return self.arrived.obj


def filled(*arrivals: Arrived) -> Mailbox:
    box = Mailbox(0, 4)
    box.expect(1, FIRST, lambda: None, LANE)
    for each in arrivals:
        box.deliver(each)
    return box


def ask(
    box: Mailbox, src: int | None = None, tag: int | None = 0, *, is_probe: bool = False
) -> Asked:
    asked = Asked(src, tag, is_probe)
    box.ask(asked.request)
    return asked


def poll(box: Mailbox, src: int | None, tag: int | None, *, is_probe: bool = True) -> Any:
    return box.poll(Asked(src, tag, is_probe).request)
