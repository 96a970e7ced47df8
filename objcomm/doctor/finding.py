"""What a conclusion is, and words that all of them use."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from objcomm.doctor.evidence import Evidence
from objcomm.doctor.facts import UNKNOWN, Report
from objcomm.inspector.words import ranks_text


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
