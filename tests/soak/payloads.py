"""Objects of all kinds, from no bytes to some MiB, that any rank can create from a number."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests import samples

#: Sizes around those at which the path changes: the first message's window, and out of band.
EDGES = (0, 1, 100, 32_400, 32_768, 33_000, 65_535, 65_536, 200_000, 1_000_001)

SMALL_MAX_NBYTES = 500
LARGE_NBYTES = 200_000
_HUGE_MAX_NBYTES = 4 << 20


def size_drawn(chance: random.Random) -> int:
    """Draw a number of bytes: mostly few, sometimes at an edge, now and then some MiB."""
    draw = chance.random()
    if draw < 0.7:
        return chance.randrange(SMALL_MAX_NBYTES)
    if draw < 0.95:
        return chance.choice(EDGES)
    return chance.randrange(LARGE_NBYTES, _HUGE_MAX_NBYTES)


def payload(seed: int, nbytes: int) -> Any:
    """Create the object of that number, with roughly that many bytes."""
    chance = random.Random(seed)
    return _KINDS[chance.randrange(len(_KINDS))](chance, nbytes)


def scalar(seed: int) -> Any:
    """Create the scalar of that number."""
    chance = random.Random(seed)
    numbers = (chance.randrange(-(2**80), 2**80), chance.random(), 2**24 + 1, True, 1 + 2j)
    return chance.choice((*numbers, None, "text", np.float32(0.1), torch.tensor(7)))


def _longs(chance: random.Random, nbytes: int) -> torch.Tensor:
    count = nbytes // 8
    return torch.frombuffer(bytearray(chance.randbytes(8 * count or 8)), dtype=torch.int64)[:count]


def _columns(chance: random.Random, nbytes: int) -> torch.Tensor:
    rows = nbytes // 16
    return _longs(chance, 32 * rows).view(2 * rows, 2)[:, 0]


def _nested(chance: random.Random, nbytes: int) -> Any:
    return {
        "step": chance.randrange(2**70),
        ("a", 1): [chance.random(), None, {chance.randrange(9)}],
        "raw": chance.randbytes(nbytes // 2),
        "weights": {"w": _longs(chance, nbytes // 2), "b": np.arange(5, dtype=np.float32)},
    }


def _run(chance: random.Random, nbytes: int) -> Any:
    points = [samples.Point(chance.randrange(99), chance.random()) for _ in range(5)]
    return samples.Run("x" * min(nbytes, 10_000), points, samples.Run("parent", []))


def _many(chance: random.Random, nbytes: int) -> Any:
    return [_longs(chance, nbytes // 20) for _ in range(20)]


_KINDS: tuple[Callable[[random.Random, int], Any], ...] = (
    lambda _chance, _nbytes: None,
    lambda chance, nbytes: chance.randbytes(nbytes),
    lambda chance, nbytes: bytearray(chance.randbytes(nbytes)),
    lambda chance, nbytes: chance.choice("aé𝄞") * (nbytes // 4),
    lambda chance, nbytes: np.frombuffer(chance.randbytes(nbytes), np.uint8).copy(),
    _longs,
    _columns,
    _nested,
    _run,
    _many,
)
