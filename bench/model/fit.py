"""What messages cost a rank's processor, out of what real ranks have taken.

Least squares of the shares by which each figure is missed, so that small calls count as much as
large ones.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.model.link import Costs
from bench.model.world import Outcome


@dataclass(frozen=True, slots=True)
class Fit:
    """The costs that tell best what calls have taken.

    Attributes:
        costs: a message is as dear to who sends it as to who receives it.
        half: of half of the calls what they took is within this factor of what the costs say.
        worst: so it is of all of them.
    """

    costs: Costs
    half: float
    worst: float


def fitted(taken: Sequence[tuple[float, Outcome]]) -> Fit:
    """The costs of calls.

    Args:
        taken: of each call a rank's processor seconds, the mean of all ranks, and what the model
            counts for it.
    """
    rows = np.array([[1.0, each.mean_messages, each.mean_opened] for _, each in taken])
    seconds = np.array([busy for busy, _ in taken])
    chosen = list(range(rows.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(
            rows[:, chosen] / seconds[:, None], np.ones(len(taken)), rcond=None
        )
        if all(found >= 0):
            break
        del chosen[int(np.argmin(found))]  # nothing costs less than nothing
    call, message, opened = (
        float(found[chosen.index(at)]) if at in chosen else 0.0 for at in range(3)
    )
    shares = rows[:, chosen] @ found / seconds
    factors = [max(share, 1 / share) for share in shares.tolist()]
    return Fit(Costs(call, message, message, opened), statistics.median(factors), max(factors))
