"""Keep a model the same on all ranks: broadcast it, average it, synchronize it, or wrap it."""

from objcomm._observe.published import publish
from objcomm._training.model import (
    average_tensors,
    broadcast_model,
    broadcast_tensors,
    eager_sync_gradients,
    eager_sync_model,
    sync_buffers,
    sync_gradients,
    sync_model,
    wrap,
)

__all__ = [
    "average_tensors",
    "broadcast_model",
    "broadcast_tensors",
    "eager_sync_gradients",
    "eager_sync_model",
    "sync_buffers",
    "sync_gradients",
    "sync_model",
    "wrap",
]

globals().update(publish(__name__, {name: globals()[name] for name in __all__}))
