"""Train with DistributedDataParallel, then evaluate every image exactly once, in order.

torch's DistributedSampler repeats some images so that all ranks take the same number of steps. Here
no image is repeated, so shards differ in length, and so do the objects that are gathered.

    torchrun --nproc-per-node 4 examples/ddp_evaluation.py
    python examples/ddp_evaluation.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import objcomm

TRAINED, BATCH_SIZE = 1200, 24  # images on all ranks together


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return the training set and the test set."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16), torch.tensor(digits)
    training = TensorDataset(images[:TRAINED], labels[:TRAINED])
    return training, TensorDataset(images[TRAINED:], labels[TRAINED:])


def train(dataset: TensorDataset) -> nn.Module:
    """Train one model on all ranks, and return it without its wrapper."""
    torch.manual_seed(0)
    model = nn.Linear(64, 10, dtype=torch.float64)
    parallel = objcomm.models.wrap(model)  # DistributedDataParallel, on CPUs too
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = objcomm.loader(dataset, batch_size=BATCH_SIZE // objcomm.world_size(), shuffle=True)
    for epoch in range(10):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(parallel(images), labels).backward()
            optimizer.step()
    return model


@torch.inference_mode()
def evaluate(model: nn.Module, dataset: TensorDataset) -> tuple[torch.Tensor | None, float]:
    """Return all predictions in dataset order on rank 0, and the mean loss on every rank."""
    loader = objcomm.loader(dataset, batch_size=64)
    answers, loss = [], 0.0
    for images, labels in loader:  # ranks may differ in steps: no collectives, no DDP forward
        scores = model(images)
        loss += nn.functional.cross_entropy(scores, labels, reduction="sum").item()
        answers.append(scores.argmax(dim=1))
    rows = list(loader.sampler)
    metrics = objcomm.metrics.average_metrics({"loss": loss / len(rows)}, count=len(rows))
    parts = objcomm.gather((rows, torch.cat(answers)))
    if parts is None:
        return None, metrics["loss"]
    in_order = torch.empty(len(dataset), dtype=torch.long)
    for asked, answered in parts:
        in_order[asked] = answered
    return in_order, metrics["loss"]


def main() -> None:
    """Train, evaluate, and compare with an evaluation of everything in one process."""
    training, test = load()
    model = train(training)
    answers, loss = evaluate(model, test)
    if answers is not None:
        images, labels = test.tensors
        right = int((answers == labels).sum())
        print(f"{len(answers)} images, {right} right, mean loss {loss:.6f}")
        assert torch.equal(answers, model(images).argmax(dim=1))


if __name__ == "__main__":
    objcomm.init("gloo")
    main()
    objcomm.shutdown()
