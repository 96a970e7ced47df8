"""What ranks contribute to random programs, so that every rank knows what to expect."""

from typing import Any

import torch

# Small, around the edges of the first message, and large.
SIZES = (0, 1, 100, 32_400, 32_768, 33_000, 65_536, 200_000, 1_000_001)


def content(rank: int, nbytes: int, turn: int) -> dict[str, Any]:
    """What a rank contributes to a turn; every rank can compute those of the others."""
    fill = (rank * 31 + turn) % 251
    return {
        "raw": bytes([fill]) * nbytes,
        "tensor": torch.full((nbytes // 8,), fill, dtype=torch.int64),
        "from": (rank, turn),
    }


def same(got: Any, want: dict[str, Any]) -> bool:
    """Whether a contribution arrived whole."""
    return bool(
        got["raw"] == want["raw"]
        and torch.equal(got["tensor"], want["tensor"])
        and got["from"] == want["from"]
    )
