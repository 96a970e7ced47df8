"""The last calls of this rank, written down for ``python -m objcomm inspect``."""

from objcomm._observe.recorder import dump
from objcomm._observe.tracing import publish

__all__ = [
    "dump",
]

publish(__name__, {name: globals()[name] for name in __all__})
