"""The declaration of a benchmark: an operation, its payloads, and its targets.

Does not know about clocks, processes or Markdown, so a suite is only a list of declarations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bench.peers import Peer

#: Binds one peer and one prepared payload to the measured call.
Bind = Callable[[Peer, Any], Callable[[], object]]

SECONDS = "seconds"
PROCESSOR_SECONDS = "processor_seconds"
PROCESSOR_SHARE = "processor_share"
#: The measure of a call in a world in which no rank has made a call before.
FIRST_CALL = "first call"
JUDGED_WORLD = 4
#: World sizes for which ranks are forked from one process; see ``bench.launch``.
MANY_RANKS = (16, 32, 64)
SMALL = 150  # samples of a call that takes microseconds
LARGE = 9  # samples of a call that takes tenths of a second


@dataclass(frozen=True, slots=True)
class Target:
    """One figure that objcomm must reach.

    Attributes:
        at_most: the largest value allowed, as a multiple of ``against``.
        against: the peer whose median of the same metric is the unit, or a number in the
            metric's own unit.
        unit: the unit of the multiple in the report; defaults to the peer's name.
        metric: the metric that is judged.
        world: the world size at which it is judged; at others it is only shown.
        why_missed: the measured reason, which the report shows if the target is missed.
        peer: the form of objcomm that must reach it.
    """

    at_most: float
    against: str | float
    unit: str = ""
    metric: str = SECONDS
    world: int = JUDGED_WORLD
    why_missed: str = ""
    peer: str = "objcomm"

    @property
    def unit_label(self) -> str:
        """The unit as the report shows it."""
        return self.unit or f"× {self.against}"


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on some payloads, with one measure.

    Attributes:
        operation: the name on the command line and in the report.
        bind: creates the measured call for one peer and payload.
        payloads: names from ``payloads.PAYLOADS``.
        peers: names from ``peers.PEERS``, in the report's order.
        worlds: the world sizes at which it runs.
        measure: ``"time"``; or, each in separate processes, a measure of ``bench.memory``,
            ``"first call"`` or ``"import"``.
        samples: how often each peer is measured; in new processes for measures other than time.
        in_a_row: calls in one sample of a time, between which ranks do not wait for each other.
        targets: the targets for objcomm's figures.
    """

    operation: str
    bind: Bind
    payloads: tuple[str, ...]
    peers: tuple[str, ...]
    worlds: tuple[int, ...]
    measure: str
    samples: int
    in_a_row: int
    targets: tuple[Target, ...]


CASES: list[Case] = []


def case(
    *payloads: str,
    peers: tuple[str, ...] = ("objcomm", "torch", "raw", "mpi4py"),
    worlds: tuple[int, ...] = (2, 4, 8),
    measure: str = "time",
    samples: int = SMALL,
    in_a_row: int = 1,
    targets: tuple[Target, ...] = (),
) -> Callable[[Bind], Bind]:
    """Declare the decorated function as a benchmark; its name is that of the operation."""

    def declare(bind: Bind) -> Bind:
        name = bind.__name__
        CASES.append(Case(name, bind, payloads, peers, worlds, measure, samples, in_a_row, targets))
        return bind

    return declare


def chosen(operation: str, world: int, *, timed: bool) -> Iterator[Case]:
    """Yield the cases of one operation (or ``"all"``, or ``"memory"``) at one world size."""
    for known in CASES:
        is_timed = known.measure == "time"
        is_memory = not is_timed and known.measure != FIRST_CALL
        wanted = operation in ("all", known.operation) or (operation == "memory" and is_memory)
        if wanted and world in known.worlds and is_timed == timed:
            yield known
