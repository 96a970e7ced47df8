"""Conclusions on the links that were measured."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median_high, median_low

from objcomm.doctor.evidence import Evidence
from objcomm.doctor.facts import Link
from objcomm.doctor.finding import Finding, Severity, by, finding

# Links of one kind on one machine differ by a factor of two from run to run where ranks share
# cores (seen with 4 ranks on 2 cores); a slow cable or a wrong card costs a factor of ten.
_SLOWER = 4.0
_LATER = 10.0
_LATER_SECONDS = 2e-3
# Gigabit Ethernet carries this; who has several hosts has seldom less on purpose.
_NETWORK_NBYTES_PER_SECOND = 100e6

Links = Sequence[Link]


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


def usual(links: Links, figure: Callable[[Link], float], best: Callable[..., float]) -> float:
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


def _is_between(evidence: Evidence, link: Link) -> bool:
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
    pairs: dict[tuple[int, int], list[Link]] = defaultdict(list)
    for link in left:
        pairs[min(link.src, link.dst), max(link.src, link.dst)].append(link)
    for pair, few in pairs.items():
        yield list(pair), few


def _machines(evidence: Evidence, link: Link, ends: Sequence[str]) -> set[str]:
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
