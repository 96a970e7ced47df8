"""The names and signatures of ``axolotl.utils.distributed``.

Only the import changes: ``from objcomm.compat import axolotl as distributed``. Each function does
the same as the objcomm function named in its docstring, and raises the same errors. In functions
that communicate, these errors can also be caught as axolotl's: as RuntimeError or, if this rank's
own code raised, as that exception's class.

As in axolotl, functions that communicate join a launcher's ranks first. Unlike in axolotl,
functions that only query never do. ``world_size=`` and ``rank=`` are accepted where axolotl or its
documentation has them, but are not needed.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch

import objcomm
from objcomm._calls.exclusive_regions import is_in_order
from objcomm._calls.group import resolve
from objcomm._environment import Placement, local_rank_in, placement_in
from objcomm._observe.tracing import keep_eager
from objcomm._training import metrics, once
from objcomm._wire.header import Operation
from objcomm.compat.raising import RaisingBlock, as_it_raised, raising
from objcomm.errors import UsageError, ranks_text

__all__ = [
    "DistributedState",
    "barrier",
    "broadcast_dict",
    "cleanup_distributed",
    "compute_and_broadcast",
    "gather_from_all_ranks",
    "gather_scalar_from_all_ranks",
    "get_current_device",
    "get_device_count",
    "get_device_type",
    "get_distributed_state",
    "get_world_size",
    "init_distributed_state",
    "is_distributed",
    "is_local_main_process",
    "is_main_process",
    "reduce_and_broadcast",
    "zero_first",
    "zero_only",
]

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")

_TIMEOUT_VARIABLE = "AXOLOTL_NCCL_TIMEOUT"  # axolotl's own, in seconds
_TIMEOUT_SECONDS = "1800"

#: Axolotl's order of preference.
_ACCELERATORS = ("cuda", "mps", "npu", "xpu")


class DistributedState(NamedTuple):
    """The attributes of accelerate's ``PartialState`` that axolotl's programs read.

    Attributes:
        process_index: this process's rank.
        num_processes: number of ranks.
        local_process_index: rank on this host; None if no environment variable gives it.
        device: this rank's device.
    """

    process_index: int
    num_processes: int
    local_process_index: int | None
    device: torch.device

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.local_process_index == 0

    @property
    def use_distributed(self) -> bool:
        """Whether there are other ranks."""
        return self.num_processes > 1


def _accelerator() -> tuple[str, object]:
    for name in _ACCELERATORS:
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return name, module
    return "cpu", None


def get_device_type() -> torch.device:
    """Return the type of this machine's accelerator, or the CPU."""
    return torch.device(_accelerator()[0])


def get_device_count() -> int:
    """Return the number of devices of that type; 1 for the CPU."""
    count: Callable[[], int] = getattr(_accelerator()[1], "device_count", lambda: 1)
    return count()


def get_current_device() -> int:
    """Return the index of the current device of that type; 0 if there is only one."""
    current: Callable[[], int] = getattr(_accelerator()[1], "current_device", lambda: 0)
    return current()


def init_distributed_state() -> None:
    """Join a launcher's ranks with ``objcomm.init``, unless they have joined already.

    The timeout is AXOLOTL_NCCL_TIMEOUT in seconds, or 1800.

    Raises:
        UsageError: as in ``objcomm.init``, or AXOLOTL_NCCL_TIMEOUT is not a number.
        StartError: as in ``objcomm.init``.
    """
    if objcomm.is_initialized():
        return
    text = os.environ.get(_TIMEOUT_VARIABLE) or _TIMEOUT_SECONDS
    try:
        limit = float(text)
    except ValueError:
        raise UsageError(f"init: {_TIMEOUT_VARIABLE}={text!r} is not a number of seconds") from None
    objcomm.init(timeout=limit)


def _place() -> Placement:
    """Return the placement of this process, whether or not the ranks have joined."""
    if objcomm.is_initialized():
        rank, world_size = objcomm.rank(), objcomm.world_size()
        return Placement("", rank, world_size, local_rank_in(os.environ), "", 0)
    return placement_in(os.environ) or Placement("", 0, 1, 0, "", 0)


def get_distributed_state() -> DistributedState | None:
    """Return the state after ``init_distributed_state``; None if the ranks have not joined."""
    if not objcomm.is_initialized():
        return None
    place = _place()
    kind = get_device_type().type
    device = torch.device(kind, get_current_device()) if kind == "cuda" else torch.device(kind)
    return DistributedState(place.rank, place.world_size, place.local_rank, device)


def is_distributed() -> bool:
    """Whether there are other ranks, joined or not; does not initialize anything."""
    return get_world_size() > 1


@raising(as_it_raised)
def barrier() -> None:
    """Wait for all ranks, as in ``objcomm.barrier``."""
    init_distributed_state()
    objcomm.barrier()


def is_main_process() -> bool:
    """Whether this is rank 0; before the ranks have joined, according to the launcher."""
    return _place().rank == 0


def is_local_main_process() -> bool:
    """Whether this is the first rank of its host, as in ``objcomm.is_main(scope="node")``."""
    return objcomm.is_main(scope="node")


def get_world_size() -> int:
    """Return the number of ranks, joined or not."""
    return _place().world_size


def cleanup_distributed() -> None:
    """Wait for this rank's device, and leave the other ranks as in ``objcomm.shutdown``."""
    synchronize: Callable[[], None] = getattr(_accelerator()[1], "synchronize", lambda: None)
    synchronize()
    objcomm.shutdown()


def zero_first(is_main: bool) -> contextlib.AbstractContextManager[None]:  # noqa: FBT001  # axolotl's
    """Run a block first on rank 0, or on each host's first rank, as in ``objcomm.main_first``.

    Args:
        is_main: true only on rank 0, or only on the first rank of each host.

    Raises:
        UsageError: ``is_main`` is true on other ranks. Raised on every rank, before any runs the
            block.
        CollectiveError: as in ``objcomm.main_first``.
    """
    return RaisingBlock(_begun(is_main=bool(is_main)))


@contextlib.contextmanager
def _begun(*, is_main: bool) -> Iterator[None]:
    init_distributed_state()
    with _first(is_main=is_main):
        yield


class _zero_first_of_node(objcomm.node_first):  # noqa: N801  # as its base
    _operation = Operation.ZERO_FIRST


def _first(*, is_main: bool) -> contextlib.AbstractContextManager[None]:
    """Choose the context manager that matches the flags of all ranks."""
    whole = resolve(None)
    if is_in_order("zero_first", whole.ranks, whole.rank):  # nested: no flags are needed
        return once.zero_first()
    flags = objcomm.all_gather(is_main)
    if flags == [rank == 0 for rank in range(len(flags))]:
        return once.zero_first()
    is_first_of_host = objcomm.rank(objcomm.node_group()) == 0
    if objcomm.all_ranks(is_main == is_first_of_host):
        return _zero_first_of_node()
    true_on = (
        ranks_text(rank for rank, flag in enumerate(flags) if flag) if any(flags) else "no rank"
    )
    raise UsageError(
        f"zero_first: is_main is true on {true_on}; it must be true on rank 0 alone, or on the "
        "first rank of each host"
    )


def zero_only() -> contextlib.AbstractContextManager[bool]:
    """Give a block a flag that is True on rank 0, and raise its failure on all ranks.

    Axolotl's version runs its body on every rank, although it is documented otherwise. A context
    manager can't skip its body: write ``with zero_only() as is_zero:`` and put the work under
    ``if is_zero:``.
    """
    init_distributed_state()
    return RaisingBlock(once.zero_only())


@raising(as_it_raised)
def gather_scalar_from_all_ranks(
    fn: Callable[[], T],
    world_size: int = 1,  # noqa: ARG001  # the group knows
    rank: int = 0,  # noqa: ARG001  # the same
) -> list[T] | None:
    """Call a function on all ranks and gather the scalars that it returns on rank 0.

    Each value keeps its exact value and type. If one rank fails, all fail.
    """
    init_distributed_state()
    return metrics.gather_scalar_from_all_ranks(fn)


@raising(as_it_raised)
def gather_from_all_ranks(
    fn: Callable[[], T],
    world_size: int = 1,  # noqa: ARG001  # the group knows
    rank: int = 0,  # noqa: ARG001  # the same
) -> list[T] | None:
    """Call a function on all ranks and gather the results on rank 0.

    See ``objcomm.metrics.gather_from_all_ranks``.
    """
    init_distributed_state()
    return objcomm.metrics.gather_from_all_ranks(fn)


@raising(as_it_raised)
def broadcast_dict(vals: T) -> T:
    """Send rank 0's dict to all ranks, as in ``objcomm.broadcast``."""
    init_distributed_state()
    return objcomm.broadcast(vals)


@raising(as_it_raised)
def compute_and_broadcast(fn: Callable[[], T]) -> T:
    """Call a function on rank 0 and broadcast the result; see ``objcomm.compute_and_broadcast``."""
    init_distributed_state()
    return objcomm.compute_and_broadcast(fn)


@raising(as_it_raised)
def reduce_and_broadcast(fn1: Callable[[], A], fn2: Callable[[list[A]], B]) -> B:
    """Call ``fn1`` on each rank, ``fn2`` on all results; see ``objcomm.reduce_and_broadcast``."""
    init_distributed_state()
    return objcomm.reduce_and_broadcast(fn1, fn2)


keep_eager(globals()[name] for name in __all__)
del keep_eager  # not a public name
