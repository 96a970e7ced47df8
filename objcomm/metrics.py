"""Familiar helpers around small results: scalars of every rank, and what is computed of them."""

import functools
from collections.abc import Callable, Iterable
from typing import Literal, NoReturn, TypedDict, TypeVar, Unpack, overload

import torch

from objcomm.bodies import all_gather_in, decide_in, gather_in
from objcomm.call import Call
from objcomm.config import Allowed
from objcomm.frames import Operation
from objcomm.group import Timeout
from objcomm.memory import DeviceLike
from objcomm.work import Work
from objcomm.world import GroupLike

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")


class _Options(TypedDict, total=False):
    group: GroupLike
    timeout: Timeout
    codec: str | None
    device: DeviceLike
    accept: Iterable[str] | None
    allow: Iterable[Allowed] | None


_PLAIN_SCALARS = (bool, int, float, complex, str, type(None))


@overload
def gather_scalar(
    value: T,
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    group: GroupLike = None,
    timeout: Timeout = None,
    async_op: Literal[False] = False,
) -> list[T] | None: ...
@overload
def gather_scalar(
    value: T,
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    group: GroupLike = None,
    timeout: Timeout = None,
    async_op: Literal[True],
) -> Work[list[T] | None]: ...
@overload
def gather_scalar(
    value: T,
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    group: GroupLike = None,
    timeout: Timeout = None,
    async_op: bool,
) -> list[T] | Work[list[T] | None] | None: ...
def gather_scalar(
    value: T,
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    group: GroupLike = None,
    timeout: Timeout = None,
    async_op: bool = False,
) -> list[T] | Work[list[T] | None] | None:
    """Collect one scalar from every rank onto one, each with its exact value and type.

    Every rank of ``group`` must call this. Types may differ between ranks: nothing is converted,
    where a float32 tensor would change 2**24 + 1 and 0.1.

    Args:
        value: bool, int of any size, float, complex, str, None, a numpy scalar or a tensor without
            dimensions.
        dst: global rank that receives.
        group_dst: the same as a rank within the group; give one. Neither: the group's first rank.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        async_op: return a work at once, whose ``wait`` gives the result.

    Returns:
        On the destination one value per rank, in the order of group ranks. ``None`` elsewhere.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        CollectiveError: some rank's value is no scalar. The destination and that rank.
        ObjcommError: whatever else ``objcomm.gather`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.gather_scalar(2**70 + 1)
        [1180591620717411303425]
    """
    call = Call(
        Operation.GATHER_SCALAR,
        group=group,
        timeout=timeout,
        codec=_codec_for(value),
        global_root=dst,
        group_root=group_dst,
        has_root=True,
    )
    return call.run(gather_in(call, lambda: _check_scalar(value)), async_op=async_op)


@overload
def all_gather_scalar(
    value: T,
    *,
    group: GroupLike = None,
    timeout: Timeout = None,
    async_op: Literal[False] = False,
) -> list[T]: ...
@overload
def all_gather_scalar(
    value: T, *, group: GroupLike = None, timeout: Timeout = None, async_op: Literal[True]
) -> Work[list[T]]: ...
@overload
def all_gather_scalar(
    value: T, *, group: GroupLike = None, timeout: Timeout = None, async_op: bool
) -> list[T] | Work[list[T]]: ...
def all_gather_scalar(
    value: T, *, group: GroupLike = None, timeout: Timeout = None, async_op: bool = False
) -> list[T] | Work[list[T]]:
    """Collect one scalar from every rank onto every rank, each with its exact value and type.

    Every rank of ``group`` must call this.

    Args:
        value: as in ``gather_scalar``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        async_op: return a work at once, whose ``wait`` gives the result.

    Returns:
        One value per rank, in the order of group ranks.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        CollectiveError: some rank's value is no scalar. Every rank.
        ObjcommError: whatever else ``objcomm.all_gather`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.all_gather_scalar(True)
        [True]
    """
    call = Call(Operation.ALL_GATHER_SCALAR, group=group, timeout=timeout, codec=_codec_for(value))
    return call.run(all_gather_in(call, value, check=_check_scalar), async_op=async_op)


def _codec_for(value: object) -> str:
    """Scalars are plain data, so a rank that refuses pickles gets them; subclasses are not."""
    kind = type(value)
    is_plain = kind in _PLAIN_SCALARS or kind.__module__ == "numpy" or kind is torch.Tensor
    return "msgpack" if is_plain else "pickle"


def _check_scalar(value: T) -> T:
    """Return a scalar, refuse anything else.

    Raises:
        TypeError: on the rank that passed it; it travels as that rank's failure.
    """
    if isinstance(value, _PLAIN_SCALARS):
        return value
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value
    bases = [(base.__module__, base.__name__) for base in type(value).__mro__]
    if ("numpy", "generic") in bases:
        return value
    raise TypeError(f"a {type(value).__name__} is no scalar; objcomm.gather takes any object")


def gather_from_all_ranks(
    fn: Callable[[], T],
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
) -> list[T] | None:
    """Call a function on every rank and collect what it returns onto one.

    Every rank of ``group`` must call this. Unlike ``gather(fn())`` it fails on every rank if ``fn``
    fails on one, so every rank waits for the destination.

    Args:
        fn: called once on every rank; returns anything that can be encoded.
        dst: global rank that receives.
        group_dst: the same as a rank within the group; give one. Neither: the group's first rank.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None. It begins after ``fn``.
        codec: what encodes this rank's result.
        device: where tensors inside received results shall lie.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.

    Returns:
        On the destination one result per rank, in the order of group ranks. ``None`` elsewhere.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        CollectiveError: ``fn`` raised on some rank, or a result could not be encoded or decoded.
            Every rank, with each failing rank's type, message and traceback.
        ObjcommError: whatever else ``objcomm.gather`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.gather_from_all_ranks(lambda: {"batches": 41})
        [{'batches': 41}]
    """
    call = Call(
        Operation.GATHER_FROM_ALL_RANKS,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        global_root=dst,
        group_root=group_dst,
        has_root=True,
        confirm=True,
        accept=accept,
        allow=allow,
    )
    return call.carry_out(gather_in(call, fn))


def gather_scalar_from_all_ranks(
    fn: Callable[[], T],
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    group: GroupLike = None,
    timeout: Timeout = None,
) -> list[T] | None:
    """Call a function on every rank and collect the scalar that it returns onto one.

    Every rank of ``group`` must call this. Each value arrives as it is, whatever its type: ints
    stay ints, ``2.0`` and ``True`` stay what they are. It fails on every rank if ``fn`` fails on
    one, so every rank waits for the destination.

    Args:
        fn: called once on every rank; returns a scalar, as ``gather_scalar`` takes it.
        dst: global rank that receives.
        group_dst: the same as a rank within the group; give one. Neither: the group's first rank.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None. It begins after ``fn``.

    Returns:
        On the destination one value per rank, in the order of group ranks. ``None`` elsewhere.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        CollectiveError: ``fn`` raised on some rank, or returned no scalar. Every rank.
        ObjcommError: whatever else ``objcomm.gather`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.gather_scalar_from_all_ranks(lambda: 2**31)
        [2147483648]
    """
    produce, codec = _called(fn)
    call = Call(
        Operation.GATHER_SCALAR_FROM_ALL_RANKS,
        group=group,
        timeout=timeout,
        codec=codec,
        global_root=dst,
        group_root=group_dst,
        has_root=True,
        confirm=True,
    )
    return call.carry_out(gather_in(call, produce))


def _called(fn: Callable[[], T]) -> tuple[Callable[[], T], str]:
    """Call a function now, because the codec depends on what it returns.

    Returns:
        What gives the result, or raises what the function raised; and the codec.
    """
    try:
        value = fn()
    except BaseException as error:  # noqa: BLE001  # this rank still takes part, and raises then
        return functools.partial(_raise, error), "msgpack"
    return lambda: _check_scalar(value), _codec_for(value)


def _raise(error: BaseException) -> NoReturn:
    raise error


@overload
def reduce_and_broadcast(
    fn1: Callable[[], A],
    fn2: Callable[[list[A]], B],
    *,
    async_op: Literal[False] = False,
    **options: Unpack[_Options],
) -> B: ...
@overload
def reduce_and_broadcast(
    fn1: Callable[[], A],
    fn2: Callable[[list[A]], B],
    *,
    async_op: Literal[True],
    **options: Unpack[_Options],
) -> Work[B]: ...
@overload
def reduce_and_broadcast(
    fn1: Callable[[], A],
    fn2: Callable[[list[A]], B],
    *,
    async_op: bool,
    **options: Unpack[_Options],
) -> B | Work[B]: ...
def reduce_and_broadcast(
    fn1: Callable[[], A],
    fn2: Callable[[list[A]], B],
    *,
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
    async_op: bool = False,
) -> B | Work[B]:
    """Compute something on every rank, then once of all results, and share that with every rank.

    Every rank of ``group`` must call this.

    Args:
        fn1: called once on every rank; returns anything that can be encoded.
        fn2: called once, on the group's first rank, with the list of all results in the order of
            group ranks; returns anything that can be encoded.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None. It begins after ``fn1``, and must
            leave room for ``fn2``.
        codec: what encodes the results.
        device: where tensors inside what is received shall lie.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        async_op: return a work at once, whose ``wait`` gives the result. ``fn1`` has been called by
            then; ``fn2`` is called on another thread.

    Returns:
        What ``fn2`` returned, on every rank.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        CollectiveError: ``fn1`` raised on some rank, or ``fn2`` did, or a result could not be
            encoded. Every rank, with each failing rank's type, message and traceback.
        ObjcommError: whatever else ``objcomm.all_gather`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.reduce_and_broadcast(lambda: 41, lambda counts: sum(counts) / len(counts))
        41.0
    """
    call = Call(
        Operation.REDUCE_AND_BROADCAST,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        accept=accept,
        allow=allow,
    )
    return call.run(decide_in(call, fn1, fn2), async_op=async_op)
