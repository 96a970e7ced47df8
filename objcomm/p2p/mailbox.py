"""Messages from rank to rank that have come to one rank of a group, and who waits for them.

Pure matching, no traffic: a message goes to the first request that admits its sender and its tag,
and of several messages that a request admits it takes the one that came first.
"""

from __future__ import annotations  # torch may be built without distributed

import bisect
import itertools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from objcomm.failures.verdict import Cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from objcomm.failures.mesh import Mesh
    from objcomm.failures.verdict import Verdict
    from objcomm.transport.lane import Lane
    from objcomm.wire.header import Header


# What one rank keeps of another's before somebody asks for it; more waits on the sender.
_KEPT_MAX_NBYTES = 64 << 20


@dataclass(slots=True, eq=False)
class Arrived:
    """A message whose first part is here.

    Attributes:
        peer: who sent it.
        tag: its tag.
        nbytes: of the whole message.
        header: its header; None if this rank sent it to itself.
        raw: its first part.
        mesh: over which it came.
        lane: over which it came.
        obj: what this rank sent to itself.
        number: the mailbox's own, in the order of arrival.
    """

    peer: int
    tag: int
    nbytes: int
    header: Header | None = None
    raw: bytes = b""
    mesh: Mesh | None = None
    lane: Lane | None = None
    obj: Any = None
    number: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it has yet to come."""
        return self.header is None or self.header.is_all_head

    def is_lost(self, verdict: Verdict | None) -> bool:
        """Whether what ended its connection has ended it, too.

        What is not here whole can't come any more; its sender is told by the same verdict. What was
        sent before a block failed may be part of that block, which nothing outside of it may meet.
        """
        return verdict is not None and (not self.is_whole or verdict.cause is Cause.FAILED)

    @property
    def is_dead(self) -> bool:
        """Whether its connection is known to have ended, and it is lost with it."""
        return self.mesh is not None and self.is_lost(self.mesh.verdict)

    @property
    def origin(self) -> tuple[Header, Mesh, Lane] | None:
        """How it came; None if this rank sent it to itself."""
        if self.header is None or self.mesh is None or self.lane is None:
            return None
        return self.header, self.mesh, self.lane


class RecvRequest:
    """Somebody who waits for a message.

    Attributes:
        src: from this rank; None from any.
        tag: of this tag; None of any.
        is_probe: whether the message stays for somebody else.
        among: who may serve it; None if not known yet. That another one is gone is no news to it.
        arrival: what was found.
        verdict: why nothing will come.
    """

    def __init__(
        self,
        src: int | None,
        tag: int | None,
        *,
        is_probe: bool = False,
        on_end: Callable[[], bool | None],
    ) -> None:
        """Begin.

        Args:
            src: from this rank; None from any.
            tag: of this tag; None of any.
            is_probe: whether the message stays for somebody else.
            on_end: called once when ``arrival`` or ``verdict`` is there, on whichever thread. Must
                not raise; returns False if the message can't be taken: the next request gets it.
        """
        self.src = src
        self.tag = tag
        self.is_probe = is_probe
        self.among: frozenset[int] | None = None
        self.arrival: Arrived | None = None
        self.verdict: Verdict | None = None
        self._on_end = on_end

    def admits(self, peer: int, tag: int) -> bool:
        """Whether a message will do."""
        return self.src in (None, peer) and self.tag in (None, tag)

    def counts_on(self, peer: int) -> bool:
        """Whether it takes any rank's message, and was put when this one could still send."""
        return self.src is None and (self.among is None or peer in self.among)

    def tell(self) -> bool:
        """Let its maker know that it has ended; returns whether a message can be taken."""
        on_end, self._on_end = self._on_end, _nothing  # it may hold this request
        return on_end() is not False


class Mailbox:
    """See the module; one for each group on each rank."""

    def __init__(self, rank: int, size: int) -> None:
        """Begin.

        Args:
            rank: this one, within the group.
            size: number of ranks.
        """
        self._expected = set(range(size)) - {rank}
        self._sources: dict[int, object] = {}
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._arrived: list[Arrived] = []
        self._requests: list[RecvRequest] = []
        self._kept_nbytes: dict[int, int] = {}
        self._credited: set[int] = set()  # who may send one message more than there is room for

    def expect(self, peer: int, source: object) -> None:
        """A rank can send again, after its connection had ended.

        Args:
            peer: which.
            source: its new connection: what is told of the end of an older one counts no more.
        """
        with self._changed:
            self._sources[peer] = source
            self._expected.add(peer)

    def look(self, src: int | None, tag: int | None) -> Arrived | None:
        """The message that a request would take now; it stays."""
        with self._changed:
            return self._first(RecvRequest(src, tag, on_end=_nothing))

    def poll(self, src: int | None, tag: int | None) -> Arrived | None:
        """As ``look``; where there is none, one more message may come although there is no room.

        Else who polls for a message behind more than is kept would never see it.
        """
        with self._changed:
            found = self._first(RecvRequest(src, tag, on_end=_nothing))
            if found is None:
                self._credited |= self._expected if src is None else {src}
                self._changed.notify_all()
            return found

    def meet(self, request: RecvRequest) -> bool:
        """Give ``request`` a message that is here; returns whether there was one."""
        with self._changed:
            is_met = self._serve(request)
        if is_met:
            self._tell(request)
        return is_met

    def ask(self, request: RecvRequest) -> None:
        """Give ``request`` a message that is here, or the first that comes and it admits."""
        with self._changed:
            is_over = request.verdict is not None or self._serve(request)
            if not is_over:
                self._requests.append(request)
                self._changed.notify_all()
        if is_over:
            self._tell(request)

    def _serve(self, request: RecvRequest) -> bool:
        """Give ``request`` a message that is here, without telling anybody."""
        found = self._first(request)
        if found is not None and not request.is_probe:
            self._take(found)
        # Under the lock, like the next: where Ctrl-C comes before anybody is told, it is known
        # what to give back.
        request.arrival = found
        return found is not None

    def _tell(self, request: RecvRequest) -> None:
        if not request.tell() and request.arrival is not None:
            self.give_back(request.arrival)

    def deliver(self, arrival: Arrived) -> None:
        """Take a message in."""
        with self._changed:
            arrival.number = next(self._numbers)
        self.give_back(arrival)

    def give_back(self, arrival: Arrived) -> None:
        """Give a message to whoever waits for it, or put it before all that came later."""
        is_placed = False
        while not is_placed:
            told = [request.tell() for request in self._served(arrival)]
            is_placed = all(told)  # else who was to take it can't: the next one

    def _served(self, arrival: Arrived) -> list[RecvRequest]:
        """The requests that a message ends; where none of them takes it, it is kept."""
        with self._changed:
            if arrival.is_dead:
                return []
            met = [each for each in self._requests if each.admits(arrival.peer, arrival.tag)]
            takers = [each for each in met if not each.is_probe]
            # Probes that asked before the taker see it; those behind would see it gone.
            served = met[: met.index(takers[0]) + 1] if takers else met
            for request in served:
                self._requests.remove(request)
                request.arrival = arrival
            if not takers:
                bisect.insort(self._arrived, arrival, key=_number)
                self._count(arrival, len(arrival.raw))
            return served

    def withdraw(self, request: RecvRequest, verdict: Verdict) -> None:
        """End a request by a verdict, if it still waits, or as soon as it is put."""
        with self._changed:
            is_waiting = self._remove(request)
            if request.arrival is None and request.verdict is None:
                request.verdict = verdict
        if is_waiting:
            request.tell()

    def cancel(self, request: RecvRequest) -> None:
        """Take a request back, and with it a message that it was given; its maker knows."""
        with self._changed:
            self._remove(request)
        if request.arrival is not None and not request.is_probe:
            self.give_back(request.arrival)

    def _remove(self, request: RecvRequest) -> bool:
        is_waiting = request in self._requests
        if is_waiting:
            self._requests.remove(request)
        return is_waiting

    def fail(self, peer: int, source: object, verdict: Verdict, *, is_for_any: bool) -> None:
        """End the requests that wait for ``peer`` alone, or also those for any rank.

        Those end in any case when there is nobody left.

        Messages that are here whole outlive their connection, and come before those of the next.

        Args:
            peer: whose connection has ended.
            source: that connection; nothing happens if there is a newer one.
            verdict: why.
            is_for_any: whether requests for any rank end as well.
        """
        with self._changed:
            if self._sources.get(peer) is not source:
                return
            lost = [each for each in self._arrived if each.peer == peer and each.is_lost(verdict)]
            for arrival in lost:
                self._take(arrival)
            self._changed.notify_all()  # the connection's own thread, which may wait for room
            self._expected.discard(peer)
            ended = [
                each
                for each in self._requests
                if each.src == peer
                or (is_for_any and each.counts_on(peer))
                or (each.src is None and not self._expected)
            ]
            for request in ended:
                self._requests.remove(request)
                request.verdict = verdict
        for request in ended:
            request.tell()

    def await_room(self, peer: int, is_over: Callable[[], bool], seconds: float) -> None:
        """Block while ``peer``'s messages fill their share and nobody asks for another one."""
        with self._changed:
            while not is_over() and self._is_full(peer):
                self._changed.wait(seconds)
            self._credited.discard(peer)

    def _is_full(self, peer: int) -> bool:
        is_wanted = peer in self._credited
        is_wanted |= any(each.src in (None, peer) for each in self._requests)
        return self._kept_nbytes.get(peer, 0) > _KEPT_MAX_NBYTES and not is_wanted

    def _first(self, request: RecvRequest) -> Arrived | None:
        # A connection ends on another thread: one that has just ended may not be told of yet.
        found = (
            each
            for each in self._arrived
            if request.admits(each.peer, each.tag) and not each.is_dead
        )
        return next(found, None)

    def _take(self, arrival: Arrived) -> None:
        self._arrived.remove(arrival)
        self._count(arrival, -len(arrival.raw))
        self._changed.notify_all()

    def _count(self, arrival: Arrived, nbytes: int) -> None:
        self._kept_nbytes[arrival.peer] = self._kept_nbytes.get(arrival.peer, 0) + nbytes


def _number(arrival: Arrived) -> int:
    return arrival.number


def _nothing() -> None:
    """For a request that nobody waits for."""
