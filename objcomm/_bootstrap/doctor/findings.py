"""What a conclusion is; those on who came, on what is installed, on limits and on clocks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from objcomm._bootstrap.doctor.facts import NAMES, PLATFORMS, UNKNOWN, Evidence, Report
from objcomm._observe.inspect.report import duration_text
from objcomm._observe.inspect.rows import Clock
from objcomm.errors import ranks_text


class Severity(Enum):
    """What a finding does to a job."""

    ERROR = "error"  # it will not run
    WARNING = "warning"  # it will be slow, or fail later
    NOTE = "note"  # good to know

    @property
    def counts(self) -> bool:
        """Whether the command's exit status tells of it."""
        return self is not Severity.NOTE


@dataclass(frozen=True, slots=True)
class Finding:
    """One conclusion.

    Attributes:
        severity: what it does to a job.
        name: what the guide calls it.
        ranks: whom it concerns.
        hosts: where they run.
        what: a sentence that says what is wrong.
        remedy: one that says what to set.
    """

    severity: Severity
    name: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    what: str
    remedy: str


def finding(
    severity: Severity, name: str, reports: Iterable[Report], what: str, remedy: str
) -> Finding:
    """A conclusion on the ranks of some reports."""
    concerned = sorted(reports, key=lambda report: report.rank)
    ranks = tuple(dict.fromkeys(report.rank for report in concerned))
    hosts = tuple(dict.fromkeys(report.host for report in concerned))
    return Finding(severity, name, ranks, hosts, what, remedy)


def who(found: Finding) -> str:
    """Whom a finding concerns: ``ranks 0-3 (host a)``."""
    if not found.ranks:
        return ""
    if found.ranks == (UNKNOWN,):
        return f"a process on {', '.join(found.hosts)}"
    if not found.hosts:
        return ranks_text(found.ranks)
    named = ", ".join(found.hosts[:_HOSTS_SHOWN])
    more = f" and {len(found.hosts) - _HOSTS_SHOWN} more" * (len(found.hosts) > _HOSTS_SHOWN)
    return f"{ranks_text(found.ranks)} on {named}{more}"


_HOSTS_SHOWN = 4


def by(evidence: Evidence, aspect: Mapping[int, str]) -> dict[str, list[Report]]:
    """The reports of ranks, by what is said of them; of ranks without a word, none."""
    found: dict[str, list[Report]] = {}
    for rank, text in sorted(aspect.items()):
        if text:
            found.setdefault(text, []).append(evidence.reports[rank])
    return found


def interface_to_set(report: Report) -> str:
    """The interface that a rank's host should most likely be told to use; empty if none will do."""
    if report.rendezvous.interface and report.rendezvous.interface != "lo":
        return report.rendezvous.interface
    usable = (
        each.name
        for each in report.interfaces
        if each.is_up and each.addresses and not each.is_loopback
    )
    return next(usable, "")


_NAME_YOURSELF = "give each process a RANK of its own, from 0 to WORLD_SIZE - 1"


def attendance(evidence: Evidence) -> Iterator[Finding]:
    """Say which ranks are missing, exist twice, disagree, or could not meet the others."""
    yield from _variables(evidence)
    yield from _unmet(evidence)
    yield from _doubles(evidence)
    yield from _sizes(evidence)
    yield from _missing(evidence)  # after what may be its cause
    yield from _silent(evidence)
    yield from _local_ranks(evidence)


def _variables(evidence: Evidence) -> Iterator[Finding]:
    wrong = {rank: report.place_problem for rank, report in evidence.reports.items()}
    for text, reports in by(evidence, wrong).items():
        what, _, remedy = text.partition("; ")
        yield finding(
            Severity.ERROR,
            "variables",
            reports,
            f"the launcher's variables are wrong: {what}",
            remedy or "set the variable to a whole number",
        )


def _unmet(evidence: Evidence) -> Iterator[Finding]:
    wrong = {rank: report.rendezvous.problem for rank, report in evidence.reports.items()}
    for text, reports in by(evidence, wrong).items():
        yield finding(Severity.ERROR, "rendezvous", reports, text, reports[0].rendezvous.remedy)


def _missing(evidence: Evidence) -> Iterator[Finding]:
    missing = evidence.missing
    if not missing:
        return
    came = set(range(evidence.world_size)) - set(missing)
    doubles = [report for report in evidence.others if report.rank in evidence.reports]
    remedy = (
        "see that they were started, that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are those "
        "of this job, and what they have printed themselves"
    )
    if doubles:
        remedy = f"they may be among the processes that have another's rank: {_NAME_YOURSELF}"
    yield Finding(
        Severity.ERROR,
        "missing-ranks",
        missing,
        (),
        f"did not come within {evidence.waited_seconds:g} s; {ranks_text(came)} did",
        remedy,
    )


def _doubles(evidence: Evidence) -> Iterator[Finding]:
    doubles: dict[int, list[Report]] = defaultdict(list)
    for report in evidence.others:
        if report.rank in evidence.reports:
            doubles[report.rank].append(report)
    for rank, others in sorted(doubles.items()):
        alike = [evidence.reports[rank], *others]
        named = ", ".join(f"pid {report.pid} on {report.host}" for report in alike)
        yield finding(
            Severity.ERROR,
            "duplicate-rank",
            alike,
            f"{len(alike)} processes say that they are rank {rank}: {named}",
            f"{_NAME_YOURSELF}, and see that no process of an earlier run is left",
        )


def _sizes(evidence: Evidence) -> Iterator[Finding]:
    size = evidence.world_size
    for report in [*evidence.reports.values(), *evidence.others]:
        if report.world_size != size and not report.place_problem:
            yield finding(
                Severity.ERROR,
                "world-size",
                [report],
                f"pid {report.pid} says that there are {report.world_size} ranks, but rank 0 that "
                f"there are {size}",
                "set WORLD_SIZE to the same number on every rank",
            )


def _silent(evidence: Evidence) -> Iterator[Finding]:
    gone = [evidence.reports[rank] for rank in evidence.silent]
    if gone:
        yield finding(
            Severity.ERROR,
            "silent-ranks",
            gone,
            "came, and then did not answer any more",
            "see what they have printed, and whether the kernel killed them (dmesg)",
        )


def _local_ranks(evidence: Evidence) -> Iterator[Finding]:
    places: dict[tuple[str, int], list[Report]] = defaultdict(list)
    for report in evidence.reports.values():
        if report.local_rank != UNKNOWN:
            places[report.machine, report.local_rank].append(report)
    for (_, local_rank), reports in places.items():
        if len(reports) > 1:
            has_devices = any(report.devices for report in reports)
            yield finding(
                Severity.ERROR if has_devices else Severity.WARNING,
                "local-rank",
                reports,
                f"are all local rank {local_rank} of one host, and would share a device",
                "set LOCAL_RANK to another number for each rank of a host, from 0",
            )


# Counted with torch 2.13 in worlds of 2 to 6: a Gloo group and objcomm's own connections take one
# socket each for every other rank, and messages from rank to rank six more; and what a program
# has open besides.
_LEAST_FILES, _LEAST_FILES_PER_PEER = 32, 2
_GOOD_FILES, _GOOD_FILES_PER_PEER = 256, 10

# Docker gives 64 MiB; a batch of images in a DataLoader's worker takes more.
_SMALL_NBYTES = 64 << 20
_MIB = 1 << 20
_SHM = "/dev/shm"  # noqa: S108  # named in sentences, nothing is written there

_CLOCK_SECONDS = 1.0

# Ranks with different ones can't work together; with other differences they may.
_MUST_AGREE = ("objcomm", "torch", "nccl")


def installation(evidence: Evidence) -> Iterator[Finding]:
    """Say what differs between ranks that should not, and which limit is too low."""
    yield from _versions(evidence)
    yield from _backends(evidence)
    yield from _devices(evidence)
    yield from _system(evidence)
    yield from _open_files(evidence)
    yield from _shared_memory(evidence)
    yield from _clocks(evidence)


def _versions(evidence: Evidence) -> Iterator[Finding]:
    for package in ("python", "torch", "objcomm", *PLATFORMS, "nccl"):
        told = {
            rank: _version(package, report.versions.get(package, ""))
            for rank, report in evidence.reports.items()
        }
        found = by(evidence, told)
        if len(found) < len(("one", "other")):
            continue
        name = NAMES.get(package, package)
        usual = max(found, key=lambda version: len(found[version]))
        odd = [each for version, reports in found.items() if version != usual for each in reports]
        versions = ", ".join(sorted(found))
        yield finding(
            Severity.ERROR if package in _MUST_AGREE else Severity.WARNING,
            "versions",
            odd,
            f"{name} differs between ranks ({versions}; most have {usual})",
            f"install {name} {usual} on these hosts",
        )


def _version(package: str, version: str) -> str:
    """As much of it as must be alike: Python's pickles by value need the same minor version."""
    return ".".join(version.split(".")[:2]) if package == "python" else version


def _backends(evidence: Evidence) -> Iterator[Finding]:
    found = by(evidence, {rank: report.backend for rank, report in evidence.reports.items()})
    if len(found) > 1:
        without = found.get("gloo", [])
        yield finding(
            Severity.ERROR,
            "backends",
            without,
            f"objcomm.init would choose {' here and '.join(sorted(found, reverse=True))} elsewhere",
            "give init the same backend= on every rank, or see why these have no such device",
        )


def _devices(evidence: Evidence) -> Iterator[Finding]:
    wrong = {rank: report.device_problem for rank, report in evidence.reports.items()}
    for text, reports in by(evidence, wrong).items():
        what, _, remedy = text.partition("; ")
        yield finding(Severity.ERROR, "devices", reports, what, remedy)


def _open_files(evidence: Evidence) -> Iterator[Finding]:
    peers = evidence.world_size - 1
    least = _LEAST_FILES + _LEAST_FILES_PER_PEER * peers
    good = _GOOD_FILES + _GOOD_FILES_PER_PEER * peers
    told: dict[int, str] = {}
    for rank, report in evidence.reports.items():
        if UNKNOWN < report.open_files < good:
            told[rank] = f"may have {report.open_files} files and sockets open"
    for text, reports in by(evidence, told).items():
        is_too_few = reports[0].open_files < least
        needs = (
            f"a group of {evidence.world_size} ranks needs {least}"
            if is_too_few
            else (f"a job of {evidence.world_size} ranks may need {good}")
        )
        has_room = reports[0].open_files_most >= good
        how = (
            f"ulimit -n {good}"
            if has_room
            else (
                f"raise the hard limit to {good} (limits.conf, docker run --ulimit nofile={good})"
            )
        )
        yield finding(
            Severity.ERROR if is_too_few else Severity.WARNING,
            "open-files",
            reports,
            f"{text}, and {needs}",
            f"run {how} before the program" if has_room else how,
        )


def _system(evidence: Evidence) -> Iterator[Finding]:
    told = {
        rank: f"the system is {report.system!r}, and several ranks have been run on Linux only"
        for rank, report in evidence.reports.items()
        if not _is_linux(report)
    }
    for text, reports in by(evidence, told).items():
        yield finding(
            Severity.NOTE if evidence.world_size == 1 else Severity.WARNING,
            "system",
            reports,
            text,
            "start several ranks on Linux; a program that runs alone needs nothing of it",
        )


def _is_linux(report: Report) -> bool:
    return report.system == "linux"


def _shared_memory(evidence: Evidence) -> Iterator[Finding]:
    told: dict[int, str] = {}
    for rank, report in evidence.reports.items():
        if not _is_linux(report):
            continue  # others share memory in their own ways
        if report.shm_nbytes == UNKNOWN:
            told[rank] = f"there is no {_SHM}"
        elif report.shm_nbytes <= _SMALL_NBYTES:
            told[rank] = f"{_SHM} has {report.shm_nbytes // _MIB} MiB in all"
        elif report.shm_free_nbytes <= _SMALL_NBYTES:
            told[rank] = f"{_SHM} has {report.shm_free_nbytes // _MIB} MiB left"
    for text, reports in by(evidence, told).items():
        yield finding(
            Severity.WARNING,
            "shared-memory",
            reports,
            f"{text}, and DataLoader's workers and NCCL pass data through it",
            "remove what is left there, mount it larger (mount -o "
            f"remount,size=8G {_SHM}), or use docker run --shm-size=8g",
        )


def clocks(evidence: Evidence) -> dict[int, Clock]:
    """Each rank's clock against rank 0's, where the two have reached each other."""
    found = {0: Clock(margin_seconds=0.0)} if 0 in evidence.reports else {}
    for rank, made in evidence.contacts.items():
        for contact in made:
            if contact.problem or rank == contact.peer or 0 not in {rank, contact.peer}:
                continue
            other = contact.peer if rank == 0 else rank
            ahead = contact.ahead_seconds if rank == 0 else -contact.ahead_seconds
            known = found.get(other, Clock())
            told = Clock(ahead, contact.margin_seconds, 1)
            found[other] = min(known, told, key=lambda each: each.margin_seconds)
    return found


def _clocks(evidence: Evidence) -> Iterator[Finding]:
    off: dict[str, list[int]] = defaultdict(list)
    known = clocks(evidence)
    for rank, clock in known.items():
        if abs(clock.ahead_seconds) - clock.margin_seconds > _CLOCK_SECONDS:
            off[evidence.reports[rank].machine].append(rank)
    for ranks in off.values():
        ahead = known[ranks[0]].ahead_seconds
        side = "ahead of" if ahead > 0 else "behind"
        yield finding(
            Severity.WARNING,
            "clock",
            [evidence.reports[rank] for rank in ranks],
            f"the clock is {duration_text(abs(ahead))} {side} that of rank 0's host, so logs and "
            "records do not fit together",
            "run chrony or ntpd on every host (chronyc tracking shows the difference)",
        )
