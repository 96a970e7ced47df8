"""Limits on the cost of decoding: work in proportion to a message's bytes, and a maximum depth.

An untrusted message of a few hundred bytes can cause hours of work, by using one large member again
and again, or by keys that all have the same hash. So work out of proportion to its bytes is
counted during decoding. Also, a list's 5-byte header can claim 4 billion members, for which a
decoder allocates memory before it reads the first one, and nested claims multiply. So the tokens of
a msgpack stream are checked first. This module knows tokens, but not what they mean.
"""

import fractions
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from objcomm.errors import DecodeError

# One step is about 50 ns of work, such as looking at one element. Each message gets the free steps,
# and more for each of its bytes; decoding a small dictionary takes 2 steps per byte.
_FREE_STEPS = 1_000_000
_STEPS_PER_BYTE = 32

# Comparing this many bits or characters (as a power of two) takes one step. Comparing a fraction
# takes 1 µs, and a numpy scalar 10 µs plus 0.5 µs for each of its fields.
_COMPARED_BITS = 9
_USUAL_WEIGHT, _OTHERS_WEIGHT, _FIELD_WEIGHT = 20, 200, 10
_HARMLESS = frozenset({str, bytes, float})
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1


class Budget:
    """The steps left for decoding one message."""

    def __init__(self, codec: str, meta: memoryview, buffers: Iterable[Any]) -> None:
        """Initialize the budget.

        Args:
            codec: name of the codec, for error messages.
            meta: the message's own bytes.
            buffers: its large members.
        """
        self._codec = codec
        nbytes = len(meta) + sum(map(_nbytes, buffers))
        self._left = _FREE_STEPS + _STEPS_PER_BYTE * nbytes

    def spend(self, steps: int) -> None:
        """Count work before it is done.

        Raises:
            DecodeError: it would be more than a message of this length justifies.
        """
        self._left -= steps
        if self._left < 0:
            raise DecodeError(
                self._codec, "decoding it would take far more work than its size justifies"
            )


def _nbytes(buffer: Any) -> int:
    return buffer.nbytes if isinstance(buffer, torch.Tensor) else len(memoryview(buffer))


class Spread:
    """Counts the steps to compare the members of one set, or the keys of one mapping.

    Members with the same hash are compared with each other. Nobody can choose the hashes of
    strings, and only about 50 floats or 64-bit integers have the same one.

    Attributes:
        spent: steps counted so far; comparing with another such set takes as many.
    """

    def __init__(self, budget: Budget, weigh: Callable[[Any], int]) -> None:
        """Initialize the counter.

        Args:
            budget: the budget to charge.
            weigh: returns the steps to compare a member with another one.
        """
        self._budget = budget
        self._weigh = weigh
        self._lone: dict[int, Any] = {}  # the first member with each hash
        self._groups: dict[int, tuple[int, int]] = {}  # for shared hashes: count and total weight
        self.spent = 0

    def add(self, members: Iterable[Any]) -> None:
        """Count more members, before they are compared.

        Raises:
            DecodeError: comparing them would take more work than the message justifies.
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
            # Either of the two may be the one that makes comparing them slow.
            self._budget.spend(before + count * weight)
            self.spent += before + count * weight
            self._groups[key] = count + 1, before + weight


def weight_of(member: Any) -> int:
    """Return the steps to compare a member of a set with another one."""
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
    """Return the length of a range; ``len`` has a limit."""
    return max(0, -((numbers.start - numbers.stop) // numbers.step))


def _fields_of(dtype: Any) -> int:
    """Return the number of fields in an item of a numpy dtype, including nested ones."""
    item = getattr(dtype, "base", dtype)  # for a field with a shape
    names = getattr(item, "names", None) or ()
    return len(names) + sum(_fields_of(item.fields[name][0]) for name in names)


#: Steps for some types, in addition to one.
_WEIGHTS: dict[type, Callable[[Any], int]] = {
    tuple: lambda members: sum(map(weight_of, members)),
    # Each member is looked up among the other set's members with the same hash.
    frozenset: _lookups_of,
    # Comparing with a Decimal converts numbers, in quadratic time.
    int: _square_of,
    fractions.Fraction: lambda number: (
        _USUAL_WEIGHT + sum(map(_square_of, number.as_integer_ratio()))
    ),
    range: length_of,  # compared with a numpy scalar, it becomes an array
    str: lambda text: len(text) >> _COMPARED_BITS,
    bytes: lambda raw: len(raw) >> _COMPARED_BITS,
}


_NAME = "msgpack"

# The first bytes of lists and mappings with up to 15 members, and with 16-bit and 32-bit lengths. A
# decoder allocates memory ahead only for lists with such lengths.
_OPENERS = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
_LONG_LISTS = (b"\xdc", b"\xdd")

# Everything else: tokens whose first byte gives their length, and empty containers.
_SHORT = rb"[\x00-\x80\x90\xc0\xc2\xc3\xe0-\xff]"
_TOKEN = _SHORT + rb"|[\xcb\xcf\xd3].{8}|[\xca\xce\xd2].{4}|[\xcd\xd1]..|"
_TOKEN += rb"[\xcc\xd0].|\xd4..|\xd5.{3}|\xd6.{5}|\xd7.{9}|\xd8.{17}|"
_TOKEN += b"|".join(rb"\x%02x.{%d}" % (0xA0 + nbytes, nbytes) for nbytes in range(32))

# Strings, bytes and extensions: the size of the length field, and further bytes of an extension.
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
# Short ones of these are tokens, too, because a long one takes one or two microseconds to skip.
for _first, (_width, _further) in _LONG_TOKENS.items():
    _lengths = (
        rb"\x00" * (_width - 1) + rb"\x%02x.{%d}" % (nbytes, nbytes + _further)
        for nbytes in range(8)
    )
    _TOKEN += rb"|\x%02x(?:" % _first[0] + b"|".join(_lengths) + b")"

# The number of members announced by a one-byte head; a mapping has two for each entry.
_FEW_MEMBERS = bytes(0x80) + bytes(range(0, 32, 2)) + bytes(range(16)) + bytes(0x60)
# A container that holds only one-byte tokens is also a token, which may be up to two levels deep.
_TOKEN += b"".join(
    rb"|\x%02x" % first + _SHORT + b"{%d}" % count
    for first, count in enumerate(_FEW_MEMBERS)
    if count
)
_LEVELS_MAX = 2
_FLAT = re.compile(rb"[^\x80-\x9f]|\Z")  # also the empty placeholder of a long token
_OF_TWO_LEVELS = re.compile(rb".+[\x80\x90]", re.DOTALL)

# One-byte heads, each the first member of the one before, followed by another container's head.
# Their number is limited because each takes 100 bytes of memory.
_HEADS = rb"(?:[\x81-\x8f\x91-\x9f](?=[\x81-\x8f\x91-\x9f\xdc-\xdf])){0,99}"
_HEAD_OF_CONTAINER = rb"[\x81-\x8f\x91-\x9f]|[\xdc\xde]..|[\xdd\xdf].{4}"
_MAPPINGS_FROM = 0xDE

# Lists that begin with a description head contain lists that are not containers of the object. One
# that begins with the number head is not a container itself.
_HEAD = b"\xc7"
_NUMBER_HEAD = b"\xc7\x03\x01int"
_DESCRIPTION_HEADS = (
    b"\xc7\x06\x01tensor",
    b"\xc7\x07\x01ndarray",
    b"\xc7\x05\x01dtype",
    b"\xc7\x06\x01scalar",
)


def check_nesting(meta: memoryview, max_depth: int, description_depth: int = 0) -> None:
    """Reject a stream whose decoding would cost far more than its bytes justify.

    Args:
        meta: a msgpack stream; if it is malformed, the decoder reports that.
        max_depth: how deep the object's containers may be nested.
        description_depth: how much deeper lists that describe a member may be nested.

    Raises:
        DecodeError: it claims more members than it has bytes, or is nested too deep.
    """
    raw = bytes(meta)
    # Bytes of strings and numbers count as well, so this is an upper bound. Takes 1 µs per KiB.
    openers = len(raw) - len(raw.translate(None, _OPENERS))
    if openers <= max_depth and not any(mark in raw for mark in _LONG_LISTS):
        return
    members = 0
    within = _Open(max_depth, max_depth + description_depth)
    for tokens, heads, count, at in _containers(raw):
        members += count + sum(heads) if heads else count
        if members > len(raw):
            raise DecodeError(_NAME, f"{len(raw)} bytes claim to hold {members} members")
        if tokens:
            within.take(tokens)
        if count < 0 or not within.due[0]:
            return  # the rest belongs to nothing, which the decoder refuses
        if heads:
            within.open_all(heads)
        within.open(count, raw, at)


class _Open:
    """The open containers, each within the previous one; the first stands for the stream.

    Attributes:
        due: the number of members each still lacks, including the member that is open.
    """

    def __init__(self, max_depth: int, max_level: int) -> None:
        self._max_depth = max_depth
        self._max_level = max_level
        self._roomy_to = max_depth + 1 - _LEVELS_MAX  # with no more open, no token is too deep
        self.due = [1]
        # For open containers, and some that are closed: the depth within the object, and whether
        # the container is part of a description.
        self._depths = [0]
        self._described = [False]

    def take(self, tokens: list[bytes]) -> None:
        """Add members that open nothing, and close the containers that they fill."""
        due, count = self.due, len(tokens)
        if len(due) > self._roomy_to:
            self._check(tokens)
        if count < due[-1]:
            due[-1] -= count
        else:
            self._close(count)

    def _check(self, tokens: list[bytes]) -> None:
        """Reject tokens that are too deep, each within the container that it will be added to."""
        begin = end = 0
        for level in reversed(range(len(self.due))):
            # Not counting the member that is complete by then.
            begin, end = end, end + self.due[level] - (level < len(self.due) - 1)
            if begin >= len(tokens):
                return
            if max(map(_levels, set(tokens[begin:end])), default=0) > self._room(level):
                raise self._too_deep()

    def _room(self, level: int) -> int:
        """Return how many more levels a container may have."""
        room = self._max_level - level
        return room if self._described[level] else min(self._max_depth - self._depths[level], room)

    def _close(self, count: int) -> None:
        """Add ``count`` members, and close the containers that they fill."""
        due = self.due
        while count and due[0]:
            taken = min(count, due[-1])
            due[-1] -= taken
            count -= taken
            while len(due) > 1 and not due[-1]:
                due.pop()
                due[-1] -= 1

    def open_all(self, heads: bytes) -> None:
        """Open containers with these numbers of members, each the first member of the previous."""
        at = len(self.due)
        if len(heads) > self._room(at - 1):
            raise self._too_deep()
        depth, is_described = self._depths[at - 1], self._described[at - 1]
        step = 0 if is_described else 1
        self.due.extend(heads)
        self._depths[at:] = [depth + step * each for each in range(1, len(heads) + 1)]
        self._described[at:] = [is_described] * len(heads)

    def open(self, count: int, raw: bytes, begin: int) -> None:
        """Open a container with ``count`` members; the first one begins at ``begin``."""
        at = len(self.due)
        is_described = self._described[at - 1]
        depth = self._depths[at - 1] + (not is_described)
        if raw.startswith(_HEAD, begin):
            is_described = is_described or raw.startswith(_DESCRIPTION_HEADS, begin)
            depth -= raw.startswith(_NUMBER_HEAD, begin)
        if depth > self._max_depth or at > self._max_level:
            raise self._too_deep()
        if count:
            self.due.append(count)
            self._depths[at:] = (depth,)
            self._described[at:] = (is_described,)
        else:
            self._close(1)

    def _too_deep(self) -> DecodeError:
        return DecodeError(
            _NAME,
            f"it is nested deeper than {self._max_depth}; see objcomm.configure(max_depth=)",
        )


def _levels(token: bytes) -> int:
    """Return how many containers are nested in a token."""
    return 0 if _FLAT.match(token) else 1 + bool(_OF_TWO_LEVELS.match(token))


class _Patterns(NamedTuple):
    token: re.Pattern[bytes]
    run: re.Pattern[bytes]  # as many tokens as possible
    step: re.Pattern[bytes]  # and the head of a container after them


@functools.cache  # compiled on first use, which takes 7 ms
def _patterns() -> _Patterns:
    run = b"(?:" + _TOKEN + b")*+"
    step = b"(" + run + b")(" + _HEADS + b")(" + _HEAD_OF_CONTAINER + b")"
    return _Patterns(*(re.compile(each, re.DOTALL) for each in (_TOKEN, run, step)))


def _containers(raw: bytes) -> Iterator[tuple[list[bytes], bytes, int, int]]:
    """Yield the lists and mappings of a stream, one at a time.

    Yields:
        For each, the tokens before it; the member counts of enclosing containers that open directly
        before it; its own member count; and where its members begin. At the end, a count of -1.
    """
    token, run, step = _patterns()
    at = 0
    tokens: list[bytes] = []
    while True:
        for found in iter(step.scanner(raw, at).match, None):  # type: ignore[attr-defined]  # fast
            before, heads, head = found.groups()
            if before:
                tokens = tokens + token.findall(before) if tokens else token.findall(before)
            at = found.end()
            if len(head) == 1:
                count = _FEW_MEMBERS[head[0]]
            else:
                count = int.from_bytes(head[1:], "big") * (2 if head[0] >= _MAPPINGS_FROM else 1)
            yield tokens, heads and heads.translate(_FEW_MEMBERS), count, at
            tokens = []
        rest = run.match(raw, at)
        if rest:
            tokens += token.findall(rest[0])
            at = rest.end()
        if raw[at : at + 1] not in _LONG_TOKENS:
            yield tokens, b"", -1, at
            return  # at the end, truncated, or at an invalid byte
        while (known := _LONG_TOKENS.get(raw[at : at + 1])) is not None:
            width, further = known
            at += 1 + width + further + int.from_bytes(raw[at + 1 : at + 1 + width], "big")
            tokens.append(b"")
