"""The names and signatures of ``flashy.distrib``, and the additional ones of encodec and demucs.

Only the import changes: ``from objcomm.compat import flashy as distrib``. Ranks are global, and
every function works without ``init_process_group``, in a world of one. Each function does the same
as the objcomm function of its name, or the one named in its docstring, and raises the same errors.
Functions that ``objcomm`` has too also accept its other arguments.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch.utils.data import DataLoader

import objcomm
from objcomm._calls.group import is_main
from objcomm._collectives.reduction.operators import REDUCE_OPS
from objcomm._world import rank, world_size
from objcomm.compat.raising import RaisingBlock, as_it_raised, raising
from objcomm.errors import UsageError, caught_as

__all__ = [
    "all_reduce",
    "average",
    "average_metrics",
    "average_tensors",
    "barrier",
    "broadcast_model",
    "broadcast_object",
    "broadcast_tensors",
    "eager_sync_gradients",
    "eager_sync_model",
    "init",
    "is_distributed",
    "is_rank_zero",
    "loader",
    "rank",
    "rank_zero_only",
    "share",
    "sync_buffer",
    "sync_grad",
    "sync_gradients",
    "sync_model",
    "world_size",
    "wrap",
]

T = TypeVar("T")
P = ParamSpec("P")

_Tensors = Iterable[torch.Tensor]

average_metrics = raising(as_it_raised)(objcomm.metrics.average_metrics)
average_tensors = raising(as_it_raised)(objcomm.models.average_tensors)
barrier = raising(as_it_raised)(objcomm.barrier)
broadcast_model = raising(as_it_raised)(objcomm.models.broadcast_model)
broadcast_tensors = raising(as_it_raised)(objcomm.models.broadcast_tensors)
sync_grad = raising(as_it_raised)(objcomm.models.sync_gradients)
sync_gradients = raising(as_it_raised)(objcomm.models.sync_gradients)
wrap = raising(as_it_raised)(objcomm.models.wrap)


def init(backend: str | None = None) -> None:
    """``objcomm.init``, which chooses the backend by default; flashy's default is nccl."""
    objcomm.init(backend)


def is_rank_zero() -> bool:
    """Whether this is global rank 0."""
    return is_main()


def is_distributed() -> bool:
    """Whether there are other ranks."""
    return world_size() > 1


def rank_zero_only(fn: Callable[P, T]) -> Callable[P, T | None]:
    """Decorate a function to run on rank 0 only; other ranks return None without communication.

    ``objcomm.main_process_only`` shares the result or the exception with all ranks.
    """

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return fn(*args, **kwargs) if is_main() else None

    return wrapped


@raising(as_it_raised)
def all_reduce(tensor: torch.Tensor, op: Any = "SUM") -> torch.Tensor:
    """``objcomm.all_reduce`` of one tensor in place; returns the same tensor.

    Raises:
        UsageError: objcomm has no such ``op``, or it is the mean of integers. Raised on every rank
            that passed it, before any traffic.
    """
    name = REDUCE_OPS.get(str(op).rpartition(".")[2])
    if name is None:
        error = UsageError(f"all_reduce: op={op!r} is not one of {', '.join(REDUCE_OPS)}")
        raise caught_as(error, TypeError)
    if name == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise UsageError(f"all_reduce: {tensor.dtype} has no mean; call objcomm.all_reduce")
    result: torch.Tensor = objcomm.all_reduce(tensor, name)
    with torch.no_grad():
        return tensor.copy_(result)


@overload
def average(metrics: Mapping[str, Any], count: float = 1.0) -> dict[str, float]: ...
@overload
def average(metrics: Sequence[Any], count: float = 1.0) -> list[float]: ...
@raising(as_it_raised)
def average(
    metrics: Mapping[str, Any] | Sequence[Any], count: float = 1.0
) -> dict[str, float] | list[float]:
    """``objcomm.metrics.average_metrics`` of a dict or, as in demucs, of a sequence of numbers."""
    if isinstance(metrics, Mapping):
        return objcomm.metrics.average_metrics(metrics, count)
    numbered = {str(place): value for place, value in enumerate(metrics)}
    return list(objcomm.metrics.average_metrics(numbered, count).values())


@raising(as_it_raised)
def sync_buffer(buffers: _Tensors, average: bool = True) -> None:  # noqa: FBT001, FBT002  # encodec's signature
    """``objcomm.models.sync_buffers`` under encodec's name."""
    objcomm.models.sync_buffers(buffers, average=average)


def eager_sync_gradients(params: _Tensors) -> AbstractContextManager[None]:
    """``objcomm.models.eager_sync_gradients``."""
    return RaisingBlock(objcomm.models.eager_sync_gradients(params))


@raising(as_it_raised)
def sync_model(
    model: torch.nn.Module,
    sync_buffers: bool = True,  # noqa: FBT001, FBT002  # flashy's signature
    average_buffers: bool = True,  # noqa: FBT001, FBT002  # likewise
) -> None:
    """``objcomm.models.sync_model``."""
    objcomm.models.sync_model(model, sync_buffers=sync_buffers, average_buffers=average_buffers)


def eager_sync_model(
    model: torch.nn.Module,
    sync_buffers: bool = True,  # noqa: FBT001, FBT002  # flashy's signature
    average_buffers: bool = True,  # noqa: FBT001, FBT002  # likewise
) -> AbstractContextManager[None]:
    """``objcomm.models.eager_sync_model``."""
    block = objcomm.models.eager_sync_model(
        model, sync_buffers=sync_buffers, average_buffers=average_buffers
    )
    return RaisingBlock(block)


@raising(as_it_raised)
def loader(
    dataset: Any,
    *args: Any,
    shuffle: bool = False,
    klass: Callable[..., Any] = DataLoader,
    **kwargs: Any,
) -> Any:
    """``objcomm.loader``."""
    return objcomm.loader(dataset, *args, shuffle=shuffle, klass=klass, **kwargs)


@raising(as_it_raised)
def broadcast_object(obj: Any = None, src: int = 0, device: Any = None) -> Any:
    """``objcomm.broadcast``; ``device``, where flashy stages bytes, has no effect."""
    del device
    return objcomm.broadcast(obj, src)


@raising(as_it_raised)
def share(obj: Any = None, src: int = 0) -> Any:
    """``objcomm.broadcast`` under demucs's name."""
    return objcomm.broadcast(obj, src)
