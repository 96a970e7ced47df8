"""What rank 0 shows and writes: a table, a picture, and the same facts for a program to read."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from objcomm import OperationStats
from objcomm.demo.config import Config
from objcomm.demo.digits import CLASSES
from objcomm.demo.evaluation import ConfusionMatrix, Predictions

FILES = ("confusion.png", "results.json", "predictions.npz")


@dataclass(frozen=True, slots=True)
class Results:
    """All that rank 0 knows at the end.

    Attributes:
        config: the settings of the run.
        predictions: each rank's answers, in rank order.
        matrix: all answers counted, as the ranks reduced it.
        calls: each rank's counters of its objcomm calls, in rank order.
    """

    config: Config
    predictions: Sequence[Predictions]
    matrix: ConfusionMatrix
    calls: Sequence[Mapping[str, OperationStats]]


@dataclass(frozen=True, slots=True)
class CallCost:
    """What one objcomm operation cost in a run.

    Attributes:
        operation: its name.
        calls: how often each rank called it.
        sent_nbytes: bytes that all ranks sent for it.
        milliseconds: time in all its calls on the slowest rank, waiting for others included.
    """

    operation: str
    calls: int
    sent_nbytes: int
    milliseconds: float


def call_costs(calls: Sequence[Mapping[str, OperationStats]]) -> list[CallCost]:
    """Join the ranks' counters: bytes add up, and a call takes as long as on its slowest rank."""
    costs = []
    for operation in calls[0]:
        counted = [of_rank[operation] for of_rank in calls]
        nbytes = sum(stats.sent_nbytes for stats in counted)
        seconds = max(stats.seconds for stats in counted)
        costs.append(CallCost(operation, counted[0].calls, nbytes, seconds * 1000))
    return costs


def table(results: Results) -> str:
    """Accuracy per rank and in all, then the cost of each objcomm call, as aligned text."""
    accuracy = [
        (f"rank {part.rank}", len(part.rows), part.right, _percent(part.right, len(part.rows)))
        for part in results.predictions
    ]
    matrix = results.matrix
    accuracy.append(("all", matrix.total, matrix.right, _percent(matrix.right, matrix.total)))
    costs = [
        (cost.operation, cost.calls, f"{cost.sent_nbytes:,}", f"{cost.milliseconds:.2f}")
        for cost in call_costs(results.calls)
    ]
    return "\n".join(
        [
            "",
            *_align(("test set", "images", "right", "accuracy"), accuracy),
            "",
            *_align(("objcomm call", "calls", "bytes sent", "ms, slowest rank"), costs),
            "",
            "Times include waiting for slower ranks, and the first call's also connecting them.",
        ]
    )


def draw(matrix: ConfusionMatrix) -> Figure:
    """The confusion matrix as a picture, each count in its cell."""
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot(
        title=f"{matrix.right} of {matrix.total} digits right",
        xlabel="answer",
        ylabel="digit",
        xticks=range(CLASSES),
        yticks=range(CLASSES),
    )
    # Errors are few: on a linear scale of all counts they would look like zeros.
    axes.imshow(np.sqrt(matrix.counts), cmap="Blues")
    for (digit, answer), count in np.ndenumerate(matrix.counts):
        if count:
            colour = "white" if digit == answer else "black"
            axes.text(answer, digit, str(count), ha="center", va="center", color=colour)
    return figure


def write(results: Results, out: Path) -> None:
    """Write ``FILES`` into the folder ``out``, which is made if need be."""
    out.mkdir(parents=True, exist_ok=True)
    draw(results.matrix).savefig(out / "confusion.png", dpi=120)
    (out / "results.json").write_text(json.dumps(_facts(results), indent=2) + "\n")
    parts = results.predictions
    np.savez(
        out / "predictions.npz",
        rank=np.concatenate([np.full_like(part.rows, part.rank) for part in parts]),
        row=np.concatenate([part.rows for part in parts]),
        truth=np.concatenate([part.truth for part in parts]),
        answer=np.concatenate([part.answers for part in parts]),
    )


def _facts(results: Results) -> dict[str, object]:
    return {
        "world_size": len(results.predictions),
        "config": asdict(results.config),
        "accuracy": {
            "all": results.matrix.right / results.matrix.total,
            "ranks": [part.right / len(part.rows) for part in results.predictions],
        },
        "confusion_matrix": results.matrix.counts.tolist(),
        "calls": [asdict(cost) for cost in call_costs(results.calls)],
    }


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}"


def _align(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    cells = [header, *[[str(cell) for cell in row] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "   ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
