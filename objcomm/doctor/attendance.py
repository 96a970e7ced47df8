"""Conclusions on who came, and whether all could."""

from collections import defaultdict
from collections.abc import Iterator

from objcomm.doctor.evidence import Evidence
from objcomm.doctor.facts import UNKNOWN, Report
from objcomm.doctor.finding import Finding, Severity, by, finding
from objcomm.inspector.words import ranks_text

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
                f"are all local rank {local_rank} of one host, and would share a CUDA device",
                "set LOCAL_RANK to another number for each rank of a host, from 0",
            )
