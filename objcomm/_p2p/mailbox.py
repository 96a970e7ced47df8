"""Messages from rank to rank that have come to one rank of a group, and who waits for them.

Pure matching, no traffic: a message goes to the first request that admits its sender and its tag,
and of several messages that a request admits it takes the one that came first. Neither search is
longer where there are thousands.
"""

from __future__ import annotations  # torch may be built without distributed

import _thread
import contextlib
import heapq
import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from objcomm._failures.verdict import Cause
from objcomm._transport.threads import guard, interrupted
from objcomm.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from objcomm._failures.mesh import Mesh
    from objcomm._failures.verdict import Verdict
    from objcomm._transport.lane import Lane
    from objcomm._wire.header import Header


# What one rank keeps of another's before somebody asks for it; more waits on the sender.
_KEPT_MAX_NBYTES = 64 << 20
# Of messages that a receive does not match, an error lists so many.
_SHOWN = 3


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
        on_taken: called when somebody receives what this rank sent to itself, if the sender waits.
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
    on_taken: Callable[[], object] | None = None

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
        mesh = self.mesh
        return mesh is not None and mesh.verdict is not None and self.is_lost(mesh.verdict)


class RecvRequest:
    """Somebody who waits for a message.

    Attributes:
        src: from this rank; None from any.
        tag: of this tag; None of any.
        is_probe: whether the message stays for somebody else.
        among: who may serve it; None if not known yet. That another one is gone is no news to it.
        arrival: what was found.
        verdict: why nothing will come.
        number: the mailbox's own, in the order in which requests were put; -1 before that.
        on_end: called once when ``arrival`` or ``verdict`` is there, on whichever thread, also in a
            step of a link. Must not raise; returns False if the message can't be taken: the next
            request gets it.
    """

    def __init__(
        self,
        src: int | None,
        tag: int | None,
        *,
        is_probe: bool = False,
        on_end: Callable[[], bool | None] | None = None,
    ) -> None:
        """Begin.

        Args:
            src: from this rank; None from any.
            tag: of this tag; None of any.
            is_probe: whether the message stays for somebody else.
            on_end: see the attribute.
        """
        self.src = src
        self.tag = tag
        self.is_probe = is_probe
        self.among: frozenset[int] | None = None
        self.arrival: Arrived | None = None
        self.verdict: Verdict | None = None
        self.number = -1
        self.on_end = on_end

    def counts_on(self, peer: int) -> bool:
        """Whether it takes any rank's message, and was put when this one could still send."""
        return self.src is None and (self.among is None or peer in self.among)

    def tell(self) -> bool:
        """Let its maker know that it has ended; returns whether a message can be taken."""
        on_end, self.on_end = self.on_end, None  # it may hold this request
        return on_end is None or on_end() is not False


#: A sender and a tag; None for any.
_Pattern = tuple[int | None, int | None]


def _patterns(peer: int, tag: int) -> tuple[_Pattern, ...]:
    """Those of all requests that admit a message."""
    return (peer, tag), (peer, None), (None, tag), (None, None)


class _Numbered(Protocol):
    number: int


N = TypeVar("N", bound=_Numbered)


class _Shelves(Generic[N]):
    """What waits, in the order of its numbers, and under each pattern by itself.

    Attributes:
        shelves: by pattern; none is empty.
    """

    __slots__ = ("shelves",)

    def __init__(self) -> None:
        self.shelves: dict[_Pattern, OrderedDict[int, N]] = {}

    def put(self, each: N, patterns: tuple[_Pattern, ...]) -> None:
        """Put something where its number belongs, which is behind all others as a rule."""
        for pattern in patterns:
            shelf = self.shelves.get(pattern)
            if shelf is None:
                shelf = self.shelves[pattern] = OrderedDict()
            is_behind = not shelf or next(reversed(shelf)) < each.number
            shelf[each.number] = each
            if not is_behind:
                self.shelves[pattern] = OrderedDict(sorted(shelf.items()))

    def take(self, each: N, patterns: tuple[_Pattern, ...]) -> bool:
        """Take it out again; returns whether it was there."""
        is_here = False
        for pattern in patterns:
            shelf = self.shelves.get(pattern)
            is_here |= shelf is not None and shelf.pop(each.number, None) is not None
            if shelf is not None and not shelf:
                del self.shelves[pattern]
        return is_here

    def under(self, *patterns: _Pattern) -> Iterator[N]:
        """All that stands under some patterns, in order."""
        shelves = []
        for each in patterns:
            shelf = self.shelves.get(each)
            if shelf is not None:
                shelves.append(shelf.values())
        if len(shelves) > 1:
            return heapq.merge(*shelves, key=_number)
        return iter(shelves[0] if shelves else ())

    def all(self) -> Iterator[N]:
        """All that stands under one pattern only, in order."""
        return self.under(*self.shelves)


_EMPTY: OrderedDict[int, Arrived] = OrderedDict()


class Mailbox:
    """See the module; one for each group on each rank.

    Attributes:
        is_interrupted: whether the calling thread has interrupted one of these steps.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Begin.

        Args:
            rank: this one, within the group.
            size: number of ranks.
        """
        self._expected = set(range(size)) - {rank}
        self._sources: dict[int, object] = {}
        self._prompts: dict[int, Callable[[], object]] = {}
        self._numbers = itertools.count()
        self._lock = lock = guard()
        self.is_interrupted: Callable[[], bool] = lock._is_owned  # noqa: SLF001  # as Condition asks
        self._arrived = _Shelves[Arrived]()
        self._requests = _Shelves[RecvRequest]()
        self._kept_nbytes: dict[int, int] = {}
        self._credited: set[int] = set()  # who may send one message more than there is room for
        self._refused: set[int] = set()  # those for whose messages there was no room
        self._dropped: deque[Arrived] = deque()  # taken out, and to be given back

    def expect(self, peer: int, source: object, prompt: Callable[[], object]) -> None:
        """A rank can send again, after its connection had ended.

        Args:
            peer: which.
            source: its new connection: what is told of the end of an older one counts no more.
            prompt: lets that connection ask again whether there is room.
        """
        with self._lock:
            self._sources[peer] = source
            self._prompts[peer] = prompt
            self._expected.add(peer)

    def check_uninterrupted(self) -> None:
        """See that a call of this thread can look, take something out or put something in.

        Raises:
            UsageError: it is a handler's or a destructor's, and has interrupted one that does.
        """
        if self.is_interrupted():
            raise UsageError(interrupted("a step of another send or receive"))

    def look(self, src: int | None, tag: int | None) -> Arrived | None:
        """The message that a request would take now; it stays."""
        self._give_back_dropped()
        with self._lock:
            return self._first((src, tag))

    def is_wanted(self, peer: int, tag: int) -> bool:
        """Whether a receive waits that such a message would end."""
        with self._lock:
            waiting = self._requests.under(*_patterns(peer, tag))
            return any(not each.is_probe for each in waiting)

    def poll(self, request: RecvRequest) -> Arrived | None:
        """Give ``request`` a message that is here, as ``meet`` does.

        Where there is none, one more message may come although there is no room: else who polls for
        a message behind more than is kept would never see it.

        Returns:
            The message, if there is one.
        """
        if not self.meet(request):
            with self._lock:
                self._credited |= self._expected if request.src is None else {request.src}
            if self._refused:
                self._prompt()
        return request.arrival

    def meet(self, request: RecvRequest) -> bool:
        """Give ``request`` a message that is here; returns whether there was one."""
        if self._dropped:
            self._give_back_dropped()
        with self._lock:
            is_met = self._serve(request)
        if self._refused:
            self._prompt()
        if is_met:
            self._tell(request)
        return is_met

    def ask(self, request: RecvRequest) -> None:
        """Give ``request`` a message that is here, or the first that comes and it admits."""
        if self._dropped:
            self._give_back_dropped()
        with self._lock:
            is_over = request.verdict is not None or self._serve(request)
            if not is_over:
                request.number = next(self._numbers)
                self._requests.put(request, ((request.src, request.tag),))
        if self._refused:
            self._prompt()
        if is_over:
            self._tell(request)

    def has_room(self, peer: int) -> bool:
        """Whether another message of ``peer``'s may come; if not, it is prompted when it may.

        None may while its messages fill their share and nobody asks for another one.
        """
        with self._lock:
            is_full = self._is_full(peer)
            (self._refused.add if is_full else self._credited.discard)(peer)
            return not is_full

    def _prompt(self) -> None:
        """Prompt those for whose messages there is room again."""
        with self._lock:
            ready = {peer for peer in self._refused if not self._is_full(peer)}
            self._refused -= ready
        for peer in ready:
            self._prompts[peer]()

    def _serve(self, request: RecvRequest) -> bool:
        """Give ``request`` a message that is here, without telling anybody."""
        found = self._first((request.src, request.tag))
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
        if self._dropped:
            self._give_back_dropped()
        arrival.number = next(self._numbers)
        self._tell_of(arrival, self._served(arrival))

    def give_back(self, arrival: Arrived) -> None:
        """Give a message to whoever waits for it, or put it before all that came later."""
        self._tell_of(arrival, self._served(arrival))

    def drop(self, arrival: Arrived) -> None:
        """As ``give_back``, from a destructor, which may run in the middle of any other step here.

        It is back before the next step begins. Somebody may wait for it already, so that another
        thread sees to it if nobody else does; it is started in a way that takes no lock.
        """
        self._dropped.append(arrival)
        with contextlib.suppress(RuntimeError):  # there can be no more threads, or the program ends
            _thread.start_new_thread(self._give_back_dropped, ())

    def _give_back_dropped(self) -> None:
        with self._lock:  # each is in its place before anybody else looks
            dropped = []
            while self._dropped:
                dropped.append(self._dropped.popleft())
            told = [(each, self._served(each)) for each in sorted(dropped, key=_number)]
        for arrival, served in told:
            self._tell_of(arrival, served)

    def _tell_of(self, arrival: Arrived, served: list[RecvRequest]) -> None:
        """Tell those whom a message has ended; where its taker can't take it, serve the next."""
        while served:
            is_taken = True
            for request in served:
                is_taken &= request.tell()
            served = [] if is_taken else self._served(arrival)

    def _served(self, arrival: Arrived) -> list[RecvRequest]:
        """The requests that a message ends; where none of them takes it, it is kept."""
        with self._lock:
            if arrival.is_dead:
                return []
            served: list[RecvRequest] = []
            patterns = _patterns(arrival.peer, arrival.tag)
            # Probes that asked before the taker see it; those behind would see it gone.
            for request in self._requests.under(*patterns):
                served.append(request)
                if not request.is_probe:
                    break
            for request in served:
                self._remove(request)
                request.arrival = arrival
            if not served or served[-1].is_probe:
                self._arrived.put(arrival, patterns)
                self._count(arrival, len(arrival.raw))
            return served

    def unmatched(self, request: RecvRequest) -> list[tuple[int, int]]:
        """Sender and tag of the first messages that have come from the rank that one waits for."""
        with self._lock:
            here = itertools.islice(self._arrived.under((request.src, None)), _SHOWN)
            return [(each.peer, each.tag) for each in here]

    def withdraw(self, request: RecvRequest, verdict: Verdict) -> None:
        """End a request by a verdict, if it still waits, or as soon as it is put."""
        with self._lock:
            is_waiting = self._remove(request)
            if request.arrival is None and request.verdict is None:
                request.verdict = verdict
        if is_waiting:
            request.tell()

    def take_back(self, request: RecvRequest) -> bool:
        """Take a request back, if it still waits; returns whether it did."""
        with self._lock:
            is_taken = self._remove(request)
        if is_taken:
            request.on_end = None
        return is_taken

    def cancel(self, request: RecvRequest) -> None:
        """Take a request back, and with it a message that it was given; its maker knows."""
        with self._lock:
            self._remove(request)
        request.on_end = None
        if request.arrival is not None and not request.is_probe:
            self.give_back(request.arrival)

    def _remove(self, request: RecvRequest) -> bool:
        return self._requests.take(request, ((request.src, request.tag),))

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
        with self._lock:
            if self._sources.get(peer) is not source:
                return
            here = self._arrived.under((peer, None))
            lost = [each for each in here if each.is_lost(verdict)]
            for arrival in lost:
                self._take(arrival)
            self._expected.discard(peer)
            ended = [
                each
                for each in self._requests.all()
                if each.src == peer
                or (is_for_any and each.counts_on(peer))
                or (each.src is None and not self._expected)
            ]
            for request in ended:
                self._remove(request)
                request.verdict = verdict
        for request in ended:
            request.tell()

    def _is_full(self, peer: int) -> bool:
        if self._kept_nbytes.get(peer, 0) <= _KEPT_MAX_NBYTES or peer in self._credited:
            return False
        return not any(src in {peer, None} for src, _ in self._requests.shelves)

    def _first(self, pattern: _Pattern) -> Arrived | None:
        for each in self._arrived.shelves.get(pattern, _EMPTY).values():
            if not each.is_dead:  # a connection that has just ended may not be told of yet
                return each
        return None

    def _take(self, arrival: Arrived) -> None:
        self._arrived.take(arrival, _patterns(arrival.peer, arrival.tag))
        self._count(arrival, -len(arrival.raw))

    def _count(self, arrival: Arrived, nbytes: int) -> None:
        self._kept_nbytes[arrival.peer] = self._kept_nbytes.get(arrival.peer, 0) + nbytes


def _number(each: _Numbered) -> int:
    return each.number
