"""The functions of ``speechbrain.utils.distributed``, of today and of 2022, under their names.

Only the import changes::

    from objcomm.compat.speechbrain import if_main_process, run_on_main

Signatures and results are SpeechBrain's, except for defects that are fixed; the page "Migrating"
lists them. Functions that communicate raise objcomm's errors, which can also be caught as
RuntimeError or, if this rank's own code raised, as that exception's class. Functions that
``objcomm`` has too accept ``group=`` and ``timeout=`` here as well.
"""

import functools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast, overload

import torch

from objcomm._bootstrap import init
from objcomm._calls.exclusive_regions import is_confined
from objcomm._calls.group import is_main, resolve
from objcomm._collectives.broadcast import barrier
from objcomm._collectives.reduction.reduce import all_reduce
from objcomm._config import GroupLike, Timeout
from objcomm._environment import local_rank_in, rank_in
from objcomm._observe.tracing import keep_eager
from objcomm._training import once
from objcomm._training.once import MainProcessContext
from objcomm._world import is_initialized, rank
from objcomm.compat.raising import as_it_raised, raising
from objcomm.errors import UsageError

__all__ = [
    "MainProcessContext",
    "OncePerNodeContext",
    "ddp_all_reduce",
    "ddp_barrier",
    "ddp_broadcast",
    "ddp_init_group",
    "ddp_prevent_block",
    "get_local_rank",
    "get_rank",
    "if_main_process",
    "infer_device",
    "is_distributed_initialized",
    "is_local_rank_zero",
    "main_process_only",
    "once_per_node",
    "rank_prefixed_message",
    "run_on_main",
    "run_once_per_node",
]

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

#: Operators that objcomm has no names for.
_BITWISE = {"BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor}

OncePerNodeContext = MainProcessContext

ddp_broadcast = raising(as_it_raised)(once.ddp_broadcast)
ddp_init_group = raising(as_it_raised)(init.ddp_init_group)
run_on_main = raising(as_it_raised)(once.run_on_main)


@overload
def main_process_only(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def main_process_only(
    *, group: GroupLike = None, timeout: Timeout = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def main_process_only(
    function: Callable[P, R] | None = None,
    /,
    *,
    group: GroupLike = None,
    timeout: Timeout = None,
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """``objcomm.main_process_only``, with errors that can also be caught as SpeechBrain's.

    Args:
        function: the function to decorate; use ``@main_process_only`` alone, or with options in
            parentheses.
        group: the participating ranks; defaults to the world.
        timeout: for each call, seconds or timedelta; defaults to the group's own.

    Raises:
        UsageError: ``function`` is not a function, or returns a coroutine or a generator. Raised
            when it is decorated.

    Examples:
        >>> @main_process_only
        ... def prepared(name: str) -> str:
        ...     return f"/scratch/{name}"
        >>> prepared("speech")
        '/scratch/speech'
    """

    def decorate(given: Callable[P, R]) -> Callable[P, R]:
        shared = once.main_process_only(group=group, timeout=timeout)
        return raising(as_it_raised)(shared(given))

    return decorate if function is None else decorate(function)


def rank_prefixed_message(message: str) -> str:
    """Put ``get_rank()`` before a log message; return it unchanged if there is no rank.

    Does not communicate.

    Args:
        message: any text.

    Examples:
        >>> rank_prefixed_message("epoch 3 done")
        'epoch 3 done'
    """
    own = get_rank()
    return message if own is None else f"[rank: {own}] {message}"


def get_rank() -> int | None:
    """Return this process's rank, from torch.distributed or else from the launcher.

    Does not communicate.

    Returns:
        The rank; None in a process that no launcher has started.

    Raises:
        UsageError: the launcher's variable is not a number.

    Examples:
        >>> get_rank() is None
        True
    """
    if is_initialized():
        return rank()
    launched = rank_in(os.environ)
    return get_local_rank() if launched is None else launched


def get_local_rank() -> int | None:
    """Return this process's rank on its host, from the launcher. Does not communicate.

    Returns:
        LOCAL_RANK, or the equivalent variable of SLURM or MPI; None if there is none.

    Raises:
        UsageError: the variable is not a number.

    Examples:
        >>> get_local_rank() is None
        True
    """
    return local_rank_in(os.environ)


def infer_device() -> str:
    """Return the device for this process: ``"cuda"`` with its local rank, or ``"cpu"``.

    Examples:
        >>> infer_device() in ("cpu", "cuda")
        True
    """
    if not torch.cuda.is_available():
        return "cpu"
    local = get_local_rank()
    return "cuda" if local is None else f"cuda:{local}"


@raising(as_it_raised)
def run_once_per_node(  # noqa: PLR0917  # SpeechBrain's positions
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    post_func: Callable[..., Any] | None = None,
    post_args: Sequence[Any] | None = None,
    post_kwargs: Mapping[str, Any] | None = None,
    run_post_on_all: bool = False,  # noqa: FBT001, FBT002  # SpeechBrain's position for it
) -> Any:
    """Run a function on the first rank of each host. Every rank must call this.

    Args:
        func: the function to run.
        args: its positional arguments.
        kwargs: its keyword arguments.
        post_func: a function that the other ranks run afterwards.
        post_args: its positional arguments.
        post_kwargs: its keyword arguments.
        run_post_on_all: whether the first ranks run ``post_func`` too.

    Returns:
        The result of the function that this rank ran last; None if it ran none. Results are not
        sent to other ranks.

    Raises:
        CollectiveError: ``func`` or ``post_func`` raised on some rank. Raised on every rank.
        ObjcommError: whatever else ``objcomm.run_once_per_node`` raises.

    Examples:
        >>> run_once_per_node(sorted, [[3, 1, 2]])
        [1, 2, 3]
    """
    results: list[Any] = [None]

    def keep(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        results[0] = function(*args, **kwargs)

    once.run_once_per_node(
        keep,
        [func, *(args or ())],
        kwargs,
        None if post_func is None else keep,
        [post_func, *(post_args or ())],
        post_kwargs,
        run_post_on_all,
    )
    return results[0]


def once_per_node(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a function to run on the first rank of each host only.

    Every rank must call the function. The first ranks get its result; all others get None.
    ``objcomm.once_per_node`` shares the result with the ranks of the host.

    Args:
        function: the function to decorate.

    Examples:
        >>> @once_per_node
        ... def unpacked(name: str) -> str:
        ...     return f"/scratch/{name}"
        >>> unpacked("speech")
        '/scratch/speech'
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
        result: R | None = run_once_per_node(function, args, kwargs)
        return result

    return run


def is_distributed_initialized() -> bool:
    """Whether torch.distributed is available and initialized. Does not communicate.

    Examples:
        >>> is_distributed_initialized()
        False
    """
    return is_initialized()


def if_main_process() -> bool:
    """Whether this is the job's first rank. Does not communicate.

    Examples:
        >>> if_main_process()
        True
    """
    return is_main()


def is_local_rank_zero() -> bool:
    """Whether this is the first rank of its host. Does not communicate.

    Raises:
        UsageError: this is known neither from the launcher nor from ``objcomm.node_group``.

    Examples:
        >>> is_local_rank_zero()
        True
    """
    return not is_initialized() or is_main(scope="node")


def ddp_prevent_block() -> bool:
    """Whether barriers and broadcasts act locally here. Does not communicate.

    Examples:
        >>> ddp_prevent_block()
        True
    """
    return is_confined() or not is_initialized()


@raising(as_it_raised)
def ddp_barrier() -> None:
    """Wait until every rank has called this.

    Returns immediately inside ``MainProcessContext``, ``run_on_main`` and the like.

    Raises:
        ObjcommError: whatever ``objcomm.barrier`` raises, on the same ranks.

    Examples:
        >>> ddp_barrier()
    """
    barrier()


@raising(as_it_raised)
def ddp_all_reduce(communication_object: T, reduce_op: Any) -> T:
    """Reduce one object from every rank, in place if it is a tensor. Every rank must call this.

    Args:
        communication_object: a tensor, which is overwritten, or anything that
            ``objcomm.all_reduce`` takes, which is not.
        reduce_op: a member of ``torch.distributed.ReduceOp``, or any operator of objcomm.

    Returns:
        The same tensor, or the result for other objects. Inside ``MainProcessContext``,
        ``run_on_main`` and the like, ``communication_object`` unchanged.

    Raises:
        UsageError: the tensor's dtype can't hold the result, such as the mean of integers. Raised
            on every rank.
        ObjcommError: whatever else ``objcomm.all_reduce`` raises, on the same ranks.

    Examples:
        >>> ddp_all_reduce(torch.ones(2), torch.distributed.ReduceOp.SUM)
        tensor([1., 1.])
    """
    if ddp_prevent_block():
        resolve(None)  # raises if a launcher's ranks have not joined yet
        return communication_object
    mine: Any = communication_object
    combined = all_reduce(mine, _BITWISE.get(getattr(reduce_op, "name", ""), reduce_op))
    if not isinstance(mine, torch.Tensor):
        return cast("T", combined)
    if combined.dtype != mine.dtype:
        raise UsageError(
            f"ddp_all_reduce: a tensor of {mine.dtype} can't hold the result, which is "
            f"{combined.dtype}; give a floating tensor, or call objcomm.all_reduce"
        )
    with torch.no_grad():
        mine.copy_(combined)
    return communication_object


keep_eager(globals()[name] for name in __all__)
del keep_eager  # not a public name
