"""Messages from rank to rank that have come to one rank of a group, and who waits for them.

Pure matching, no traffic: a message goes to the first request that admits its sender and its tag,
and of several messages that a request admits it takes the one that came first.
"""

from __future__ import annotations  # torch may be built without distributed

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from objcomm.frames import Header
    from objcomm.transport.lane import Lane
    from objcomm.transport.mesh import Mesh
    from objcomm.transport.verdict import Verdict

# What one rank keeps of another's before somebody asks for it; more waits on the sender.
_KEPT_MAX_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
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
    """

    peer: int
    tag: int
    nbytes: int
    header: Header | None = None
    raw: bytes = b""
    mesh: Mesh | None = None
    lane: Lane | None = None
    obj: Any = None

    @property
    def origin(self) -> tuple[Header, Mesh, Lane] | None:
        """How it came; None if this rank sent it to itself."""
        if self.header is None or self.mesh is None or self.lane is None:
            return None
        return self.header, self.mesh, self.lane


class Request:
    """Somebody who waits for a message.

    Attributes:
        src: from this rank; None from any.
        tag: of this tag; None of any.
        is_probe: whether the message stays for somebody else.
        arrival: what was found.
        verdict: why nothing will come.
    """

    def __init__(
        self,
        src: int | None,
        tag: int | None,
        *,
        is_probe: bool = False,
        on_end: Callable[[], None],
    ) -> None:
        """Begin.

        Args:
            src: from this rank; None from any.
            tag: of this tag; None of any.
            is_probe: whether the message stays for somebody else.
            on_end: called once when ``arrival`` or ``verdict`` is there, on whichever thread.
        """
        self.src = src
        self.tag = tag
        self.is_probe = is_probe
        self.arrival: Arrival | None = None
        self.verdict: Verdict | None = None
        self._on_end = on_end

    def admits(self, peer: int, tag: int) -> bool:
        """Whether a message will do."""
        return self.src in (None, peer) and self.tag in (None, tag)

    def end(self, arrival: Arrival | None, verdict: Verdict | None) -> None:
        """Let its maker know."""
        self.arrival, self.verdict = arrival, verdict
        self._on_end()


class Mailbox:
    """See the module; one for each group on each rank."""

    def __init__(self, rank: int, size: int) -> None:
        """Begin.

        Args:
            rank: this one, within the group.
            size: number of ranks.
        """
        self._expected = set(range(size)) - {rank}
        self._changed = threading.Condition()
        self._arrived: list[Arrival] = []
        self._requests: list[Request] = []
        self._kept_nbytes: dict[int, int] = {}

    def expect(self, peer: int) -> None:
        """A rank can send again, after its connection had ended."""
        with self._changed:
            self._expected.add(peer)

    def look(self, src: int | None, tag: int | None) -> Arrival | None:
        """The message that a request would take now; it stays."""
        with self._changed:
            return self._first(Request(src, tag, on_end=_nothing))

    def ask(self, request: Request) -> None:
        """Give ``request`` a message that is here, or the first that comes and it admits."""
        with self._changed:
            found = self._first(request)
            if found is None:
                self._requests.append(request)
                self._changed.notify_all()
            elif not request.is_probe:
                self._take(found)
        if found is not None:
            request.end(found, None)

    def deliver(self, arrival: Arrival) -> None:
        """Take a message in."""
        with self._changed:
            met = [each for each in self._requests if each.admits(arrival.peer, arrival.tag)]
            takers = [each for each in met if not each.is_probe]
            # Probes that asked before the taker see it; those behind would see it gone.
            served = met[: met.index(takers[0]) + 1] if takers else met
            for request in served:
                self._requests.remove(request)
            if not takers:
                self._arrived.append(arrival)
                self._count(arrival, len(arrival.raw))
        for request in served:
            request.end(arrival, None)

    def give_back(self, arrival: Arrival) -> None:
        """Put a message back to where it was: before all that came later."""
        with self._changed:
            self._arrived.insert(0, arrival)
            self._count(arrival, len(arrival.raw))

    def withdraw(self, request: Request, verdict: Verdict | None) -> bool:
        """End a request without a message; returns whether it was still waiting."""
        with self._changed:
            if request not in self._requests:
                return False
            self._requests.remove(request)
        request.end(None, verdict)
        return True

    def fail(self, peer: int, verdict: Verdict, *, is_for_any: bool) -> None:
        """End the requests that wait for ``peer`` alone, or also those for any rank.

        Those end in any case when there is nobody left.

        What it has sent and nobody took is lost with the connection.
        """
        with self._changed:
            lost = [each for each in self._arrived if each.peer == peer]
            for arrival in lost:
                self._take(arrival)
            self._expected.discard(peer)
            is_for_any = is_for_any or not self._expected
            ended = [
                each
                for each in self._requests
                if each.src == peer or (is_for_any and each.src is None)
            ]
            for request in ended:
                self._requests.remove(request)
        for request in ended:
            request.end(None, verdict)

    def await_room(self, peer: int, is_over: Callable[[], bool], seconds: float) -> None:
        """Block while ``peer``'s messages fill their share and nobody asks for another one."""
        with self._changed:
            while not is_over() and self._is_full(peer):
                self._changed.wait(seconds)

    def _is_full(self, peer: int) -> bool:
        is_wanted = any(each.src in (None, peer) for each in self._requests)
        return self._kept_nbytes.get(peer, 0) > _KEPT_MAX_NBYTES and not is_wanted

    def _first(self, request: Request) -> Arrival | None:
        found = (each for each in self._arrived if request.admits(each.peer, each.tag))
        return next(found, None)

    def _take(self, arrival: Arrival) -> None:
        self._arrived.remove(arrival)
        self._count(arrival, -len(arrival.raw))
        self._changed.notify_all()

    def _count(self, arrival: Arrival, nbytes: int) -> None:
        self._kept_nbytes[arrival.peer] = self._kept_nbytes.get(arrival.peer, 0) + nbytes


def _nothing() -> None:
    """For a request that nobody waits for."""
