"""Gather the ranks' results, or average their metrics.

``objcomm.gather_scalar`` and ``objcomm.reduce_and_broadcast`` are in ``objcomm`` itself.
"""

from objcomm._observe.published import publish
from objcomm._training.metrics import all_gather_scalar, average_metrics, gather_from_all_ranks

__all__ = [
    "all_gather_scalar",
    "average_metrics",
    "gather_from_all_ranks",
]

globals().update(publish(__name__, {name: globals()[name] for name in __all__}))
