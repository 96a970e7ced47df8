"""The program of each rank, which ``python -m objcomm.demo`` starts. Read ``run`` first.

All objcomm calls of the demo are here, in the order in which the ranks make them, except that
``learning`` broadcasts the initial weights. Rank 0 prints a table, and writes a picture and the
results as files for other programs.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import objcomm
from objcomm import OperationStats
from objcomm.demo.config import REFUSED, Config, read_config
from objcomm.demo.learning import CLASSES, ConfusionMatrix, Predictions, load_shards, predict, train

FILES = ("confusion.png", "results.json", "predictions.npz")


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a run, on rank 0.

    Attributes:
        config: the settings of the run.
        predictions: each rank's predictions, in rank order.
        matrix: the counts of all predictions, reduced over the ranks.
        calls: each rank's counters of its objcomm calls, in rank order.
    """

    config: Config
    predictions: Sequence[Predictions]
    matrix: ConfusionMatrix
    calls: Sequence[Mapping[str, OperationStats]]


@dataclass(frozen=True, slots=True)
class CallCost:
    """The cost of one objcomm operation in a run.

    Attributes:
        operation: its name.
        calls: number of calls on each rank.
        sent_nbytes: bytes that all ranks sent for it.
        milliseconds: time of all its calls on the slowest rank, including waiting for others.
    """

    operation: str
    calls: int
    sent_nbytes: int
    milliseconds: float


def call_costs(calls: Sequence[Mapping[str, OperationStats]]) -> list[CallCost]:
    """Combine the ranks' counters: add up the bytes, and take the time of the slowest rank."""
    costs = []
    for operation in calls[0]:
        counted = [of_rank[operation] for of_rank in calls]
        nbytes = sum(stats.sent_nbytes for stats in counted)
        seconds = max(stats.seconds for stats in counted)
        costs.append(CallCost(operation, counted[0].calls, nbytes, seconds * 1000))
    return costs


def table(results: Results) -> str:
    """Format the accuracy per rank and in total, then the cost of each objcomm call."""
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
    """Draw the confusion matrix, with each count in its cell."""
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot(
        title=f"{matrix.right} of {matrix.total} digits right",
        xlabel="answer",
        ylabel="digit",
        xticks=range(CLASSES),
        yticks=range(CLASSES),
    )
    # There are few errors; on a linear scale they would look like zeros.
    axes.imshow(np.sqrt(matrix.counts), cmap="Blues")
    for (digit, answer), count in np.ndenumerate(matrix.counts):
        if count:
            colour = "white" if digit == answer else "black"
            axes.text(answer, digit, str(count), ha="center", va="center", color=colour)
    return figure


def write(results: Results, out: Path) -> None:
    """Write ``FILES`` into the folder ``out``, which is created if necessary."""
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


_PATIENCE_SECONDS = 60.0


def run(config: Config, out: Path) -> None:
    """Train one model on all ranks, evaluate a part on each rank, and report on rank 0."""
    rank, world_size = objcomm.rank(), objcomm.world_size()
    train_shard, test_shard = load_shards(
        rank, world_size, test_share=config.test_share, seed=config.seed
    )
    model = train(config, train_shard)

    predictions = predict(model, test_shard, rank)
    gathered = objcomm.gather(predictions, progress=True)
    matrix = objcomm.reduce(ConfusionMatrix.of(predictions), ConfusionMatrix.merge)
    calls = objcomm.gather(objcomm.stats())

    if gathered is not None and matrix is not None and calls is not None:  # only on rank 0
        results = Results(config, gathered, matrix, calls)
        write(results, out)
        print(table(results))
        print(f"Written to {out}: {', '.join(FILES)}")


def share_config(path: Path) -> Config:
    """Read the config on rank 0 and broadcast it to every rank.

    With ``broadcast(read_config(path))``, an error in reading would keep rank 0 from the call in
    which the others wait. An exception from the callback here is raised on every rank.

    Raises:
        CollectiveError: rank 0 can't use the file. Raised on every rank.
    """
    return objcomm.reduce_and_broadcast(lambda: None, lambda _: read_config(path))


def refuse(error: objcomm.CollectiveError) -> int:
    """Print on rank 0 why there is no config; return the exit status of every rank."""
    if objcomm.is_main():
        print(f"objcomm.demo: {error.failures[0].message}", file=sys.stderr, flush=True)
    # torchrun, which may start this module too, ends all ranks as soon as one fails, so no rank may
    # exit before rank 0 has printed the message. The group still works after a failure.
    objcomm.barrier("rank 0 has spoken")
    return REFUSED


def main(argv: Sequence[str] | None = None) -> int:
    """Run this rank's part; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="torchrun -m objcomm.demo.job", description="One rank of objcomm's demo."
    )
    parser.add_argument("--config", type=Path, required=True, help="a TOML file, read on rank 0")
    parser.add_argument("--out", type=Path, required=True, help="a folder, written on rank 0")
    arguments = parser.parse_args(argv)
    objcomm.init("gloo", timeout=_PATIENCE_SECONDS)
    try:
        try:
            config = share_config(arguments.config)
        except objcomm.CollectiveError as error:
            return refuse(error)
        run(config, arguments.out)
    finally:
        objcomm.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
