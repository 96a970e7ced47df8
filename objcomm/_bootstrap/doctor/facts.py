"""What a rank tells of itself and of what it has tried, its form on the way, and all that is known.

Knows how facts are written and read, and nothing of how they are found or what they mean. What
is read may come from any program that reached the store: each field is checked.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from objcomm._observe.terminal import printable
from objcomm.errors import UsageError

T = TypeVar("T")

#: How it looks where packets are lost: to who waits, and to a kernel that finds no card to send to.
NO_ANSWER = "no answer"
NO_ROUTE = "no route to it"

_MOST_NBYTES = 1 << 24  # the contacts of a rank with thousands of others
_FRACTION = (float, int)

#: For what torch can be built, by its name in ``torch.version``.
PLATFORMS = ("cuda", "hip", "xpu")

#: What is installed, as its makers write it.
NAMES = {"python": "Python", "cuda": "CUDA", "hip": "HIP", "xpu": "XPU", "nccl": "NCCL"}

#: A number that is not known.
UNKNOWN = -1

#: What the look-up of a name must not take: every rank waits so long for each that connects.
SLOW_LOOKUP_SECONDS = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Interface:
    """One network interface of a host.

    Attributes:
        name: as the kernel calls it.
        addresses: IPv4 first, without the length of the network's part.
        is_up: whether it is switched on and has a carrier.
        mtu: bytes in the largest packet.
        mbit: its speed in Mbit/s, or ``UNKNOWN``.
    """

    name: str
    addresses: tuple[str, ...] = ()
    is_up: bool = True
    mtu: int = UNKNOWN
    mbit: int = UNKNOWN

    @property
    def is_loopback(self) -> bool:
        """Whether it leads to no other host."""
        return self.name == "lo" or (bool(self.addresses) and all(map(is_loopback, self.addresses)))


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Which interface a backend would use.

    Attributes:
        interface: its name, several joined by commas; empty if there is none.
        address: the address there.
        why: what made it this one.
        problem: what is wrong with it; empty if nothing is.
    """

    interface: str = ""
    address: str = ""
    why: str = ""
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Rendezvous:
    """The place where the ranks are to meet, as one rank sees it.

    Attributes:
        host: name or address.
        port: on it.
        addresses: what the name stands for on this rank's host.
        problem: why this rank could not meet the others there; empty if it could.
        remedy: what to set then.
        interface: through which this rank reaches it; empty if it does not.
        caller: this rank's address on the way there; empty if it does not reach it.
        is_here: whether it is on this rank's host.
    """

    host: str = ""
    port: int = 0
    addresses: tuple[str, ...] = ()
    problem: str = ""
    remedy: str = ""
    interface: str = ""
    caller: str = ""
    is_here: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One rank.

    Attributes:
        rank: its global rank; ``UNKNOWN`` if its variables do not say.
        world_size: number of ranks, as its variables say.
        local_rank: among the ranks of its host; ``UNKNOWN`` if nothing tells.
        launcher: whose variables told it; empty if there is none.
        host: the host's name.
        machine: a name that only ranks on one host share.
        pid: number of its process there.
        versions: of Python, torch, objcomm, CUDA (or HIP, XPU) and NCCL, as far as they are there.
        backends: those that its torch has.
        devices: what each device of its accelerator is called.
        backend: what ``objcomm.init`` would choose.
        place_problem: what is wrong with its launcher's variables; empty if nothing is.
        device_problem: why it has no accelerator of its own; empty if it has, or needs none.
        system: the operating system, as Python names it.
        shm_nbytes: size of ``/dev/shm``, or ``UNKNOWN``.
        shm_free_nbytes: of it free, or ``UNKNOWN``.
        open_files: how many files and sockets it may have open.
        open_files_most: how far it may raise that itself.
        interfaces: those of its host.
        gloo: which of them Gloo would use.
        nccl: which of them NCCL would use.
        rendezvous: where it meets the others.
        port: where it listens for the others, at Gloo's address; 0 if it does not.
        token: what it answers there.
        environment: variables that decide about the network.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = UNKNOWN
    launcher: str = ""
    host: str = ""
    machine: str = ""
    pid: int = 0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    backends: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    backend: str = ""
    place_problem: str = ""
    device_problem: str = ""
    system: str = "linux"
    shm_nbytes: int = UNKNOWN
    shm_free_nbytes: int = UNKNOWN
    open_files: int = UNKNOWN
    open_files_most: int = UNKNOWN
    interfaces: tuple[Interface, ...] = ()
    gloo: Choice = Choice()
    nccl: Choice = Choice()
    rendezvous: Rendezvous = Rendezvous()
    port: int = 0
    token: str = ""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """What a rank must know of another one to reach it.

    Attributes:
        rank: the other's.
        machine: a name that only ranks on one host share.
        address: where it listens; empty if it does not.
        port: the same.
        token: what it answers there.
        arrival: the number under which it came.
        caller: its address on the way to the store; empty if it does not reach it.
    """

    rank: int
    machine: str
    address: str
    port: int
    token: str
    arrival: int
    caller: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Reachable:
    """How one rank reached another.

    Attributes:
        peer: the other's rank.
        problem: why it did not; empty if it did.
        ahead_seconds: by how much the other's clock is ahead of this rank's.
        margin_seconds: how far that may be wrong.
    """

    peer: int
    problem: str = ""
    ahead_seconds: float = 0.0
    margin_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredLink:
    """What was measured from one rank to another.

    Attributes:
        src: who sent.
        dst: who received.
        latency_seconds: half of the quickest round trip of an empty message.
        nbytes_per_second: of a large message, the best of some.
    """

    src: int
    dst: int
    latency_seconds: float
    nbytes_per_second: float


@dataclasses.dataclass(frozen=True, slots=True)
class Lookup:
    """How long the name of a rank's address took to be looked up.

    Attributes:
        rank: the lowest that connects from there.
        address: as the store sees it.
        seconds: what the slowest took, or took at least; of those that lost no query, two in a row.
        count: how many there were.
    """

    rank: int
    address: str
    seconds: float
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Contacts:
    """All that one rank has reached, or has not.

    Attributes:
        made: with other ranks.
        lookups: of names, by a rank on the store's host.
    """

    made: tuple[Reachable, ...] = ()
    lookups: tuple[Lookup, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """All that one rank has measured.

    Attributes:
        measured: as sender.
        problem: what ended it; empty if nothing did.
        left_out: how many pairs of ranks the whole job did not measure for want of time.
    """

    measured: tuple[MeasuredLink, ...] = ()
    problem: str = ""
    left_out: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Roll:
    """Who takes part, as rank 0 has seen it.

    Attributes:
        peers: each of them.
        looker: the rank that looks up names, on the store's host; ``UNKNOWN`` if none is there.
    """

    peers: tuple[Peer, ...]
    looker: int = UNKNOWN


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What comes when all have tried to reach one another.

    Attributes:
        has_measurement: whether the links are measured; otherwise rank 0 reports.
    """

    has_measurement: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Over:
    """That rank 0 has reported.

    Attributes:
        status: the exit status of all ranks.
    """

    status: int


def is_loopback(address: str) -> bool:
    """Whether an address is one that every host has for itself."""
    return address.startswith("127.") or address in {"::1", "::ffff:127.0.0.1"}


def written(facts: Any) -> str:
    """Facts as the text that goes to another rank."""
    return json.dumps(dataclasses.asdict(facts))


def read(kind: type[T], text: bytes) -> T:
    """Facts that another rank has written.

    Args:
        kind: which dataclass of this module.
        text: what it wrote.

    Raises:
        UsageError: it is something else.
    """
    if len(text) > _MOST_NBYTES:
        raise UsageError(f"doctor: {len(text)} bytes are too many for a {kind.__name__}")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"doctor: no {kind.__name__}: {error}") from error
    return typing.cast("T", _checked(kind, raw, kind.__name__))


def _checked(kind: Any, raw: Any, where: str) -> Any:
    """``raw`` as the wanted type, or an error that names where it is not."""
    if dataclasses.is_dataclass(kind) and isinstance(raw, dict):
        make: Any = kind
        hints = typing.get_type_hints(kind)
        if raw.keys() != hints.keys():
            raise UsageError(f"doctor: {where} has other fields; do all ranks run one objcomm?")
        fields = {name: _checked(hints[name], raw[name], f"{where}.{name}") for name in hints}
        return make(**fields)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and isinstance(raw, list):
        return tuple(_checked(arguments[0], each, where) for each in raw)
    if origin is dict and isinstance(raw, dict):
        return {printable(str(name)): _checked(arguments[1], raw[name], where) for name in raw}
    if kind is str and isinstance(raw, str):
        return printable(raw)
    is_number = type(raw) is kind or (kind is float and type(raw) in _FRACTION)
    if isinstance(kind, types.GenericAlias) or not is_number or not abs(raw) < 2**64:
        raise UsageError(f"doctor: {where} is wrong: {raw!r:.50}")
    return kind(raw)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What rank 0 has collected; or what one rank knows that met nobody.

    Attributes:
        world_size: number of ranks, as the one says that draws the conclusions.
        reports: by rank, of those that take part.
        others: of processes that came, too, with a rank that another one has, or that none has.
        waited_seconds: how long the others were waited for.
        is_alone: whether this is what one rank knows by itself.
        seen: ranks that a rank without rank 0 could see in the store; None if there was no store.
        contacts: whom each rank tried to reach, by rank.
        lookups: how long names took to be looked up, by the rank on the store's host that tried.
        silent: ranks that came, and then did not answer any more.
        links: what was measured.
        failures: what ended the measurement, by rank.
        left_out: how many pairs of ranks were not measured.
    """

    world_size: int
    reports: Mapping[int, Report]
    others: tuple[Report, ...] = ()
    waited_seconds: float = 0.0
    is_alone: bool = False
    seen: tuple[int, ...] | None = None
    contacts: Mapping[int, tuple[Reachable, ...]] = field(default_factory=dict)
    lookups: Mapping[int, tuple[Lookup, ...]] = field(default_factory=dict)
    silent: tuple[int, ...] = ()
    links: tuple[MeasuredLink, ...] = ()
    failures: Mapping[int, str] = field(default_factory=dict)
    left_out: int = 0

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that did not come, as far as that is known here."""
        if self.is_alone and self.seen is None:
            return ()
        came = self.reports.keys() | set(self.seen or ())
        return tuple(rank for rank in range(self.world_size) if rank not in came)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks are here and reach one another, so that a group can be made."""
        are_reached = all(not each.problem for made in self.contacts.values() for each in made)
        can_listen = all(not report.gloo.problem for report in self.reports.values())
        return are_reached and can_listen and not (self.missing or self.others or self.silent)

    @property
    def machines(self) -> set[str]:
        """The hosts that ranks run on."""
        return {report.machine for report in self.reports.values()}
