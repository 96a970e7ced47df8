"""Counters of what each operation cost this rank."""

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class OperationStats:
    """One operation's figures on this rank, summed over its calls.

    Attributes:
        calls: how often it was called.
        exchanges: rounds of messages, each of which had to wait for the one before.
        sent_nbytes: bytes sent, to all ranks together.
        received_nbytes: bytes received.
        seconds: time spent in it, waiting for other ranks included.
    """

    calls: int = 0
    exchanges: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0
    seconds: float = 0.0


class Counters:
    """The figures of one group, which several threads may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_operation: dict[str, OperationStats] = {}

    def add(self, operation: str, cost: OperationStats) -> None:
        """Add one call's cost."""
        with self._lock:
            before = self._by_operation.get(operation, OperationStats())
            self._by_operation[operation] = OperationStats(
                before.calls + cost.calls,
                before.exchanges + cost.exchanges,
                before.sent_nbytes + cost.sent_nbytes,
                before.received_nbytes + cost.received_nbytes,
                before.seconds + cost.seconds,
            )

    def snapshot(self) -> dict[str, OperationStats]:
        """The figures so far, by operation."""
        with self._lock:
            return {name: replace(each) for name, each in self._by_operation.items()}

    def clear(self) -> None:
        """Begin at zero."""
        with self._lock:
            self._by_operation.clear()
