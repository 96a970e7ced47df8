"""Match point-to-point messages that have arrived at one rank of a group with requests for them.

This module only matches and causes no traffic. A message goes to the first request that matches
its sender and tag. A request takes the earliest of the messages that match it. The cost of either
search does not depend on how many messages or requests are waiting.
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


# How many bytes of one peer's unrequested messages this rank keeps; the rest stay with the sender.
_KEPT_MAX_NBYTES = 64 << 20
# Maximum number of unmatched messages that an error lists.
_SHOWN = 3


@dataclass(slots=True, eq=False)
class Arrived:
    """A message whose first part has arrived.

    Attributes:
        peer: the sender.
        tag: its tag.
        nbytes: length of the whole message.
        header: its header; None if this rank sent it to itself.
        raw: its first part.
        mesh: the mesh over which it came.
        lane: the lane over which it came.
        obj: the object, if this rank sent it to itself.
        number: its number in the mailbox, in order of arrival.
        on_taken: called when an object that this rank sent to itself is received, if the sender
            waits for that.
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
        """Whether all of it has arrived."""
        return self.header is None or self.header.is_all_head

    def is_lost(self, verdict: Verdict | None) -> bool:
        """Return whether it is lost if its connection ends for the reason in ``verdict``.

        The missing part of an incomplete message can't arrive any more, and its sender gets the
        same verdict. A message sent before a block failed may be part of that block, so it must not
        be matched outside the block.
        """
        return verdict is not None and (not self.is_whole or verdict.cause is Cause.FAILED)

    @property
    def is_dead(self) -> bool:
        """Whether it is known to be lost because its connection has ended."""
        mesh = self.mesh
        return mesh is not None and mesh.verdict is not None and self.is_lost(mesh.verdict)


class RecvRequest:
    """A receive or probe that waits for a message.

    Attributes:
        src: the required sender; None for any.
        tag: the required tag; None for any.
        is_probe: whether the message stays in the mailbox.
        among: the ranks that may send it; None if not known yet. The loss of any other rank does
            not affect this request.
        arrival: the message that was found.
        verdict: why no message will come.
        number: its number in the mailbox, in the order in which requests were added; -1 before.
        on_lane: called with a rank and the lane of its new connection, over which the message may
            come, while the mailbox is locked.
        on_end: called once when ``arrival`` or ``verdict`` is set, on any thread, possibly during a
            step of a link. Must not raise. Returns False if the message can't be taken; the next
            request then gets it.
    """

    def __init__(
        self,
        src: int | None,
        tag: int | None,
        *,
        is_probe: bool = False,
        on_end: Callable[[], bool | None] | None = None,
    ) -> None:
        """Create a request that is not in a mailbox yet.

        Args:
            src: the required sender; None for any.
            tag: the required tag; None for any.
            is_probe: whether the message stays in the mailbox.
            on_end: see the attribute.
        """
        self.src = src
        self.tag = tag
        self.is_probe = is_probe
        self.among: frozenset[int] | None = None
        self.on_lane: Callable[[int, Lane], object] | None = None
        self.arrival: Arrived | None = None
        self.verdict: Verdict | None = None
        self.number = -1
        self.on_end = on_end

    def counts_on(self, peer: int) -> bool:
        """Return whether it accepts any sender, and ``peer`` could still send when it was added."""
        return self.src is None and (self.among is None or peer in self.among)

    def notify(self) -> bool:
        """Call ``on_end``, once; return whether a message can be taken."""
        on_end, self.on_end = self.on_end, None  # it may hold this request
        return on_end is None or on_end() is not False


#: A sender and a tag; None matches any.
_Pattern = tuple[int | None, int | None]


def _patterns(peer: int, tag: int) -> tuple[_Pattern, ...]:
    """Return the patterns of all requests that match a message."""
    return (peer, tag), (peer, None), (None, tag), (None, None)


class _Numbered(Protocol):
    number: int


N = TypeVar("N", bound=_Numbered)


class _Shelves(Generic[N]):
    """Waiting items, in the order of their numbers, both together and by pattern.

    Attributes:
        shelves: the items by pattern; no shelf is empty.
    """

    __slots__ = ("shelves",)

    def __init__(self) -> None:
        self.shelves: dict[_Pattern, OrderedDict[int, N]] = {}

    def put(self, each: N, patterns: tuple[_Pattern, ...]) -> None:
        """Add an item at the position of its number, which is usually the end."""
        for pattern in patterns:
            shelf = self.shelves.get(pattern)
            if shelf is None:
                shelf = self.shelves[pattern] = OrderedDict()
            is_behind = not shelf or next(reversed(shelf)) < each.number
            shelf[each.number] = each
            if not is_behind:
                self.shelves[pattern] = OrderedDict(sorted(shelf.items()))

    def take(self, each: N, patterns: tuple[_Pattern, ...]) -> bool:
        """Remove an item; return whether it was there."""
        is_here = False
        for pattern in patterns:
            shelf = self.shelves.get(pattern)
            is_here |= shelf is not None and shelf.pop(each.number, None) is not None
            if shelf is not None and not shelf:
                del self.shelves[pattern]
        return is_here

    def under(self, *patterns: _Pattern) -> Iterator[N]:
        """Iterate over all items under some patterns, in order."""
        shelves = []
        for each in patterns:
            shelf = self.shelves.get(each)
            if shelf is not None:
                shelves.append(shelf.values())
        if len(shelves) > 1:
            return heapq.merge(*shelves, key=_number)
        return iter(shelves[0] if shelves else ())

    def all(self) -> Iterator[N]:
        """Iterate over all items in order; each must have only one pattern."""
        return self.under(*self.shelves)


_EMPTY: OrderedDict[int, Arrived] = OrderedDict()


class Mailbox:
    """See the module docstring; each rank has one for each group.

    Attributes:
        is_interrupted: whether the caller is a handler or destructor that interrupted a step of the
            mailbox on the same thread.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Create an empty mailbox.

        Args:
            rank: this rank, within the group.
            size: number of ranks.
        """
        self._expected = set(range(size)) - {rank}
        self._sources: dict[int, object] = {}
        self._prompts: dict[int, Callable[[], object]] = {}
        self._numbers = itertools.count()
        self._lock = lock = guard()
        self.is_interrupted: Callable[[], bool] = lock._is_owned  # noqa: SLF001  # like Condition
        self._arrived = _Shelves[Arrived]()
        self._requests = _Shelves[RecvRequest]()
        self._kept_nbytes: dict[int, int] = {}
        self._credited: set[int] = set()  # peers that may exceed the limit by one message
        self._refused: set[int] = set()  # peers with a message that the limit held back
        self._dropped: deque[Arrived] = deque()  # taken out, and to be given back

    def expect(self, peer: int, source: object, prompt: Callable[[], object], lane: Lane) -> None:
        """Note that a rank can send, over its first connection or a new one.

        Args:
            peer: that rank.
            source: its new connection; a report that an older one has ended is ignored from now on.
            prompt: makes that connection ask again whether there is room.
            lane: the lane on which it sends; requests for any rank wait on it from now on.
        """
        with self._lock:
            self._sources[peer] = source
            self._prompts[peer] = prompt
            self._expected.add(peer)
            for each in self._requests.all():
                if each.on_lane is not None and each.counts_on(peer):
                    each.on_lane(peer, lane)

    def check_uninterrupted(self) -> None:
        """Check that a call on this thread can use the mailbox.

        Raises:
            UsageError: the caller is a handler or destructor that interrupted a step of it.
        """
        if self.is_interrupted():
            raise UsageError(interrupted("a step of another send or receive"))

    def look(self, src: int | None, tag: int | None) -> Arrived | None:
        """Return the message that a request would take now, without taking it."""
        self._give_back_dropped()
        with self._lock:
            return self._first((src, tag))

    def is_wanted(self, peer: int, tag: int) -> bool:
        """Return whether such a message would complete a waiting receive."""
        with self._lock:
            waiting = self._requests.under(*_patterns(peer, tag))
            return any(not each.is_probe for each in waiting)

    def poll(self, request: RecvRequest) -> Arrived | None:
        """Give ``request`` a message that has arrived, as ``meet`` does.

        If there is none, one more message may exceed the limit. Otherwise a caller that polls for a
        message behind a full mailbox would never see it.

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
        """Give ``request`` a message that has arrived; return whether there was one."""
        if self._dropped:
            self._give_back_dropped()
        with self._lock:
            is_met = self._serve(request)
        if self._refused:
            self._prompt()
        if is_met:
            self._notify(request)
        return is_met

    def ask(self, request: RecvRequest) -> None:
        """Give ``request`` a message that has arrived, or the first match that arrives later."""
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
            self._notify(request)

    def has_room(self, peer: int) -> bool:
        """Return whether ``peer`` may deliver another message; if not, it is prompted once it may.

        It may not while its messages exceed their limit and no request waits for it or any rank.
        """
        with self._lock:
            is_full = self._is_full(peer)
            (self._refused.add if is_full else self._credited.discard)(peer)
            return not is_full

    def _prompt(self) -> None:
        """Prompt the refused peers for which there is room again."""
        with self._lock:
            ready = {peer for peer in self._refused if not self._is_full(peer)}
            self._refused -= ready
        for peer in ready:
            self._prompts[peer]()

    def _serve(self, request: RecvRequest) -> bool:
        """Give ``request`` a message that has arrived, without calling ``on_end``."""
        found = self._first((request.src, request.tag))
        if found is not None and not request.is_probe:
            self._take(found)
        # Set under the same lock as the removal: if Ctrl-C comes before ``on_end`` is called, it is
        # known which message to give back.
        request.arrival = found
        return found is not None

    def _notify(self, request: RecvRequest) -> None:
        if not request.notify() and request.arrival is not None:
            self.give_back(request.arrival)

    def deliver(self, arrival: Arrived) -> None:
        """Add a message that has arrived."""
        if self._dropped:
            self._give_back_dropped()
        arrival.number = next(self._numbers)
        self._notify_all(arrival, self._served(arrival))

    def give_back(self, arrival: Arrived) -> None:
        """Give a message to a waiting request, or keep it ahead of all that arrived later."""
        self._notify_all(arrival, self._served(arrival))

    def drop(self, arrival: Arrived) -> None:
        """Give a message back from a destructor, which may have interrupted any step here.

        The next step begins by giving it back. A request may already be waiting for it, so a new
        thread does the same in case no step follows. Starting that thread takes no lock.
        """
        self._dropped.append(arrival)
        with contextlib.suppress(RuntimeError):  # no more threads can start, or the program ends
            _thread.start_new_thread(self._give_back_dropped, ())

    def _give_back_dropped(self) -> None:
        with self._lock:  # each is in its place before any other thread looks
            dropped = []
            while self._dropped:
                dropped.append(self._dropped.popleft())
            messages = [(each, self._served(each)) for each in sorted(dropped, key=_number)]
        for arrival, served in messages:
            self._notify_all(arrival, served)

    def _notify_all(self, arrival: Arrived, served: list[RecvRequest]) -> None:
        """Report a message to the requests that got it; if none can take it, serve the next."""
        while served:
            is_taken = True
            for request in served:
                is_taken &= request.notify()
            served = [] if is_taken else self._served(arrival)

    def _served(self, arrival: Arrived) -> list[RecvRequest]:
        """Return the requests that a message serves; keep the message if none of them takes it."""
        with self._lock:
            if arrival.is_dead:
                return []
            served: list[RecvRequest] = []
            patterns = _patterns(arrival.peer, arrival.tag)
            # Probes that are ahead of the receive see the message; those behind it do not.
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
        """Return sender and tag of the first few messages that came from a request's sender."""
        with self._lock:
            here = itertools.islice(self._arrived.under((request.src, None)), _SHOWN)
            return [(each.peer, each.tag) for each in here]

    def withdraw(self, request: RecvRequest, verdict: Verdict) -> None:
        """End a request by a verdict, now if it is waiting, otherwise as soon as it is added."""
        with self._lock:
            is_waiting = self._remove(request)
            if request.arrival is None and request.verdict is None:
                request.verdict = verdict
        if is_waiting:
            request.notify()

    def take_back(self, request: RecvRequest) -> bool:
        """Take a request back if it is still waiting; return whether it was."""
        with self._lock:
            is_taken = self._remove(request)
        if is_taken:
            request.on_end = None
        return is_taken

    def cancel(self, request: RecvRequest) -> None:
        """Take a request back, and any message that it was given, without calling ``on_end``."""
        with self._lock:
            self._remove(request)
        request.on_end = None
        if request.arrival is not None and not request.is_probe:
            self.give_back(request.arrival)

    def _remove(self, request: RecvRequest) -> bool:
        return self._requests.take(request, ((request.src, request.tag),))

    def fail(self, peer: int, source: object, verdict: Verdict, *, is_for_any: bool) -> None:
        """End the requests that wait for ``peer`` alone, and possibly those for any rank.

        Requests for any rank also end if no rank is left that can send.

        Complete messages outlive their connection, and come before those of the next connection.

        Args:
            peer: the rank whose connection has ended.
            source: that connection; nothing happens if there is a newer one.
            verdict: why it ended.
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
            request.notify()

    def _is_full(self, peer: int) -> bool:
        if self._kept_nbytes.get(peer, 0) <= _KEPT_MAX_NBYTES or peer in self._credited:
            return False
        return not any(src in {peer, None} for src, _ in self._requests.shelves)

    def _first(self, pattern: _Pattern) -> Arrived | None:
        for each in self._arrived.shelves.get(pattern, _EMPTY).values():
            if not each.is_dead:  # the end of its connection may not be reported here yet
                return each
        return None

    def _take(self, arrival: Arrived) -> None:
        self._arrived.take(arrival, _patterns(arrival.peer, arrival.tag))
        self._count(arrival, -len(arrival.raw))

    def _count(self, arrival: Arrived, nbytes: int) -> None:
        self._kept_nbytes[arrival.peer] = self._kept_nbytes.get(arrival.peer, 0) + nbytes


def _number(each: _Numbered) -> int:
    return each.number
