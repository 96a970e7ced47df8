"""The names and signatures of ``axolotl.utils.distributed``.

``from objcomm.compat import axolotl as distributed`` is the whole change in code that calls them.
Each does what the function of objcomm does that its docstring names, with that function's errors.
What communicates raises them as axolotl did, too: they are also RuntimeErrors, or what this rank's
own code raised.
As axolotl's, the functions that communicate join the ranks of a launcher first; unlike axolotl's,
the ones that only ask never do. ``world_size=`` and ``rank=`` are accepted where axolotl or its
pages have them, and not needed.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch

import objcomm
from objcomm._calls.absence import is_in_order
from objcomm._calls.group import resolve
from objcomm._environment import Placement, local_rank_in, placement_in
from objcomm._observe.tracing import keep_eager
from objcomm._training import main_process, metrics
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
    """What axolotl's programs read of accelerate's ``PartialState``.

    Attributes:
        process_index: this process's rank.
        num_processes: number of ranks.
        local_process_index: rank on this host; None where no variable tells.
        device: this rank's own.
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
    """The type of this machine's accelerator, or the CPU."""
    return torch.device(_accelerator()[0])


def get_device_count() -> int:
    """How many devices of that type there are; 1 CPU."""
    count: Callable[[], int] = getattr(_accelerator()[1], "device_count", lambda: 1)
    return count()


def get_current_device() -> int:
    """The number of the current device of that type; 0 where there is but one."""
    current: Callable[[], int] = getattr(_accelerator()[1], "current_device", lambda: 0)
    return current()


def init_distributed_state() -> None:
    """Join the ranks of a launcher by ``objcomm.init``, if there is one and it was not done yet.

    The limit in seconds is AXOLOTL_NCCL_TIMEOUT's, or 1800.

    Raises:
        UsageError: as ``objcomm.init``.
        StartError: as ``objcomm.init``.
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
    """Where this process is, whether its ranks have joined or not."""
    if objcomm.is_initialized():
        rank, world_size = objcomm.rank(), objcomm.world_size()
        return Placement("", rank, world_size, local_rank_in(os.environ), "", 0)
    return placement_in(os.environ) or Placement("", 0, 1, 0, "", 0)


def get_distributed_state() -> DistributedState | None:
    """What ``init_distributed_state`` came to; None where the ranks have not joined."""
    if not objcomm.is_initialized():
        return None
    place = _place()
    kind = get_device_type().type
    device = torch.device(kind, get_current_device()) if kind == "cuda" else torch.device(kind)
    return DistributedState(place.rank, place.world_size, place.local_rank, device)


def is_distributed() -> bool:
    """Whether there are other ranks, joined or not; nothing is initialised by asking."""
    return get_world_size() > 1


@raising(as_it_raised)
def barrier() -> None:
    """Wait for all ranks, as ``objcomm.barrier``."""
    init_distributed_state()
    objcomm.barrier()


def is_main_process() -> bool:
    """Whether this is rank 0; before the ranks have joined, by what the launcher says."""
    return _place().rank == 0


def is_local_main_process() -> bool:
    """Whether this is the first rank of its host, as ``objcomm.is_main(scope="node")``."""
    return objcomm.is_main(scope="node")


def get_world_size() -> int:
    """Number of ranks, joined or not."""
    return _place().world_size


def cleanup_distributed() -> None:
    """Wait for this rank's device, and leave the ranks, as ``objcomm.shutdown``."""
    synchronize: Callable[[], None] = getattr(_accelerator()[1], "synchronize", lambda: None)
    synchronize()
    objcomm.shutdown()


def zero_first(is_main: bool) -> contextlib.AbstractContextManager[None]:  # noqa: FBT001  # axolotl's
    """Let the first rank, or that of each host, through a block first; see ``objcomm.main_first``.

    Args:
        is_main: true on rank 0 alone, or on the first rank of each host alone.

    Raises:
        UsageError: it is true on other ranks. Every rank, before any runs the block.
        CollectiveError: as ``objcomm.main_first``.
    """
    return RaisingBlock(_begun(is_main=bool(is_main)), as_it_raised)


@contextlib.contextmanager
def _begun(*, is_main: bool) -> Iterator[None]:
    init_distributed_state()
    with _first(is_main=is_main):
        yield


class _zero_first_of_node(objcomm.node_first):  # noqa: N801  # as its base
    _operation = Operation.ZERO_FIRST


def _first(*, is_main: bool) -> contextlib.AbstractContextManager[None]:
    """The block that fits to what all ranks say of themselves."""
    whole = resolve(None)
    if is_in_order("zero_first", whole.ranks, whole.rank):  # nested: nobody need say anything
        return main_process.zero_first()
    flags = objcomm.all_gather(is_main)
    if flags == [rank == 0 for rank in range(len(flags))]:
        return main_process.zero_first()
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
    """A block that knows whether it is rank 0's; and whose failure is everybody's.

    Axolotl's ran its body on every rank, although it said otherwise. No context manager can skip
    it: write ``with zero_only() as is_zero:`` and put the work under ``if is_zero:``.
    """
    init_distributed_state()
    return RaisingBlock(main_process.zero_only(), as_it_raised)


@raising(as_it_raised)
def gather_scalar_from_all_ranks(
    fn: Callable[[], T],
    world_size: int = 1,  # noqa: ARG001  # the group knows
    rank: int = 0,  # noqa: ARG001  # the same
) -> list[T] | None:
    """Call a function on all ranks; rank 0 gets what they return.

    Each value arrives as it is, whatever its type. All ranks fail if one does.
    """
    init_distributed_state()
    return metrics.gather_scalar_from_all_ranks(fn)


@raising(as_it_raised)
def gather_from_all_ranks(
    fn: Callable[[], T],
    world_size: int = 1,  # noqa: ARG001  # the group knows
    rank: int = 0,  # noqa: ARG001  # the same
) -> list[T] | None:
    """Call a function on all ranks; rank 0 gets what they return.

    See ``objcomm.metrics.gather_from_all_ranks``.
    """
    init_distributed_state()
    return objcomm.metrics.gather_from_all_ranks(fn)


@raising(as_it_raised)
def broadcast_dict(vals: T) -> T:
    """Give rank 0's dict to all ranks, as ``objcomm.broadcast``."""
    init_distributed_state()
    return objcomm.broadcast(vals)


@raising(as_it_raised)
def compute_and_broadcast(fn: Callable[[], T]) -> T:
    """Compute something on rank 0, for all; see ``objcomm.compute_and_broadcast``."""
    init_distributed_state()
    return objcomm.compute_and_broadcast(fn)


@raising(as_it_raised)
def reduce_and_broadcast(fn1: Callable[[], A], fn2: Callable[[list[A]], B]) -> B:
    """Compute something on each rank, then once of all; see ``objcomm.reduce_and_broadcast``."""
    init_distributed_state()
    return objcomm.reduce_and_broadcast(fn1, fn2)


keep_eager(globals()[name] for name in __all__)
del keep_eager  # no public name
