"""A link between threads of one process, so that the routes can be tried at any world size."""

import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from objcomm.frames import Header, Operation
from objcomm.history import Entry
from objcomm.transport.base import Deadline, DeviceLink
from objcomm.transport.device import DevicePath
from objcomm.transport.exchange import Exchange
from objcomm.transport.lane import Lane

JOIN_SECONDS = 20.0


class Wire:
    """One pair, direction and tag: receives are filled in the order in which they were posted."""

    def __init__(self) -> None:
        self.sent: queue.Queue[torch.Tensor] = queue.Queue()
        self.posted: deque[Arrival] = deque()


class Wires:
    """What all ranks' links share."""

    def __init__(self, size: int, *, is_one_host: bool = True) -> None:
        self.size = size
        self.is_one_host = is_one_host
        self._lock = threading.Lock()
        self._wires: dict[tuple[int, int, int], Wire] = defaultdict(Wire)

    def between(self, source: int, destination: int, tag: int) -> Wire:
        with self._lock:
            return self._wires[source, destination, tag]

    def left_over(self) -> int:
        """Messages that nobody has received."""
        return sum(each.sent.qsize() for each in self._wires.values())


class Arrival:
    """A receive under way."""

    def __init__(self, wire: Wire, flat: torch.Tensor) -> None:
        self._wire = wire
        self._flat = flat
        self._is_filled = False
        wire.posted.append(self)

    def wait(self, timeout: timedelta) -> bool:
        while not self._is_filled:
            try:
                sent = self._wire.sent.get(timeout=timeout.total_seconds())
            except queue.Empty as error:
                raise RuntimeError("timed out") from error
            self._wire.posted.popleft()._fill(sent)  # noqa: SLF001  # of its own kind
        return True

    def _fill(self, sent: torch.Tensor) -> None:
        assert sent.numel() <= self._flat.numel(), "Gloo would abort this process"
        self._flat[: sent.numel()] = sent
        self._is_filled = True


class Departure:
    """A send, which is always done."""

    def wait(self, timeout: timedelta) -> bool:
        del timeout
        return True


class MemoryLink:
    """See ``objcomm.transport.base.Link``; also a device link, where "the device" is the CPU."""

    device = torch.device("cpu")

    def __init__(self, wires: Wires, rank: int) -> None:
        self.rank = rank
        self.size = wires.size
        self.is_one_host = wires.is_one_host
        self.sent: list[tuple[int, int]] = []  # bytes and tag of each transfer
        self._wires = wires

    def send(self, flat: torch.Tensor, peer: int, tag: int = -1) -> Departure:
        assert flat.numel() > 0, "Gloo can't send nothing"
        self.sent.append((flat.numel(), tag))
        self._wires.between(self.rank, peer, tag).sent.put(flat.clone())
        return Departure()

    def recv(self, flat: torch.Tensor, peer: int, tag: int = -1) -> Arrival:
        return Arrival(self._wires.between(peer, self.rank, tag), flat)

    def abort(self) -> None:
        pass


class MemoryDeviceLink:
    """See ``objcomm.transport.base.DeviceLink``, over the same kind of wires."""

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


def header_of(rank: int, **fields: Any) -> Header:
    blank = dict.fromkeys(Header._fields, 0)
    texts = {"codec": "pickle", "call_site": "train.py:1", "root": -1}
    return Header(**{**blank, **texts, "operation": Operation.GATHER, "sender": rank, **fields})


def exchange_on(
    link: MemoryLink,
    lane: Lane,
    *,
    device_link: DeviceLink | None = None,
    seconds: float = JOIN_SECONDS,
    **fields: Any,
) -> Exchange:
    return Exchange(
        link=link,
        lane=lane,
        entry=Entry(header_of(link.rank, **fields), "gather"),
        deadline=Deadline(seconds),
        max_nbytes=1 << 30,
        device=DevicePath(device_link),
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
