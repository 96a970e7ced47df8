"""Averages of named numbers over ranks, weighted and exact."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from objcomm.bodies import decide_in
from objcomm.call import Call
from objcomm.errors import UsageError
from objcomm.frames import Operation
from objcomm.group import Timeout
from objcomm.outcome import DisagreementError, named
from objcomm.world import GroupLike

_Number: TypeAlias = int | float
_Counted: TypeAlias = tuple[_Number, _Number]  # a value, and how much it counts


def average_metrics(
    metrics: Mapping[str, Any],
    count: float | Mapping[str, float] = 1,
    *,
    missing: Literal["error", "skip"] = "error",
    group: GroupLike = None,
    timeout: Timeout = None,
) -> dict[str, float]:
    """Average named numbers over all ranks, each weighted by how many samples it stands for.

    Every rank of ``group`` must call this. Names are matched, whatever their order. The average is
    computed exactly and rounded once, so it depends neither on the order of the ranks nor on how
    many there are: if all ranks have 2**53 - 1, that is the average.

    Args:
        metrics: numbers by name: bool, int, float, or a tensor or numpy value of one element.
        count: what this rank's values weigh, such as its number of samples: one number for all, or
            one for each name. Not negative. A value that counts 0 has no say, even if it is nan.
        missing: what to do if a name is not on every rank: raise (``"error"``), or average over
            the ranks that have it (``"skip"``).
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.

    Returns:
        A new dict of floats, the same on every rank: this rank's names in their order, then names
        of other ranks only. ``sum(value * count) / sum(count)``, and nan where no value counts. In
        a world of one the same computation on one rank.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        CollectiveError: names differ, a value is no number or a count is none or negative. Every
            rank; ``failures`` says for each rank what is wrong.
        ObjcommError: whatever else ``objcomm.all_gather`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.average_metrics({"loss": 0.5, "epoch": 16777217}, count=64)
        {'loss': 0.5, 'epoch': 16777217.0}
    """
    if missing not in {"error", "skip"}:
        raise UsageError(f"average_metrics: missing={missing!r} is neither 'error' nor 'skip'")
    call = Call(
        Operation.AVERAGE_METRICS,
        group=group,
        timeout=timeout,
        codec="msgpack",
        must_agree=missing,
    )
    may_lack = missing == "skip"
    means = call.carry_out(
        decide_in(
            call,
            lambda: _counted(metrics, count),
            lambda operands: _means(operands, may_lack=may_lack),
            is_part=_is_counted,
            is_answer=lambda plain: _are_means(plain, metrics),
        )
    )
    return {name: means[name] for name in (*metrics, *means)}


def _counted(metrics: Mapping[str, Any], count: float | Mapping[str, float]) -> dict[str, _Counted]:
    """This rank's contribution as plain numbers.

    Raises:
        TypeError: a name is no text, or a value or count no number.
        ValueError: a count is negative or not finite, or a name has none.
    """
    if not isinstance(count, Mapping):
        _weight(count, "all names")
    counted = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"a metric's name is text, not {name!r}")
        if isinstance(count, Mapping) and name not in count:
            raise ValueError(f"count= has nothing for {name!r}; give every name a count")
        weight = count[name] if isinstance(count, Mapping) else count
        counted[name] = _number(value, name), _weight(weight, name)
    return counted


def _is_counted(plain: object) -> bool:
    """Whether it can be what ``_counted`` gave on another rank."""
    return isinstance(plain, dict) and all(
        isinstance(name, str)
        and isinstance(counted, (tuple, list))
        and len(counted) == 2  # noqa: PLR2004  # a value and its weight
        and all(type(each) in {int, float} for each in counted)
        for name, counted in plain.items()
    )


def _are_means(plain: object, metrics: Iterable[str]) -> bool:
    """Whether it can be what ``_means`` gave on another rank."""
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
            raise TypeError(f"{name!r} is no single number: {error}") from error
    if isinstance(value, int) and abs(value) <= sys.float_info.max:
        return int(value)
    if isinstance(value, float):
        return float(value)
    kind = "too large for a float" if isinstance(value, int) else f"a {type(value).__name__}"
    raise TypeError(f"{name!r} is {kind}, so there is no average")


def _means(operands: Sequence[Mapping[str, _Counted]], *, may_lack: bool) -> dict[str, float]:
    """The average of each name.

    Raises:
        DisagreementError: names differ, and may not.
    """
    if not may_lack:
        _check_names([frozenset(operand) for operand in operands])
    names = dict.fromkeys(name for operand in operands for name in operand)
    return {
        name: _mean([operand[name] for operand in operands if name in operand]) for name in names
    }


def _check_names(found: Sequence[frozenset[str]]) -> None:
    """Hold the ranks' names against those that most ranks have.

    Raises:
        DisagreementError: they differ.
    """
    kinds: dict[frozenset[str], list[int]] = {}
    for rank, names in enumerate(found):
        kinds.setdefault(names, []).append(rank)
    usual = max(kinds, key=lambda names: len(kinds[names]))  # of several the first
    most = named(kinds[usual])
    reasons = {}
    for names, ranks in kinds.items():
        parts = (("lacks", usual - names), ("has also", names - usual))
        words = [f"{verb} {', '.join(map(repr, sorted(few)))}" for verb, few in parts if few]
        if words:
            reason = f"unlike {most} it {' and '.join(words)}; missing='skip' takes what there is"
            reasons.update(dict.fromkeys(ranks, reason))
    if reasons:
        raise DisagreementError(dict(sorted(reasons.items())))


def _mean(operands: Sequence[_Counted]) -> float:
    """``sum(value * count) / sum(count)``, rounded once."""
    counted = [(value, count) for value, count in operands if count]
    special = [value for value, _ in counted if isinstance(value, float) and value - value != 0]
    if special:
        return sum(special)  # infinities of both signs make nan
    if not counted:
        return math.nan
    # Every float is a whole number over a power of two, so all this is exact.
    ratios = [(*value.as_integer_ratio(), *count.as_integer_ratio()) for value, count in counted]
    above, below = _sum([(p * r, q * s) for p, q, r, s in ratios])
    total, parts = _sum([(r, s) for _, _, r, s in ratios])
    return (above * parts) / (below * total)


def _sum(ratios: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The sum of fractions whose denominators are powers of two."""
    denominator = max(below for _, below in ratios)
    return sum(above * (denominator // below) for above, below in ratios), denominator
