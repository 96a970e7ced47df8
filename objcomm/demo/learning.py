"""The data, a small network, its training with plain torch, and its evaluation.

The data are scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, split over the ranks. They are
part of scikit-learn, so nothing is downloaded. Gradients are tensors of known shape, so objcomm is
not needed for them; the initial weights, a dict of tensors, come from rank 0 in one call.
``Predictions`` is gathered and ``ConfusionMatrix`` is reduced. Both are ordinary classes that need
no registration.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn
from tqdm import tqdm

import objcomm
from objcomm.demo.config import Config

PIXELS = 64
CLASSES = 10
_BRIGHTEST = 16.0  # pixel values in the dataset range from 0 to 16


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the training or the test set.

    Attributes:
        rows: the indices of these images in the whole dataset.
        images: one row of pixels from 0 to 1 per image.
        labels: the digit on each image.
    """

    rows: NDArray[np.int64]
    images: torch.Tensor
    labels: torch.Tensor


def load_shards(rank: int, world_size: int, *, test_share: float, seed: int) -> tuple[Shard, Shard]:
    """Return this rank's training and test shard.

    The ranks' test shards are disjoint and together form the whole test set. All training shards
    have the same size, because every rank must participate in each averaging of gradients; up to
    ``world_size - 1`` images remain unused.
    """
    pixels, labels = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels / _BRIGHTEST, dtype=torch.float32)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = np.split(order, [round(test_share * len(labels))])
    train = train[: len(train) // world_size * world_size]

    def shard(rows: NDArray[np.int64]) -> Shard:
        mine = rows[rank::world_size]
        return Shard(mine, images[mine], torch.as_tensor(labels[mine]))

    return shard(train), shard(test)


@dataclass(frozen=True, slots=True)
class Predictions:
    """One rank's predictions for the images of its test shard.

    Attributes:
        rank: the rank.
        rows: the indices of the images in the whole dataset.
        truth: the digit on each image.
        answers: the digit that the model predicted for each image.
    """

    rank: int
    rows: NDArray[np.int64]
    truth: NDArray[np.int64]
    answers: NDArray[np.int64]

    @property
    def right(self) -> int:
        """The number of correct predictions."""
        return int((self.truth == self.answers).sum())


@dataclass(frozen=True, slots=True)
class ConfusionMatrix:
    """How often the digit of a row was taken for the digit of a column.

    Attributes:
        counts: number of images by true digit and predicted digit.
    """

    counts: NDArray[np.int64]

    @classmethod
    def of(cls, predictions: Predictions) -> "ConfusionMatrix":
        """Count one rank's predictions."""
        counts = np.zeros((CLASSES, CLASSES), dtype=np.int64)
        np.add.at(counts, (predictions.truth, predictions.answers), 1)
        return cls(counts)

    def merge(self, other: "ConfusionMatrix") -> "ConfusionMatrix":
        """Return the matrix of both sets of images; neither operand changes."""
        return ConfusionMatrix(self.counts + other.counts)

    @property
    def total(self) -> int:
        """The number of images."""
        return int(self.counts.sum())

    @property
    def right(self) -> int:
        """The number of correct predictions."""
        return int(self.counts.trace())


@torch.inference_mode()
def predict(model: nn.Module, shard: Shard, rank: int) -> Predictions:
    """Predict the digit on every image of a shard."""
    answers = model(shard.images).argmax(dim=1)
    return Predictions(rank, shard.rows, shard.labels.numpy(), answers.numpy())


def train(config: Config, shard: Shard) -> nn.Module:
    """Train one model on all ranks; every rank ends up with the same weights.

    Every rank must call this, with a shard of the same length. Rank 0 shows a progress bar.
    """
    torch.manual_seed(config.seed)
    model = nn.Sequential(
        nn.Linear(PIXELS, config.hidden), nn.ReLU(), nn.Linear(config.hidden, CLASSES)
    )
    model.load_state_dict(objcomm.broadcast(model.state_dict(), progress=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate, momentum=0.9)
    steps = tqdm(
        list(_minibatches(config, len(shard.rows))),
        desc=f"training on {objcomm.world_size()} ranks",
        unit="step",
        disable=not objcomm.is_main(),
    )
    for batch in steps:
        loss = nn.functional.cross_entropy(model(shard.images[batch]), shard.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        _average_gradients(model)
        optimizer.step()
        steps.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model


def _minibatches(config: Config, images: int) -> Iterator[torch.Tensor]:
    for _ in range(config.epochs):
        yield from torch.randperm(images).split(config.batch_size)


def _average_gradients(model: nn.Module) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()
