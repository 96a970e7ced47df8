"""Conclusions on interfaces, and on who can't reach whom."""

from collections import defaultdict
from collections.abc import Iterator

from objcomm.backends import uses_nccl
from objcomm.doctor.evidence import Evidence
from objcomm.doctor.facts import (
    SLOW_LOOKUP_SECONDS,
    UNKNOWN,
    Interface,
    Lookup,
    Report,
    is_loopback,
)
from objcomm.doctor.finding import Finding, Severity, by, finding, interface_to_set
from objcomm.inspector.words import ranks_text

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# A card twice as fast stands idle.
_FASTER = 2
_LINES_SHOWN = 8


def network(evidence: Evidence) -> Iterator[Finding]:
    """Say which interface is wrong, and which hosts can't reach which."""
    yield from _gloo(evidence)
    yield from _gloo_elsewhere(evidence)
    yield from _families(evidence)
    yield from _nccl(evidence)
    yield from _unreached(evidence)
    yield from _slow_names(evidence)
    yield from _packets(evidence)
    yield from _slower_cards(evidence)


def _set(variable: str, report: Report, otherwise: str) -> str:
    name = interface_to_set(report)
    return f"set {variable}={name}" if name else otherwise


def _gloo(evidence: Evidence) -> Iterator[Finding]:
    wrong = {
        rank: f"{report.gloo.why}, but {report.gloo.problem}; there {_listed(report)}"
        for rank, report in evidence.reports.items()
        if report.gloo.problem
    }
    for text, reports in by(evidence, wrong).items():
        remedy = _set(_GLOO, reports[0], f"unset {_GLOO}, or give the host a network interface")
        yield finding(Severity.ERROR, "gloo-interface", reports, text, remedy)


def _listed(report: Report) -> str:
    names = [f"{each.name} ({each.addresses[0]})" for each in report.interfaces if each.addresses]
    return f"are {', '.join(names)}" if len(names) > 1 else f"is {''.join(names) or 'none'}"


def _gloo_elsewhere(evidence: Evidence) -> Iterator[Finding]:
    if len(evidence.machines) == 1:
        return
    wrong = {
        rank: f"Gloo would listen at {report.gloo.address}, which no other host reaches, because "
        f"{report.gloo.why}"
        for rank, report in evidence.reports.items()
        if is_loopback(report.gloo.address)
    }
    for text, reports in by(evidence, wrong).items():
        mend = "let the host's name stand for its address in the network (/etc/hosts)"
        remedy = _set(_GLOO, reports[0], "give the host a network interface")
        yield finding(Severity.ERROR, "gloo-loopback", reports, text, f"{remedy}, or {mend}")


def _families(evidence: Evidence) -> Iterator[Finding]:
    addressed = [report for report in evidence.reports.values() if report.gloo.address]
    newer = [report for report in addressed if ":" in report.gloo.address]
    if newer and len(newer) < len(addressed):
        yield finding(
            Severity.ERROR,
            "gloo-family",
            newer,
            "Gloo would use IPv6 here and IPv4 on other ranks, and can't connect the two",
            f"set {_GLOO} on these hosts to an interface that has an IPv4 address",
        )


def _nccl(evidence: Evidence) -> Iterator[Finding]:
    several = len(evidence.machines) > 1
    wrong: dict[int, str] = {}
    for rank, report in evidence.reports.items():
        is_used = uses_nccl(report.backend)
        if report.nccl.problem and (is_used or _NCCL in report.environment):
            wrong[rank] = f"{report.nccl.why or 'NCCL'}, but {report.nccl.problem}"
        elif several and is_used and is_loopback(report.nccl.address):
            wrong[rank] = (
                f"NCCL would meet at {report.nccl.address}, which no other host reaches, because "
                f"{report.nccl.why}"
            )
    for text, reports in by(evidence, wrong).items():
        is_used = any(uses_nccl(report.backend) for report in reports)
        yield finding(
            Severity.ERROR if is_used else Severity.WARNING,
            "nccl-interface",
            reports,
            text + "" * is_used + "; NCCL is not used here" * (not is_used),
            _set(_NCCL, reports[0], f"unset {_NCCL}, or give the host a network interface"),
        )


def _unreached(evidence: Evidence) -> Iterator[Finding]:
    lost: dict[tuple[str, str, str], list[tuple[int, int]]] = defaultdict(list)
    for rank, made in evidence.contacts.items():
        for contact in made:
            if contact.problem and not _is_explained(evidence, rank, contact.peer):
                here, there = (evidence.reports[each].machine for each in (rank, contact.peer))
                lost[here, there, contact.problem].append((rank, contact.peer))
    for (here, there, problem), found in lost.items():
        back = lost.get((there, here, problem), [])
        if back and here > there:
            continue  # said with the other direction
        both = [evidence.reports[rank] for pair in found + back for rank in pair]
        one, other = ({rank for rank, _ in found}, {peer for _, peer in found})
        address = evidence.reports[min(other)].gloo.address
        is_mutual = bool(back) and here != there
        pair = f"{ranks_text(one)} and {ranks_text(other)} can't reach each other"
        way = f"{ranks_text(one)} can't reach {ranks_text(other)}"
        yield finding(
            Severity.ERROR,
            "unreachable",
            both,
            f"{pair if is_mutual else way} at {address}: {problem}",
            f"open all ports between these hosts (firewall, security group, routes), or set "
            f"{_GLOO} to interfaces of one network",
        )


def _is_explained(evidence: Evidence, rank: int, peer: int) -> bool:
    """Whether another finding says already why a rank is not reached."""
    one, other = evidence.reports[rank], evidence.reports[peer]
    is_local = is_loopback(other.gloo.address) or is_loopback(one.gloo.address)
    return bool(other.gloo.problem) or (is_local and one.machine != other.machine)


def _used(report: Report) -> Interface | None:
    """The interface that carries objcomm's bytes."""
    first = report.gloo.interface.partition(",")[0]
    return next((each for each in report.interfaces if each.name == first), None)


def _slow_names(evidence: Evidence) -> Iterator[Finding]:
    for looker, told in evidence.lookups.items():
        host = evidence.reports[looker].host
        lookups = [each for each in told if each.rank in evidence.reports]
        slow = [each for each in lookups if each.seconds >= SLOW_LOOKUP_SECONDS]
        if not slow:
            continue
        worst = max(slow, key=lambda each: each.seconds)
        lines = [f"'{each.address} {_name(evidence, each)}'" for each in lookups]
        more = f" and so on, for {len(lines) - _LINES_SHOWN} more" * (len(lines) > _LINES_SHOWN)
        yield finding(
            Severity.WARNING,
            "slow-names",
            [evidence.reports[each.rank] for each in slow],
            f"torch's store looks up the name of each rank that connects, and answers none "
            f"meanwhile: on {host} the name of {worst.address} took {worst.seconds:.1f} s, the "
            f"slowest of {worst.count} look-ups",
            f"add to /etc/hosts on {host} the line{'s' * (len(lines) > 1)} "
            f"{', '.join(lines[:_LINES_SHOWN])}{more}; or set RES_OPTIONS=timeout:1 for all "
            "processes, and a query that is lost costs 1 s instead of 5",
        )


def _name(evidence: Evidence, lookup: Lookup) -> str:
    """What stands for an address in the proposed line."""
    is_local = is_loopback(lookup.address)
    return "localhost" if is_local else evidence.reports[lookup.rank].host


def _packets(evidence: Evidence) -> Iterator[Finding]:
    sizes: dict[int, list[Report]] = defaultdict(list)
    for report in evidence.reports.values():
        used = _used(report)
        if used is not None and used.mtu != UNKNOWN and not used.is_loopback:
            sizes[used.mtu].append(report)
    if len(sizes) > 1:
        named = ", ".join(f"{mtu} on {reports[0].host}" for mtu, reports in sorted(sizes.items()))
        yield finding(
            Severity.WARNING,
            "mtu",
            [report for reports in sizes.values() for report in reports],
            f"the largest packets of the hosts' interfaces differ ({named}); where a switch drops "
            "the larger ones, small messages pass and large ones hang",
            "set the same MTU on all hosts and switches (ip link set dev ... mtu ...)",
        )


def _slower_cards(evidence: Evidence) -> Iterator[Finding]:
    told: dict[int, str] = {}
    for rank, report in evidence.reports.items():
        used = _used(report)
        usable = [each for each in report.interfaces if each.is_up and each.addresses]
        best = max(usable, key=lambda each: each.mbit, default=None)
        if used is None or best is None or not 0 < used.mbit * _FASTER <= best.mbit:
            continue
        told[rank] = (
            f"Gloo would use {used.name} with {used.mbit} Mbit/s, and {best.name} has {best.mbit}"
        )
    for text, reports in by(evidence, told).items():
        name = text.partition(", and ")[2].partition(" ")[0]
        remedy = f"set {_GLOO}={name} if all hosts reach one another there"
        yield finding(Severity.NOTE, "slower-interface", reports, text, remedy)
