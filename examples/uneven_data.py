"""Train with DistributedDataParallel although ranks have different numbers of batches.

In each backward pass, ranks wait for each other. If a rank left the loop at the end of its own
data, the others would hang. Here all ranks continue while any rank has a batch. A rank without one
uses an empty batch, which adds nothing to the gradient. To stop at the shortest data instead, use
`while not objcomm.any_rank(batch is None)`.

    torchrun --nproc-per-node 4 examples/uneven_data.py
    python examples/uneven_data.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import objcomm

TRAINED, BATCH_SIZE, EPOCHS = 1200, 16, 3


def main() -> None:
    """Train, and check that all ranks took the same number of steps and used every image."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16), torch.tensor(digits)
    empty = images[:0], labels[:0]

    torch.manual_seed(0)
    owners = (torch.rand(TRAINED) ** 2 * objcomm.world_size()).long()  # rank 0 has the most
    mine = torch.nonzero(owners == objcomm.rank()).flatten()
    model = nn.Linear(64, 10, dtype=torch.float64)
    parallel = objcomm.models.wrap(model)  # DistributedDataParallel, on CPUs too
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = steps = 0
    for _ in range(EPOCHS):
        batches = ((images[rows], labels[rows]) for rows in mine.split(BATCH_SIZE))
        batch = next(batches, None)
        while objcomm.any_rank(batch is not None):
            inputs, truth = batch or empty
            optimizer.zero_grad()
            # A sum, because the mean over no images is nan.
            loss = nn.functional.cross_entropy(parallel(inputs), truth, reduction="sum")
            (loss / BATCH_SIZE).backward()
            optimizer.step()
            seen += len(truth)
            steps += 1
            batch = next(batches, None)

    objcomm.agree(steps)  # raises if a rank took more steps than another
    seen = objcomm.all_reduce(seen, "sum")
    assert seen == EPOCHS * TRAINED
    if objcomm.is_main():
        print(f"all ranks took the same steps, and saw {seen} images in {EPOCHS} epochs")


if __name__ == "__main__":
    objcomm.init("gloo")
    main()
    objcomm.shutdown()
