"""Measure with torchmetrics, which synchronizes through a function of the program."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import all_gather_object  # a name that is imported early
from torchmetrics import CatMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from tests.programs import timed, write


def gather(value: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Return all ranks' tensors, of any sizes."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    all_gather_object(everyone, value, group=group)
    return everyone


def main() -> None:
    """Measure many times, synchronizing in both ways, and write the last values."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    metrics = MetricCollection(
        {
            "accuracy": MulticlassAccuracy(5, dist_sync_fn=gather),
            "confusion": MulticlassConfusionMatrix(5, dist_sync_fn=gather),
            "as it comes": MulticlassConfusionMatrix(5),
            "uneven": CatMetric(dist_sync_fn=gather),
        },
        compute_groups=False,
    )
    times: list[float] = []
    values: dict[str, Any] = {}
    for step in range(30):
        metrics.reset()
        answers = torch.randint(5, (40 + rank,), generator=generator)
        truth = torch.randint(5, (40 + rank,), generator=generator)
        for name, metric in metrics.items():
            metric.update(*([answers] if name == "uneven" else [answers, truth]))
        with timed(times):
            values = metrics.compute()
        assert len(values["uneven"]) == sum(40 + each for each in range(dist.get_world_size())), (
            step
        )
    write([rank, {name: value.tolist() for name, value in values.items()}], times)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
