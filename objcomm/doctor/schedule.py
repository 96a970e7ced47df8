"""Who tries whom, and when: pure arithmetic on ranks.

All ranks compute the same from what they all know.
"""

from collections.abc import Sequence

Pair = tuple[int, int]

#: Of more others than this a rank tries some only.
PEERS_MAX = 64
#: Of more pairs than this some only are measured.
PAIRS_MAX = 4096


def distances(size: int) -> list[int]:
    """How far apart two ranks of a ring may be, in the order in which they are tried.

    Neighbours first, then across the ring, then powers of two: so that a beginning of the list has
    every rank in it alike, and near ones with far ones.
    """
    most = size // 2
    first = [1, most, *(1 << bit for bit in range(1, size.bit_length()))]
    ordered = dict.fromkeys(each for each in [*first, *range(1, most + 1)] if 1 <= each <= most)
    return list(ordered)


def peers_of(rank: int, size: int) -> list[int]:
    """The ranks that one tries to reach: all of them, or ``PEERS_MAX`` with rank 0 among them."""
    around = [(rank + way * far) % size for far in distances(size) for way in (1, -1)]
    first = [0] * (rank != 0)
    return list(dict.fromkeys([*first, *around]))[:PEERS_MAX]


def pairs(size: int) -> list[Pair]:
    """The pairs to measure, those first that tell most; the lower rank of each first."""
    found: dict[Pair, None] = {}
    for far in distances(size):
        for rank in range(size):
            one, other = sorted((rank, (rank + far) % size))
            found[one, other] = None
        if len(found) >= PAIRS_MAX:
            break
    return list(found)[:PAIRS_MAX]


def rounds(wanted: Sequence[Pair], machines: Sequence[str]) -> list[list[Pair]]:
    """Lay pairs into rounds so that no host has to do with two pairs of one round.

    Args:
        wanted: the pairs, the first of them as early as may be.
        machines: the host of each rank.
    """
    laid: list[list[Pair]] = []
    busy: dict[str, set[int]] = {machine: set() for machine in machines}
    free_from = dict.fromkeys(machines, 0)
    for pair in wanted:
        here = {machines[rank] for rank in pair}
        at = max(free_from[machine] for machine in here)
        while any(at in busy[machine] for machine in here):
            at += 1
        while len(laid) <= at:
            laid.append([])
        laid[at].append(pair)
        for machine in here:
            busy[machine].add(at)
            while free_from[machine] in busy[machine]:
                free_from[machine] += 1
    return laid
