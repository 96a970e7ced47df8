"""Helpers for small results: gather scalars from every rank, or compute something from them.

Also average named numbers over ranks, exactly and with weights.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, Unpack, overload

import torch

from objcomm._calls.call import Call, plain_call
from objcomm._calls.work import Work
from objcomm._collectives.gather import all_gather_in, decide_in, gather_in
from objcomm._config import (
    Allowed,
    Async,
    CallOptions,
    DeviceLike,
    GroupLike,
    MaybeAsync,
    Options,
    Sync,
    Timeout,
    WithDestination,
    settings,
)
from objcomm._wire.failure_message import DisagreementError
from objcomm._wire.header import Operation
from objcomm.errors import UsageError, grouped, ranks_text

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")


class _Coding(CallOptions, total=False):
    codec: str | None
    device: DeviceLike
    accept: Iterable[str] | None
    allow: Iterable[Allowed] | None


class _Sync(CallOptions, Sync): ...


class _Async(CallOptions, Async): ...


class _MaybeAsync(CallOptions, MaybeAsync): ...


class _SyncTo(_Sync, WithDestination): ...


class _AsyncTo(_Async, WithDestination): ...


class _MaybeAsyncTo(_MaybeAsync, WithDestination): ...


class _CodingSync(_Coding, Sync): ...


class _CodingAsync(_Coding, Async): ...


class _CodingMaybeAsync(_Coding, MaybeAsync): ...


_PLAIN_SCALARS = (bool, int, float, complex, str, type(None))


@overload
def gather_scalar(
    value: T, dst: int | None = None, **options: Unpack[_SyncTo]
) -> list[T] | Any: ...
@overload
def gather_scalar(
    value: T, dst: int | None = None, **options: Unpack[_AsyncTo]
) -> Work[list[T] | Any]: ...
@overload
def gather_scalar(
    value: T, dst: int | None = None, **options: Unpack[_MaybeAsyncTo]
) -> list[T] | Work[list[T] | Any] | Any: ...
def gather_scalar(
    value: T,
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
    async_op: bool = False,
) -> list[T] | Work[list[T] | Any] | Any:
    """Gather one scalar from every rank onto one, each with its exact value and type.

    Every rank of ``group`` must call this. Types may differ between ranks. Nothing is converted,
    whereas a float32 tensor would change 2**24 + 1 and 0.1.

    Args:
        value: bool, int of any size, float, complex, str, None, numpy scalar, or 0-dimensional
            tensor.
        dst: global rank of the destination.
        group_dst: rank within the group, as an alternative to ``dst``; defaults to the group's
            first rank.
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: seconds or timedelta; defaults to the group's own.
        async_op: return a Work immediately; its ``wait`` returns the result.

    Returns:
        On the destination, one value per rank, in group rank order. ``None`` elsewhere.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        CollectiveError: some rank's value is not a scalar. Raised on the destination and that rank.
        ObjcommError: whatever else ``objcomm.gather`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.gather_scalar(2**70 + 1)
        [1180591620717411303425]
    """
    return _gathered(
        Operation.GATHER_SCALAR,
        value,
        _check_scalar,
        (dst, group_dst),
        name=name,
        group=group,
        timeout=timeout,
        async_op=async_op,
    )


@overload
def all_gather_scalar(value: T, **options: Unpack[_Sync]) -> list[T]: ...
@overload
def all_gather_scalar(value: T, **options: Unpack[_Async]) -> Work[list[T]]: ...
@overload
def all_gather_scalar(value: T, **options: Unpack[_MaybeAsync]) -> list[T] | Work[list[T]]: ...
def all_gather_scalar(
    value: T,
    *,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
    async_op: bool = False,
) -> list[T] | Work[list[T]]:
    """Gather one scalar from every rank onto every rank, each with its exact value and type.

    Every rank of ``group`` must call this.

    Args:
        value: as in ``gather_scalar``.
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: seconds or timedelta; defaults to the group's own.
        async_op: return a Work immediately; its ``wait`` returns the result.

    Returns:
        One value per rank, in group rank order.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        CollectiveError: some rank's value is not a scalar. Raised on every rank.
        ObjcommError: whatever else ``objcomm.all_gather`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.metrics.all_gather_scalar(True)
        [True]
    """
    gathered: list[T] | Work[list[T]] = _gathered(
        Operation.ALL_GATHER_SCALAR,
        value,
        _check_scalar,
        name=name,
        group=group,
        timeout=timeout,
        async_op=async_op,
    )
    return gathered


def gather_from_all_ranks(
    fn: Callable[[], T],
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
) -> list[T] | Any:
    """Call a function on every rank and gather the results onto one.

    Every rank of ``group`` must call this. Unlike ``gather(fn())``, it fails on every rank if
    ``fn`` fails on any, so every rank waits for the destination.

    Args:
        fn: called once on every rank; returns anything that can be encoded.
        dst: global rank of the destination.
        group_dst: rank within the group, as an alternative to ``dst``; defaults to the group's
            first rank.
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: seconds or timedelta; defaults to the group's own. It starts after ``fn``.
        codec: name of the codec that encodes this rank's result.
        device: the device to place received tensors on.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.

    Returns:
        On the destination, one result per rank, in group rank order. ``None`` elsewhere.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        CollectiveError: ``fn`` raised on some rank, or a result could not be encoded or decoded.
            Raised on every rank, with each failing rank's type, message and traceback.
        ObjcommError: whatever else ``objcomm.gather`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.metrics.gather_from_all_ranks(lambda: {"batches": 41})
        [{'batches': 41}]
    """
    return _gathered(
        Operation.GATHER_FROM_ALL_RANKS,
        fn,
        None,
        (dst, group_dst),
        name=name,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        confirm=True,
        accept=accept,
        allow=allow,
    )


def gather_scalar_from_all_ranks(fn: Callable[[], T]) -> list[T] | Any:
    """Call a function on every rank and gather the scalars that it returns on rank 0.

    Every rank must call this. Each scalar keeps its exact value and type: ints stay ints, and
    ``2.0`` and ``True`` stay what they are. The call fails on every rank if ``fn`` fails on any, so
    every rank waits for rank 0.

    Args:
        fn: called once on every rank; returns a scalar, as in ``gather_scalar``.

    Returns:
        On rank 0, one value per rank, in rank order. ``None`` elsewhere.

    Raises:
        CollectiveError: ``fn`` raised on some rank, or did not return a scalar. Raised on every
            rank.
        ObjcommError: whatever else ``objcomm.gather`` raises, on the same ranks.

    Examples:
        >>> from objcomm.compat.axolotl import gather_scalar_from_all_ranks
        >>> gather_scalar_from_all_ranks(lambda: 2**31)
        [2147483648]
    """
    value: Any
    check: Callable[[Any], Any] = _check_scalar
    try:
        value = fn()  # now, because the codec depends on it
    except BaseException as error:  # noqa: BLE001  # this rank still participates, and raises in the call
        value, check = error, _raise
    operation = Operation.GATHER_SCALAR_FROM_ALL_RANKS
    return _gathered(operation, value, check, (0, None), group=None, confirm=True)


def _gathered(
    operation: Operation,
    given: Any,
    check: Callable[[Any], Any] | None,
    root: tuple[int | None, int | None] | None = None,
    *,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Gather one contribution per rank, onto one rank or all ranks.

    Args:
        operation: the operation that the user called.
        given: this rank's contribution, or a function that returns it.
        check: returns the contribution if it is a scalar, or raises; None to call a function.
        root: the destination as a global rank and as a group rank; None for all ranks.
        async_op: whether to return a Work immediately.
        options: the user's own.
    """
    if check is not None:
        # Ranks that refuse pickles accept plain scalars; instances of subclasses need pickle.
        kind = type(given)
        is_plain = kind in _PLAIN_SCALARS or kind.__module__ == "numpy" or kind is torch.Tensor
        options["codec"] = "msgpack" if is_plain else "pickle"
        if (accepted := settings().accept) is not None:
            options["accept"] = {*accepted, "msgpack"}
    dst, group_dst = root or (None, None)
    with Call(
        operation,
        root_argument="dst",
        global_root=dst,
        group_root=group_dst,
        has_root=root is not None,
        async_op=async_op,
        **options,
    ) as call:
        gather: Callable[..., Callable[[], Any]] = gather_in if root else all_gather_in
        rest = gather(call, given, check or call.aside)
        return call.later(rest) if async_op else rest()


def _check_scalar(value: T) -> T:
    """Return the value if it is a scalar.

    Raises:
        TypeError: it is not. The other ranks receive this as the failure of this rank.
    """
    if isinstance(value, _PLAIN_SCALARS):
        return value
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value
    bases = [(base.__module__, base.__name__) for base in type(value).__mro__]
    if ("numpy", "generic") in bases:
        return value
    raise TypeError(f"a {type(value).__name__} is not a scalar; objcomm.gather takes any object")


def _raise(error: BaseException) -> NoReturn:
    raise error


@overload
def reduce_and_broadcast(
    fn1: Callable[[], A], fn2: Callable[[list[A]], B], **options: Unpack[_CodingSync]
) -> B: ...
@overload
def reduce_and_broadcast(
    fn1: Callable[[], A], fn2: Callable[[list[A]], B], **options: Unpack[_CodingAsync]
) -> Work[B]: ...
# mypy can't infer A from an overloaded fn2 such as the builtin sum, but it tries int and float.
@overload
def reduce_and_broadcast(
    fn1: Callable[[], int], fn2: Callable[[list[int]], B], **options: Unpack[_CodingSync]
) -> B: ...
@overload
def reduce_and_broadcast(
    fn1: Callable[[], int], fn2: Callable[[list[int]], B], **options: Unpack[_CodingAsync]
) -> Work[B]: ...
@overload
def reduce_and_broadcast(
    fn1: Callable[[], float], fn2: Callable[[list[float]], B], **options: Unpack[_CodingSync]
) -> B: ...
@overload
def reduce_and_broadcast(
    fn1: Callable[[], float], fn2: Callable[[list[float]], B], **options: Unpack[_CodingAsync]
) -> Work[B]: ...
@overload
def reduce_and_broadcast(
    fn1: Callable[[], A], fn2: Callable[[list[A]], B], **options: Unpack[_CodingMaybeAsync]
) -> B | Work[B]: ...
def reduce_and_broadcast(
    fn1: Callable[[], A],
    fn2: Callable[[list[A]], B],
    *,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
    async_op: bool = False,
) -> B | Work[B]:
    """Call a function on every rank, reduce all results on one rank, and broadcast the outcome.

    Every rank of ``group`` must call this.

    Args:
        fn1: called once on every rank; returns anything that can be encoded.
        fn2: called once, on the group's first rank, with the list of all results in group rank
            order; returns anything that can be encoded.
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: seconds or timedelta; defaults to the group's own. It starts after ``fn1``, and
            must be long enough for ``fn2``.
        codec: name of the codec that encodes the results.
        device: the device to place received tensors on.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        async_op: return a Work immediately; its ``wait`` returns the result. ``fn1`` is called
            before this returns, ``fn2`` on another thread.

    Returns:
        What ``fn2`` returned, on every rank.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        CollectiveError: ``fn1`` raised on some rank, ``fn2`` raised, or a result could not be
            encoded. Raised on every rank, with each failing rank's type, message and traceback.
        ObjcommError: whatever else ``objcomm.all_gather`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.reduce_and_broadcast(lambda: 41, lambda counts: sum(counts) / len(counts))
        41.0
    """
    with Call(
        Operation.REDUCE_AND_BROADCAST,
        name=name,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        accept=accept,
        allow=allow,
        async_op=async_op,
    ) as call:
        rest = decide_in(call, fn1, fn2)
        return call.later(rest) if async_op else rest()


_Number: TypeAlias = int | float
_Counted: TypeAlias = tuple[_Number, _Number]  # a value and its weight


def average_metrics(
    metrics: Mapping[str, Any],
    count: float | Mapping[str, float] = 1,
    *,
    missing: Literal["error", "skip"] = "error",
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
) -> dict[str, float]:
    """Average named numbers over all ranks, each weighted by the number of samples it covers.

    Every rank of ``group`` must call this. Numbers are matched by name, in any order. Each average
    is computed exactly and rounded once, so it does not depend on the order or number of the ranks:
    if all ranks have 2**53 - 1, that is the average.

    Args:
        metrics: numbers by name: bool, int, float, or a tensor or numpy value of one element.
        count: the weight of this rank's values, such as its number of samples: one number for all
            names, or one for each. Not negative. A value of weight 0 is ignored, even if it is nan.
        missing: what to do if a name is not on every rank: raise (``"error"``), or average over
            the ranks that have it (``"skip"``).
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: seconds or timedelta; defaults to the group's own.

    Returns:
        A new dict of floats, with the same values on every rank. This rank's names come first, in
        their order, then the names that only other ranks have. Each value is
        ``sum(value * count) / sum(count)``, or nan if all its weights are 0. A world of one
        computes the same.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        CollectiveError: names differ, a value or a count is not a number, or a count is negative or
            infinite. Raised on every rank; ``failures`` says what is wrong on each rank.
        ObjcommError: whatever else ``objcomm.all_gather`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.metrics.average_metrics({"loss": 0.5, "epoch": 16777217}, count=64)
        {'loss': 0.5, 'epoch': 16777217.0}
    """
    if missing not in ("error", "skip"):  # not a set: a list has no hash
        raise UsageError(f"average_metrics: missing={missing!r} must be 'error' or 'skip'")
    may_lack = missing == "skip"
    with plain_call(
        Operation.AVERAGE_METRICS,
        name=name,
        group=group,
        timeout=timeout,
        must_agree=missing,
    ) as call:
        rest = decide_in(
            call,
            lambda: _counted(metrics, count),
            lambda operands: _means(operands, may_lack=may_lack),
            is_part=_is_counted,
            is_answer=lambda plain: _are_means(plain, metrics),
        )
        means = rest()
    return {name: means[name] for name in (*metrics, *means)}


def _counted(metrics: Mapping[str, Any], count: float | Mapping[str, float]) -> dict[str, _Counted]:
    """Return this rank's contribution as plain numbers.

    Raises:
        TypeError: a name is not a string, or a value or count is not a number.
        ValueError: a count is negative or not finite, or a name has no count.
    """
    if not isinstance(count, Mapping):
        _weight(count, "all names")
        count = dict.fromkeys(metrics, count)
    counted = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"a metric's name must be a string, not {name!r}")
        if name not in count:
            raise ValueError(f"count= has no entry for {name!r}; give every name a count")
        counted[name] = _number(value, name), _weight(count[name], name)
    return counted


def _is_counted(plain: object) -> bool:
    """Whether a received value has the form of what ``_counted`` returns."""
    return isinstance(plain, dict) and all(
        isinstance(name, str)
        and isinstance(counted, (tuple, list))
        and len(counted) == 2  # noqa: PLR2004  # a value and its weight
        and all(type(each) in {int, float} for each in counted)
        for name, counted in plain.items()
    )


def _are_means(plain: object, metrics: Iterable[str]) -> bool:
    """Whether a received value has the form of what ``_means`` returns."""
    return (
        isinstance(plain, dict)
        and plain.keys() >= set(metrics)
        and all(isinstance(name, str) for name in plain)
        and all(type(mean) in {int, float} for mean in plain.values())
    )


def _weight(count: object, name: str) -> _Number:
    weight = _number(count, f"count of {name}")
    if not 0 <= weight < math.inf:
        raise ValueError(f"the count of {name!r} is {weight!r}, which is not a number of samples")
    return weight


def _number(value: object, name: str) -> _Number:
    if hasattr(value, "item"):  # a tensor's or numpy's
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:
            raise TypeError(f"{name!r} is not a single number: {error}") from error
    if isinstance(value, int) and abs(value) <= sys.float_info.max:
        return int(value)
    if isinstance(value, float):
        return float(value)
    kind = "too large for a float" if isinstance(value, int) else f"a {type(value).__name__}"
    raise TypeError(f"{name!r} is {kind}, so there is no average")


def _means(operands: Sequence[Mapping[str, _Counted]], *, may_lack: bool) -> dict[str, float]:
    """Average the values of each name.

    Raises:
        DisagreementError: names differ, and ``may_lack`` is False.
    """
    if not may_lack:
        _check_names([frozenset(operand) for operand in operands])
    names = dict.fromkeys(name for operand in operands for name in operand)
    return {
        name: _mean([operand[name] for operand in operands if name in operand]) for name in names
    }


def _check_names(found: Sequence[frozenset[str]]) -> None:
    """Compare each rank's names with those that most ranks have.

    Raises:
        DisagreementError: they differ.
    """
    kinds = grouped((names, rank) for rank, names in enumerate(found))
    usual = max(kinds, key=lambda names: len(kinds[names]))  # the first of several
    most = ranks_text(kinds[usual])
    reasons = {}
    for names, ranks in kinds.items():
        parts = (("lacks", usual - names), ("has also", names - usual))
        words = [f"{verb} {', '.join(map(repr, sorted(few)))}" for verb, few in parts if few]
        if words:
            reason = (
                f"unlike {most} it {' and '.join(words)}; missing='skip' averages what there is"
            )
            reasons.update(dict.fromkeys(ranks, reason))
    if reasons:
        raise DisagreementError(dict(sorted(reasons.items())))


def _mean(operands: Sequence[_Counted]) -> float:
    """Return ``sum(value * count) / sum(count)``, rounded once."""
    counted = [(value, count) for value, count in operands if count]
    special = [value for value, _ in counted if isinstance(value, float) and value - value != 0]
    if special:
        return sum(special)  # infinities of both signs make nan
    if not counted:
        return math.nan
    # Every float is an integer divided by a power of two, so all this is exact.
    ratios = [(*value.as_integer_ratio(), *count.as_integer_ratio()) for value, count in counted]
    above, below = _sum([(p * r, q * s) for p, q, r, s in ratios])
    total, parts = _sum([(r, s) for _, _, r, s in ratios])
    return (above * parts) / (below * total)


def _sum(ratios: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Add fractions whose denominators are powers of two."""
    denominator = max(below for _, below in ratios)
    return sum(above * (denominator // below) for above, below in ratios), denominator
