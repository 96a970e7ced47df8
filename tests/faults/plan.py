"""Which fault strikes which rank, in which operation and phase, and what the others must see.

Declarations only: ``run`` runs them, ``table`` writes the results.
"""

from collections.abc import Iterator
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple

from tests.group.operations import ROOTED


class Phase(StrEnum):
    """How far the victim is in its call."""

    BEFORE = "before its call"
    FIRST_USE = "before the group's first use"
    AFTER_ERROR = "before its call, after an error that the group outlives"
    IN_CALL = "before its header"
    BETWEEN = "between header and payload"
    PAYLOAD = "in the payload"
    CALLBACK = "in its callback"
    CONNECTING = "while the new group connects"


class Fault(StrEnum):
    """What happens to the victim."""

    KILLED = "killed (SIGKILL)"
    EXITS = "exits (`os._exit`)"
    FORKED = "killed, with a forked child that has its sockets"
    DISCONNECTED = "its sockets close"
    STOPPED = "stopped (SIGSTOP) for longer than the limit"
    RESUMED = "stopped, and resumed in time"
    ABSENT = "does not come within the limit"
    STORE_STOPPED = "stopped with the store that it hosts"
    INTERRUPTED = "interrupted (SIGINT)"


#: Faults after which the victim's process is gone.
DEADLY = {Fault.KILLED, Fault.EXITS, Fault.FORKED}
#: Faults after which the survivors time out; see ``Case.is_awaited``.
UNANSWERED = {Fault.STOPPED, Fault.ABSENT, Fault.STORE_STOPPED}

COLLECTIVES = [
    "broadcast", "gather", "all_gather", "scatter", "reduce", "all_reduce", "all_to_all",
    "reduce_scatter", "scan", "exscan", "reduce_and_broadcast", "barrier", "stream",
]  # fmt: skip
#: Operations between two ranks; the last one forms a ring.
POINT_TO_POINT = ["send", "isend", "recv", "irecv", "recv from any", "probe", "sendrecv"]
#: Operations that create groups.
DIVISIONS = ["split", "dup", "node_group", "leaders", "new_group", "survivors"]
#: One helper of each family, more where one sends differently; tested, but not in the table.
HELPERS = [
    "run_on_main", "main_first", "average_metrics", "agree", "sync_gradients", "sync_model",
    "broadcast_file",
]  # fmt: skip
OPERATIONS = [*COLLECTIVES, *POINT_TO_POINT, *DIVISIONS]
#: Operations by which ranks wait for which. The quick tests take the operations of each in turn.
FAMILIES = [
    ["broadcast", "stream"],
    ["gather", "all_gather"],
    ["reduce", "all_reduce", "reduce_and_broadcast", "reduce_scatter"],
    ["all_to_all", "scatter"],
    ["scan", "exscan"],
    ["barrier"],
    ["send", "recv", "probe", "sendrecv", "recv from any"],
    ["isend", "irecv"],
    ["split", "dup", "node_group", "leaders"],
    ["new_group", "survivors"],
]
#: torch's names of the same operations.
TORCHS = {
    "broadcast": "broadcast_object_list",
    "gather": "gather_object",
    "all_gather": "all_gather_object",
    "scatter": "scatter_object_list",
    "send": "send_object_list",
    "recv": "recv_object_list",
}

SMALL_NBYTES = 100
LARGE_NBYTES = 32 << 20
#: Timeout of a wait that is meant to time out.
LIMIT_SECONDS = 2.0
#: The same if no duration is checked: on a busy machine a victim takes long to reach its payload,
#: and a survivor its call.
PATIENT_LIMIT_SECONDS = 4.0
#: How long torch's own thread waits for a rank that is gone. The ranks' calls end earlier.
TORCH_CONNECTS_SECONDS = 5.0
#: Timeout for faults that must not time out; longer than any test waits for a rank's report.
FAR_SECONDS = 300.0
#: How long a victim is stopped before it is resumed in time.
STOP_SECONDS = 1.2


class Case(NamedTuple):
    """One fault in one operation.

    Attributes:
        operation: its name in objcomm.
        fault: what happens.
        phase: when.
        world_size: number of ranks.
        victim: the rank that it strikes.
        root: source or destination, if there is one.
        nbytes: what each rank contributes.
        library: ``"objcomm"``, or ``"torch"`` for its own object collectives.
        asked_phase: the phase in the table's row; not every operation has a payload.
        is_over_gloo: whether ranks can't use objcomm's own links.
        is_across: whether ranks pretend to be on several hosts, see ``host_of``.
    """

    operation: str
    fault: Fault
    phase: Phase
    world_size: int = 3
    victim: int = 1
    root: int = 0
    nbytes: int = LARGE_NBYTES
    library: str = "objcomm"
    asked_phase: Phase = Phase.BEFORE
    is_over_gloo: bool = False
    is_across: bool = False

    def host_of(self, rank: int) -> int:
        """Return the host that a rank pretends to be on, if the ranks are across hosts.

        Each rank has its own, unless only a process on the victim's host can report the fault: a
        forked child keeps the victim's connections open, or there are no connections yet after an
        error.
        """
        is_told = self.fault is Fault.FORKED or self.phase is Phase.AFTER_ERROR
        return rank // 2 if is_told else rank

    @property
    def limit_seconds(self) -> float:
        """Return the timeout of each call."""
        return LIMIT_SECONDS if self.is_awaited else FAR_SECONDS

    @property
    def survivors(self) -> list[int]:
        """List all ranks except the victim."""
        return [rank for rank in range(self.world_size) if rank != self.victim]

    @property
    def living(self) -> list[int]:
        """List all ranks whose processes survive the fault."""
        return self.survivors if self.fault in DEADLY else list(range(self.world_size))

    @property
    def is_between_two(self) -> bool:
        """Return whether it is point-to-point."""
        return self.operation in POINT_TO_POINT

    @property
    def is_apart(self) -> bool:
        """Return whether its ranks connect apart from the world, so that survivors can again."""
        return self.operation in {"new_group", "survivors"}

    @property
    def is_survived(self) -> bool:
        """Whether the others return, with a group of those that are alive."""
        return self.operation == "survivors" and not self.is_awaited

    @property
    def is_awaited(self) -> bool:
        """Whether the others wait for the victim until their timeout, because it may still come."""
        is_to_call_again = self.operation == "survivors" and self.fault is Fault.INTERRUPTED
        return self.fault in UNANSWERED or is_to_call_again

    @property
    def partner(self) -> int:
        """Return the rank that the victim talks to, if there is only one."""
        return self.survivors[0]

    @property
    def victim_receives(self) -> bool:
        """Return whether the victim is the receiver, not the sender, of its message."""
        return self.operation in {"send", "isend"}

    @property
    def could_be_any(self) -> bool:
        """Return whether its partner receives from any rank, and no rank has started sending."""
        is_open = self.phase is Phase.BEFORE and self.fault in UNANSWERED
        return self.operation == "recv from any" and is_open

    @property
    def is_resumable(self) -> bool:
        """Return whether the victim can repeat its call after an interrupt."""
        # A synchronous send has given up, and its partner is notified.
        return self.victim_receives or self.operation in {"irecv", "sendrecv"}

    @property
    def concerned(self) -> list[int]:
        """List the survivors that communicate with the victim."""
        is_pair = self.is_between_two and self.operation != "sendrecv"
        return [self.partner] if is_pair else self.survivors

    @property
    def is_disconnected(self) -> bool:
        """Return whether no ranks are connected when the fault happens."""
        return self.phase in {Phase.FIRST_USE, Phase.AFTER_ERROR}

    @property
    def is_stores_host(self) -> bool:
        """Return whether the victim hosts the store, instead of a separate process."""
        return self.fault is Fault.STORE_STOPPED

    def __str__(self) -> str:
        role = "root " * (self.operation in ROOTED and self.root == self.victim)
        size = "small" if self.nbytes == SMALL_NBYTES else "large"
        return (
            (
                f"{self.operation}-{self.fault.name}-{self.phase.name}-"
                f"{role}{self.victim} of {self.world_size}-{size}"
                f"{'-over Gloo' * self.is_over_gloo}{'-between hosts' * self.is_across}"
            )
            .replace(" ", "_")
            .lower()
        )


#: Operations whose objects come from one rank.
_SOURCED = {"broadcast", "scatter", "stream"}
#: Operations that return nothing.
_EMPTY = {"barrier", "main_first", "sync_gradients", "sync_model"}


def limit_of(case: Case, *, is_patient: bool) -> float:
    """Return the timeout of a wait that is meant to time out."""
    is_awaited = case.fault in {Fault.STOPPED, Fault.ABSENT}
    return PATIENT_LIMIT_SECONDS if is_patient and is_awaited else LIMIT_SECONDS


def expected(case: Case, rank: int) -> Any:
    """Return what the operation returns on one rank without a fault."""
    size = range(case.world_size)
    if case.operation in DIVISIONS:
        is_left_out = case.operation == "survivors" and case.fault in DEADLY
        return case.survivors if is_left_out else list(size)
    if case.operation in _EMPTY or (case.operation == "exscan" and rank == 0):
        return None
    if case.operation in {"all_gather", "all_to_all"}:
        return [contribution(case, each) for each in size]
    if case.operation == "gather":
        return [contribution(case, each) for each in size] if rank == case.root else None
    if case.operation == "reduce" and rank != case.root:
        return None
    is_sourced = case.operation in _SOURCED
    return contribution(case, case.root if is_sourced else 0)


def contribution(case: Case, rank: int) -> bytes:
    """Return what one rank contributes; the victim's is as long as the others'."""
    return bytes([rank + 1]) * case.nbytes


def _awaited_root(operation: str, victim: int) -> int:
    """Return a root for which others wait for the victim."""
    return victim if operation in _SOURCED else 0


#: The table's rows: a fault, and its phase.
TRIED: list[tuple[Fault, Phase]] = [
    (Fault.KILLED, Phase.FIRST_USE),
    (Fault.KILLED, Phase.AFTER_ERROR),
    (Fault.KILLED, Phase.BEFORE),
    (Fault.KILLED, Phase.IN_CALL),
    (Fault.KILLED, Phase.BETWEEN),
    (Fault.KILLED, Phase.PAYLOAD),
    (Fault.EXITS, Phase.PAYLOAD),
    (Fault.FORKED, Phase.PAYLOAD),
    (Fault.DISCONNECTED, Phase.PAYLOAD),
    (Fault.STOPPED, Phase.PAYLOAD),
    (Fault.RESUMED, Phase.PAYLOAD),
    (Fault.ABSENT, Phase.BEFORE),
    (Fault.STORE_STOPPED, Phase.BEFORE),
    (Fault.INTERRUPTED, Phase.IN_CALL),
]


def tabled() -> Iterator[Case]:
    """Yield every fault of the table in every operation; the middle one of three ranks fails."""
    for fault, phase in TRIED:
        victim = 0 if fault is Fault.STORE_STOPPED else 1
        for operation in OPERATIONS:
            yield Case(
                operation,
                fault,
                _possible(operation, phase),
                victim=victim,
                root=_awaited_root(operation, victim),
                asked_phase=phase,
            )


def _possible(operation: str, phase: Phase) -> Phase:
    """Return the nearest possible phase: barriers and divisions send headers only."""
    if phase is Phase.PAYLOAD and operation in DIVISIONS:
        return Phase.CONNECTING
    is_short = operation == "barrier" or operation in DIVISIONS
    return Phase.IN_CALL if is_short and phase in {Phase.BETWEEN, Phase.PAYLOAD} else phase


def in_torch(case: Case) -> Case | None:
    """Return the same fault in torch's own operation; ``None`` if there is none."""
    # A group in torch survives no error, and torch connects before any call.
    if case.operation not in TORCHS or case.phase in {Phase.FIRST_USE, Phase.AFTER_ERROR}:
        return None
    return case._replace(library="torch")


# Gloo carries objects only if ranks can't have streams.
_EACH_OVER_GLOO = 4


def suite_cases() -> Iterator[Case]:
    """Yield each case of the suite once: the table, and what has no row in it.

    The quick cases are repeated across hosts, and some of them over Gloo.
    """
    across = [case._replace(is_across=True) for case in quick_cases()]
    over_gloo = [case._replace(is_over_gloo=True) for case in quick_cases()][::_EACH_OVER_GLOO]
    cases = chain(tabled(), _QUICK, _LONG, across, over_gloo)
    yield from {str(case): case for case in cases}.values()


def quick_cases() -> Iterator[Case]:
    """Yield each fault in each family, alternating operations and phases, and a few more.

    ``make test`` runs these, and ``make test-long`` the rest of the suite.
    """
    by_place = {(case.operation, case.fault, case.asked_phase): case for case in tabled()}
    chosen: list[Case] = []
    for place, family in enumerate(FAMILIES):
        for number, fault in enumerate(Fault):
            moments = [phase for each, phase in TRIED if each is fault]
            operation = family[(place + number) % len(family)]
            chosen.append(by_place[operation, fault, moments[place % len(moments)]])
    yield from {str(case): case for case in chain(chosen, _QUICK)}.values()


#: Other victims, world sizes and helpers, one of each kind.
_QUICK = [
    # The hub, a rank that only receives, and one whose death reaches some rank only through others.
    Case("all_gather", Fault.KILLED, Phase.BETWEEN, victim=0),
    Case("broadcast", Fault.KILLED, Phase.PAYLOAD, victim=2),
    Case("all_reduce", Fault.KILLED, Phase.PAYLOAD, victim=2, world_size=4),
    Case("broadcast", Fault.KILLED, Phase.IN_CALL, 2, root=1, nbytes=SMALL_NBYTES),
    Case("reduce", Fault.KILLED, Phase.CALLBACK, victim=0),
    Case("main_first", Fault.EXITS, Phase.CALLBACK, victim=2),
    # If only the first rank contributes something, it is the victim.
    Case("run_on_main", Fault.KILLED, Phase.PAYLOAD, victim=0),
    Case("average_metrics", Fault.ABSENT, Phase.BEFORE, victim=2, nbytes=SMALL_NBYTES),
    Case("sync_gradients", Fault.KILLED, Phase.PAYLOAD),
    Case("broadcast_file", Fault.KILLED, Phase.PAYLOAD),
]
#: The same for the long tests.
_LONG = [
    Case("gather", Fault.KILLED, Phase.IN_CALL, 2, nbytes=SMALL_NBYTES),
    Case("all_gather", Fault.KILLED, Phase.IN_CALL, 2, nbytes=SMALL_NBYTES),
    Case("barrier", Fault.KILLED, Phase.IN_CALL, 2, nbytes=SMALL_NBYTES),
    Case("all_gather", Fault.EXITS, Phase.BEFORE, victim=3, world_size=4),
    Case("gather", Fault.KILLED, Phase.PAYLOAD, victim=0),
    Case("barrier", Fault.KILLED, Phase.IN_CALL, victim=0),
    Case("barrier", Fault.EXITS, Phase.IN_CALL, victim=2),
    Case("all_reduce", Fault.EXITS, Phase.CALLBACK, victim=0),
    Case("scan", Fault.KILLED, Phase.CALLBACK, victim=2),
    Case("reduce_and_broadcast", Fault.KILLED, Phase.CALLBACK, victim=0),
    Case("broadcast", Fault.EXITS, Phase.PAYLOAD, victim=2, world_size=4),
    Case("all_to_all", Fault.KILLED, Phase.PAYLOAD, victim=2, world_size=4),
    Case("exscan", Fault.KILLED, Phase.PAYLOAD, victim=3, world_size=4),
    Case("reduce", Fault.RESUMED, Phase.PAYLOAD, victim=0),
    Case("all_gather", Fault.ABSENT, Phase.BEFORE, victim=2, nbytes=SMALL_NBYTES),
    Case("run_on_main", Fault.KILLED, Phase.CALLBACK, victim=0),
    Case("main_first", Fault.KILLED, Phase.CALLBACK, victim=0),
    Case("average_metrics", Fault.KILLED, Phase.IN_CALL, nbytes=SMALL_NBYTES),
    Case("agree", Fault.KILLED, Phase.IN_CALL),
    Case("sync_gradients", Fault.ABSENT, Phase.BEFORE, nbytes=SMALL_NBYTES),
    Case("sync_model", Fault.KILLED, Phase.IN_CALL, victim=0, nbytes=SMALL_NBYTES),
    Case("sync_model", Fault.RESUMED, Phase.PAYLOAD),
    Case("broadcast_file", Fault.KILLED, Phase.PAYLOAD, victim=0),
    Case("broadcast_file", Fault.ABSENT, Phase.BEFORE, victim=2),
]
