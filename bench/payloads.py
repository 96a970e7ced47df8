"""Named objects of known sizes for the cases to send.

Every rank builds a payload only from a rank number, and equal calls build equal objects, so that a
receiver can check a received object without a second transfer.
"""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

MIB = 1 << 20
HUGE_NBYTES = 2**31 + 1  # more than a signed 32-bit length can hold
VIEWED_NBYTES = 10**9
COPIED_NBYTES = 100 * 10**6


@dataclass(slots=True)
class Tally:
    """A small object of a user's class, merged in rank order."""

    counts: dict[str, int] = field(default_factory=dict)
    seen: int = 0

    def merge(self, other: "Tally") -> "Tally":
        """Return the sum of both tallies; neither changes."""
        counts = dict(self.counts)
        for label, count in other.counts.items():
            counts[label] = counts.get(label, 0) + count
        return Tally(counts, self.seen + other.seen)


def _config(_rank: int, _shrink: int) -> dict[str, Any]:
    # About 1 KiB when pickled, with the types that a training script's config has.
    return {
        "model": {"name": "resnet50", "width": 64, "blocks": [3, 4, 6, 3], "dropout": 0.1},
        "optimizer": {"name": "adamw", "lr": 3e-4, "betas": (0.9, 0.999), "decay": None},
        "data": {f"shard_{i}": f"train/part-{i:05d}.parquet" for i in range(16)},
        "steps": 100_000,
        "resume": False,
        "notes": string.ascii_lowercase * 6,
    }


def _result(rank: int, _shrink: int) -> dict[str, Any]:
    return {"rank": rank, "correct": 1797 + rank, "loss": 0.25 / (rank + 1), "split": "test"}


def _results(_rank: int, shrink: int) -> list[dict[str, Any]]:
    return [_result(number, 1) for number in range(10_000 // shrink)]


def _tally(rank: int, _shrink: int) -> Tally:
    return Tally({f"class_{label}": label * rank + 1 for label in range(10)}, seen=rank)


def _step(rank: int, _shrink: int) -> dict[str, Any]:
    # About 300 B when pickled, as a scheduler sends to its workers for each step.
    return {
        "step": 4711 + rank,
        "requests": [f"request-{number}" for number in range(6)],
        "new_tokens": dict.fromkeys(range(6), 1),
        "blocks": [[number, 64 * number] for number in range(10)],
        "finished": (),
        "preempted": None,
        "temperature": 0.7,
    }


def _tokens(nbytes: int) -> Callable[[int, int], list[int]]:
    # Numbers like token ids; nearly all take three bytes in a pickle.
    def build(rank: int, shrink: int) -> list[int]:
        return [(7919 * at + rank) % 50_000 for at in range(nbytes // shrink // 3)]

    return build


def _columns(nbytes: int) -> Callable[[int, int], dict[str, np.ndarray]]:
    def build(rank: int, shrink: int) -> dict[str, np.ndarray]:
        return {f"column{at}": _array(nbytes // 8)(rank + at, shrink) for at in range(8)}

    return build


def _scalar(rank: int, _shrink: int) -> float:
    return 0.1 * (rank + 1)


def _array(nbytes: int) -> Callable[[int, int], np.ndarray]:
    def build(rank: int, shrink: int) -> np.ndarray:
        return np.arange(nbytes // shrink // 8, dtype=np.int64) + rank

    return build


def _state(nbytes: int) -> Callable[[int, int], dict[str, np.ndarray]]:
    def build(_rank: int, shrink: int) -> dict[str, np.ndarray]:
        return {"w": _array(nbytes)(0, shrink)}

    return build


def _tensor(nbytes: int) -> Callable[[int, int], torch.Tensor]:
    def build(_rank: int, shrink: int) -> torch.Tensor:
        return torch.from_numpy(_array(nbytes)(0, shrink))

    return build


def _noise(nbytes: int) -> Callable[[int, int], bytes]:
    def build(rank: int, shrink: int) -> bytes:
        return random.Random(rank).randbytes(nbytes // shrink)  # noqa: S311  # not a secret

    return build


def _skewed(
    build: Callable[[int, int], Any], small: Callable[[int, int], Any]
) -> Callable[[int, int], Any]:
    def pick(rank: int, shrink: int) -> Any:
        return build(rank, shrink) if rank == 1 else small(rank, 1)

    return pick


def _tensors(count: int, nbytes: int) -> Callable[[int, int], dict[str, torch.Tensor]]:
    def build(rank: int, shrink: int) -> dict[str, torch.Tensor]:
        numel = nbytes // count // shrink // 4
        # Integers, whose sums and means are the same in any order.
        return {f"layer{at}": torch.full((numel,), float(at + rank)) for at in range(count)}

    return build


def _parameters(count: int, nbytes: int) -> Callable[[int, int], list[torch.Tensor]]:
    def build(rank: int, shrink: int) -> list[torch.Tensor]:
        parameters = []
        for gradient in _tensors(count, nbytes)(rank, shrink).values():
            parameters.append(torch.nn.Parameter(torch.zeros_like(gradient)))
            parameters[-1].grad = gradient
        return list(parameters)

    return build


def _huge(_rank: int, shrink: int) -> bytes:
    if shrink > 1:
        return b"\x01" * (HUGE_NBYTES // shrink)
    # A repeated random block, because randbytes() is limited to 2**31 bits.
    block = random.Random(0).randbytes(MIB)  # noqa: S311  # not a secret
    return block * (HUGE_NBYTES // MIB) + block[: HUGE_NBYTES % MIB]


def _view(_rank: int, shrink: int) -> torch.Tensor:
    # zeros() maps pages that nothing has touched, so viewing a gigabyte costs no memory.
    whole = torch.zeros(VIEWED_NBYTES // shrink // 4)
    whole[5] = 3.5
    return whole[5:6]


STEP = "step dict, 300 B"
_MEDIUM_SIZES = {"40 kB": 40_000, "100 kB": 100_000, "300 kB": 300_000, "1 MiB": MIB}
_MEDIUM_KINDS: dict[str, Callable[[int], Callable[[int, int], Any]]] = {
    " of bytes": _noise,
    " list of ints": _tokens,
    " dict of 8 arrays": _columns,
}

#: Functions ``build(rank, shrink)`` by payload name; a smoke run shrinks large payloads.
PAYLOADS: dict[str, Callable[[int, int], Any]] = {
    "nothing": lambda _rank, _shrink: None,
    "config dict, 1 KiB": _config,
    "small dict": _result,
    "10,000 small dicts": _results,
    "small custom object": _tally,
    "float": _scalar,
    '{"w": 128 MiB ndarray}': _state(128 * MIB),
    "128 MiB tensor": _tensor(128 * MIB),
    "256 MiB tensor": _tensor(256 * MIB),
    "8 MiB array per rank": _array(8 * MIB),
    "64 MiB of bytes on rank 1, 1 KiB elsewhere": _skewed(_noise(64 * MIB), _noise(1024)),
    "64 MiB array on rank 1, 1 KiB elsewhere": _skewed(_array(64 * MIB), _array(1024)),
    "64 MiB array": _array(64 * MIB),
    "one element of a 1 GB tensor": _view,
    "2^31 + 1 bytes": _huge,
    "dict of 100 tensors, 64 MiB": _tensors(100, 64 * MIB),
    "1,000 gradients, 4 MiB": _parameters(1000, 4 * MIB),
    "100 MB array": _array(COPIED_NBYTES),
    STEP: _step,
    **{
        f"{size}{of}": build(nbytes)
        for of, build in _MEDIUM_KINDS.items()
        for size, nbytes in _MEDIUM_SIZES.items()
    },
}

#: Sizes too large to fit beside the header, and too small to be limited by memory speed alone.
MEDIUM = tuple(f"{size}{of}" for of in _MEDIUM_KINDS for size in _MEDIUM_SIZES)


def same(one: Any, other: Any) -> bool:
    """Whether two received objects are equal, arrays and tensors inside them included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Tensor):
        # Some libraries place received tensors on the sender's device.
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
