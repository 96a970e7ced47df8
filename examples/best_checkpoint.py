"""Try settings on all ranks, save the best model on the rank that has it, and load it everywhere.

`argmax` returns the best score and its rank. Only that rank writes the file; if this fails, for
example because the disk is full, every rank raises the error.

    torchrun --nproc-per-node 4 examples/best_checkpoint.py
    python examples/best_checkpoint.py
"""

import shutil
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import objcomm

TRAINED = 1200
RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # some ranks try one more than others, or none


def trained(rate: float, images: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    """Train a model for fifty steps with a learning rate."""
    torch.manual_seed(0)
    model = nn.Linear(64, 10, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


@torch.inference_mode()
def score(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the mean log-likelihood; higher is better."""
    return -nn.functional.cross_entropy(model(images), labels).item()


def main() -> None:
    """Find the best rate, save and load its model, and check that all ranks have it."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16), torch.tensor(digits)

    mine: nn.Module = nn.Linear(64, 10)
    my_rate, my_score = 0.0, float("-inf")
    for rate in RATES[objcomm.rank() :: objcomm.world_size()]:
        model = trained(rate, images[:TRAINED], labels[:TRAINED])
        reached = score(model, images[TRAINED:], labels[TRAINED:])
        if reached > my_score:
            mine, my_rate, my_score = model, rate, reached
    best = objcomm.all_reduce(my_score, "argmax")

    folder = Path(objcomm.run_on_main(tempfile.mkdtemp))  # must be readable by all ranks

    def save() -> Path:
        path = folder / "best.pt"
        torch.save({"rate": my_rate, "weights": mine.state_dict()}, path)
        return path

    checkpoint = torch.load(objcomm.compute_and_broadcast(save, best.rank))
    model = nn.Linear(64, 10, dtype=torch.float64)
    model.load_state_dict(checkpoint["weights"])
    assert score(model, images[TRAINED:], labels[TRAINED:]) == best.value
    objcomm.barrier("all have loaded it")  # only then may rank 0 remove it
    if objcomm.is_main():
        shutil.rmtree(folder)
        print(f"all ranks have the model of rate {checkpoint['rate']}, score {best.value:.6f}")


if __name__ == "__main__":
    objcomm.init("gloo")
    main()
    objcomm.shutdown()
