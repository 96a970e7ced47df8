"""What all ranks have or want: the same value, a yes of any or of all, one seed."""

import functools
import secrets
from collections.abc import Iterable
from typing import TypeVar

from objcomm.bodies import decide_in
from objcomm.call import Call
from objcomm.config import Allowed
from objcomm.frames import Operation
from objcomm.group import Timeout
from objcomm.outcome import DisagreementError, named
from objcomm.sameness import difference
from objcomm.world import GroupLike, resolve

T = TypeVar("T")

_SEED_BITS = 32  # numpy.random.seed takes no more


def _is_flag(plain: object) -> bool:
    return type(plain) is bool


def _is_digest(plain: object) -> bool:
    return type(plain) is bytes


def _is_seed(plain: object) -> bool:
    return type(plain) is int and 0 <= plain < 1 << _SEED_BITS


def agree(
    value: T,
    *,
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
) -> T:
    """Make sure that every rank has the same value.

    Every rank of ``group`` must call this. Values are the same if their types are and their content
    is: nan is the same as nan, ``1`` is neither ``1.0`` nor ``True``, and the order of a dict's
    keys does not count. Tensors and arrays are compared by dtype, shape and elements, wherever
    they lie, and objects without an ``==`` of their own by what pickle would save of them. Values
    that are encoded alike are not sent at all, only their digests.

    Args:
        value: anything that can be encoded.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes the values.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.

    Returns:
        ``value``, the identical object.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        CollectiveError: values differ, or one could not be encoded, decoded or compared. Every
            rank. ``failures`` has each rank whose value is not the one that most ranks have, with
            the place where it differs and who has what there.
        ObjcommError: whatever else ``objcomm.all_gather`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.agree({"lr": 0.1, "layers": (64, 10)})
        {'lr': 0.1, 'layers': (64, 10)}
    """
    deadline = resolve(group).deadline("agree", timeout)
    begin = functools.partial(
        Call, Operation.AGREE, group=group, codec=codec, accept=accept, allow=allow
    )
    call = begin(timeout=deadline.seconds_left, must_agree="digests")
    if call.is_alone:
        call.carry_out(decide_in(call, lambda: value, _same_on_all))
        return value
    if call.carry_out(
        decide_in(
            call, lambda: call.digest(value), _are_all_equal, is_part=_is_digest, is_answer=_is_flag
        )
    ):
        return value
    # Equal values may have other bytes, such as dicts whose keys came in another order.
    call = begin(timeout=deadline.seconds_left, must_agree="values")
    call.carry_out(decide_in(call, lambda: value, _same_on_all))
    return value


def _are_all_equal(digests: list[bytes]) -> bool:
    return len(set(digests)) == 1


def _same_on_all(values: list[object]) -> None:
    """Compare every rank's value.

    Raises:
        DisagreementError: they are not all the same.
    """
    kinds: list[list[int]] = []  # ranks with the same value
    for rank, value in enumerate(values):
        for ranks in kinds:
            if difference(value, values[ranks[0]]) is None:
                ranks.append(rank)
                break
        else:
            kinds.append([rank])
    most = max(kinds, key=len)  # of several the first
    reasons = {}
    for ranks in kinds:
        found = difference(values[ranks[0]], values[most[0]])
        if found is not None:
            path, theirs, usual = found
            reason = f"{path}: {theirs} on {named(ranks)}, {usual} on {named(most)}"
            reasons.update(dict.fromkeys(ranks, reason))
    if reasons:
        raise DisagreementError(dict(sorted(reasons.items())))


def any_rank(flag: object, *, group: GroupLike = None, timeout: Timeout = None) -> bool:
    """Whether the flag is true on at least one rank.

    Every rank of ``group`` must call this.

    Args:
        flag: a bool, or anything that has a truth value.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.

    Returns:
        True or False, the same on every rank.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        CollectiveError: a flag has no truth value, such as a tensor of two elements. Every rank.
        ObjcommError: whatever else ``objcomm.all_gather`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.any_rank(float("nan") > 0)
        False
    """
    call = Call(Operation.ANY_RANK, group=group, timeout=timeout, codec="msgpack")
    return call.carry_out(
        decide_in(call, lambda: bool(flag), any, is_part=_is_flag, is_answer=_is_flag)
    )


def all_ranks(flag: object, *, group: GroupLike = None, timeout: Timeout = None) -> bool:
    """Whether the flag is true on every rank.

    Every rank of ``group`` must call this.

    Args:
        flag: a bool, or anything that has a truth value.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.

    Returns:
        True or False, the same on every rank.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        CollectiveError: a flag has no truth value, such as a tensor of two elements. Every rank.
        ObjcommError: whatever else ``objcomm.all_gather`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.all_ranks([1, 2, 3])
        True
    """
    call = Call(Operation.ALL_RANKS, group=group, timeout=timeout, codec="msgpack")
    return call.carry_out(
        decide_in(call, lambda: bool(flag), all, is_part=_is_flag, is_answer=_is_flag)
    )


def shared_seed(*, group: GroupLike = None, timeout: Timeout = None) -> int:
    """A fresh random seed that is the same on every rank.

    Every rank of ``group`` must call this. The group's first rank asks the operating system for
    it, so no generator of this program is read or changed, and no seed of this program's makes
    it come again.

    Args:
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.

    Returns:
        From 0 to 2**32 - 1, which ``torch.manual_seed``, ``random.seed`` and ``numpy.random.seed``
        take.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        ObjcommError: whatever ``objcomm.all_gather`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> 0 <= objcomm.shared_seed() < 2**32
        True
    """
    call = Call(Operation.SHARED_SEED, group=group, timeout=timeout, codec="msgpack")
    return call.carry_out(
        decide_in(call, lambda: None, lambda _: secrets.randbits(_SEED_BITS), is_answer=_is_seed)
    )
