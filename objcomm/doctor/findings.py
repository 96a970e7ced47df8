"""All conclusions on what is known, the worst first."""

from objcomm.doctor.attendance import attendance
from objcomm.doctor.evidence import Evidence
from objcomm.doctor.finding import Finding, Severity
from objcomm.doctor.installation import installation
from objcomm.doctor.network import network
from objcomm.doctor.speed import speed

_ORDER = tuple(Severity)


def findings(evidence: Evidence) -> list[Finding]:
    """Draw all conclusions; those first that end a job, and among them what others may come of."""
    found = [
        each
        for conclude in (attendance, network, installation, speed)
        for each in conclude(evidence)
    ]
    return sorted(found, key=lambda each: _ORDER.index(each.severity))


def status(found: list[Finding]) -> int:
    """The command's exit status: 1 if anything will break or slow a job."""
    return int(any(each.severity.counts for each in found))
