"""The report: for a terminal, as JSON, and the links as heat maps.

On a terminal the findings come last, where they stay on the screen.
"""

import dataclasses
import json
import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from objcomm._bootstrap.doctor.facts import (
    NAMES,
    PLATFORMS,
    UNKNOWN,
    Choice,
    Evidence,
    MeasuredLink,
    Report,
)
from objcomm._bootstrap.doctor.findings import Finding, Severity, clocks, who
from objcomm._observe.inspect.report import duration_text
from objcomm._observe.inspect.rows import Clock
from objcomm._observe.terminal import aligned
from objcomm.errors import MissingDependencyError, ranges_text, ranks_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_VERSION = 1
_LABELLED = 12
_SPAN = 4


def draw(evidence: Evidence, path: Path) -> None:
    """Write latency and bandwidth between all ranks as a picture.

    Args:
        evidence: with links.
        path: where; its suffix says in which form.

    Raises:
        MissingDependencyError: there is no matplotlib.
        OSError: it can't be written.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # an extra, and slow to import
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "matplotlib") from error
    figure = Figure(figsize=(11, 5), layout="constrained")
    links = evidence.links
    left = figure.add_subplot(1, 2, 1, title="latency, ms (dark: slow)")
    right = figure.add_subplot(1, 2, 2, title="bandwidth, MB/s (dark: slow)")
    ranks = sorted(evidence.reports)
    # Dark is bad in both: a slow cable is a dark row and a dark column.
    _map(left, ranks, {_ends(link): link.latency_seconds * 1e3 for link in links}, "viridis_r")
    _map(right, ranks, {_ends(link): link.nbytes_per_second / 1e6 for link in links}, "viridis")
    figure.savefig(path, dpi=120)


def _ends(link: MeasuredLink) -> tuple[int, int]:
    return link.src, link.dst


def _map(
    axes: "Axes", ranks: Sequence[int], figures: Mapping[tuple[int, int], float], colours: str
) -> None:
    cells = [[figures.get((rank, peer), math.nan) for peer in ranks] for rank in ranks]
    # Wide enough that links which differ by little look alike, and none of them slow.
    least, most = min(figures.values()), max(figures.values())
    most = max(most, _SPAN * least) if colours.endswith("_r") else most
    image = axes.imshow(cells, cmap=colours, vmin=0.0, vmax=most)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.get_figure(root=True).colorbar(image, ax=axes, shrink=0.8)  # type: ignore[union-attr]  # it has one
    if len(ranks) > _LABELLED:
        return
    axes.set_xticks(range(len(ranks)), list(map(str, ranks)))
    axes.set_yticks(range(len(ranks)), list(map(str, ranks)))
    for row, rank in enumerate(ranks):
        for column, peer in enumerate(ranks):
            cell = figures.get((rank, peer))
            if cell is not None:
                is_dark = cell > most / 2 if colours.endswith("_r") else cell < most / 2
                colour = "white" if is_dark else "black"
                axes.text(column, row, _text(cell), ha="center", va="center", color=colour)


def _text(figure: float) -> str:
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}"  # noqa: PLR2004  # three digits


def plain(evidence: Evidence, found: Sequence[Finding], status: int) -> str:
    """All that is known, as JSON."""
    told = {
        "objcomm_doctor": _VERSION,
        "status": status,
        "world_size": evidence.world_size,
        "missing": list(evidence.missing),
        "silent": list(evidence.silent),
        "waited_seconds": evidence.waited_seconds,
        "findings": [
            dataclasses.asdict(each) | {"severity": each.severity.value} for each in found
        ],
        "ranks": [_without_token(each) for _, each in sorted(evidence.reports.items())],
        "others": [_without_token(each) for each in evidence.others],
        "contacts": {
            str(rank): [dataclasses.asdict(each) for each in made]
            for rank, made in sorted(evidence.contacts.items())
        },
        "lookups": {
            str(rank): [dataclasses.asdict(each) for each in found]
            for rank, found in sorted(evidence.lookups.items())
        },
        "links": [dataclasses.asdict(each) for each in evidence.links],
        "left_out": evidence.left_out,
    }
    return json.dumps(told, indent=2) + "\n"


def _without_token(report: Report) -> dict[str, object]:
    told = dataclasses.asdict(report)
    told.pop("token")
    return told


# More columns do not fit on a screen; the picture and the JSON have them.
_MATRIX_MAX = 12
_WIDTH = 100
_GIB = 1 << 30
_MANY_FILES = 1 << 30
_WOULD = "NCCL, which this torch does not have, would use"


def report(evidence: Evidence, found: Sequence[Finding]) -> str:
    """All of it, from the facts to the findings."""
    blocks = [
        [*_heading(evidence), *_hosts(evidence)],
        _whys(evidence),
        _unreached(evidence),
        *_matrices(evidence),
        conclusions(found),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def conclusions(found: Sequence[Finding]) -> list[str]:
    """The findings, each with what to set, and a last line that sums them up."""
    lines = []
    for each in found:
        concerned = who(each)
        said = f"{concerned}{': ' * bool(concerned)}{each.what}"
        lines += _wrapped(f"{each.severity.name} {each.name}", f": {said}")
        lines += _wrapped("  ->", f" {each.remedy}")
    return [*lines, _summary(found)]


def _wrapped(first: str, text: str) -> list[str]:
    """Lines of a screen's width, all but the first indented."""
    return textwrap.wrap(
        first + text,
        _WIDTH,
        subsequent_indent="     ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(found: Sequence[Finding]) -> str:
    counts = [(each, sum(one.severity is each for one in found)) for each in Severity]
    told = ", ".join(f"{count} {each.value}{'s' * (count > 1)}" for each, count in counts if count)
    if not any(each.severity.counts for each in found):
        return f"nothing found that would break or slow a job{f' ({told})' * bool(told)}"
    first = next(each for each in found if each.severity.counts)
    return f"{told}; first: {first.name}{f', {who(first)}' * bool(who(first))}"


def _heading(evidence: Evidence) -> list[str]:
    reports = list(evidence.reports.values())
    first = reports[0]
    launchers = sorted({each.launcher for each in reports if each.launcher})
    by_whom = f", by the variables of {', '.join(launchers)}" if launchers else ", no launcher"
    place = first.rendezvous
    came = f"{ranks_text(evidence.reports)} of {evidence.world_size}"
    hosts = f"{len(evidence.machines)} host{'s' * (len(evidence.machines) > 1)}"
    meeting = f", meeting at {place.host}:{place.port}" if place.host else ""
    return [
        f"objcomm doctor: {came} on {hosts}{by_whom}{meeting}",
        *_alike(evidence, _installed),
        "",
    ]


def _installed(report: Report) -> str:
    versions = [f"{NAMES.get(name, name)} {text}" for name, text in report.versions.items()]
    has_any = bool(report.devices) or any(name in report.versions for name in PLATFORMS)
    lacks = "" if has_any else ", no accelerator"
    return f"{', '.join(versions)}{lacks}; backends: {', '.join(report.backends) or 'none'}"


def _alike(evidence: Evidence, told: Callable[[Report], str]) -> list[str]:
    """A line for all ranks that tell the same."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, each in evidence.reports.items():
        by_text[told(each)].append(rank)
    if len(by_text) == 1:
        return [text for text in by_text if text]
    return [f"{ranks_text(ranks)}: {text}" for text, ranks in by_text.items() if text]


_SHM = "/dev/shm"  # noqa: S108  # the title of a column
_COLUMNS = ("host", "ranks", "Gloo", "NCCL", "devices", "open files", _SHM, "clock")


def _hosts(evidence: Evidence) -> list[str]:
    known = clocks(evidence)
    by_row: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, each in evidence.reports.items():
        clock = known.get(rank)
        by_row[each.machine, *_cells(each, _clock(rank, clock, evidence))].append(rank)
    rows = [(row[1], ranges_text(ranks), *row[2:]) for row, ranks in by_row.items()]
    return aligned([_COLUMNS, *rows])


def _cells(each: Report, clock: str) -> tuple[str, ...]:
    gloo = each.gloo
    return (
        each.host,
        f"{gloo.interface} {gloo.address}" if not gloo.problem else "none",
        _nccl(each),
        _devices(each.devices),
        "no limit" if each.open_files >= _MANY_FILES else str(each.open_files),
        _memory(each),
        clock,
    )


def _nccl(each: Report) -> str:
    if "nccl" not in each.backends:
        return "-"
    return each.nccl.interface if not each.nccl.problem else "none"


def _devices(devices: Sequence[str]) -> str:
    kinds = dict.fromkeys(devices)
    return ", ".join(f"{devices.count(kind)} x {kind}" for kind in kinds) or "-"


def _memory(each: Report) -> str:
    if each.shm_nbytes == UNKNOWN:
        return "none"
    return f"{each.shm_free_nbytes / _GIB:.1f} of {each.shm_nbytes / _GIB:.1f} GiB"


def _clock(rank: int, clock: Clock | None, evidence: Evidence) -> str:
    zero = evidence.reports.get(0)
    if zero is not None and evidence.reports[rank].machine == zero.machine:
        return "-"
    if clock is None:
        return "?"
    sign = "+" if clock.ahead_seconds >= 0 else "-"
    return (
        f"{sign}{duration_text(abs(clock.ahead_seconds))} (+-{duration_text(clock.margin_seconds)})"
    )


def _whys(evidence: Evidence) -> list[str]:
    """Why each backend uses its interface."""
    lines: dict[str, list[int]] = defaultdict(list)
    for rank, each in evidence.reports.items():
        has_nccl = "nccl" in each.backends
        lines[_why("Gloo uses", each.gloo)].append(rank)
        lines[_why("NCCL uses" if has_nccl else _WOULD, each.nccl)].append(rank)
        if each.environment:
            told = " ".join(f"{name}={text}" for name, text in each.environment.items())
            lines[f"variables: {told}"].append(rank)
    every = len(evidence.reports)
    return [
        text if len(ranks) == every else f"{ranks_text(ranks)}: {text}"
        for text, ranks in sorted(lines.items())
    ]


def _why(backend: str, choice: Choice) -> str:
    uses = choice.interface if not choice.problem else f"nothing ({choice.problem})"
    return f"{backend} {uses}: {choice.why}" if choice.why else f"{backend} {uses}"


def _unreached(evidence: Evidence) -> list[str]:
    """Who reaches whom, if not all do."""
    ranks = sorted(evidence.reports)
    problems = {
        (rank, each.peer): each.problem for rank, made in evidence.contacts.items() for each in made
    }
    if not any(problems.values()) or len(ranks) > _MATRIX_MAX:
        return []
    rows = [
        [str(rank), *("-" if rank == peer else _mark(problems, rank, peer) for peer in ranks)]
        for rank in ranks
    ]
    head = ["from \\ to", *map(str, ranks)]
    return ["who reaches whom (x: not, ?: not tried)", *aligned([head, *rows])]


def _mark(problems: Mapping[tuple[int, int], str], rank: int, peer: int) -> str:
    if (rank, peer) not in problems:
        return "?"
    return "x" if problems[rank, peer] else "ok"


def _matrices(evidence: Evidence) -> list[list[str]]:
    if not evidence.links:
        return []
    left = f"; {evidence.left_out} pairs of ranks were left out for want of time (--timeout)"
    told = left if evidence.left_out else ""
    latency = [f"latency, ms (half a round trip of an empty message{told})"]
    rate = [f"bandwidth, MB/s (one message of up to 8 MiB{told})"]
    if len(evidence.reports) > _MATRIX_MAX:
        links = evidence.links
        latency += [_extremes([link.latency_seconds * 1e3 for link in links], "{:.2f}")]
        rate += [_extremes([link.nbytes_per_second / 1e6 for link in links], "{:.0f}")]
    else:
        latency += _matrix(evidence, lambda link: f"{link.latency_seconds * 1e3:.2f}")
        rate += _matrix(evidence, lambda link: f"{link.nbytes_per_second / 1e6:.4g}")
    return [latency, rate]


def _extremes(figures: Sequence[float], form: str) -> str:
    least, middle, most = (
        form.format(figure) for figure in (min(figures), median(figures), max(figures))
    )
    return f"least {least}, median {middle}, most {most} (--png and --json show all)"


def _matrix(evidence: Evidence, cell: Callable[[MeasuredLink], str]) -> list[str]:
    ranks = sorted(evidence.reports)
    cells = {(link.src, link.dst): cell(link) for link in evidence.links}
    rows = [[str(rank), *(cells.get((rank, peer), "-") for peer in ranks)] for rank in ranks]
    return aligned([["from \\ to", *map(str, ranks)], *rows], is_right=True)
