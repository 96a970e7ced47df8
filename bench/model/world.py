"""Run ranks one at a time, each with its own simulated clock.

The rank with the earliest clock runs until it waits or is no longer the earliest. So shared
resources (a network card, a processor) are assigned in the order of simulated time. Does not know
what is sent.
"""

import heapq
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_STACK_NBYTES = 512 << 10  # a thread's default of 8 MiB is too much for 4,096


@dataclass(frozen=True, slots=True)
class Machine:
    """The hosts and the network between them, as input of the model.

    Attributes:
        cores: processors of a host that its ranks share; 0 if each rank has its own.
        near_seconds: latency of a message to another rank on its host.
        near_rate: bytes per second between the ranks of a host, all of them together.
        far_seconds: latency of a message to a rank on another host.
        far_rate: bytes per second of a host's network card, in each direction.
    """

    cores: int
    near_seconds: float
    near_rate: float
    far_seconds: float
    far_rate: float


@dataclass(slots=True)
class Count:
    """The messages and bytes that one rank, or one host's network card, has sent and received."""

    sent: int = 0
    sent_nbytes: int = 0
    received: int = 0
    received_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one operation.

    Attributes:
        seconds: time until the last rank returned.
        rounds: how often a rank waited for a message that depended on an earlier one; the most of
            any rank.
        messages: messages that the busiest rank sent and received.
        nbytes: bytes, likewise.
        card_nbytes: bytes of the busiest network card, in its busier direction.
        connections: the most ranks with which any rank has exchanged messages.
        mean_messages: as ``messages``, averaged over all ranks.
        mean_opened: objects that a rank has read out of messages, averaged over all ranks.
        sends: for each rank, its messages in order: destination and size in bytes.
    """

    seconds: float
    rounds: int
    messages: int
    nbytes: int
    card_nbytes: int
    connections: int
    mean_messages: float
    mean_opened: float
    sends: list[list[tuple[int, int]]]


class DeadlockError(RuntimeError):
    """All ranks that have not returned wait for each other."""


class Receive:
    """A pending receive.

    Attributes:
        came: the message, once it has been sent.
        at: when it arrives; negative until it has been sent.
    """

    def __init__(self) -> None:
        self.came: Any = None
        self.at = -1.0
        self.is_awaited = False


@dataclass(slots=True)
class _Wire:
    """The queues of one sender, receiver and tag."""

    sent: deque[tuple[float, Any]] = field(default_factory=deque)
    posted: deque[Receive] = field(default_factory=deque)


class World:
    """See the module.

    Attributes:
        hosts: the host of each rank, as a number.
        size: number of ranks.
        ranks: the counts of each rank.
        cards: the counts of each host's network card.
        sends: for each rank, its messages in order: destination and size in bytes.
        peers: for each rank, the ranks with which it has exchanged messages.
        clocks: the clock of each rank, in seconds.
        opened: for each rank, how many objects it has read out of messages.
        asked: for each rank, how many requests it has made to the store.
    """

    def __init__(self, hosts: Sequence[int], machine: Machine) -> None:
        """Create the world.

        Args:
            hosts: the host of each rank, as a number.
            machine: the properties of the hosts.
        """
        self.hosts = tuple(hosts)
        self.size = len(self.hosts)
        self._machine = machine
        self.ranks = [Count() for _ in self.hosts]
        self.cards: dict[int, Count] = defaultdict(Count)
        self.sends: list[list[tuple[int, int]]] = [[] for _ in self.hosts]
        self.peers: list[set[int]] = [set() for _ in self.hosts]
        self.clocks = [0.0] * self.size
        self.opened = [0] * self.size
        self.asked = [0] * self.size
        self._cores = {host: [0.0] * machine.cores for host in self.hosts}
        self._memory_is_free = dict.fromkeys(self.hosts, 0.0)
        self._store_is_free = 0.0
        self._card_gives = dict.fromkeys(self.hosts, 0.0)
        self._card_takes = dict.fromkeys(self.hosts, 0.0)
        self._wires: dict[tuple[int, int, int], _Wire] = defaultdict(_Wire)
        self._turns = [threading.Lock() for _ in self.hosts]
        self._nobody_can_run = threading.Lock()
        self._ready: list[tuple[float, int]] = []
        self._are_given_up = False

    def run(self, body: Callable[[int], object]) -> list[Any]:
        """Run ``body(rank)`` on every rank.

        Returns:
            The result of each rank.

        Raises:
            DeadlockError: some ranks wait for messages that no rank sends.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []
        returned = 0

        def be_a_rank(rank: int) -> None:
            nonlocal returned
            self._turns[rank].acquire()
            try:
                results[rank] = body(rank)
                returned += 1
            except BaseException as error:  # noqa: BLE001  # raised below
                errors.append(error)
            if not self._are_given_up:
                self._pass_on(is_over=bool(errors))  # after an error, others may poll forever

        for turn in (*self._turns, self._nobody_can_run):
            turn.acquire()
        before = threading.stack_size(_STACK_NBYTES)
        try:
            threads = [
                threading.Thread(target=be_a_rank, args=(rank,)) for rank in range(self.size)
            ]
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
        self._ready = [(0.0, rank) for rank in range(self.size)]
        self._pass_on()
        self._nobody_can_run.acquire()
        is_stuck = returned < self.size and not errors
        self._are_given_up = True
        for thread, turn in zip(threads, self._turns, strict=True):
            if thread.is_alive() and turn.locked():
                turn.release()
                thread.join()
        if is_stuck:
            raise DeadlockError(f"{self.size - returned} ranks wait for each other")
        if errors:
            raise errors[0]
        return results

    def spend(self, rank: int, seconds: float) -> None:
        """Let a rank compute, after waiting for a free processor if its host has too few."""
        cores = self._cores[self.hosts[rank]]
        if not cores:
            self.clocks[rank] += seconds
            return
        self._be_first(rank)
        self.clocks[rank] = max(self.clocks[rank], cores[0]) + seconds
        heapq.heapreplace(cores, self.clocks[rank])

    def ask(self, rank: int, seconds: float) -> None:
        """Send a request to the store, which is on a separate host, and wait for the answer.

        Args:
            rank: the rank that makes the request.
            seconds: how long the request keeps the store's host busy.
        """
        self._be_first(rank)
        way = self._machine.far_seconds
        self._store_is_free = max(self._store_is_free, self.clocks[rank] + way) + seconds
        self.clocks[rank] = self._store_is_free + way
        self.asked[rank] += 1

    def send(self, rank: int, peer: int, tag: int, nbytes: int, message: object) -> None:
        """Send a message. This takes no time on the sender; see ``spend``."""
        self._be_first(rank)
        at = self._arrival(rank, peer, nbytes)
        self.ranks[rank].sent += 1
        self.ranks[rank].sent_nbytes += nbytes
        self.ranks[peer].received += 1
        self.ranks[peer].received_nbytes += nbytes
        self.sends[rank].append((peer, nbytes))
        self.peers[rank].add(peer)
        self.peers[peer].add(rank)
        wire = self._wires[rank, peer, tag]
        if not wire.posted:
            wire.sent.append((at, message))
            return
        receive = wire.posted.popleft()
        receive.at, receive.came = at, message
        if receive.is_awaited:
            self.clocks[peer] = max(self.clocks[peer], at)
            heapq.heappush(self._ready, (self.clocks[peer], peer))

    def recv(self, rank: int, peer: int, tag: int) -> Receive:
        """Start to receive the next message from a peer with a tag."""
        receive = Receive()
        wire = self._wires[peer, rank, tag]
        if wire.sent:
            receive.at, receive.came = wire.sent.popleft()
        else:
            wire.posted.append(receive)
        return receive

    def wait(self, rank: int, receive: Receive) -> Any:
        """Wait for a message: advance the rank's clock to its arrival, and return the message."""
        if receive.at < 0:
            receive.is_awaited = True
            self._pass_on()
            self._take_turn(rank)
        self.clocks[rank] = max(self.clocks[rank], receive.at)
        return receive.came

    def outcome(self, rounds: int) -> Outcome:
        """Summarize what has happened so far."""
        cards = self.cards.values()
        messages = [each.sent + each.received for each in self.ranks]
        return Outcome(
            seconds=max(self.clocks),
            rounds=rounds,
            messages=max(messages),
            nbytes=max(each.sent_nbytes + each.received_nbytes for each in self.ranks),
            card_nbytes=max((max(c.sent_nbytes, c.received_nbytes) for c in cards), default=0),
            connections=max(map(len, self.peers)),
            mean_messages=sum(messages) / self.size,
            mean_opened=sum(self.opened) / self.size,
            sends=self.sends,
        )

    def left_over(self) -> int:
        """Return the number of messages that no rank has received."""
        return sum(len(wire.sent) for wire in self._wires.values())

    def _arrival(self, rank: int, peer: int, nbytes: int) -> float:
        now, here, there = self.clocks[rank], self.hosts[rank], self.hosts[peer]
        machine = self._machine
        if here == there:
            leaves = max(now, self._memory_is_free[here]) + nbytes / machine.near_rate
            self._memory_is_free[here] = leaves
            return leaves + machine.near_seconds
        for card, sent, received in ((self.cards[here], 1, 0), (self.cards[there], 0, 1)):
            card.sent += sent
            card.sent_nbytes += sent * nbytes
            card.received += received
            card.received_nbytes += received * nbytes
        moving = nbytes / machine.far_rate
        begins = max(now, self._card_gives[here])
        self._card_gives[here] = begins + moving
        begins = max(begins + machine.far_seconds, self._card_takes[there])
        self._card_takes[there] = begins + moving
        return begins + moving

    def _be_first(self, rank: int) -> None:
        """Let ranks with earlier clocks run first."""
        mine = (self.clocks[rank], rank)
        if self._ready and self._ready[0] < mine:
            heapq.heappush(self._ready, mine)
            self._pass_on()
            self._take_turn(rank)

    def _pass_on(self, *, is_over: bool = False) -> None:
        if self._ready and not is_over:
            self._turns[heapq.heappop(self._ready)[1]].release()
        else:
            self._nobody_can_run.release()

    def _take_turn(self, rank: int) -> None:
        self._turns[rank].acquire()
        if self._are_given_up:
            raise DeadlockError("nobody sends what this rank waits for")
