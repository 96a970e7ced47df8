"""The picture above the tables: our times as shares of torch's, at the world that is judged."""

from pathlib import Path

from bench.case import JUDGED_WORLD, SECONDS
from bench.results import OURS, Results

_BASELINE = "torch"
_INCHES_PER_BAR = 0.3


def shares(results: Results) -> dict[str, float]:
    """Per case, our median over that of torch's object collective; the smallest last."""
    found: dict[str, float] = {}
    for record in results:
        is_ours = (record.peer, record.metric, record.world) == (OURS, SECONDS, JUDGED_WORLD)
        baseline = results.find(record, _BASELINE)
        if is_ours and baseline:
            found[f"{record.operation}: {record.payload}"] = record.median / baseline.median
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def draw(results: Results, file: Path) -> bool:
    """Write a bar per case; False, and no file, without matplotlib or without such figures."""
    bars = shares(results)
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # optional
    except ImportError:
        return False
    if not bars:
        return False
    figure = Figure(figsize=(8, 1 + _INCHES_PER_BAR * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    drawn = axes.barh(list(bars), list(bars.values()), color="#3b6ea5")
    axes.bar_label(drawn, fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlim(0, max(1.1, *bars.values()))
    axes.set_xlabel(f"time as a share of torch's object collective, {JUDGED_WORLD} ranks, Gloo")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=90)
    return True
