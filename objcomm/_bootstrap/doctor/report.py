"""Format the report for a terminal and as JSON, and draw the links as heat maps.

On a terminal the findings come last, where they stay on the screen.
"""

import dataclasses
import json
import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from objcomm._bootstrap.doctor.facts import UNKNOWN, Evidence, Link, Report
from objcomm._bootstrap.doctor.findings import Finding, Severity, status
from objcomm._observe.terminal import aligned, printable
from objcomm.errors import MissingDependencyError, grouped, ranges_text, ranks_text

# More columns do not fit on a screen; the picture and the JSON show them.
_MATRIX_MAX = 12
_WIDTH = 100
_GIB = 1 << 30
_MANY_FILES = 1 << 30
_COLUMNS = ("host", "ranks", "Gloo", "devices", "open files", "free shared memory")


def draw(evidence: Evidence, path: Path) -> None:
    """Draw latency and bandwidth between all ranks.

    Args:
        evidence: evidence that includes links.
        path: the file to write; its suffix chooses the format.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OSError: the file can't be written.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # an extra, and slow to import
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "matplotlib") from error
    figure = Figure(figsize=(11, 5), layout="constrained")
    ranks = sorted(evidence.reports)
    ticks = ranks[:: 1 + len(ranks) // _MATRIX_MAX]
    # Dark is bad in both pictures: a slow cable is a dark row and a dark column.
    for at, (title, _, _, figure_of) in enumerate(_MEASURES):
        known = {(link.src, link.dst): figure_of(link) for link in evidence.links}
        cells = [[known.get((rank, peer), math.nan) for peer in ranks] for rank in ranks]
        axes = figure.add_subplot(1, 2, at + 1, title=f"{title} (dark: slow)")
        axes.set(xlabel="to rank", ylabel="from rank", xticks=ticks, yticks=ticks)
        # The scale is so wide that links that differ only a little look alike, and none looks slow.
        most = max(*known.values(), 4 * min(known.values()) * (at == 0))
        image = axes.imshow(cells, cmap=("viridis_r", "viridis")[at], vmin=0.0, vmax=most)
        figure.colorbar(image, ax=axes, shrink=0.8)
    figure.savefig(path, dpi=120)


def _milliseconds(link: Link) -> float:
    return link.latency_seconds * 1e3


def _megabytes(link: Link) -> float:
    return link.nbytes_per_second / 1e6


_MEASURES = (
    ("latency, ms", "half a round trip of a tiny message", "{:.2f}", _milliseconds),
    ("bandwidth, MB/s", "one message of up to 8 MiB", "{:.4g}", _megabytes),
)


def plain(evidence: Evidence, found: Sequence[Finding]) -> str:
    """Return everything that is known, as JSON."""
    known = dataclasses.asdict(evidence)
    known["ranks"] = list(known.pop("reports").values())
    for each in [*known["ranks"], *known["others"]]:
        del each["token"]
    conclusions = [dataclasses.asdict(each) | {"severity": each.severity.value} for each in found]
    head = {"objcomm_doctor": 1, "status": status(found), "findings": conclusions}
    return json.dumps(head | known | {"left_out": evidence.left_out}, indent=2) + "\n"


def report(evidence: Evidence, found: Sequence[Finding]) -> str:
    """Return the whole report as text, from the facts to the findings."""
    blocks = [
        [*_heading(evidence), "", *_hosts(evidence)],
        _alike(evidence, lambda each: each.variables, "="),
        _unreached(evidence),
        *_links(evidence),
    ]
    facts = ["\n".join(map(printable, block)) for block in blocks if block]
    return "\n\n".join([*facts, "\n".join(conclusions(found))]) + "\n"


def conclusions(found: Sequence[Finding]) -> list[str]:
    """Return the findings, each with its remedy, and a last line that summarizes them."""
    lines = []
    for each in found:
        name = f"{each.severity.name} {each.name}"
        finding = ": ".join(filter(None, [name, each.where, each.what]))
        for text in (finding, f"  -> {each.remedy}"):
            lines += textwrap.wrap(
                printable(text),
                _WIDTH,
                subsequent_indent="     ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    counts = [(each, sum(one.severity is each for one in found)) for each in Severity]
    totals = ", ".join(
        f"{count} {each.value}{'s' * (count > 1)}" for each, count in counts if count
    )
    if not status(found):
        return [
            *lines,
            f"nothing found that would break or slow a job{f' ({totals})' * bool(totals)}",
        ]
    first = ", ".join(filter(None, [found[0].name, printable(found[0].where)]))
    return [*lines, f"{totals}; first: {first}"]


def _heading(evidence: Evidence) -> list[str]:
    first, *_ = evidence.reports.values()
    by_whom = f", by the variables of {first.launcher}" if first.launcher else ", no launcher"
    meeting = f", meeting at {first.meeting}" * bool(first.meeting)
    hosts = f"{len(evidence.machines)} host{'s' * (len(evidence.machines) > 1)}"
    came = f"{ranks_text(evidence.reports)} of {evidence.world_size} on {hosts}"
    return [
        f"objcomm doctor: {came}{by_whom}{meeting}",
        *_alike(evidence, lambda each: each.versions, " "),
    ]


def _alike(
    evidence: Evidence, pairs_of: Callable[[Report], tuple[tuple[str, str], ...]], sign: str
) -> list[str]:
    """Return one line for each group of ranks with the same pairs of name and value."""
    by_text = grouped(
        (", ".join(sign.join(pair) for pair in pairs_of(each)), rank)
        for rank, each in evidence.reports.items()
    )
    return [
        f"{ranks_text(ranks)}: {text}" if len(by_text) > 1 else text
        for text, ranks in by_text.items()
        if text
    ]


def _hosts(evidence: Evidence) -> list[str]:
    by_row: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, each in evidence.reports.items():
        by_row[
            each.machine,
            each.host,
            f"{each.interface_at(each.address)} {each.address}".strip() or "none",
            ", ".join(f"{count} x {name}" for name, count in Counter(each.devices).items()) or "-",
            "no limit" if each.open_files >= _MANY_FILES else str(each.open_files),
            "none" if each.shm_free_nbytes == UNKNOWN else f"{each.shm_free_nbytes / _GIB:.1f} GiB",
        ].append(rank)
    rows = [(host, ranges_text(ranks), *row) for (_, host, *row), ranks in by_row.items()]
    return aligned([_COLUMNS, *rows])


def _unreached(evidence: Evidence) -> list[str]:
    """Return a matrix of which rank reaches which, if any attempt failed."""
    marks = {
        (rank, each.peer): "x" if each.problem else "ok"
        for rank, made in evidence.contacts.items()
        for each in made
    }
    if "x" not in marks.values() or len(evidence.reports) > _MATRIX_MAX:
        return []
    return ["reachability (x: no, ?: not tried)", *_matrix(evidence, marks, "?")]


def _matrix(evidence: Evidence, cells: dict[tuple[int, int], str], unknown: str) -> list[str]:
    ranks = sorted(evidence.reports)
    rows = [
        [str(rank), *(cells.get((rank, peer), "-" if rank == peer else unknown) for peer in ranks)]
        for rank in ranks
    ]
    return aligned([["from \\ to", *map(str, ranks)], *rows], is_right=True)


def _links(evidence: Evidence) -> list[list[str]]:
    left = f"; {evidence.left_out} pairs of ranks were skipped for lack of time (--timeout)"
    blocks = []
    for title, how, form, figure_of in _MEASURES:
        known = {(link.src, link.dst): figure_of(link) for link in evidence.links}
        lines = _matrix(evidence, {pair: form.format(each) for pair, each in known.items()}, "-")
        if known and len(evidence.reports) > _MATRIX_MAX:
            least, middle, most = (form.format(of(known.values())) for of in (min, median, max))
            lines = [f"{least} to {most}, median {middle} (--png and --json show all)"]
        blocks += [[f"{title} ({how}{left * bool(evidence.left_out)})", *lines]] * bool(known)
    return blocks
