"""How much work decoding one message may be: in proportion to its bytes.

A stranger's message of a few hundred bytes may ask for hours: by one large member that is used
again and again, or by keys that all have the same hash. So what costs more than its own bytes is
counted while it is decoded.
"""

import fractions
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

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
