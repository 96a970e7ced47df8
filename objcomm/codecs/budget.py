"""How much work decoding one message may be: in proportion to its bytes.

A stranger's message of a few hundred bytes may ask for hours: by one large member that is used
again and again, or by keys that all have the same hash. So what costs more than its own bytes is
counted while it is decoded.
"""

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
# scalar of numpy's 10.
_COMPARED_BITS = 9
_USUAL_WEIGHT, _OTHERS_WEIGHT = 20, 200
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
    """

    def __init__(self, budget: Budget, weigh: Callable[[Any], int]) -> None:
        """Begin.

        Args:
            budget: what it is counted against.
            weigh: how many steps it takes to compare a member with another one.
        """
        self._budget = budget
        self._weigh = weigh
        self._counts: Counter[int] = Counter()

    def add(self, members: Iterable[Any]) -> None:
        """Count more of them, before they are compared.

        Raises:
            DecodeError: it would take more than the message is worth.
        """
        counts = self._counts
        for member in members:
            kind = type(member)
            if kind in _HARMLESS or (kind is int and _INT_MIN <= member <= _INT_MAX):
                continue
            key = hash(member)
            if before := counts[key]:
                self._budget.spend(before * self._weigh(member))
            counts[key] = before + 1


def weight_of(member: Any) -> int:
    """How many steps it takes to compare a member of a set with another one."""
    kind = type(member)
    if kind is tuple or kind is frozenset:
        return 1 + sum(map(weight_of, member))
    if kind is int:  # beside a Decimal it is converted, in quadratic time
        parts: int = member.bit_length() >> _COMPARED_BITS
        return 1 + parts * parts
    if kind is str or kind is bytes:
        return 1 + (len(member) >> _COMPARED_BITS)
    return _OTHERS_WEIGHT if hasattr(member, "dtype") else _USUAL_WEIGHT
