"""Export the counters of ``objcomm.stats``, and what ranks are doing, to monitoring tools."""

from objcomm._failures.activity import activity_to_prometheus
from objcomm._observe.published import publish
from objcomm._observe.stats import stats_to_prometheus, stats_to_tensorboard

__all__ = [
    "activity_to_prometheus",
    "stats_to_prometheus",
    "stats_to_tensorboard",
]

globals().update(publish(__name__, {name: globals()[name] for name in __all__}))
