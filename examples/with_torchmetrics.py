"""Use torchmetrics and objcomm side by side to merge metrics from all ranks.

torchmetrics synchronizes inside `compute`, on all ranks, with one gather for each state. objcomm
reduces whole metrics with torchmetrics' own `merge_state`, onto one rank or all, in a single call.

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
    """Merge the metrics of two ranks."""
    for name, metric in left.items():
        metric.merge_state(right[name])
    return left


def answer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, for this rank's images, the nearest digit, the true digit, and the distance."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels).float(), torch.tensor(digits)
    means = torch.stack([images[:TRAINED][labels[:TRAINED] == d].mean(dim=0) for d in range(10)])
    rows = slice(TRAINED + objcomm.rank(), None, objcomm.world_size())
    distances, answers = torch.cdist(images[rows], means).min(dim=1)
    return answers, labels[rows], distances


def measured(answers: torch.Tensor, labels: torch.Tensor, *, synchronised: bool) -> Metrics:
    """Return metrics that have been updated with this rank's images."""
    metrics: Metrics = {
        "accuracy": MulticlassAccuracy(10, average="micro", sync_on_compute=synchronised),
        "confusion": MulticlassConfusionMatrix(10, sync_on_compute=synchronised),
    }
    for metric in metrics.values():
        metric.update(answers, labels)
    return metrics


def main() -> None:
    """Compute the metrics with both libraries, and compare."""
    answers, labels, distances = answer()
    theirs = measured(answers, labels, synchronised=True)
    values = {name: metric.compute() for name, metric in theirs.items()}  # on every rank
    kept = CatMetric()
    kept.update(distances)
    values["distances"] = kept.compute()

    ours = objcomm.reduce(measured(answers, labels, synchronised=False), merged)  # onto rank 0
    in_order = objcomm.reduce(distances, "concat")
    if ours is not None and in_order is not None:  # only on rank 0
        assert all(torch.equal(ours[name].compute(), values[name]) for name in ours)
        assert torch.equal(in_order, values["distances"])
        accuracy = ours["accuracy"].compute()
        print(f"accuracy {accuracy:.6f} of {len(in_order)} images, both ways")


if __name__ == "__main__":
    objcomm.init("gloo")
    main()
    objcomm.shutdown()
