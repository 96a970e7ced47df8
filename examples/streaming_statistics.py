"""Compute mean and variance of data that fits on no rank, by reducing objects of your own class.

Each rank streams its part of the data and updates one small object; `all_reduce` merges the objects
of all ranks. Updates are from Welford (Technometrics 4, 1962), merges from Chan, Golub and LeVeque
("Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979).

    torchrun --nproc-per-node 4 examples/streaming_statistics.py
    python examples/streaming_statistics.py
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import objcomm

Vector = NDArray[np.float64]


def zeros() -> Vector:
    """Return a zero for each pixel of an image."""
    return np.zeros(64)


@dataclass
class Statistics:
    """Statistics of the rows seen so far.

    Attributes:
        count: number of rows.
        mean: mean of each column.
        squares: for each column, the sum of squared distances from the mean.
    """

    count: int = 0
    mean: Vector = field(default_factory=zeros)
    squares: Vector = field(default_factory=zeros)

    def add(self, row: Vector) -> None:
        """Add one row."""
        self.count += 1
        distance = row - self.mean
        self.mean += distance / self.count
        self.squares += distance * (row - self.mean)

    def merge(self, other: "Statistics") -> "Statistics":
        """Return the statistics of both sets of rows."""
        count = self.count + other.count
        if count == 0:
            return self
        distance = other.mean - self.mean
        mean = self.mean + distance * (other.count / count)
        between = distance**2 * (self.count * other.count / count)
        return Statistics(count, mean, self.squares + other.squares + between)


def main() -> None:
    """Stream, merge, and compare with numpy's result for all rows."""
    rows = load_digits().data
    mine = Statistics()
    for row in rows[objcomm.rank() :: objcomm.world_size()]:  # could be files, each read once
        mine.add(row)
    total = objcomm.all_reduce(mine, Statistics.merge)
    deviation = np.sqrt(total.squares / total.count)
    np.testing.assert_allclose(total.mean, rows.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(deviation, rows.std(axis=0), rtol=1e-12)
    if objcomm.is_main():
        at = int(deviation.argmax())
        of_pixel = f"{total.mean[at]:.6f} ± {deviation[at]:.6f}"
        print(f"{total.count} rows; pixel {at} varies most: {of_pixel}")


if __name__ == "__main__":
    objcomm.init("gloo")
    main()
    objcomm.shutdown()
