"""The links as heat maps, and all that is known as JSON."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from objcomm.doctor.evidence import Evidence
from objcomm.doctor.facts import Link, Report
from objcomm.doctor.finding import Finding
from objcomm.errors import MissingDependencyError

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
        raise MissingDependencyError("matplotlib", "doctor") from error
    figure = Figure(figsize=(11, 5), layout="constrained")
    links = evidence.links
    left = figure.add_subplot(1, 2, 1, title="latency, ms (dark: slow)")
    right = figure.add_subplot(1, 2, 2, title="bandwidth, MB/s (dark: slow)")
    ranks = sorted(evidence.reports)
    # Dark is bad in both: a slow cable is a dark row and a dark column.
    _map(left, ranks, {_ends(link): link.latency_seconds * 1e3 for link in links}, "viridis_r")
    _map(right, ranks, {_ends(link): link.nbytes_per_second / 1e6 for link in links}, "viridis")
    figure.savefig(path, dpi=120)


def _ends(link: Link) -> tuple[int, int]:
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
