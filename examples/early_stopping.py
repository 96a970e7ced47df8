"""Stop training on all ranks as soon as one rank wants to stop.

Each rank watches its own validation sets, here one for each digit. Before each epoch the ranks
check whether any of them wants to stop. If a rank left the loop alone, the others would wait for
its gradients.

    torchrun --nproc-per-node 4 examples/early_stopping.py
    python examples/early_stopping.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import objcomm

TRAINED = 300
PATIENCE = 10  # epochs without a better loss


class Watch:
    """A validation set, and the number of epochs since its loss improved."""

    def __init__(self, name: str, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.name = name
        self.images = images
        self.labels = labels
        self.best = float("inf")
        self.waited = 0

    @torch.inference_mode()
    def is_over(self, model: nn.Module) -> bool:
        """Evaluate the model after an epoch; return whether to stop."""
        loss = nn.functional.cross_entropy(model(self.images), self.labels).item()
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(loss, self.best)
        return self.waited >= PATIENCE


def main() -> None:
    """Train until a rank wants to stop, and print the reasons."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16), torch.tensor(digits)
    mine = slice(objcomm.rank(), TRAINED, objcomm.world_size())
    watches = []
    for digit in range(objcomm.rank(), 10, objcomm.world_size()):
        rows = torch.nonzero(labels[TRAINED:] == digit).flatten() + TRAINED
        watches.append(Watch(f"digit {digit}", images[rows], labels[rows]))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    objcomm.models.broadcast_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    over: list[str] = []
    epochs = 0
    while not objcomm.any_rank(over):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
        objcomm.models.sync_gradients(model.parameters())
        optimizer.step()
        over = [watch.name for watch in watches if watch.is_over(model)]
        epochs += 1

    epochs = objcomm.agree(epochs)  # raises if a rank has stopped at another epoch
    reasons = objcomm.all_reduce(over, "concat")
    if objcomm.is_main():
        print(f"stopped after {epochs} epochs by {', '.join(sorted(reasons))}")


if __name__ == "__main__":
    objcomm.init("gloo")
    main()
    objcomm.shutdown()
