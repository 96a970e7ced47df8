"""What all ranks have or want: the same value, a yes of any or of all, one seed.

Where two values first differ, in type or content, is told; nan is the same as nan. ``==`` will not
do: of tensors and arrays it gives no truth value, of nan a wrong one, and ``1`` and ``True`` are
equal to it.
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

from objcomm._calls.call import Call
from objcomm._calls.group import resolve
from objcomm._collectives.gather import decide_in
from objcomm._config import Allowed, GroupLike, Timeout
from objcomm._wire.failure_message import DisagreementError
from objcomm._wire.header import Operation
from objcomm.errors import name_of, ranks_text, text_of

_MAX_TEXT = 100
_PROTOCOL = 5
_NUMPY = ("numpy", "numpy.ma", "numpy.ma.core")

# What an object's ``__reduce_ex__`` gives.
_PARTS = ("'s class", "'s arguments", "'s state", "'s items", "'s items", "'s setter")
_STATE = 2

_texts = reprlib.Repr()
_texts.maxother = _texts.maxstring = _texts.maxlong = _MAX_TEXT


def difference(left: object, right: object, path: str = "value") -> tuple[str, str, str] | None:
    """Where two values first differ.

    Args:
        left: one.
        right: the other one.
        path: what they are called.

    Returns:
        The path of the members that differ, such as ``value['lr']``, and each as text; None where
        nothing differs.
    """
    return _Comparison().compare(left, right, path)


class _Comparison:
    def __init__(self) -> None:
        # By identity, for members that hold themselves; kept alive, so that no identity recurs.
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
            # As text nan is equal to nan, and added to 0 there is no negative zero.
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
        if hasattr(left, "mask"):  # what is masked may be anything
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
        # What pickle would save is all that an object holds; it also finds nan beside nan.
        try:
            mine, theirs = _reduced(left), _reduced(right)
        except TypeError:  # it can't be taken apart, and is another object
            return _unless(is_same=False, left=left, right=right, path=path)
        if isinstance(mine, str) or len(mine) != len(theirs):
            return _unless(mine == theirs, left, right, path)
        parts = zip(_PARTS, map(_listed, mine), map(_listed, theirs), strict=False)
        found = self._first(parts, path)
        return _unless(found is None, left, right, path) if has_equality else found


def _reduced(obj: Any) -> Any:
    """What pickle would save; an exception's ``__dict__`` is there once it was looked at."""
    reduced = obj.__reduce_ex__(_PROTOCOL)
    return reduced[:_STATE] if reduced[_STATE:] == ({},) else reduced


def _are_same_classes(left: type, right: type) -> bool:
    """Also of one name: a class that travels by value arrives as another one."""
    names = [(each.__module__, each.__qualname__) for each in (left, right)]
    return left is right or names[0] == names[1]


def _attributes_of(cls: type) -> set[str]:
    """All that a class and its bases define, ``object`` left out."""
    return {name for base in cls.__mro__[:-1] for name in vars(base)}


def _listed(part: Any) -> Any:
    return [*part] if hasattr(part, "__next__") else part


def _unless(
    is_same: bool,  # noqa: FBT001  # a condition, as in a sentence
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
    # Floats of one byte can't be compared.
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _are_equal(left: Any, right: Any) -> bool:
    """Element by element; nan is the same as nan."""
    are_nan = (left != left) & (right != right)  # noqa: PLR0124  # true of nan alone
    return bool(((left == right) | are_nan).all())


def _keys(keys: Sequence[object]) -> str:
    return f"also {', '.join(map(text, keys))}" if keys else "no others"


def _with_type(value: object) -> str:
    if isinstance(value, type):
        return name_of(value)
    return f"{text(value)} ({name_of(type(value))})"


def text(value: object) -> str:
    """A value in a few words; never raises."""
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        return f"a tensor of {value.dtype} {tuple(value.shape)}"
    try:
        return " ".join(_texts.repr(value).split())[: 2 * _MAX_TEXT]
    except BaseException as error:  # noqa: BLE001  # a user's __repr__ may even exit
        return f"a {name_of(type(value))} ({text_of(error)})"


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
    name: str = "",
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
        name: of this call, as in ``objcomm.broadcast``.
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
    # Equal values may have other bytes, such as dicts whose keys came in another order.
    with begin(timeout=deadline.seconds_left, must_agree="values") as call:
        decide_in(call, lambda: value, _same_on_all)()
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
            reason = f"{path}: {theirs} on {ranks_text(ranks)}, {usual} on {ranks_text(most)}"
            reasons.update(dict.fromkeys(ranks, reason))
    if reasons:
        raise DisagreementError(dict(sorted(reasons.items())))


def any_rank(
    flag: object, *, name: str = "", group: GroupLike = None, timeout: Timeout = None
) -> bool:
    """Whether the flag is true on at least one rank.

    Every rank of ``group`` must call this.

    Args:
        flag: a bool, or anything that has a truth value.
        name: of this call, as in ``objcomm.broadcast``.
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
    with Call(Operation.ANY_RANK, name=name, group=group, timeout=timeout, codec="msgpack") as call:
        rest = decide_in(call, lambda: bool(flag), any, is_part=_is_flag, is_answer=_is_flag)
        return rest()


def all_ranks(
    flag: object, *, name: str = "", group: GroupLike = None, timeout: Timeout = None
) -> bool:
    """Whether the flag is true on every rank.

    Every rank of ``group`` must call this.

    Args:
        flag: a bool, or anything that has a truth value.
        name: of this call, as in ``objcomm.broadcast``.
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
    with Call(
        Operation.ALL_RANKS, name=name, group=group, timeout=timeout, codec="msgpack"
    ) as call:
        rest = decide_in(call, lambda: bool(flag), all, is_part=_is_flag, is_answer=_is_flag)
        return rest()


def shared_seed(*, name: str = "", group: GroupLike = None, timeout: Timeout = None) -> int:
    """A fresh random seed that is the same on every rank.

    Every rank of ``group`` must call this. The group's first rank asks the operating system for
    it, so no generator of this program is read or changed, and no seed of this program's makes
    it come again.

    Args:
        name: of this call, as in ``objcomm.broadcast``.
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
    with Call(
        Operation.SHARED_SEED, name=name, group=group, timeout=timeout, codec="msgpack"
    ) as call:
        rest = decide_in(
            call, lambda: None, lambda _: secrets.randbits(_SEED_BITS), is_answer=_is_seed
        )
        return rest()
