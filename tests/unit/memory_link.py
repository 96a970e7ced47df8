"""A link between threads of one process, so that the routes can be tried at any world size."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from objcomm.algorithms.device import DevicePath
from objcomm.algorithms.exchange import Exchange
from objcomm.algorithms.transfers import Meter
from objcomm.config import Settings
from objcomm.observe.history import Entry
from objcomm.transport.lane import Lane
from objcomm.transport.link import Deadline, DeviceLink
from objcomm.wire.gate import Gate
from objcomm.wire.header import BLANK, EVERYONE, Header, Operation

JOIN_SECONDS = 120.0  # only a hang takes so long


class Wire:
    """One pair, direction and tag: what is sent meets what is posted, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: deque[torch.Tensor] = deque()
        self._posted: deque[Arrival] = deque()

    def put(self, flat: torch.Tensor) -> None:
        self._meet(self._sent, flat)

    def post(self, arrival: "Arrival") -> None:
        self._meet(self._posted, arrival)

    def left_over(self) -> int:
        """Messages that nobody has received."""
        return len(self._sent)

    def _meet(self, queue: deque[Any], item: Any) -> None:
        with self._lock:
            queue.append(item)
            while self._sent and self._posted:
                self._posted.popleft().fill(self._sent.popleft())


class Wires:
    """What all ranks' links share."""

    def __init__(self, size: int, hosts: Sequence[int] = ()) -> None:
        self.size = size
        self.hosts = tuple(hosts or [0] * size)
        self._lock = threading.Lock()
        self._wires: dict[tuple[int, int, int], Wire] = defaultdict(Wire)

    def between(self, source: int, destination: int, tag: int) -> Wire:
        with self._lock:
            return self._wires[source, destination, tag]

    def left_over(self) -> int:
        """Messages that nobody has received."""
        return sum(each.left_over() for each in self._wires.values())


class Arrival:
    """A receive under way."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self._has_come = threading.Event()
        self._is_too_long = False

    def fill(self, sent: torch.Tensor) -> None:
        self._is_too_long = sent.numel() > self._flat.numel()
        if not self._is_too_long:
            self._flat[: sent.numel()] = sent
        self._has_come.set()

    def wait(self, timeout: timedelta) -> bool:
        if not self._has_come.wait(timeout.total_seconds()):
            raise RuntimeError("timed out")
        assert not self._is_too_long, "Gloo would abort this process"
        return True


class Departure:
    """A send, which is always done."""

    def wait(self, timeout: timedelta) -> bool:
        del timeout
        return True


class MemoryLink:
    """See ``objcomm.transport.link.Link``; also a device link, where "the device" is the CPU."""

    device = torch.device("cpu")

    def __init__(self, wires: Wires, rank: int) -> None:
        self.rank = rank
        self.size = wires.size
        self.hosts = wires.hosts
        self.sent: list[tuple[int, int]] = []  # bytes and tag of each transfer
        self._wires = wires

    def send(self, flat: torch.Tensor, peer: int, tag: int = -1) -> Departure:
        assert flat.numel() > 0, "Gloo can't send nothing"
        self.sent.append((flat.numel(), tag))
        self._wires.between(self.rank, peer, tag).put(flat.clone())
        return Departure()

    def recv(self, flat: torch.Tensor, peer: int, tag: int = -1) -> Arrival:
        arrival = Arrival(flat)
        self._wires.between(peer, self.rank, tag).post(arrival)
        return arrival

    def is_flowing(self) -> bool:
        """See ``Link``."""
        return True

    def wait_apart(self, wait: Callable[[], None]) -> None:
        """See ``Link``; there is nothing that could be stuck."""
        wait()

    def abort(self) -> None:
        pass


class MemoryDeviceLink:
    """See ``objcomm.transport.link.DeviceLink``, over the same kind of wires."""

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
        parts = flat.chunk(self._link.size)
        self._swap(list(parts), into)

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        self._swap([flat] * self._link.size, into)

    def _swap(self, flats: list[torch.Tensor], into: torch.Tensor) -> None:
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
    return Exchange(
        link=link,
        lane=lane,
        entry=Entry(header_of(link.rank, **fields), "gather"),
        deadline=Deadline(seconds),
        gate=Gate(chosen or Settings(max_nbytes=1 << 30), "a mesh", link.rank),
        device=DevicePath(device_link),
        meter=meter,
    )


def new_lane() -> Lane:
    return Lane("", 0, threading.current_thread())


def on_every_rank(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Run ``body(rank)`` on a thread for each rank; return what they returned, or raise."""
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
    for thread in threads:
        thread.join(JOIN_SECONDS)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank still waits"
    return results
