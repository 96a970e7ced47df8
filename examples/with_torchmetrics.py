"""torchmetrics and objcomm side by side: metrics of all ranks, joined where they are needed.

torchmetrics synchronises inside of `compute`, on all ranks, by a gather for each state. objcomm
reduces metrics as a whole, by torchmetrics' own `merge_state`, onto one rank or all, in one call.

    torchrun --nproc-per-node 4 examples/with_torchmetrics.py
    python examples/with_torchmetrics.py
"""

import torch
from sklearn.datasets import load_digits
from torchmetrics import CatMetric, Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

import objcomm

TRAINED = 1200

Metrics = dict[str, Metric]


def merged(left: Metrics, right: Metrics) -> Metrics:
    """The metrics of both ranks' images."""
    for name, metric in left.items():
        metric.merge_state(right[name])
    return left


def answer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of this rank's images: the nearest digit, the true one, and how near the nearest is."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels).float(), torch.tensor(digits)
    means = torch.stack([images[:TRAINED][labels[:TRAINED] == d].mean(dim=0) for d in range(10)])
    rows = slice(TRAINED + objcomm.rank(), None, objcomm.world_size())
    distances, answers = torch.cdist(images[rows], means).min(dim=1)
    return answers, labels[rows], distances


def measured(answers: torch.Tensor, labels: torch.Tensor, *, synchronised: bool) -> Metrics:
    """Metrics that have seen this rank's images."""
    metrics: Metrics = {
        "accuracy": MulticlassAccuracy(10, average="micro", sync_on_compute=synchronised),
        "confusion": MulticlassConfusionMatrix(10, sync_on_compute=synchronised),
    }
    for metric in metrics.values():
        metric.update(answers, labels)
    return metrics


def main() -> None:
    """Compute both ways, and compare."""
    answers, labels, distances = answer()
    theirs = measured(answers, labels, synchronised=True)
    values = {name: metric.compute() for name, metric in theirs.items()}  # on every rank
    kept = CatMetric()
    kept.update(distances)
    values["distances"] = kept.compute()

    ours = objcomm.reduce(measured(answers, labels, synchronised=False), merged)  # onto rank 0
    in_order = objcomm.reduce(distances, "concat")
    if ours is not None and in_order is not None:  # so on rank 0
        assert all(torch.equal(ours[name].compute(), values[name]) for name in ours)
        assert torch.equal(in_order, values["distances"])
        accuracy = ours["accuracy"].compute()
        print(f"accuracy {accuracy:.6f} of {len(in_order)} images, both ways")


if __name__ == "__main__":
    objcomm.init("gloo")
    main()
    objcomm.shutdown()
