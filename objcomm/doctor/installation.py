"""Conclusions on what is installed, on the hosts' limits, and on their clocks."""

from collections import defaultdict
from collections.abc import Iterator

from objcomm.doctor.evidence import Evidence
from objcomm.doctor.facts import UNKNOWN
from objcomm.doctor.finding import Finding, Severity, by, finding
from objcomm.inspector.clocks import Clock
from objcomm.inspector.words import duration_text

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
_NAMES = {"python": "Python", "cuda": "CUDA", "nccl": "NCCL"}


def installation(evidence: Evidence) -> Iterator[Finding]:
    """Say what differs between ranks that should not, and which limit is too low."""
    yield from _versions(evidence)
    yield from _backends(evidence)
    yield from _devices(evidence)
    yield from _open_files(evidence)
    yield from _shared_memory(evidence)
    yield from _clocks(evidence)


def _versions(evidence: Evidence) -> Iterator[Finding]:
    for package in ("python", "torch", "objcomm", "cuda", "nccl"):
        told = {
            rank: _version(package, report.versions.get(package, ""))
            for rank, report in evidence.reports.items()
        }
        found = by(evidence, told)
        if len(found) < len(("one", "other")):
            continue
        name = _NAMES.get(package, package)
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
            "give init the same backend= on every rank, or see why CUDA is not there on these",
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


def _shared_memory(evidence: Evidence) -> Iterator[Finding]:
    told: dict[int, str] = {}
    for rank, report in evidence.reports.items():
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
