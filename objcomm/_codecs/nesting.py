"""What decoding a message may cost: work in proportion to its bytes, and no deeper than allowed.

A stranger's message of a few hundred bytes may ask for hours: by one large member that is used
again and again, or by keys that all have the same hash. So what costs more than its own bytes is
counted while it is decoded. And a list's header of 5 bytes may claim 4 billion members, for which
a decoder makes room before it reads the first; lists of such claims within each other multiply. So
a msgpack stream's tokens are read first. Knows tokens and nothing of what they mean.
"""

import fractions
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from objcomm.errors import DecodeError

# One step is some 50 ns of work, such as to look at one element. What everyone may spend, and what
# each byte of a message adds: decoding a small dictionary takes 2 steps for each of its bytes.
_FREE_STEPS = 1_000_000
_STEPS_PER_BYTE = 32

# Comparing: so many bits or letters are one step, as a power of two; a fraction takes 1 µs, and a
# scalar of numpy's 10, and half of one for each of its fields.
_COMPARED_BITS = 9
_USUAL_WEIGHT, _OTHERS_WEIGHT, _FIELD_WEIGHT = 20, 200, 10
_HARMLESS = frozenset({str, bytes, float})
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1


class Budget:
    """What is left for one message."""

    def __init__(self, codec: str, meta: memoryview, buffers: Iterable[Any]) -> None:
        """Begin.

        Args:
            codec: for an error's text.
            meta: the message's own bytes.
            buffers: its large members.
        """
        self._codec = codec
        nbytes = len(meta) + sum(map(_nbytes, buffers))
        self._left = _FREE_STEPS + _STEPS_PER_BYTE * nbytes

    def spend(self, steps: int) -> None:
        """Count work before it is done.

        Raises:
            DecodeError: it would be more than a message of this length is worth.
        """
        self._left -= steps
        if self._left < 0:
            raise DecodeError(self._codec, "decoding it would take far more work than it has bytes")


def _nbytes(buffer: Any) -> int:
    return buffer.nbytes if isinstance(buffer, torch.Tensor) else len(memoryview(buffer))


class Spread:
    """Counts what it takes to compare the members of one set, or the keys of one mapping.

    Members of the same hash are compared with each other. Texts' hashes nobody can choose, and of
    floats and of integers of 64 bits only some 50 have the same one.

    Attributes:
        spent: how many steps it has come to; as many as comparing with another such set takes.
    """

    def __init__(self, budget: Budget, weigh: Callable[[Any], int]) -> None:
        """Begin.

        Args:
            budget: what it is counted against.
            weigh: how many steps it takes to compare a member with another one.
        """
        self._budget = budget
        self._weigh = weigh
        self._lone: dict[int, Any] = {}  # by its hash, the first member that has it
        self._groups: dict[int, tuple[int, int]] = {}  # where more have it: how many, their weight
        self.spent = 0

    def add(self, members: Iterable[Any]) -> None:
        """Count more of them, before they are compared.

        Raises:
            DecodeError: it would take more than the message is worth.
        """
        for member in members:
            kind = type(member)
            if kind in _HARMLESS or (kind is int and _INT_MIN <= member <= _INT_MAX):
                continue
            key = hash(member)
            if key not in self._lone:
                self._lone[key] = member
                continue
            count, before = self._groups.get(key) or (1, self._weigh(self._lone[key]))
            weight = self._weigh(member)
            # Either of two may be what makes comparing them long.
            self._budget.spend(before + count * weight)
            self.spent += before + count * weight
            self._groups[key] = count + 1, before + weight


def weight_of(member: Any) -> int:
    """How many steps it takes to compare a member of a set with another one."""
    weigh = _WEIGHTS.get(type(member))
    if weigh is not None:
        return 1 + weigh(member)
    dtype = getattr(member, "dtype", None)
    return _USUAL_WEIGHT if dtype is None else _OTHERS_WEIGHT + _FIELD_WEIGHT * _fields_of(dtype)


def _square_of(number: int) -> int:
    parts: int = number.bit_length() >> _COMPARED_BITS
    return parts * parts


def _lookups_of(members: frozenset[Any]) -> int:
    alike = Counter(map(hash, members))
    return sum(weight_of(each) * alike[hash(each)] for each in members)


def length_of(numbers: range) -> int:
    """How many there are; ``len`` has a limit."""
    return max(0, -((numbers.start - numbers.stop) // numbers.step))


def _fields_of(dtype: Any) -> int:
    """How many fields one item of numpy's has, those of its fields included."""
    item = getattr(dtype, "base", dtype)  # of a field with a shape
    names = getattr(item, "names", None) or ()
    return len(names) + sum(_fields_of(item.fields[name][0]) for name in names)


#: Of some types, besides one step.
_WEIGHTS: dict[type, Callable[[Any], int]] = {
    tuple: lambda members: sum(map(weight_of, members)),
    # Each is looked up among those members of the other one that have its hash.
    frozenset: _lookups_of,
    # Beside a Decimal numbers are converted, in quadratic time.
    int: _square_of,
    fractions.Fraction: lambda number: (
        _USUAL_WEIGHT + sum(map(_square_of, number.as_integer_ratio()))
    ),
    range: length_of,  # beside a scalar of numpy's it becomes an array
    str: lambda text: len(text) >> _COMPARED_BITS,
    bytes: lambda raw: len(raw) >> _COMPARED_BITS,
}


_NAME = "msgpack"

# Lists and mappings: of up to 15 members, of 16 and of 32 bits. Only long lists claim memory.
_OPENERS = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
_LONG_LISTS = (b"\xdc", b"\xdd")

# What stands between: tokens whose first byte gives their length.
_TOKEN = rb"[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]|[\xcb\xcf\xd3].{8}|[\xca\xce\xd2].{4}|[\xcd\xd1]..|"
_TOKEN += rb"[\xcc\xd0].|\xd4..|\xd5.{3}|\xd6.{5}|\xd7.{9}|\xd8.{17}|"
_TOKEN += b"|".join(rb"\x%02x.{%d}" % (0xA0 + nbytes, nbytes) for nbytes in range(32))

# Texts, bytes and extensions: the length's own bytes, and what an extension has besides.
_LONG_TOKENS = {
    b"\xd9": (1, 0),
    b"\xda": (2, 0),
    b"\xdb": (4, 0),
    b"\xc4": (1, 0),
    b"\xc5": (2, 0),
    b"\xc6": (4, 0),
    b"\xc7": (1, 1),
    b"\xc8": (2, 1),
    b"\xc9": (4, 1),
}
# How many members a head of one byte announces; a mapping has two for each.
_FEW_MEMBERS = {
    bytes([first]): (first & 0x0F) * (1 if first & 0x10 else 2) for first in range(0x80, 0xA0)
}
_HEAD_OF_CONTAINER = rb"[\x80-\x9f]|[\xdc\xde]..|[\xdd\xdf].{4}"
_MAPPINGS_FROM = 0xDE

# Lists that begin with these names hold lists that are no containers of the object's; the first one
# is itself none.
_HEAD = b"\xc7"
_NUMBER_HEAD = b"\xc7\x03\x01int"
_DESCRIPTION_HEADS = (
    b"\xc7\x06\x01tensor",
    b"\xc7\x07\x01ndarray",
    b"\xc7\x05\x01dtype",
    b"\xc7\x06\x01scalar",
)


def check_nesting(meta: memoryview, max_depth: int, description_depth: int = 0) -> None:
    """Refuse a stream whose decoding would cost far more than its bytes.

    Args:
        meta: msgpack, well-formed or not: what is not is left to the decoder.
        max_depth: how deep the object's containers may lie in each other.
        description_depth: how much deeper the lists may lie that describe a member.

    Raises:
        DecodeError: it claims more members than it has bytes, or is nested too deep.
    """
    raw = bytes(meta)
    # Bytes of texts and numbers count as well, so this is only an upper bound, in 1 µs for 1 KiB.
    openers = len(raw) - len(raw.translate(None, _OPENERS))
    if openers <= max_depth and not any(mark in raw for mark in _LONG_LISTS):
        return
    members = 0
    # Of each open container, behind what stands for the stream: the members that it still lacks,
    # how deep it lies in the object, and whether it is a description.
    due, depths, described = [1], [0], [False]
    for scalars, count, at in _containers(raw):
        members += count
        if members > len(raw):
            raise DecodeError(_NAME, f"{len(raw)} bytes claim to hold {members} members")
        if scalars < due[-1]:
            due[-1] -= scalars
        else:
            _close(due, scalars)
            if not due[0]:
                return  # the rest belongs to nothing, which the decoder refuses
        opened = len(due)
        is_description = described[opened - 1]
        depth = depths[opened - 1] + (not is_description)
        if raw.startswith(_HEAD, at):
            is_description = is_description or raw.startswith(_DESCRIPTION_HEADS, at)
            depth -= raw.startswith(_NUMBER_HEAD, at)
        if depth > max_depth or opened > max_depth + description_depth:
            raise DecodeError(
                _NAME,
                f"it is nested deeper than {max_depth}; see objcomm.configure(max_depth=)",
            )
        if count:
            due.append(count)
            depths[opened:] = (depth,)
            described[opened:] = (is_description,)
        else:
            _close(due, 1)


def _close(due: list[int], scalars: int) -> None:
    """Take so many members, and what is full with them."""
    while scalars and due[0]:
        taken = min(scalars, due[-1])
        due[-1] -= taken
        scalars -= taken
        while len(due) > 1 and not due[-1]:
            due.pop()
            due[-1] -= 1


class _Patterns(NamedTuple):
    token: re.Pattern[bytes]
    run: re.Pattern[bytes]  # as many tokens as there are
    step: re.Pattern[bytes]  # and a container's head behind them


@functools.cache  # compiled by the first stream that needs them, which takes a millisecond
def _patterns() -> _Patterns:
    run = b"(?:" + _TOKEN + b")*+"
    step = b"(" + run + b")(" + _HEAD_OF_CONTAINER + b")"
    return _Patterns(*(re.compile(each, re.DOTALL) for each in (_TOKEN, run, step)))


def _containers(raw: bytes) -> Iterator[tuple[int, int, int]]:
    """Each list and mapping: the scalars since the one before, its members, where they begin."""
    token, run, step = _patterns()
    at = scalars = 0
    while True:
        for found in iter(step.scanner(raw, at).match, None):  # type: ignore[attr-defined]  # fast
            before, head = found.groups()
            if before:
                scalars += len(token.findall(before))
            at = found.end()
            count = _FEW_MEMBERS.get(head)
            if count is None:
                count = int.from_bytes(head[1:], "big") * (2 if head[0] >= _MAPPINGS_FROM else 1)
            yield scalars, count, at
            scalars = 0
        rest = run.match(raw, at)
        if rest:
            scalars += len(token.findall(rest[0]))
            at = rest.end()
        if raw[at : at + 1] not in _LONG_TOKENS:
            return  # at its end, cut off, or the byte that means nothing
        while (known := _LONG_TOKENS.get(raw[at : at + 1])) is not None:
            width, further = known
            at += 1 + width + further + int.from_bytes(raw[at + 1 : at + 1 + width], "big")
            scalars += 1
