"""Use Lightning Fabric and objcomm side by side: Fabric trains, objcomm moves objects.

Fabric's `broadcast` takes any object, but its `all_gather` and `all_reduce` take only tensors of
one shape. Both libraries use the same ranks.

    torchrun --nproc-per-node 4 examples/with_fabric.py
    python examples/with_fabric.py
"""

import collections

import torch
from lightning_fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn

import objcomm

TRAINED = 1200  # divisible by most numbers of ranks, so that the mean over equal parts is exact


def train(fabric: Fabric, images: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    """Train a model with Fabric for fifty steps."""
    torch.manual_seed(0)
    model = nn.Linear(64, 10, dtype=torch.float64)
    parallel, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    mine = slice(fabric.global_rank, TRAINED, fabric.world_size)
    for _ in range(50):
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(parallel(images[mine]), labels[mine]))
        optimizer.step()
    return model


def main() -> None:
    """Train with Fabric; share, average and count with both."""
    ranks = objcomm.world_size()
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16), torch.tensor(digits)

    settings = {"names": ("zero", "one")} if fabric.is_global_zero else None
    assert objcomm.broadcast(settings) == fabric.broadcast(settings)

    model = train(fabric, images, labels)
    rows = slice(TRAINED + fabric.global_rank, None, fabric.world_size)
    with torch.inference_mode():
        scores = model(images[rows])
    loss = nn.functional.cross_entropy(scores, labels[rows])

    # The first two means weigh all ranks equally; the third one weighs them by their images.
    mean = objcomm.all_reduce(loss, "mean")
    by_fabric = fabric.all_reduce(loss.clone(), reduce_op="mean")  # it changes its argument
    torch.testing.assert_close(mean, by_fabric)
    exact = objcomm.metrics.average_metrics({"loss": loss}, count=len(scores))["loss"]

    # Reduce an object that is not a tensor: the counts of confused digits.
    wrong = scores.argmax(dim=1) != labels[rows]
    pairs = zip(labels[rows][wrong].tolist(), scores.argmax(dim=1)[wrong].tolist(), strict=True)
    confused = objcomm.all_reduce(collections.Counter(pairs), "counter")
    if fabric.is_global_zero:
        (truth, answer), times = confused.most_common(1)[0]
        print(f"loss {exact:.6f}, {confused.total()} wrong; {truth} was {answer} {times} times")


if __name__ == "__main__":
    objcomm.init("gloo")
    main()
    objcomm.shutdown()
