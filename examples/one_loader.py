"""Rank 0 loads the data for all ranks, which train models with different settings on it.

Each batch is read and shuffled once, and every rank gets it: `objcomm.stream` yields the same
batches everywhere. If the loader raises, every rank raises its error.

    torchrun --nproc-per-node 4 examples/one_loader.py
    python examples/one_loader.py
"""

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import objcomm

TRAINED = 1200
EPOCHS = 5
RATES = (0.03, 0.1, 0.3, 1.0, 3.0)  # some ranks try one more than others, or none

Batch = tuple[torch.Tensor, torch.Tensor]


def batches() -> Iterator[Batch]:
    """Load the digits, and yield shuffled batches of all epochs; for rank 0 only."""
    pixels, digits = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(pixels[:TRAINED] / 16), torch.tensor(digits[:TRAINED]))
    generator = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        yield from DataLoader(dataset, batch_size=40, shuffle=True, generator=generator)


def make_model(rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Create a model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(64, 10, dtype=torch.float64)
    return model, torch.optim.SGD(model.parameters(), lr=rate)


def main() -> None:
    """Train this rank's models on the shared batches, and print which rate was best."""
    mine = RATES[objcomm.rank() :: objcomm.world_size()]
    models = {rate: make_model(rate) for rate in mine}
    losses = dict.fromkeys(mine, 0.0)
    steps = 0
    for images, labels in objcomm.stream(batches() if objcomm.is_main() else None):
        steps += 1
        for rate, (model, optimizer) in models.items():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses[rate] = loss.item()
    objcomm.agree(steps)
    everything = objcomm.reduce(losses, "union")
    if everything is not None:
        best = min(everything, key=everything.__getitem__)
        print(f"{steps} batches, loaded once; rate {best} ends with loss {everything[best]:.6f}")


if __name__ == "__main__":
    objcomm.init("gloo")
    main()
    objcomm.shutdown()
