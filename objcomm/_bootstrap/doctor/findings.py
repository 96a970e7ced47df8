"""Draw conclusions from the facts: what is wrong, which ranks it concerns, and what to set."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median_low

from objcomm._bootstrap.doctor.facts import (
    SLOW_LOOKUP_SECONDS,
    UNKNOWN,
    Evidence,
    Link,
    Report,
    is_loopback,
)
from objcomm.errors import grouped, ranks_text


class Severity(Enum):
    """The consequence of a finding for a job."""

    ERROR = "error"  # it will not run
    WARNING = "warning"  # it will be slow, or fail later
    NOTE = "note"  # good to know; does not affect the exit status


ERROR, WARNING, NOTE = Severity


@dataclass(frozen=True, slots=True)
class Finding:
    """One conclusion.

    Attributes:
        severity: the consequence for a job.
        name: its name in the guide.
        ranks: the ranks that it concerns.
        hosts: the hosts of these ranks.
        what: a sentence that says what is wrong.
        remedy: a sentence that says what to set.
    """

    severity: Severity
    name: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    what: str
    remedy: str

    @property
    def where(self) -> str:
        """The ranks that it concerns, and their hosts, as text."""
        if not self.ranks:
            return ""
        ranks = "a process" if self.ranks == (UNKNOWN,) else ranks_text(self.ranks)
        return f"{ranks} on {_shown(self.hosts, 4)}" if self.hosts else ranks


def findings(evidence: Evidence) -> list[Finding]:
    """Draw all conclusions, sorted by severity, with causes before their possible effects."""
    found = [each for conclude in _CONCLUSIONS for each in conclude(evidence)]
    return sorted(found, key=lambda each: list(Severity).index(each.severity))


def status(found: Iterable[Finding]) -> int:
    """Return the command's exit status: 1 if anything will break or slow a job."""
    return int(any(each.severity is not NOTE for each in found))


Conclusion = Callable[[Evidence], Iterator[Finding]]
# The severity, what is wrong with a rank, and what to set; None if nothing is wrong.
Complaint = tuple[Severity, str, str] | None


def _finding(
    severity: Severity, name: str, reports: Iterable[Report], what: str, remedy: str
) -> Finding:
    concerned = sorted(reports, key=lambda report: report.rank)
    ranks = tuple(dict.fromkeys(report.rank for report in concerned))
    hosts = tuple(dict.fromkeys(report.host for report in concerned))
    return Finding(severity, name, ranks, hosts, what, remedy)


def _of_ranks(name: str, complain: Callable[[Evidence, Report], Complaint]) -> Conclusion:
    """Make a conclusion from each rank's own facts; equal complaints become one finding."""

    def conclude(evidence: Evidence) -> Iterator[Finding]:
        everybody = [*evidence.reports.values(), *evidence.others]
        alike = grouped((complain(evidence, report), report) for report in everybody)
        for complaint, reports in alike.items():
            if complaint is not None:
                severity, what, remedy = complaint
                yield _finding(severity, name, reports, what, remedy)

    return conclude


def _as_advised(problem: str) -> Complaint:
    """Split a problem at its last semicolon, after which it says what to do."""
    what, _, remedy = problem.rpartition("; ")
    return (ERROR, what, remedy) if problem else None


_NAME_YOURSELF = "give each process its own RANK, from 0 to WORLD_SIZE - 1"


def _duplicate_ranks(evidence: Evidence) -> Iterator[Finding]:
    for rank, first in evidence.reports.items():
        alike = [first, *(report for report in evidence.others if report.rank == rank)]
        if len(alike) > 1:
            named = ", ".join(f"pid {report.pid} on {report.host}" for report in alike)
            what = f"{len(alike)} processes say that they are rank {rank}: {named}"
            remedy = f"{_NAME_YOURSELF}, and see that no process of an earlier run is left"
            yield _finding(ERROR, "duplicate-rank", alike, what, remedy)


def _world_size(evidence: Evidence, report: Report) -> Complaint:
    what = f"WORLD_SIZE={report.world_size}, but on rank 0 it is {evidence.world_size}"
    is_wrong = not report.place_problem and report.world_size != evidence.world_size
    return (ERROR, what, "set WORLD_SIZE to the same number on every rank") if is_wrong else None


def _missing_ranks(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.missing:
        return
    came = set(range(evidence.world_size)) - set(evidence.missing)
    what = f"did not arrive within {evidence.waited_seconds:g} s; {ranks_text(came)} did"
    remedy = (
        "check that they were started, that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are "
        "those of this job, and what they have printed themselves"
    )
    if any(report.rank in evidence.reports for report in evidence.others):
        remedy = f"they may be among the processes that have another's rank: {_NAME_YOURSELF}"
    yield Finding(ERROR, "missing-ranks", evidence.missing, (), what, remedy)


def _silent_ranks(evidence: Evidence, report: Report) -> Complaint:
    what = "joined, and then stopped answering"
    remedy = "check what they printed, and whether the kernel killed them (dmesg)"
    return (ERROR, what, remedy) if report.rank in evidence.silent else None


def _local_ranks(evidence: Evidence) -> Iterator[Finding]:
    places = grouped(((each.machine, each.local_rank), each) for each in evidence.reports.values())
    for (_, local_rank), reports in places.items():
        if len(reports) > 1 and local_rank != UNKNOWN:
            severity = ERROR if any(report.devices for report in reports) else WARNING
            what = f"are all local rank {local_rank} of one host, and would share a device"
            remedy = "set LOCAL_RANK to another number for each rank of a host, from 0"
            yield _finding(severity, "local-rank", reports, what, remedy)


_GLOO = "GLOO_SOCKET_IFNAME"


def _gloo_interface(_: Evidence, report: Report) -> Complaint:
    if not report.gloo_problem:
        return None
    chosen = dict(report.variables).get(_GLOO)
    there = ", ".join(dict.fromkeys(name for name, _ in report.interfaces))
    what = f"Gloo can't listen: {report.gloo_problem}; the host has {there or 'no interface'}"
    return ERROR, f"{_GLOO}={chosen}, but {what}" if chosen else what, _interface_to_set(report)


def _gloo_loopback(evidence: Evidence, report: Report) -> Complaint:
    if not is_loopback(report.address) or len(evidence.machines) == 1:
        return None
    what = f"Gloo listens at {report.address}, which other hosts cannot reach"
    hosts = "let the host's name resolve to its address in the network (/etc/hosts)"
    return ERROR, what, f"{_interface_to_set(report)}, or {hosts}"


def _interface_to_set(report: Report) -> str:
    """Suggest the interface that leads to the store, or the first that leads to other hosts."""
    usable = [name for name, address in report.interfaces if not is_loopback(address)]
    name = report.interface_at(report.caller)
    names = [name, *usable] if name in usable else [*usable, ""]
    return f"set {_GLOO}={names[0]}" if names[0] else f"unset {_GLOO}, or add a network interface"


def _unreachable(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for each host or pair of hosts between whose ranks connections failed."""
    reports = evidence.reports
    lost: dict[frozenset[str], list[tuple[int, int, str]]] = defaultdict(list)
    for rank, made in evidence.contacts.items():
        for contact in made:
            one, other = reports[rank], reports[contact.peer]
            is_local = is_loopback(other.address) or is_loopback(one.address)
            is_explained = other.gloo_problem or (is_local and one.machine != other.machine)
            if contact.problem and not is_explained:
                hosts = frozenset({one.machine, other.machine})
                lost[hosts].append((rank, contact.peer, contact.problem))
    for found in lost.values():
        first, peer, _ = found[0]
        ranks, peers = {rank for rank, _, _ in found}, {peer for _, peer, _ in found}
        here = {rank for rank in ranks | peers if reports[rank].machine == reports[first].machine}
        there = (ranks | peers) - here
        what = f"{ranks_text(ranks)} can't reach {ranks_text(peers)}"
        if not ranks <= here:
            what = f"{ranks_text(here)} and {ranks_text(there)} can't reach each other"
        what += f" at {reports[peer].address}: {' or '.join(sorted({why for *_, why in found}))}"
        remedy = (
            "open all ports between these hosts (firewall, security group, routes), or set "
            f"OBJCOMM_PORTS to those that are open, or {_GLOO} to interfaces of one network"
        )
        yield _finding(ERROR, "unreachable", [reports[rank] for rank in here | there], what, remedy)


def _shown(texts: Sequence[str], most: int = 8) -> str:
    more = len(texts) - most
    return ", ".join(texts[:most]) + f" and {more} more" * (more > 0)


def _slow_names(evidence: Evidence) -> Iterator[Finding]:
    reports = evidence.reports
    known = [each for each in evidence.lookups if {each.by, each.rank} <= reports.keys()]
    slow = [each for each in known if each.seconds >= SLOW_LOOKUP_SECONDS]
    if not slow:
        return
    worst = max(slow, key=lambda each: each.seconds)
    host = reports[worst.by].host
    lines = [
        f"'{each.address} {'localhost' if is_loopback(each.address) else reports[each.rank].host}'"
        for each in known
    ]
    what = (
        "torch's store looks up the name of each rank that connects, and answers none meanwhile: "
        f"on {host} the name of {worst.address} took {worst.seconds:.1f} s, the slowest of "
        f"{worst.count} look-ups"
    )
    remedy = (
        f"add to /etc/hosts on {host} the line{'s' * (len(lines) > 1)} {_shown(lines)}; or set "
        "RES_OPTIONS=timeout:1 for all processes, and a query that is lost costs 1 s instead of 5"
    )
    yield _finding(WARNING, "slow-names", [reports[each.rank] for each in slow], what, remedy)


# Ranks that differ in these can't work together; other differences may be harmless.
_MUST_AGREE = {"objcomm", "torch", "NCCL", "init's backend"}


def _versions(evidence: Evidence) -> Iterator[Finding]:
    found: dict[str, dict[str, list[Report]]] = defaultdict(lambda: defaultdict(list))
    for report in evidence.reports.values():
        for name, version in report.versions:
            # Functions pickled by value need the same minor version of Python.
            alike = ".".join(version.split(".")[:2]) if name == "Python" else version
            found[name][alike].append(report)
    for name, versions in found.items():
        usual = max(versions, key=lambda version: len(versions[version]))
        what = f"{name} differs between ranks ({', '.join(sorted(versions))}; most have {usual})"
        odd = [each for version in versions if version != usual for each in versions[version]]
        remedy = f"install {name} {usual} on these hosts"
        if name == "init's backend":
            remedy = "give init the same backend= on every rank, or see why only some have a device"
        if odd:
            yield _finding(ERROR if name in _MUST_AGREE else WARNING, "versions", odd, what, remedy)


# Counted with torch 2.13 and 2 to 6 ranks: for every other rank, a Gloo group and objcomm's own
# connections use one socket each, and point-to-point messages six more. The rest is for the
# program's own files.
_LEAST_FILES, _LEAST_FILES_PER_PEER = 32, 2
_GOOD_FILES, _GOOD_FILES_PER_PEER = 256, 10


def _open_files(evidence: Evidence, report: Report) -> Complaint:
    size = evidence.world_size
    least = _LEAST_FILES + _LEAST_FILES_PER_PEER * (size - 1)
    good = _GOOD_FILES + _GOOD_FILES_PER_PEER * (size - 1)
    if not UNKNOWN < report.open_files < good:
        return None
    what = (
        f"may have {report.open_files} files and sockets open; a group of {size} ranks needs "
        f"{least}, and a job with messages from rank to rank up to {good}"
    )
    remedy = (
        f"run ulimit -n {good} before the program; if that is refused, raise the hard limit "
        f"(limits.conf, docker run --ulimit nofile={good})"
    )
    return ERROR if report.open_files < least else WARNING, what, remedy


# Docker's default is 64 MiB; a batch of images in a DataLoader worker takes more.
_SMALL_NBYTES = 64 << 20


def _shared_memory(_: Evidence, report: Report) -> Complaint:
    if report.system != "linux" or report.shm_free_nbytes > _SMALL_NBYTES:
        return None  # other systems share memory in their own ways
    left = f"{report.shm_free_nbytes >> 20} MiB left in /dev/shm"
    left = "no /dev/shm" if report.shm_free_nbytes == UNKNOWN else left
    what = f"there is {left}, and DataLoader's workers and NCCL pass data through it"
    remedy = (
        "remove what is left there, mount it larger (mount -o remount,size=8G /dev/shm), or use "
        "docker run --shm-size=8g"
    )
    return WARNING, what, remedy


def _system(evidence: Evidence, report: Report) -> Complaint:
    if report.system == "linux":
        return None
    what = f"the system is {report.system!r}, and several ranks have only been tested on Linux"
    remedy = "start several ranks on Linux; a program that runs alone does not need it"
    return NOTE if evidence.world_size == 1 else WARNING, what, remedy


def _group(evidence: Evidence, report: Report) -> Complaint:
    problem = evidence.failures.get(report.rank)
    what = f"could not create a Gloo group of all ranks, or it failed: {problem}"
    remedy = "see the other findings; if there are none, run with TORCH_DISTRIBUTED_DEBUG=DETAIL"
    return (ERROR, what, remedy) if problem else None


# Gigabit Ethernet reaches this; hosts of one job are seldom meant to have less.
_NETWORK_NBYTES_PER_SECOND = 100e6


def _links(evidence: Evidence) -> Iterator[Finding]:
    machine = {rank: report.machine for rank, report in evidence.reports.items()}
    near = [link for link in evidence.links if machine[link.src] == machine[link.dst]]
    far = [link for link in evidence.links if machine[link.src] != machine[link.dst]]
    cores = "see what else runs on that host, and that each rank has cores of its own (taskset)"
    yield from _odd(evidence, near, "within a host", cores)
    card = (
        f"see that {_GLOO} names the fastest interface that all hosts have, and look at its cable "
        "and counters (ethtool, ip -s link)"
    )
    yield from _odd(evidence, far, "between hosts", card)
    seconds = _usual({link: 1 / link.nbytes_per_second for link in far})
    if seconds * _NETWORK_NBYTES_PER_SECOND > 1:
        what = f"links between hosts carry {_rate(seconds)}, less than gigabit Ethernet"
        yield _finding(WARNING, "slow-network", [], what, card)


def _odd(evidence: Evidence, links: Iterable[Link], kind: str, remedy: str) -> Iterator[Finding]:
    """Find links that are slower than others of their kind, and the ranks that have most of them.

    If ranks share cores, links of one kind on one machine differ by a factor of two from run to run
    (measured with 4 ranks on 2 cores). A slow cable or a wrong card costs a factor of ten.
    """
    for name, took, times, more, text in (
        ("slow-link", {link: 1 / link.nbytes_per_second for link in links}, 4, 0.0, _rate),
        ("late-link", {link: link.latency_seconds for link in links}, 10, 2e-3, _duration),
    ):
        usual = _usual(took)
        bad = [link for link in took if took[link] > max(usual * times, usual + more)]
        ends = Counter(rank for link in bad for rank in (link.src, link.dst))
        reports = [evidence.reports[rank] for rank in ends if ends[rank] == max(ends.values())]
        named = [f"rank {link.src} to rank {link.dst} ({text(took[link])})" for link in bad]
        if bad:
            what = f"{_shown(named)}, where {text(usual)} is usual {kind}"
            yield _finding(WARNING, name, reports, what, remedy)


def _usual(took: Mapping[Link, float]) -> float:
    """Return what a link should take: the median of each rank's best link.

    If two are in the middle, the better one. A host with a slow card makes every link to it slow,
    which in a small world are most links, so a median over links would take that as usual.
    """
    best: dict[int, float] = {}
    for link, seconds in took.items():
        for rank in (link.src, link.dst):
            best[rank] = min(seconds, best.get(rank, seconds))
    return median_low(best.values()) if best else 0.0


def _rate(seconds: float) -> str:
    return f"{1e-6 / seconds:.3g} MB/s"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms for a message"


_CONCLUSIONS: tuple[Conclusion, ...] = (
    _of_ranks("variables", lambda _, report: _as_advised(report.place_problem)),
    _of_ranks("rendezvous", lambda _, report: _as_advised(report.meeting_problem)),
    _duplicate_ranks,
    _of_ranks("world-size", _world_size),
    _missing_ranks,
    _of_ranks("silent-ranks", _silent_ranks),
    _local_ranks,
    _of_ranks("gloo-interface", _gloo_interface),
    _of_ranks("gloo-loopback", _gloo_loopback),
    _unreachable,
    _slow_names,
    _versions,
    _of_ranks("devices", lambda _, report: _as_advised(report.device_problem)),
    _of_ranks("open-files", _open_files),
    _of_ranks("shared-memory", _shared_memory),
    _of_ranks("system", _system),
    _of_ranks("group", _group),
    _links,
)
