"""``agree``, ``any_rank``, ``all_ranks`` and ``shared_seed``: small decisions shared by all ranks.

Values are compared by type and content, and the first difference is reported. Comparing with
``==`` is not enough: it gives no single truth value for tensors and arrays, is False for nan and
nan, and is True for ``1`` and ``True``.
"""

import dataclasses
import functools
import pickle
import reprlib
import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from objcomm._calls.call import Call, plain_call
from objcomm._calls.group import resolve
from objcomm._collectives.gather import decide_in
from objcomm._config import Allowed, GroupLike, Timeout
from objcomm._wire.failure_message import DisagreementError
from objcomm._wire.header import Operation
from objcomm.errors import name_of, ranks_text, text_of

_MAX_TEXT = 100
_PROTOCOL = 5
_NUMPY = ("numpy", "numpy.ma", "numpy.ma.core")

# The parts of the tuple that an object's ``__reduce_ex__`` returns.
_PARTS = ("'s class", "'s arguments", "'s state", "'s items", "'s items", "'s setter")
_STATE = 2

_texts = reprlib.Repr()
_texts.maxother = _texts.maxstring = _texts.maxlong = _MAX_TEXT


def difference(left: object, right: object, path: str = "value") -> tuple[str, str, str] | None:
    """Find where two values first differ.

    Args:
        left: one value.
        right: the other value.
        path: what errors call the value.

    Returns:
        The path of the first members that differ, such as ``value['lr']``, and both members as
        text; None if nothing differs.
    """
    return _Comparison().compare(left, right, path)


class _Comparison:
    def __init__(self) -> None:
        # By identity, because members may contain themselves. Kept alive so that no id is reused.
        self._seen: dict[tuple[int, int], tuple[object, object]] = {}

    def compare(self, left: Any, right: Any, path: str) -> tuple[str, str, str] | None:
        if left is right or (id(left), id(right)) in self._seen:
            return None
        if not _are_same_classes(type(left), type(right)):
            return path, _with_type(left), _with_type(right)
        if isinstance(left, pickle.PickleBuffer):
            left, right = (bytes(each.raw()) for each in (left, right))
        if isinstance(left, torch.UntypedStorage):
            left, right = (
                torch.tensor((), dtype=torch.uint8).set_(each.cpu()) for each in (left, right)
            )
        if isinstance(left, int | str | bytes):
            return _unless(left == right, left, right, path)
        self._seen[id(left), id(right)] = left, right
        return self._compare_content(left, right, path)

    def _compare_content(self, left: Any, right: Any, path: str) -> tuple[str, str, str] | None:
        if isinstance(left, torch.Tensor):
            found = _unless(_are_same_tensors(left, right), left, right, path)
        elif type(left).__module__ in _NUMPY and hasattr(left, "shape"):
            found = self._compare_arrays(left, right, path)
        elif isinstance(left, float | complex):
            # ``repr`` makes nan equal to nan; adding 0 turns negative zero into zero.
            found = _unless(repr(left + 0) == repr(right + 0), left, right, path)
        elif isinstance(left, Mapping):
            found = self._compare_mappings(left, right, path)
        elif isinstance(left, list | tuple | deque):
            found = self._compare_members(left, right, path)
        elif isinstance(left, type):
            found = _unless(_are_same_classes(left, right), left, right, path)
        elif dataclasses.is_dataclass(left):
            names = [each.name for each in dataclasses.fields(left) if each.compare]
            found = self._compare_attributes(left, right, names, path)
        else:
            found = self._compare_others(left, right, path)
        return found

    def _compare_arrays(self, left: Any, right: Any, path: str) -> tuple[str, str, str] | None:
        if hasattr(left, "mask"):  # values under the mask do not matter
            mine, theirs = ((each.mask, each.filled(0)) for each in (left, right))
            return self.compare(mine, theirs, path)
        is_alike = left.dtype == right.dtype and left.shape == right.shape
        if is_alike and left.dtype.hasobject:
            return self.compare(left.tolist(), right.tolist(), path)
        is_same = is_alike and (left.tobytes() == right.tobytes() or _are_equal(left, right))
        return _unless(is_same, left, right, path)

    def _compare_mappings(
        self, left: Mapping[Any, Any], right: Mapping[Any, Any], path: str
    ) -> tuple[str, str, str] | None:
        if left.keys() != right.keys():
            beside = [key for key in left if key not in right]
            lacking = [key for key in right if key not in left]
            return f"keys of {path}", _keys(beside), _keys(lacking)
        pairs = ((f"[{key!r}]", left[key], right[key]) for key in left)
        return self._first(pairs, path)

    def _compare_members(
        self, left: Sequence[Any], right: Sequence[Any], path: str
    ) -> tuple[str, str, str] | None:
        if len(left) != len(right):
            return f"len({path})", str(len(left)), str(len(right))
        pairs = zip(left, right, strict=True)
        return self._first(((f"[{i}]", *pair) for i, pair in enumerate(pairs)), path)

    def _compare_attributes(
        self, left: Any, right: Any, names: Iterable[str], path: str
    ) -> tuple[str, str, str] | None:
        pairs = ((f".{name}", getattr(left, name), getattr(right, name)) for name in names)
        return self._first(pairs, path)

    def _first(
        self, pairs: Iterable[tuple[str, Any, Any]], path: str
    ) -> tuple[str, str, str] | None:
        found = (self.compare(left, right, path + step) for step, left, right in pairs)
        return next((each for each in found if each is not None), None)

    def _compare_others(self, left: Any, right: Any, path: str) -> tuple[str, str, str] | None:
        has_equality = "__eq__" in _attributes_of(type(left))
        if has_equality and (left == right) is True:
            return None
        # Pickle saves everything that an object holds, and comparing that makes nan equal to nan.
        try:
            mine, theirs = _reduced(left), _reduced(right)
        except TypeError:  # pickle cannot save it, and it is not the same object
            return _unless(is_same=False, left=left, right=right, path=path)
        if isinstance(mine, str) or len(mine) != len(theirs):
            return _unless(mine == theirs, left, right, path)
        parts = zip(_PARTS, map(_listed, mine), map(_listed, theirs), strict=False)
        found = self._first(parts, path)
        return _unless(found is None, left, right, path) if has_equality else found


def _reduced(obj: Any) -> Any:
    """Return what pickle would save, whether or not an exception's ``__dict__`` exists yet."""
    reduced = obj.__reduce_ex__(_PROTOCOL)
    return reduced[:_STATE] if reduced[_STATE:] == ({},) else reduced


def _are_same_classes(left: type, right: type) -> bool:
    """Compare classes by name, too: a class that is sent by value arrives as another class."""
    names = [(each.__module__, each.__qualname__) for each in (left, right)]
    return left is right or names[0] == names[1]


def _attributes_of(cls: type) -> set[str]:
    """Return all names that a class and its bases define, except those of ``object``."""
    return {name for base in cls.__mro__[:-1] for name in vars(base)}


def _listed(part: Any) -> Any:
    return [*part] if hasattr(part, "__next__") else part


def _unless(
    is_same: bool,  # noqa: FBT001  # calls read as a sentence
    left: object,
    right: object,
    path: str,
) -> tuple[str, str, str] | None:
    return None if is_same else (path, text(left), text(right))


def _are_same_tensors(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape or left.layout != right.layout:
        return False
    if left.is_meta or right.is_meta:
        return left.is_meta == right.is_meta
    return _are_equal(_dense(left), _dense(right))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    # One-byte floats cannot be compared.
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _are_equal(left: Any, right: Any) -> bool:
    """Compare element by element; nan is the same as nan."""
    are_nan = (left != left) & (right != right)  # noqa: PLR0124  # True only for nan
    return bool(((left == right) | are_nan).all())


def _keys(keys: Sequence[object]) -> str:
    return f"also {', '.join(map(text, keys))}" if keys else "no others"


def _with_type(value: object) -> str:
    if isinstance(value, type):
        return name_of(value)
    return f"{text(value)} ({name_of(type(value))})"


def text(value: object) -> str:
    """Describe a value in a few words; never raises."""
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        return f"a tensor of {value.dtype} {tuple(value.shape)}"
    try:
        return " ".join(_texts.repr(value).split())[: 2 * _MAX_TEXT]
    except BaseException as error:  # noqa: BLE001  # a user's __repr__ may even call exit
        return f"a {name_of(type(value))} ({text_of(error)})"


T = TypeVar("T")

_SEED_BITS = 32  # the most that numpy.random.seed accepts


def _is_flag(plain: object) -> bool:
    return type(plain) is bool


def _is_digest(plain: object) -> bool:
    return type(plain) is bytes


def _is_seed(plain: object) -> bool:
    return type(plain) is int and 0 <= plain < 1 << _SEED_BITS


def agree(
    value: T,
    *,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
) -> T:
    """Make sure that every rank has the same value.

    Every rank of ``group`` must call this. Values are the same if they have the same type and
    content. NaN equals NaN, ``1`` differs from ``1.0`` and ``True``, and the order of a dict's keys
    does not matter. Tensors and arrays are compared by dtype, shape and elements, on any device.
    Objects whose class does not define ``==`` are compared by what pickle would save. Only digests
    are sent, unless they differ between ranks.

    Args:
        value: any object that can be encoded.
        name: name of this call; see ``objcomm.broadcast``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.
        codec: name of the codec that encodes the values.
        accept: codecs this rank accepts in this call; see ``objcomm.configure``.
        allow: what a received pickle may name in this call; see ``objcomm.configure``.

    Returns:
        ``value`` itself.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        CollectiveError: values differ, or one could not be encoded, decoded or compared. Raised on
            every rank. ``failures`` has an entry for each rank whose value is not the most common
            one, with the place where it differs and the two values there.
        ObjcommError: any other error of ``objcomm.all_gather``, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.agree({"lr": 0.1, "layers": (64, 10)})
        {'lr': 0.1, 'layers': (64, 10)}
    """
    deadline = resolve(group, "agree").deadline("agree", timeout)
    begin = functools.partial(
        Call, Operation.AGREE, name=name, group=group, codec=codec, accept=accept, allow=allow
    )
    with begin(timeout=deadline.seconds_left, must_agree="digests") as call:
        if call.is_alone:
            decide_in(call, lambda: value, _same_on_all)()
            return value
        rest = decide_in(
            call, lambda: call.digest(value), _are_all_equal, is_part=_is_digest, is_answer=_is_flag
        )
        if rest():
            return value
    # Equal values may be encoded differently, such as dicts with keys in another order.
    with begin(timeout=deadline.seconds_left, must_agree="values") as call:
        decide_in(call, lambda: value, _same_on_all)()
    return value


def _are_all_equal(digests: list[bytes]) -> bool:
    return len(set(digests)) == 1


def _same_on_all(values: list[object]) -> None:
    """Compare every rank's value.

    Raises:
        DisagreementError: some values differ.
    """
    kinds: list[list[int]] = []  # ranks with the same value
    for rank, value in enumerate(values):
        for ranks in kinds:
            if difference(value, values[ranks[0]]) is None:
                ranks.append(rank)
                break
        else:
            kinds.append([rank])
    most = max(kinds, key=len)  # the first, if several are equally common
    reasons = {}
    for ranks in kinds:
        found = difference(values[ranks[0]], values[most[0]])
        if found is not None:
            path, theirs, usual = found
            reason = f"{path}: {theirs} on {ranks_text(ranks)}, {usual} on {ranks_text(most)}"
            reasons.update(dict.fromkeys(ranks, reason))
    if reasons:
        raise DisagreementError(dict(sorted(reasons.items())))


def any_rank(
    flag: object, *, name: str = "", group: GroupLike = None, timeout: Timeout = None
) -> bool:
    """Return whether the flag is true on at least one rank.

    Every rank of ``group`` must call this.

    Args:
        flag: a bool, or any object with a truth value.
        name: name of this call; see ``objcomm.broadcast``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.

    Returns:
        True or False, the same on every rank.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        CollectiveError: a flag has no truth value, such as a tensor of two elements. Raised on
            every rank.
        ObjcommError: any other error of ``objcomm.all_gather``, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.any_rank(float("nan") > 0)
        False
    """
    with plain_call(Operation.ANY_RANK, name=name, group=group, timeout=timeout) as call:
        rest = decide_in(call, lambda: bool(flag), any, is_part=_is_flag, is_answer=_is_flag)
        return rest()


def all_ranks(
    flag: object, *, name: str = "", group: GroupLike = None, timeout: Timeout = None
) -> bool:
    """Return whether the flag is true on every rank.

    Every rank of ``group`` must call this.

    Args:
        flag: a bool, or any object with a truth value.
        name: name of this call; see ``objcomm.broadcast``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.

    Returns:
        True or False, the same on every rank.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        CollectiveError: a flag has no truth value, such as a tensor of two elements. Raised on
            every rank.
        ObjcommError: any other error of ``objcomm.all_gather``, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.all_ranks([1, 2, 3])
        True
    """
    with plain_call(Operation.ALL_RANKS, name=name, group=group, timeout=timeout) as call:
        rest = decide_in(call, lambda: bool(flag), all, is_part=_is_flag, is_answer=_is_flag)
        return rest()


def shared_seed(*, name: str = "", group: GroupLike = None, timeout: Timeout = None) -> int:
    """Return a fresh random seed that is the same on every rank.

    Every rank of ``group`` must call this. The group's first rank gets the seed from the operating
    system, so the call neither reads nor changes the program's random generators, and seeding them
    does not make the result reproducible.

    Args:
        name: name of this call; see ``objcomm.broadcast``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.

    Returns:
        An int from 0 to 2**32 - 1, which ``torch.manual_seed``, ``random.seed`` and
        ``numpy.random.seed`` accept.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        ObjcommError: any error of ``objcomm.all_gather``, on the same ranks.

    Examples:
        >>> import objcomm
        >>> 0 <= objcomm.shared_seed() < 2**32
        True
    """
    with plain_call(Operation.SHARED_SEED, name=name, group=group, timeout=timeout) as call:
        rest = decide_in(
            call, lambda: None, lambda _: secrets.randbits(_SEED_BITS), is_answer=_is_seed
        )
        return rest()
