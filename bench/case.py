"""What a benchmark declares: an operation, what it is tried on, and what it has to reach.

Knows nothing of clocks, processes or Markdown, so a suite stays a list of declarations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bench.peers import Peer

#: Binds one peer and one prepared payload to the call that is measured.
Bind = Callable[[Peer, Any], Callable[[], object]]

SECONDS = "seconds"
PROCESSOR_SECONDS = "processor_seconds"
PROCESSOR_SHARE = "processor_share"
#: The measure of a call that needs a world in which nobody has called yet.
FIRST_CALL = "first call"
JUDGED_WORLD = 4
#: Worlds so large that their ranks are forked from one process, see ``bench.launch``.
MANY_RANKS = (16, 32, 64)
SMALL = 150  # samples of a call that takes microseconds
LARGE = 9  # samples of a call that takes tenths of a second


@dataclass(frozen=True, slots=True)
class Target:
    """One figure that objcomm has to reach.

    Attributes:
        at_most: the largest value allowed, as a multiple of ``against``.
        against: the peer whose median of the same metric is the unit, or a number in the
            metric's own unit.
        unit: how the report writes the multiple's unit; by default the peer's name.
        metric: which figure is judged.
        world: where it is judged; elsewhere it is only shown.
        why_missed: the measured reason, which the report gives where the target is missed.
        peer: which form of objcomm has to reach it.
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
        """What one unit is, for a reader."""
        return self.unit or f"× {self.against}"


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on some payloads, measured in one way.

    Attributes:
        operation: the name on the command line and in the report.
        bind: makes the measured call for one peer and payload.
        payloads: names from ``payloads.PAYLOADS``.
        peers: names from ``peers.PEERS``, in the report's order.
        worlds: the world sizes it is tried at.
        measure: ``"time"``, or a measure of ``bench.memory``, each in processes of its own; or
            ``"first call"`` or ``"import"``.
        samples: how often each peer is measured; in fresh processes where it is not about time.
        in_a_row: calls in one sample of a time, during which each rank goes on as soon as it may.
        targets: what objcomm's figures must reach.
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
    """Declare the decorated function a benchmark; its name is the operation's."""

    def declare(bind: Bind) -> Bind:
        name = bind.__name__
        CASES.append(Case(name, bind, payloads, peers, worlds, measure, samples, in_a_row, targets))
        return bind

    return declare


def chosen(operation: str, world: int, *, timed: bool) -> Iterator[Case]:
    """The declared cases of one operation (or ``"all"``, or ``"memory"``) at one world size."""
    for known in CASES:
        is_timed = known.measure == "time"
        is_memory = not is_timed and known.measure != FIRST_CALL
        wanted = operation in ("all", known.operation) or (operation == "memory" and is_memory)
        if wanted and world in known.worlds and is_timed == timed:
            yield known
