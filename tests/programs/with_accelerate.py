"""Train with accelerate, and use it to share settings and collect strings."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from torch.utils.data import DataLoader, TensorDataset

from tests.programs import timed, write


def train(accelerator: Accelerator) -> list[float]:
    """Fit a plane and return the weights."""
    set_seed(7)
    inputs = torch.randn(64, 3)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5]])
    model: Any = torch.nn.Linear(3, 1)
    prepared = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(TensorDataset(inputs, targets), batch_size=8),
    )
    parallel, optimizer, loader = prepared
    for _ in range(3):
        for batch, wanted in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(parallel(batch), wanted))
            optimizer.step()
    weights: list[float] = accelerator.unwrap_model(parallel).weight.flatten().tolist()
    return weights


def main() -> None:
    """Train, then share objects many times, and write both results."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    weights = train(accelerator)
    times: list[float] = []
    for step in range(30):
        with timed(times):
            (settings,) = broadcast_object_list(
                [{"step": step, "w": torch.full((1000,), float(rank))}], from_process=1
            )
            texts = gather_object([f"text {step} of rank {rank}"] * (rank + 1))
            joined = accelerator.gather_for_metrics([{"rank": rank}], use_gather_object=True)
    write([rank, weights, settings["step"], float(settings["w"].sum()), texts, joined], times)
    accelerator.end_training()  # this destroys the process group


if __name__ == "__main__":
    main()
