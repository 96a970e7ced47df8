"""What a rank reports of itself and of what it has tried, and all that rank 0 knows in the end.

Knows nothing of how facts are found or what they mean. All but ``Evidence`` are records of a store,
see ``objcomm._transport.store``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

#: A number that is not known.
UNKNOWN = -1

#: The look-up of a name should take less: every rank waits so long for each one that connects.
SLOW_LOOKUP_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Peer:
    """What other ranks must know of a rank to reach it.

    Attributes:
        rank: its global rank; ``UNKNOWN`` if its variables do not say.
        machine: a name that only ranks on one host share.
        address: where Gloo listens on it; empty if it can't.
        port: where the doctor listens at that address; 0 if it does not.
        token: what it answers there; no other process has the same one.
        caller: its address on the way to the store; empty if it does not reach the store.
        is_at_store: whether the store is on its host.
    """

    rank: int = 0
    machine: str = ""
    address: str = ""
    port: int = 0
    token: str = ""
    caller: str = ""
    is_at_store: bool = False


@dataclass(frozen=True, slots=True)
class Report(Peer):
    """One rank.

    Attributes:
        world_size: number of ranks, as its variables say.
        local_rank: among the ranks of its host; ``UNKNOWN`` if no variable says.
        launcher: whose variables it has; empty if there is no launcher.
        host: the host's name.
        pid: number of its process there.
        system: the operating system, as Python names it.
        versions: what must be alike: what is installed, as pairs of name and version, and which
            backend ``objcomm.init`` would choose.
        devices: what each device of its accelerator is called.
        shm_free_nbytes: what is free of ``/dev/shm``, or ``UNKNOWN``.
        open_files: how many files and sockets it may have open.
        interfaces: those of its host, as pairs of name and address.
        variables: those that decide about the network, as pairs of name and value.
        meeting: ``host:port`` where it is to meet the others; empty without a launcher.
        place_problem: what is wrong with its launcher's variables, and what to set; or empty.
        device_problem: why it has no accelerator of its own, and what to do; or empty.
        gloo_problem: why nobody can listen at Gloo's address; empty if that works.
        meeting_problem: why it, or others, can't meet there, and what to set; empty if they can.
    """

    world_size: int = 1
    local_rank: int = UNKNOWN
    launcher: str = ""
    host: str = ""
    pid: int = 0
    system: str = "linux"
    versions: tuple[tuple[str, str], ...] = ()
    devices: tuple[str, ...] = ()
    shm_free_nbytes: int = UNKNOWN
    open_files: int = UNKNOWN
    interfaces: tuple[tuple[str, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    meeting: str = ""
    place_problem: str = ""
    device_problem: str = ""
    gloo_problem: str = ""
    meeting_problem: str = ""

    def interface_at(self, address: str) -> str:
        """The name of the interface that has an address; empty if none has."""
        return next((name for name, own in self.interfaces if own == address), "")


@dataclass(frozen=True, slots=True)
class Contact:
    """How one rank reached another.

    Attributes:
        peer: the other's rank.
        problem: why it did not; empty if it did.
    """

    peer: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Lookup:
    """How long the name of a rank's address took to be looked up.

    Attributes:
        by: the rank that looked it up, on the store's host.
        rank: the lowest that connects from there.
        address: as the store sees it.
        seconds: what the slowest took, or took at least; of those that lost no query, two in a row.
        count: how many there were.
    """

    by: int
    rank: int
    address: str
    seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class Link:
    """What was measured from one rank to another.

    Attributes:
        src: the sender.
        dst: the receiver.
        latency_seconds: half of the quickest round trip of a tiny message.
        nbytes_per_second: of a large message, the best of some.
    """

    src: int
    dst: int
    latency_seconds: float
    nbytes_per_second: float


@dataclass(frozen=True, slots=True)
class Measured:
    """All that one rank has measured.

    Attributes:
        links: those on which it sent.
        problem: what ended it; empty if nothing did.
    """

    links: tuple[Link, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What rank 0 has collected; or what one rank knows that has not met it.

    Attributes:
        world_size: number of ranks, as the rank says that draws the conclusions.
        reports: by rank, of those that take part.
        missing: ranks that did not come, as far as that is known here.
        others: of processes that came, too, with a rank that another one has, or that none has.
        waited_seconds: how long the others were waited for.
        contacts: those that each rank tried to reach, by rank.
        lookups: how long names took to be looked up.
        silent: ranks that came, and then did not answer any more.
        links: what was measured.
        failures: what ended the measurement, by rank.
    """

    world_size: int
    reports: Mapping[int, Report]
    missing: tuple[int, ...] = ()
    others: tuple[Report, ...] = ()
    waited_seconds: float = 0.0
    contacts: Mapping[int, tuple[Contact, ...]] = field(default_factory=dict)
    lookups: tuple[Lookup, ...] = ()
    silent: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()
    failures: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks are here and reach one another, so that a group can be made."""
        are_reached = all(not each.problem for made in self.contacts.values() for each in made)
        can_listen = all(not report.gloo_problem for report in self.reports.values())
        return are_reached and can_listen and not (self.missing or self.others or self.silent)

    @property
    def left_out(self) -> int:
        """How many pairs of ranks were not measured, each in both directions."""
        return self.world_size * (self.world_size - 1) // 2 - len(self.links) // 2

    @property
    def machines(self) -> set[str]:
        """The hosts that ranks run on."""
        return {report.machine for report in self.reports.values()}


def is_loopback(address: str) -> bool:
    """Whether an address is one that every host has for itself."""
    return address.startswith("127.") or address in {"::1", "::ffff:127.0.0.1"}
