"""A link between threads of one process, on which the routes run at any world size."""

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch

from objcomm._algorithms.device import DeviceLink, DevicePath
from objcomm._algorithms.exchange import Exchange
from objcomm._algorithms.transfers import Meter
from objcomm._config import Settings
from objcomm._observe.history import CallRecord
from objcomm._transport.lane import Lane
from objcomm._transport.link import PEER_LOST, Deadline, LinkClosed, LinkTimeout, Sharing
from objcomm._transport.share import Share
from objcomm._transport.threads import Signal
from objcomm._wire.admission import Gate
from objcomm._wire.header import BLANK, EVERYONE, WINDOW_NBYTES, Header, Operation
from objcomm._wire.message import Message

JOIN_SECONDS = 300.0  # only a hang takes this long


Way = tuple[int, int, int]  # source rank, destination rank, tag


class Wires:
    """What the links of all ranks share: on each way, sends meet posted receives in order.

    Attributes:
        size: number of ranks.
        hosts: the host of each rank.
        sharing: the hosts whose ranks hand large memory over to each other.
    """

    def __init__(self, size: int, hosts: Sequence[int] = (), sharing: Collection[int] = ()) -> None:
        self.size = size
        self.sharing = sharing
        self.hosts = tuple(hosts or [0] * size)
        self._lock = threading.Lock()
        self._sent: dict[Way, deque[Any]] = defaultdict(deque)
        self._posted: dict[Way, deque[Arrival]] = defaultdict(deque)
        self._ended_by: dict[frozenset[int], int] = {}

    def put(self, way: Way, sent: Any) -> None:
        self._meet(self._sent, way, sent)

    def post(self, way: Way, arrival: "Arrival") -> None:
        self._meet(self._posted, way, arrival)

    def _meet(self, queues: dict[Way, deque[Any]], way: Way, item: Any) -> None:
        with self._lock:
            queues[way].append(item)
            while self._sent[way] and self._posted[way]:
                self._posted[way].popleft().fill(self._sent[way].popleft())

    def end(self, rank: int, peer: int) -> None:
        """Close the connection of ``rank`` to ``peer``, which ends all waits on it."""
        with self._lock:
            self._ended_by.setdefault(frozenset({rank, peer}), rank)
            for ends, posted in self._posted.items():
                while {*ends[:2]} == {rank, peer} and posted:
                    posted.popleft().fail()

    def ended_by(self, rank: int, peer: int) -> int | None:
        """Return the rank that closed the connection between two ranks, if one did."""
        return self._ended_by.get(frozenset({rank, peer}))

    def left_over(self, way: Way | None = None) -> int:
        """Count the messages that no rank has received."""
        with self._lock:  # otherwise two threads may create the same queue, and one is lost
            queues = [self._sent[way]] if way else self._sent.values()
            return sum(map(len, queues))


class Arrival:
    """A receive in progress."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self._is_over = threading.Event()
        self._is_too_long = False
        self._has_failed = False

    def fill(self, sent: torch.Tensor) -> None:
        self._is_too_long = sent.numel() > self._flat.numel()
        if not self._is_too_long:
            self._flat[: sent.numel()] = sent
        self._is_over.set()

    def fail(self) -> None:
        self._has_failed = True
        self._is_over.set()

    def wait(self, limit: timedelta) -> None:
        if not self._is_over.wait(limit.total_seconds()):
            raise LinkTimeout("timed out")
        if self._has_failed:
            raise LinkClosed(PEER_LOST)
        assert not self._is_too_long, "a real link may end this process"

    def is_done(self) -> bool:
        return self._is_over.is_set() and not self._has_failed


class Handover(Arrival):
    """See ``objcomm._transport.link.Borrowed``.

    Attributes:
        came: the tensors that were handed over, as the sender has them.
    """

    def __init__(self, nbytes: int, peer: int) -> None:
        super().__init__(torch.empty(0, dtype=torch.uint8))
        self.peer = peer
        self.number = 0
        self.share: Share | None = None
        self.came: Sequence[torch.Tensor] = ()
        self._nbytes = nbytes

    def fill(self, sent: Any) -> None:
        self.share, self.came = sent
        assert sum(each.numel() for each in self.came) == self._nbytes
        self._is_over.set()


class Departure:
    """A send, which is always complete."""

    def wait(self, limit: timedelta) -> None:
        pass

    def is_done(self) -> bool:
        return True


class MemoryLink:
    """See ``objcomm._transport.link.Connections``; also a device link whose device is the CPU.

    It makes every demand that a real link may make.
    """

    kind = "memory"
    head_max_nbytes = WINDOW_NBYTES
    needs_last_byte_apart = True
    is_interruptible = False
    ahead = 4
    shares_memory = True
    device = torch.device("cpu")
    may_send_nothing = False  # an empty send costs a message, so no route should make one

    def __init__(self, wires: Wires, rank: int) -> None:
        self.rank = rank
        self.size = wires.size
        self.hosts = wires.hosts
        self.sent: list[tuple[int, int]] = []  # bytes and tag of each transfer
        self.crossed_nbytes = 0  # bytes of the transfers to other hosts
        self.wires = wires
        self._standing: dict[tuple[int, int], tuple[torch.Tensor, Arrival]] = {}

    def send(self, flat: Any, peer: int, tag: int = -1) -> Departure:
        if not isinstance(flat, torch.Tensor):
            pieces = flat if isinstance(flat, list) else [flat]
            flat = torch.frombuffer(bytearray().join(pieces), dtype=torch.uint8)
        assert flat.numel() > 0 or self.may_send_nothing, "a message without need"
        self._check(peer)
        self.sent.append((flat.numel(), tag))
        self.crossed_nbytes += flat.numel() * (self.hosts[peer] != self.hosts[self.rank])
        self.wires.put((self.rank, peer, tag), flat.clone())
        return Departure()

    def recv(self, flat: Any, peer: int, tag: int = -1) -> Arrival:
        arrival = Arrival(flat)
        self.wires.post((peer, self.rank, tag), arrival)
        # Checked after posting, because the connection may have been closed meanwhile.
        if self.is_closed(peer) and not arrival.is_done():
            self.wires.end(self.rank, peer)
            self._check(peer)
        return arrival

    def sharing_with(self, peer: int) -> Sharing | None:
        """See ``Link``."""
        host = self.hosts[self.rank]
        return self if host == self.hosts[peer] and host in self.wires.sharing else None

    def send_share(
        self, share: Share | None, flats: Sequence[torch.Tensor], peer: int, tag: int
    ) -> Departure:
        """See ``Sharing``: each receiver closes its own descriptors."""
        self._check(peer)
        theirs = None if share is None else Share([os.dup(each) for each in share.descriptors])
        assert theirs is None or theirs.is_fixed()
        self.wires.put((self.rank, peer, tag), (theirs, [each.clone() for each in flats]))
        return Departure()

    def recv_share(self, nbytes: int, peer: int, tag: int) -> Handover:
        """See ``Sharing``."""
        handover = Handover(nbytes, peer)
        self.wires.post((peer, self.rank, tag), handover)
        return handover

    def recv_instead(self, borrowed: Any, flats: Sequence[torch.Tensor]) -> Departure:
        """See ``Sharing``."""
        for flat, came in zip(flats, borrowed.came, strict=True):
            flat.copy_(came)
        return Departure()

    def wait(self, pending: Arrival | Departure, limit: timedelta) -> None:
        """See ``Link``."""
        pending.wait(limit)

    def expect(self, peers: Sequence[int], tag: int) -> None:
        """See ``Link``."""
        for peer in peers:
            is_left = self.wires.left_over((peer, self.rank, tag)) > 0
            if (peer, tag) not in self._standing and (is_left or not self.is_closed(peer)):
                room = torch.zeros(self.head_max_nbytes, dtype=torch.uint8)
                self._standing[peer, tag] = room, self.recv(room, peer, tag)

    def take(self, peer: int, tag: int, until: float) -> bytes:
        """See ``Link``."""
        self.expect([peer], tag)
        if (peer, tag) not in self._standing:
            raise LinkClosed(PEER_LOST)
        room, arrival = self._standing[peer, tag]
        left = min(until - time.monotonic(), JOIN_SECONDS)
        arrival.wait(timedelta(seconds=max(0.0, left)))
        del self._standing[peer, tag]
        return room.numpy().tobytes()

    def attend(self, peer: int, accepts: Mapping[int, Callable[[bytes], bool]]) -> NoReturn:
        """See ``Connections``."""
        kept: dict[int, bytes] = {}  # messages that were not accepted
        while True:
            ended: dict[int, LinkClosed] = {}
            for tag, accept in accepts.items():
                try:
                    if tag not in kept:
                        kept[tag] = self.take(peer, tag, time.monotonic() + 0.01)
                    if accept(kept[tag]):
                        del kept[tag]
                except LinkTimeout:
                    pass
                except LinkClosed as error:  # messages received before the end have yet to be taken
                    ended[tag] = error
            if len(ended) == len(accepts):
                raise ended.popitem()[1]

    def prompt(self, peer: int) -> None:
        """See ``Connections``: an unaccepted message is offered again in any case."""

    def signal(self) -> Signal:
        """See ``Connections``: messages move without help."""
        return Signal()

    def has_come(self, peer: int, tag: int) -> bool:
        """See ``Link``."""
        standing = self._standing.get((peer, tag))
        return standing is not None and standing[1].is_done()

    def came_late(self, peer: int, tag: int) -> bool:
        """See ``Link``."""
        return self.has_come(peer, tag)

    def move(self, *, is_awaited: bool = True) -> None:
        """Do nothing, because messages move without help."""

    def wait_apart(self, wait: Callable[[], None]) -> None:
        """See ``Link``; nothing here can get stuck."""
        wait()

    def abort(self, farewell: bytes = b"") -> None:  # noqa: ARG002  # no test needs it
        """See ``Connections``."""
        for peer in self._others():
            self.wires.end(self.rank, peer)

    def farewell_of(self, peer: int) -> bytes:  # noqa: ARG002  # likewise
        """See ``Connections``: this link carries no farewell."""
        return b""

    def call(self, peer: int) -> None:
        """See ``Connections``: all ranks are connected from the start."""

    def await_delivery(self, until: float) -> None:
        """See ``Connections``: sent messages have already arrived."""

    def closed(self) -> list[int]:
        """See ``Connections``."""
        return [peer for peer in self._others() if self.is_closed(peer)]

    def has_lost_any(self) -> bool:
        """See ``Connections``."""
        return bool(self.closed())

    def is_closed(self, peer: int) -> bool:
        """See ``Connections``."""
        return self.wires.ended_by(self.rank, peer) is not None

    def is_out_of_reach(self, peer: int) -> bool:  # noqa: ARG002  # no host is ever out of reach
        """See ``Connections``."""
        return False

    def has_lost_all(self) -> bool:
        return len(self.closed()) == len(self._others())

    def closed_by(self) -> list[int]:
        """See ``Connections``."""
        return [peer for peer in self._others() if self.wires.ended_by(self.rank, peer) == peer]

    def is_interrupted(self) -> bool:
        return False

    def has_unread(self, peer: int) -> bool:  # noqa: ARG002  # sent messages have already arrived
        """See ``Connections``."""
        return False

    def unread(self) -> list[bytes]:
        """See ``Connections``: messages stay on their wire until a receive asks for them."""
        return []

    def refuse(self) -> None:
        """See ``Connections``."""

    def beside(self, peers: Sequence[int]) -> list[int]:
        """See ``Connections``."""
        hosts = {self.hosts[peer] for peer in peers}
        return [peer for peer in self._others() if self.hosts[peer] in hosts]

    def _others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _check(self, peer: int) -> None:
        if self.is_closed(peer):
            raise LinkClosed(PEER_LOST)


class MemoryDeviceLink:
    """See ``objcomm._algorithms.device.DeviceLink``, over the same kind of wires."""

    device = torch.device("cpu")

    def __init__(self, wires: Wires, rank: int) -> None:
        self._link = MemoryLink(wires, rank)
        self.carried = 0

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        if self._link.rank != root:
            self.recv(flat, root)
            return
        for peer in range(self._link.size):
            if peer != root:
                self.send(flat, peer)

    def send(self, flat: torch.Tensor, peer: int) -> None:
        self.carried += 1
        self._link.send(flat, peer)

    def recv(self, flat: torch.Tensor, peer: int) -> None:
        self._link.recv(flat, peer).wait(timedelta(seconds=JOIN_SECONDS))

    def all_to_all(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        self._swap(flat.chunk(self._link.size), into)

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        self._swap([flat] * self._link.size, into)

    def abort(self) -> None:
        """End nothing."""

    def _swap(self, flats: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        rooms = into.chunk(self._link.size)
        for peer, flat in enumerate(flats):
            if peer != self._link.rank:
                self.send(flat, peer)
        for peer, room in enumerate(rooms):
            if peer != self._link.rank:
                self.recv(room, peer)
        rooms[self._link.rank].copy_(flats[self._link.rank])


def header_of(rank: int, **fields: Any) -> Header:
    blank = dict.fromkeys(Header._fields, 0)
    texts = {"codec": "pickle", "call_site": "train.py:1", "root": -1, "name": ""}
    texts.update(destination=EVERYONE, digest=BLANK, signature=BLANK)
    return Header(**{**blank, **texts, "operation": Operation.GATHER, "sender": rank, **fields})


def exchange_on(
    link: MemoryLink,
    lane: Lane,
    *,
    device_link: DeviceLink | None = None,
    seconds: float = JOIN_SECONDS,
    chosen: Settings | None = None,
    meter: Meter | None = None,
    **fields: Any,
) -> Exchange:
    path = DevicePath([] if device_link is None else [device_link])
    return Exchange(
        link=link,
        lane=lane,
        entry=CallRecord(header_of(link.rank, **fields), "gather"),
        deadline=Deadline(seconds),
        gate=Gate(chosen or Settings(max_nbytes=1 << 30), "a mesh", link.rank, path.devices),
        device=path,
        meter=meter,
    )


def first_bytes(message: Message) -> bytes:
    """Return the bytes of a message that are sent first, unsigned."""
    return bytes(Gate(Settings(), "").head_of(message))


def new_lane() -> Lane:
    return Lane("", 0, threading.current_thread())


def on_every_rank(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Run ``body(rank)`` on one thread per rank, and return the results or raise."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:  # noqa: BLE001  # raised below, on the test's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + JOIN_SECONDS
    while not errors and any(thread.is_alive() for thread in threads) and time.monotonic() < until:
        for thread in threads:
            thread.join(0.05)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank still waits"
    return results


class WideLink(MemoryLink):
    """A link whose first messages may exceed a window, as on streams."""

    head_max_nbytes = 2 << 20


def linked(
    size: int,
    hosts: Sequence[int] = (),
    sharing: Collection[int] = (),
    kind: type[MemoryLink] = MemoryLink,
) -> list[MemoryLink]:
    """Return the links of this many ranks."""
    wires = Wires(size, hosts, sharing)
    return [kind(wires, rank) for rank in range(size)]


def sent_to_rank_0(
    messages: Mapping[int, Message], size: int = 2, kind: type[MemoryLink] = MemoryLink, **own: Any
) -> Exchange:
    """Return rank 0's exchange after each of these ranks has sent it the head of a message."""
    wires = Wires(size)
    for rank, message in messages.items():
        exchange = exchange_on(kind(wires, rank), new_lane())
        exchange.send_head(message, [0], may_be_whole=True)
    return exchange_on(kind(wires, 0), new_lane(), **own)
