"""How much work decoding one message may be: in proportion to its bytes.

A stranger's message of a few hundred bytes may ask for hours: by one large member that is used
again and again, or by keys that all have the same hash. So what costs more than its own bytes is
counted while it is decoded.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from objcomm.errors import DecodeError

# One step is some 50 ns of work, such as to look at one element. What everyone may spend, and what
# each byte of a message adds: decoding a small dictionary takes 2 steps for each of its bytes.
_FREE_STEPS = 1_000_000
_STEPS_PER_BYTE = 32

# Up to so many members it does not matter how their hashes are spread.
_FEW_MEMBERS = 1_000
_EQUAL_HASHES_MAX = 100
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


def check_spread(codec: str, members: Sequence[Any]) -> None:
    """Refuse members of a set, or keys, that would be compared with each other one by one.

    Raises:
        DecodeError: many of them have the same hash.
    """
    if len(members) > _FEW_MEMBERS:
        Spread(codec).add(members)


class Spread:
    """How the hashes of a container's members are spread.

    Texts' hashes nobody can choose, and of floats and of integers of 64 bits only some 50 have the
    same one.
    """

    def __init__(self, codec: str) -> None:
        self._codec = codec
        self._counts: Counter[int] = Counter()

    def add(self, members: Iterable[Any]) -> None:
        """Count more of them.

        Raises:
            DecodeError: too many have the same hash.
        """
        counts = self._counts
        for member in members:
            kind = type(member)
            if kind in _HARMLESS or (kind is int and _INT_MIN <= member <= _INT_MAX):
                continue
            key = hash(member)
            counts[key] += 1
            if counts[key] > _EQUAL_HASHES_MAX:
                raise DecodeError(
                    self._codec,
                    f"more than {_EQUAL_HASHES_MAX} members of one set, or keys of one mapping, "
                    "have the same hash",
                )
