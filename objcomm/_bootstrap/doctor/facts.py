"""The facts that a rank reports about itself and its attempts, and those that rank 0 collects.

Does not know how facts are found or what they mean. All classes except ``Evidence`` are records in
a store; see ``objcomm._transport.store``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

#: A number that is not known.
UNKNOWN = -1

#: Looking up a name should take less: when a rank connects, all others wait for the lookup.
SLOW_LOOKUP_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Peer:
    """What other ranks must know about a rank to reach it.

    Attributes:
        rank: its global rank; ``UNKNOWN`` if its variables do not give it.
        machine: a name that ranks share only if they are on the same host.
        address: the address at which Gloo listens; empty if it can't.
        port: the port on which the doctor listens at that address; 0 if it does not.
        token: its answer there, which is unique to this process.
        caller: its address as seen by the store; empty if it can't reach the store.
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
    """The facts about one rank.

    Attributes:
        world_size: number of ranks, from its variables.
        local_rank: rank among those of its host; ``UNKNOWN`` if no variable gives it.
        launcher: the launcher whose variables it has; empty if there is none.
        host: the host's name.
        pid: its process id.
        system: Python's name for the operating system.
        versions: what must be the same on all ranks, as pairs of name and version: installed
            software, and the backend that ``objcomm.init`` would choose.
        devices: the name of each device of its accelerator.
        shm_free_nbytes: free space in ``/dev/shm``, or ``UNKNOWN``.
        open_files: how many files and sockets it may have open.
        interfaces: the network interfaces of its host, as pairs of name and address.
        variables: the variables that affect the network, as pairs of name and value.
        meeting: ``host:port`` where it should meet the others; empty without a launcher.
        place_problem: what is wrong with its launcher's variables, and what to set; or empty.
        device_problem: why it does not have its own accelerator, and what to do; or empty.
        gloo_problem: why nothing can listen at Gloo's address; empty if that works.
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
        """Return the name of the interface that has an address; empty if there is none."""
        return next((name for name, own in self.interfaces if own == address), "")


@dataclass(frozen=True, slots=True)
class Contact:
    """The result of one rank's attempt to reach another.

    Attributes:
        peer: the other rank.
        problem: why it was not reached; empty if it was.
    """

    peer: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Lookup:
    """How long it took to look up the name of a rank's address.

    Attributes:
        by: the rank that looked it up, on the store's host.
        rank: the lowest rank that connects from this address.
        address: the address as the store sees it.
        seconds: how long the slowest lookup took, or was waited for. A lookup that lost no query
            counts as no slower than the one before it.
        count: number of lookups.
    """

    by: int
    rank: int
    address: str
    seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class Link:
    """The measurements from one rank to another.

    Attributes:
        src: the sender.
        dst: the receiver.
        latency_seconds: half of the fastest round trip of a tiny message.
        nbytes_per_second: the rate of a large message, the best of several.
    """

    src: int
    dst: int
    latency_seconds: float
    nbytes_per_second: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one rank.

    Attributes:
        links: the links on which it was the sender.
        problem: the error that ended the measurement; or empty.
    """

    links: tuple[Link, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What rank 0 has collected, or what a rank that has not met rank 0 knows.

    Attributes:
        world_size: number of ranks, according to the rank that draws the conclusions.
        reports: the reports of participating ranks, by rank.
        missing: ranks that did not arrive, as far as this rank knows.
        others: reports of additional processes, whose rank is invalid or belongs to another.
        waited_seconds: how long this rank waited for the others.
        contacts: the results of each rank's attempts to reach others, by rank.
        lookups: how long it took to look up names.
        silent: ranks that arrived, and then stopped answering.
        links: the measured links.
        failures: the errors that ended the measurement, by rank.
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
        """Whether all ranks have arrived and reach each other, so that a group can be created."""
        are_reached = all(not each.problem for made in self.contacts.values() for each in made)
        can_listen = all(not report.gloo_problem for report in self.reports.values())
        return are_reached and can_listen and not (self.missing or self.others or self.silent)

    @property
    def left_out(self) -> int:
        """The number of pairs of ranks whose links were not measured."""
        return self.world_size * (self.world_size - 1) // 2 - len(self.links) // 2

    @property
    def machines(self) -> set[str]:
        """The hosts that ranks run on."""
        return {report.machine for report in self.reports.values()}


def is_loopback(address: str) -> bool:
    """Whether an address is a loopback address."""
    return address.startswith("127.") or address in {"::1", "::ffff:127.0.0.1"}
