"""Model how ranks meet in a store before they connect, with the functions of the package.

The store answers one request after another, like torch's ``TCPStore``. The connections themselves
and the host's name lookups are not modeled.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bench.model.world import World
from objcomm._transport import rendezvous

# This query is answered in the client's own process.
_ASKS_NOBODY = "has_extended_api"


def meet(store: Any, rank: int, size: int) -> None:
    """Run one rank's part: meet all ranks, then remove its keys from the store."""
    progress = rendezvous.MeetingState(rank, tuple(range(size)))
    rendezvous.meet(store, rank, size, progress)
    rendezvous.forget(store, progress.nonce, size, ())


class CountingStore:
    """A store that counts the requests to it.

    Attributes:
        asked: number of requests.
    """

    def __init__(self, store: Any) -> None:
        self.asked = 0
        self._store = store

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        """Return the store's operation of that name, and count it."""
        self.asked += operation != _ASKS_NOBODY
        method: Callable[..., Any] = getattr(self._store, operation)
        return method


@contextlib.contextmanager
def bare_stores() -> Iterator[None]:
    """Make ``rendezvous`` work with stores other than torch's, by adding no prefix to keys."""
    with mock.patch.object(rendezvous, "under", lambda store, _: store):
        yield


class _ModelStore:
    """One rank's client of the store."""

    def __init__(self, world: World, rank: int, content: dict[str, bytes], seconds: float) -> None:
        self._world = world
        self._rank = rank
        self._content = content
        self._seconds = seconds

    def set(self, key: str, value: str) -> None:
        self._ask()
        self._content[key] = value.encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Supports only reading; see ``objcomm._transport.store.read``."""
        if expected != desired:
            raise NotImplementedError
        self._ask()
        return self._content.get(key, expected.encode())

    def has_extended_api(self) -> bool:
        return True

    def append(self, key: str, value: str) -> None:
        self._ask()
        self._content[key] = self._content.get(key, b"") + value.encode()

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        self._ask()
        for key, value in zip(keys, values, strict=True):
            self._content[key] = value.encode()

    def add(self, key: str, amount: int) -> int:
        self._ask()
        total = int(self._content.get(key, b"0")) + amount
        self._content[key] = str(total).encode()
        return total

    def delete_key(self, key: str) -> bool:
        self._ask()
        return self._content.pop(key, None) is not None

    def _ask(self) -> None:
        self._world.ask(self._rank, self._seconds)


def meet_in_model(world: World, store_seconds: float) -> dict[str, bytes]:
    """Make all ranks of a world meet; all arrive at the same time.

    Args:
        world: the ranks' world; afterwards its clocks and ``asked`` have the cost.
        store_seconds: how long a request keeps the store's host busy.

    Returns:
        What is left in the store.
    """
    content: dict[str, bytes] = {}
    here = threading.local()

    def sleep(seconds: float) -> None:
        world.clocks[here.rank] += seconds

    def now() -> float:
        seconds: float = world.clocks[here.rank]
        return seconds

    def machine() -> str:
        return f"host{world.hosts[here.rank]}"

    def on_rank(rank: int) -> None:
        here.rank = rank
        meet(_ModelStore(world, rank, content, store_seconds), rank, world.size)

    clock = SimpleNamespace(sleep=sleep, monotonic=now)
    with (
        bare_stores(),
        mock.patch.object(rendezvous, "time", clock),
        mock.patch.object(rendezvous, "machine", machine),
    ):
        world.run(on_rank)
    return content
