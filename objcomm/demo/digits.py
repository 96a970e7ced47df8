"""The data: scikit-learn's 1,797 handwritten digits, 8 x 8 pixels each, split over the ranks.

The images are part of scikit-learn, so nothing is downloaded.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits

PIXELS = 64
CLASSES = 10
_BRIGHTEST = 16.0  # the data set counts a pixel's ink from 0 to 16


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the training or the test set.

    Attributes:
        rows: which rows of the whole data set these are.
        images: one row of pixels from 0 to 1 per image.
        labels: the digit on each.
    """

    rows: NDArray[np.int64]
    images: torch.Tensor
    labels: torch.Tensor


def load_shards(rank: int, world_size: int, *, test_share: float, seed: int) -> tuple[Shard, Shard]:
    """This rank's training and test shard.

    The ranks' test shards are disjoint and together the whole test set. Training shards are all of
    one size, because every rank must take part in each averaging of gradients; the up to
    ``world_size - 1`` images that are left over stay unused.
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
