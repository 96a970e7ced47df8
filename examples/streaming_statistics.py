"""Mean and variance of data that no rank can hold: a class of your own, reduced.

Each rank streams through its part and updates one small object; `all_reduce` merges those of all
ranks. Updates are Welford's (Technometrics 4, 1962), merges those of Chan, Golub and LeVeque
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
    """One number for each of an image's pixels."""
    return np.zeros(64)


@dataclass
class Statistics:
    """What is known of the rows that were seen.

    Attributes:
        count: how many.
        mean: of each column.
        squares: sums of squared distances to the mean.
    """

    count: int = 0
    mean: Vector = field(default_factory=zeros)
    squares: Vector = field(default_factory=zeros)

    def add(self, row: Vector) -> None:
        """Take one more row in."""
        self.count += 1
        distance = row - self.mean
        self.mean += distance / self.count
        self.squares += distance * (row - self.mean)

    def merge(self, other: "Statistics") -> "Statistics":
        """The statistics of both sets of rows."""
        count = self.count + other.count
        if count == 0:
            return self
        distance = other.mean - self.mean
        mean = self.mean + distance * (other.count / count)
        between = distance**2 * (self.count * other.count / count)
        return Statistics(count, mean, self.squares + other.squares + between)


def main() -> None:
    """Stream, merge, and compare with numpy on all rows at once."""
    rows = load_digits().data
    mine = Statistics()
    for row in rows[objcomm.rank() :: objcomm.world_size()]:  # think of files that are read once
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
