"""Estimate the processor time of messages from the times of real ranks.

Minimizes the sum of squares of relative errors, so that small calls count as much as large ones.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.model.link import Costs
from bench.model.world import Outcome


@dataclass(frozen=True, slots=True)
class Fit:
    """The costs that best explain the times of calls.

    Attributes:
        costs: the costs; sending a message costs as much as receiving it.
        half: the factor within which half of the calls agree with the costs.
        worst: the factor within which all calls do.
    """

    costs: Costs
    half: float
    worst: float


def fitted(taken: Sequence[tuple[float, Outcome]]) -> Fit:
    """Fit the costs to measured calls.

    Args:
        taken: for each call, the processor seconds of a rank (the mean over all ranks), and the
            model's counts.
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
        del chosen[int(np.argmin(found))]  # costs can't be negative
    call, message, opened = (
        float(found[chosen.index(at)]) if at in chosen else 0.0 for at in range(3)
    )
    shares = rows[:, chosen] @ found / seconds
    factors = [max(share, 1 / share) for share in shares.tolist()]
    return Fit(Costs(call, message, message, opened), statistics.median(factors), max(factors))
