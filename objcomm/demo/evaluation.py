"""What a trained model answers, and how often it is right.

``Predictions`` is gathered and ``ConfusionMatrix`` reduced: two ordinary classes that know nothing
of ranks meeting, and need to register nowhere.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from objcomm.demo.digits import CLASSES, Shard


@dataclass(frozen=True, slots=True)
class Predictions:
    """One rank's answers on its shard of the test set, image by image.

    Attributes:
        rank: who answered.
        rows: which rows of the whole data set were asked.
        truth: the digit on each.
        answers: what the model said.
    """

    rank: int
    rows: NDArray[np.int64]
    truth: NDArray[np.int64]
    answers: NDArray[np.int64]

    @property
    def right(self) -> int:
        """How many answers are right."""
        return int((self.truth == self.answers).sum())


@dataclass(frozen=True, slots=True)
class ConfusionMatrix:
    """How often the digit of a row was taken for the digit of a column.

    Attributes:
        counts: images, by true digit and by answer.
    """

    counts: NDArray[np.int64]

    @classmethod
    def of(cls, predictions: Predictions) -> "ConfusionMatrix":
        """Count one rank's answers."""
        counts = np.zeros((CLASSES, CLASSES), dtype=np.int64)
        np.add.at(counts, (predictions.truth, predictions.answers), 1)
        return cls(counts)

    def merge(self, other: "ConfusionMatrix") -> "ConfusionMatrix":
        """The matrix of both sets of images; neither operand changes."""
        return ConfusionMatrix(self.counts + other.counts)

    @property
    def total(self) -> int:
        """How many images were asked."""
        return int(self.counts.sum())

    @property
    def right(self) -> int:
        """How many answers are right."""
        return int(self.counts.trace())


@torch.inference_mode()
def predict(model: nn.Module, shard: Shard, rank: int) -> Predictions:
    """Ask the model for every image of a shard."""
    answers = model(shard.images).argmax(dim=1)
    return Predictions(rank, shard.rows, shard.labels.numpy(), answers.numpy())
