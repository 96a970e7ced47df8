"""Counters of what each operation cost this rank."""

import threading
from dataclasses import dataclass


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
        self._by_operation: dict[str, list[float]] = {}

    def add(  # the fields of OperationStats
        self,
        operation: str,
        *,
        exchanges: int,
        sent_nbytes: int,
        received_nbytes: int,
        seconds: float,
    ) -> None:
        """Add one call's cost."""
        # A list that is added to in place: an object per call would cost 3 µs.
        with self._lock:
            totals = self._by_operation.setdefault(operation, [0, 0, 0, 0, 0.0])
            totals[0] += 1
            totals[1] += exchanges
            totals[2] += sent_nbytes
            totals[3] += received_nbytes
            totals[4] += seconds

    def snapshot(self) -> dict[str, OperationStats]:
        """The figures so far, by operation."""
        with self._lock:
            return {
                operation: OperationStats(
                    int(calls), int(rounds), int(sent), int(received), seconds
                )
                for operation, (
                    calls,
                    rounds,
                    sent,
                    received,
                    seconds,
                ) in self._by_operation.items()
            }

    def clear(self) -> None:
        """Begin at zero."""
        with self._lock:
            self._by_operation.clear()
