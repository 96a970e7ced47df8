"""What is done to which rank, where in which operation, and what the others must then see.

Declarations only: ``run`` carries them out, ``table`` writes down what was seen.
"""

from collections.abc import Iterator
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple

from tests.group.operations import ROOTED


class Phase(StrEnum):
    """How far the victim has come in its call."""

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


#: After these its process is gone.
DEADLY = {Fault.KILLED, Fault.EXITS, Fault.FORKED}
#: After these the survivors' time limit passes.
UNANSWERED = {Fault.STOPPED, Fault.ABSENT, Fault.STORE_STOPPED}

COLLECTIVES = [
    "broadcast",
    "gather",
    "all_gather",
    "scatter",
    "reduce",
    "all_reduce",
    "all_to_all",
    "reduce_scatter",
    "scan",
    "exscan",
    "reduce_and_broadcast",
    "barrier",
]
#: Between two ranks; the last one goes round in a ring.
POINT_TO_POINT = ["send", "isend", "recv", "irecv", "recv from any", "probe", "sendrecv"]
#: What makes groups.
DIVISIONS = ["split", "dup", "node_group", "leaders", "new_group"]
#: One of each family of helpers, and more where one sends otherwise; tried, but in no table.
HELPERS = ["run_on_main", "main_first", "average_metrics", "agree", "sync_gradients", "sync_model"]
OPERATIONS = [*COLLECTIVES, *POINT_TO_POINT, *DIVISIONS]
#: The same by who waits for whom. Of each, the quick tests take one operation after the other.
FAMILIES = [
    ["broadcast"],
    ["gather", "all_gather"],
    ["reduce", "all_reduce", "reduce_and_broadcast", "reduce_scatter"],
    ["all_to_all", "scatter"],
    ["scan", "exscan"],
    ["barrier"],
    ["send", "recv", "probe", "sendrecv", "recv from any"],
    ["isend", "irecv"],
    ["split", "dup", "node_group", "leaders"],
    ["new_group"],
]
#: What torch calls the same.
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
#: A wait that shall end by its limit.
LIMIT_SECONDS = 2.0
#: The same where no duration is held: on a busy machine a victim takes long to reach its payload,
#: and a survivor its call.
PATIENT_LIMIT_SECONDS = 4.0
#: For faults that must not end by a limit; longer than anybody waits for what a rank has seen.
FAR_SECONDS = 120.0
#: How long a victim is stopped that is resumed in time.
STOP_SECONDS = 1.2


class Case(NamedTuple):
    """One fault in one operation.

    Attributes:
        operation: objcomm's name of it.
        fault: what happens.
        phase: when.
        world_size: number of ranks.
        victim: to which rank.
        root: source or destination, where there is one.
        nbytes: what each rank contributes.
        library: ``"objcomm"``, or ``"torch"`` for its own object collectives.
        asked_phase: the phase of the table's row; not every operation has a payload.
        is_over_gloo: whether ranks may not have a link of objcomm's own.
        is_across: whether ranks are as if on several hosts, see ``host_of``.
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
        """On which host a rank is as if it were, where they are across.

        On one of its own, but where nothing except a process beside the victim can tell: a child
        that it has forked keeps its connections, or there are none yet after an error.
        """
        is_told = self.fault is Fault.FORKED or self.phase is Phase.AFTER_ERROR
        return rank // 2 if is_told else rank

    @property
    def limit_seconds(self) -> float:
        """The time limit of each call."""
        # Torch connects, and hears of no death meanwhile; nor of closed sockets, where it is about
        # to use them: it tries again up to its limit.
        is_deaf = self.phase is Phase.CONNECTING and self.fault in DEADLY | {Fault.DISCONNECTED}
        return LIMIT_SECONDS if is_deaf or self.fault in UNANSWERED else FAR_SECONDS

    @property
    def survivors(self) -> list[int]:
        """All ranks but the victim."""
        return [rank for rank in range(self.world_size) if rank != self.victim]

    @property
    def living(self) -> list[int]:
        """All ranks whose processes outlive the fault."""
        return self.survivors if self.fault in DEADLY else list(range(self.world_size))

    @property
    def is_between_two(self) -> bool:
        """Whether it is no collective."""
        return self.operation in POINT_TO_POINT

    @property
    def is_apart(self) -> bool:
        """Whether its ranks meet by themselves, apart from the world, and survivors can again."""
        return self.operation == "new_group"

    @property
    def partner(self) -> int:
        """Whom the victim talks to, if it talks to one rank."""
        return self.survivors[0]

    @property
    def victim_receives(self) -> bool:
        """Whether the victim is the receiver of a message to it, and not the sender of one."""
        return self.operation in {"send", "isend"}

    @property
    def could_be_any(self) -> bool:
        """Whether its partner waits for any rank, and nobody has begun to send."""
        is_open = self.phase is Phase.BEFORE and self.fault in UNANSWERED
        return self.operation == "recv from any" and is_open

    @property
    def is_resumable(self) -> bool:
        """Whether the victim's call, ended by an interrupt, can be made once more."""
        # What sends synchronously has given up, and its partner is told.
        return self.victim_receives or self.operation in {"irecv", "sendrecv"}

    @property
    def concerned(self) -> list[int]:
        """The survivors that have to do with the victim."""
        is_pair = self.is_between_two and self.operation != "sendrecv"
        return [self.partner] if is_pair else self.survivors

    @property
    def is_disconnected(self) -> bool:
        """Whether nobody is joined to any other when the fault happens."""
        return self.phase in {Phase.FIRST_USE, Phase.AFTER_ERROR}

    @property
    def is_stores_host(self) -> bool:
        """Whether the victim hosts the store, and not a process of its own."""
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


#: What returns nothing.
_EMPTY = {"barrier", "main_first", "sync_gradients", "sync_model"}


def limit_of(case: Case, *, is_patient: bool) -> float:
    """The limit of a wait that ends by one."""
    # Torch connects up to the limit, and all ranks have to come there within it.
    is_awaited = case.fault in {Fault.STOPPED, Fault.ABSENT} or case.phase is Phase.CONNECTING
    return PATIENT_LIMIT_SECONDS if is_patient and is_awaited else LIMIT_SECONDS


def expected(case: Case, rank: int) -> Any:
    """What the operation returns on one rank if nothing is wrong."""
    size = range(case.world_size)
    if case.operation in DIVISIONS or case.operation in _EMPTY:
        return list(size) if case.operation in DIVISIONS else None
    if case.operation in {"all_gather", "all_to_all"}:
        return [contribution(case, each) for each in size]
    if case.operation == "gather":
        return [contribution(case, each) for each in size] if rank == case.root else None
    if case.operation == "reduce" and rank != case.root:
        return None
    if case.operation == "exscan" and rank == 0:
        return None
    is_sourced = case.operation in {"broadcast", "scatter"}
    return contribution(case, case.root if is_sourced else 0)


def contribution(case: Case, rank: int) -> bytes:
    """What one rank brings; the victim's is as long as the others'."""
    return bytes([rank + 1]) * case.nbytes


def _awaited_root(operation: str, victim: int) -> int:
    """A root with which others wait for the victim."""
    return victim if operation in {"broadcast", "scatter"} else 0


#: The table's rows: a fault, and when it happens.
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
    """Every fault of the table in every operation, in three ranks of which the middle one fails."""
    for fault, phase in TRIED:
        victim = 0 if fault is Fault.STORE_STOPPED else 1
        for operation in OPERATIONS:
            yield Case(
                operation,
                fault,
                _possible(operation, fault, phase),
                victim=victim,
                root=_awaited_root(operation, victim),
                asked_phase=phase,
            )


def _possible(operation: str, fault: Fault, phase: Phase) -> Phase:
    """The phase that comes nearest: what a barrier sends, or who divides, is all header."""
    # While torch connects, a forked child would keep it until its own limit.
    is_heard = fault is not Fault.FORKED
    if phase is Phase.PAYLOAD and operation in DIVISIONS and is_heard:
        return Phase.CONNECTING
    is_short = operation == "barrier" or operation in DIVISIONS
    return Phase.IN_CALL if is_short and phase in {Phase.BETWEEN, Phase.PAYLOAD} else phase


def in_torch(case: Case) -> Case | None:
    """The same fault in torch's own operation; ``None`` if it has none."""
    # Torch has no error that a group outlives, and connects before any call.
    if case.operation not in TORCHS or case.phase in {Phase.FIRST_USE, Phase.AFTER_ERROR}:
        return None
    return case._replace(library="torch")


# Gloo carries objects only where ranks can't have streams.
_EACH_OVER_GLOO = 4


def suite_cases() -> Iterator[Case]:
    """All that the suite tries, each case once: the table, and what it has no row for.

    Between hosts what the quick tests try within one, and of that a part over Gloo.
    """
    across = [case._replace(is_across=True) for case in quick_cases()]
    over_gloo = [case._replace(is_over_gloo=True) for case in quick_cases()][::_EACH_OVER_GLOO]
    cases = chain(tabled(), _QUICK, _LONG, across, over_gloo)
    yield from {str(case): case for case in cases}.values()


def quick_cases() -> Iterator[Case]:
    """Each fault in each family, by operations and at moments that take turns, and a few more.

    ``make test`` tries these, and ``make test-long`` the rest of the suite's.
    """
    by_place = {(case.operation, case.fault, case.asked_phase): case for case in tabled()}
    chosen: list[Case] = []
    for place, family in enumerate(FAMILIES):
        for number, fault in enumerate(Fault):
            moments = [phase for each, phase in TRIED if each is fault]
            operation = family[(place + number) % len(family)]
            chosen.append(by_place[operation, fault, moments[place % len(moments)]])
    yield from {str(case): case for case in chain(chosen, _QUICK)}.values()


#: Other places in a world, other sizes and helpers, one of each kind.
_QUICK = [
    # The hub, a rank that only receives, and one whose death a third one has to hear of.
    Case("all_gather", Fault.KILLED, Phase.BETWEEN, victim=0),
    Case("broadcast", Fault.KILLED, Phase.PAYLOAD, victim=2),
    Case("all_reduce", Fault.KILLED, Phase.PAYLOAD, victim=2, world_size=4),
    Case("broadcast", Fault.KILLED, Phase.IN_CALL, 2, root=1, nbytes=SMALL_NBYTES),
    Case("reduce", Fault.KILLED, Phase.CALLBACK, victim=0),
    Case("main_first", Fault.EXITS, Phase.CALLBACK, victim=2),
    # Where only the first rank gives something, it is the victim.
    Case("run_on_main", Fault.KILLED, Phase.PAYLOAD, victim=0),
    Case("average_metrics", Fault.ABSENT, Phase.BEFORE, victim=2, nbytes=SMALL_NBYTES),
    Case("sync_gradients", Fault.KILLED, Phase.PAYLOAD),
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
]
