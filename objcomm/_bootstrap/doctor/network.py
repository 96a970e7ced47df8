"""Conclusions on interfaces, on who can't reach whom, and on the links that were measured."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median_high, median_low

from objcomm._bootstrap.doctor.facts import (
    NO_ANSWER,
    NO_ROUTE,
    SLOW_LOOKUP_SECONDS,
    UNKNOWN,
    Evidence,
    Interface,
    Lookup,
    MeasuredLink,
    Report,
    is_loopback,
)
from objcomm._bootstrap.doctor.findings import Finding, Severity, by, finding, interface_to_set
from objcomm._bootstrap.init import uses_nccl
from objcomm.errors import ranks_text

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# A card twice as fast stands idle.
_FASTER = 2
_LINES_SHOWN = 8
# One cause, and which of them a rank sees depends on whether its patience or the kernel's ends
# first: both may take three seconds.
_LOST_PACKETS = frozenset({NO_ANSWER, NO_ROUTE})


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
    lost: dict[tuple[str, str, str], list[tuple[int, int, str]]] = defaultdict(list)
    for rank, made in evidence.contacts.items():
        for contact in made:
            if contact.problem and not _is_explained(evidence, rank, contact.peer):
                here, there = (evidence.reports[each].machine for each in (rank, contact.peer))
                cause = "" if contact.problem in _LOST_PACKETS else contact.problem
                lost[here, there, cause].append((rank, contact.peer, contact.problem))
    for (here, there, cause), found in lost.items():
        back = lost.get((there, here, cause), [])
        if back and here > there:
            continue  # said with the other direction
        both = [evidence.reports[rank] for *pair, _ in found + back for rank in pair]
        one, other = ({rank for rank, _, _ in found}, {peer for _, peer, _ in found})
        problem = " or ".join(sorted({problem for *_, problem in found + back}))
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
            f"OBJCOMM_PORTS to those that are open, or {_GLOO} to interfaces of one network",
        )


def _is_explained(evidence: Evidence, rank: int, peer: int) -> bool:
    """Whether another finding says already why a rank is not reached."""
    one, other = evidence.reports[rank], evidence.reports[peer]
    is_local = is_loopback(other.gloo.address) or is_loopback(one.gloo.address)
    return bool(other.gloo.problem) or (is_local and one.machine != other.machine)


def _used(report: Report) -> Interface | None:
    """The interface that carries Gloo's bytes, and objcomm's where the user names it."""
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


# Links of one kind on one machine differ by a factor of two from run to run where ranks share
# cores (seen with 4 ranks on 2 cores); a slow cable or a wrong card costs a factor of ten.
_SLOWER = 4.0
_LATER = 10.0
_LATER_SECONDS = 2e-3
# Gigabit Ethernet carries this; who has several hosts has seldom less on purpose.
_NETWORK_NBYTES_PER_SECOND = 100e6

Links = Sequence[MeasuredLink]


def speed(evidence: Evidence) -> Iterator[Finding]:
    """Say which links are slow against the others of their kind, and whether all of them are."""
    yield from _failures(evidence)
    inside = [link for link in evidence.links if not _is_between(evidence, link)]
    between = [link for link in evidence.links if _is_between(evidence, link)]
    for links, kind in ((inside, "within a host"), (between, "between hosts")):
        yield from _slow(evidence, links, kind)
        yield from _late(evidence, links, kind)
    if between:
        typical = usual(between, lambda link: link.nbytes_per_second, max)
        if typical < _NETWORK_NBYTES_PER_SECOND:
            yield finding(
                Severity.WARNING,
                "slow-network",
                [],
                f"links between hosts carry {_rate(typical)}, less than gigabit Ethernet does",
                "see that GLOO_SOCKET_IFNAME names the fastest interface that all hosts have",
            )


def usual(
    links: Links, figure: Callable[[MeasuredLink], float], best: Callable[..., float]
) -> float:
    """What a link should be like: the median over the ranks of each rank's best link.

    Of two in the middle it is the better one. A host with a slow card makes every link to it slow,
    and in a small world most links: a median of the links would call that usual.
    """
    of_rank: dict[int, list[float]] = defaultdict(list)
    for link in links:
        for rank in (link.src, link.dst):
            of_rank[rank].append(figure(link))
    middle = median_high if best is max else median_low
    return middle(best(figures) for figures in of_rank.values())


def _is_between(evidence: Evidence, link: MeasuredLink) -> bool:
    return evidence.reports[link.src].machine != evidence.reports[link.dst].machine


def _failures(evidence: Evidence) -> Iterator[Finding]:
    for text, reports in by(evidence, evidence.failures).items():
        yield finding(
            Severity.ERROR,
            "group",
            reports,
            f"a Gloo group of all ranks was made in vain, or broke: {text}",
            "see the other findings; where there are none, run with TORCH_DISTRIBUTED_DEBUG=DETAIL",
        )


def _slow(evidence: Evidence, links: Links, kind: str) -> Iterator[Finding]:
    if not links:
        return
    typical = usual(links, lambda link: link.nbytes_per_second, max)
    slow = [link for link in links if link.nbytes_per_second * _SLOWER < typical]
    for ranks, few in _culprits(evidence, slow, links):
        worst = min(link.nbytes_per_second for link in few)
        yield finding(
            Severity.WARNING,
            "slow-link",
            [evidence.reports[rank] for rank in ranks],
            f"{_links(few, ranks)}: {_rate(worst)}, where links {kind} usually carry "
            f"{_rate(typical)}",
            _remedy(kind),
        )


def _late(evidence: Evidence, links: Links, kind: str) -> Iterator[Finding]:
    if not links:
        return
    typical = usual(links, lambda link: link.latency_seconds, min)
    limit = max(typical * _LATER, typical + _LATER_SECONDS)
    late = [link for link in links if link.latency_seconds > limit]
    for ranks, few in _culprits(evidence, late, links):
        worst = max(link.latency_seconds for link in few)
        yield finding(
            Severity.WARNING,
            "late-link",
            [evidence.reports[rank] for rank in ranks],
            f"{_links(few, ranks)}: a message takes {worst * 1e3:.2f} ms, where links {kind} "
            f"usually take {typical * 1e3:.2f} ms",
            _remedy(kind),
        )


def _remedy(kind: str) -> str:
    if kind == "between hosts":
        return (
            "see that GLOO_SOCKET_IFNAME names the fast interface there, and look at its cable and "
            "counters (ethtool, ip -s link)"
        )
    return "see what else runs on that host, and that each rank has cores of its own (taskset)"


def _culprits(evidence: Evidence, bad: Links, links: Links) -> Iterator[tuple[list[int], Links]]:
    """Bad links by the host that has none but bad ones, one way or both; others by pairs."""
    left = list(bad)
    for ends in (("src", "dst"), ("src",), ("dst",)):
        for machine in sorted(evidence.machines) if len(evidence.machines) > 1 else []:
            mine = [link for link in links if machine in _machines(evidence, link, ends)]
            found = [link for link in left if link in mine]
            if len(found) == len(mine) > 1:
                left = [link for link in left if link not in found]
                yield _ranks_of(evidence, machine), found
    pairs: dict[tuple[int, int], list[MeasuredLink]] = defaultdict(list)
    for link in left:
        pairs[min(link.src, link.dst), max(link.src, link.dst)].append(link)
    for pair, few in pairs.items():
        yield list(pair), few


def _machines(evidence: Evidence, link: MeasuredLink, ends: Sequence[str]) -> set[str]:
    return {evidence.reports[getattr(link, end)].machine for end in ends}


def _ranks_of(evidence: Evidence, machine: str) -> list[int]:
    return [rank for rank, report in evidence.reports.items() if report.machine == machine]


def _links(few: Links, ranks: Sequence[int]) -> str:
    """Bad links in words, by the rank or the host that all of them have in common."""
    sources, targets = {link.src for link in few}, {link.dst for link in few}
    if len(few) == 1:
        return f"from rank {few[0].src} to rank {few[0].dst}"
    if len(sources | targets) == len(("one", "other")):
        return "in both directions"
    own = set(ranks)
    if sources <= own:
        return "all that it sends to other hosts"
    if targets <= own:
        return "all that it gets from other hosts"
    return "all its links to other hosts"


def _rate(nbytes_per_second: float) -> str:
    return f"{nbytes_per_second / 1e6:.3g} MB/s"
