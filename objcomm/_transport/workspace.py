"""Memory that the ranks of one host have together: each writes in its own part, all read in all.

It stays mapped for as long as its lane is used, so that what goes through it costs no new pages.
"""

from collections.abc import Sequence

import torch

# A piece that is small enough for the processor's cache, and large enough that the words between
# two steps cost little. 64 MiB among 4 ranks on 2 cores, against Gloo's ring in the same run: with
# 64 KiB 0.87, 128 KiB 0.59, 256 KiB 0.44, 512 KiB 0.46, 1 MiB 0.49.
_SLOT_MAX_NBYTES = 512 << 10
_NBYTES_MAX = 8 << 20
#: One is read while the other is written.
TURNS = 2
_ALIGNMENT = 64


class Workspace:
    """See the module. A rank's part has slots for two turns: one for each rank and one of its own.

    Attributes:
        slot_nbytes: of each slot.
        turn_nbytes: of all of one rank's slots in a turn.
    """

    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        """Begin.

        Args:
            memories: each rank's part, as this process sees it; it may write to its own only.
        """
        self._memories = memories
        self.slot_nbytes = slot_nbytes(len(memories))
        self.turn_nbytes = (len(memories) + 1) * self.slot_nbytes

    def slot(self, turn: int, rank: int, number: int) -> torch.Tensor:
        """Where a rank writes in a turn what the rank ``number`` reads: ``slot_nbytes`` there."""
        start = number * self.slot_nbytes
        return self.turn(turn, rank)[start : start + self.slot_nbytes]

    def result(self, turn: int, owner: int) -> torch.Tensor:
        """Where ``owner`` writes what all read."""
        return self.slot(turn, owner, len(self._memories))  # behind those of the ranks

    def turn(self, turn: int, rank: int) -> torch.Tensor:
        """All slots of a rank in a turn: where it writes what all read."""
        start = turn % TURNS * self.turn_nbytes
        return self._memories[rank][start : start + self.turn_nbytes]


def slot_nbytes(size: int) -> int:
    """Bytes of a slot among so many ranks."""
    fair = _NBYTES_MAX // (TURNS * (size + 1))
    return min(_SLOT_MAX_NBYTES, fair // _ALIGNMENT * _ALIGNMENT)


def part_nbytes(size: int) -> int:
    """Bytes of one rank's part."""
    return TURNS * (size + 1) * slot_nbytes(size)
