"""Who receives from whom when one rank's bytes go to all: pure arithmetic on ranks.

Each function takes the rank, the root and the number of ranks, and returns the rank to receive
from (``None`` for the root) and those to send to, in that order. All ranks compute the same
picture from what they all know.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

Place = tuple[int | None, list[int]]
Topology = Callable[[int, int, int], Place]

#: Up to this many ranks a root sends small messages to each by itself: one hop, and cheaper than
#: a tree where ranks share cores (measured at 2, 4 and 8 ranks).
STAR_MAX_SIZE = 8

#: In a tree for small messages a rank serves so many hosts, and so many ranks of its own host. Of
#: 512 hosts the last is three hops away.
_BRANCHES_MAX = 8

#: Large payloads are passed on in pieces of at most this size, which are still in the processor's
#: cache then.
CHUNK_MAX_NBYTES = 4 << 20
_CHUNK_MIN_NBYTES = 1 << 20
#: The same of a line of hosts, where the first piece is passed on while the others come. 1 MiB to
#: three other hosts, four ranks on 2 cores, took 10.1 ms in such pieces over cards of 1 Gbit/s, and
#: 24.6 ms whole; over 5 Gbit/s 7.3 and 4.9.
_LINE_CHUNK_MIN_NBYTES = 256 << 10


def star(rank: int, root: int, size: int) -> Place:
    """The root sends to every other rank."""
    if rank != root:
        return root, []
    return None, [peer for peer in range(size) if peer != root]


def binomial(rank: int, root: int, size: int) -> Place:
    """A binomial tree: after k steps 2**k ranks have it; the largest subtree is served first."""
    place = (rank - root) % size
    lowest = place & -place if place else 1 << size.bit_length()
    steps = [step for step in _powers_below(size) if step < lowest and place + step < size]
    children = [(place + step + root) % size for step in reversed(steps)]
    return ((place - lowest + root) % size if place else None), children


@functools.lru_cache(maxsize=256)  # as ``tree``
def in_order(rank: int, root: int, hosts: tuple[int, ...]) -> Place:
    """Binomial trees in which each rank, with those below it, is a run of ranks without a gap.

    So what they have can be combined in the ranks' order, counted from ``root`` on. Ranks that
    follow each other on one host meet there first.

    Args:
        rank: whose place.
        root: where the tree ends.
        hosts: of each rank, as a number.

    Returns:
        To whom its run goes; and whose runs follow this rank's own, in that order. Not to be
        changed.
    """
    size = len(hosts)
    turned = [(root + at) % size for at in range(size)]
    runs = [list(each) for _, each in itertools.groupby(turned, hosts.__getitem__)]
    at = next(at for at, run in enumerate(runs) if rank in run)
    parent, children = _among(runs[at], rank, lambda _: binomial)
    children.reverse()
    if rank != runs[at][0]:
        return parent, children
    parent, others = _among([run[0] for run in runs], rank, lambda _: binomial)
    return parent, [*children, *reversed(others)]


def line(rank: int, root: int, size: int) -> Place:
    """Each rank passes on to the next: none sends anything twice."""
    place = (rank - root) % size
    parent = (rank - 1) % size if place else None
    return parent, [(rank + 1) % size] if place + 1 < size else []


def firsts(hosts: Sequence[int], root: int) -> dict[int, int]:
    """Of each host the rank that a root's bytes reach first, the root's own host before others."""
    first = {hosts[root]: root}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    return first


def by_host(hosts: Sequence[int]) -> dict[int, list[int]]:
    """The ranks of each host, hosts and ranks in order."""
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return ranks


def host_by_host(hosts: Sequence[int], among: Callable[[int], Topology]) -> Topology:
    """One rank of each host gets it, and passes it on to those beside it.

    Args:
        hosts: of each rank, as a number.
        among: how it goes between so many first ranks, and so many ranks of a host.
    """

    def place(rank: int, root: int, size: int) -> Place:
        first = firsts(hosts, root)
        own = first[hosts[rank]]
        beside = [own, *(each for each in range(size) if first[hosts[each]] == own != each)]
        parent, children = _among(beside, rank, among)
        if rank != own:
            return parent, children
        parent, others = _among(list(first.values()), rank, among)
        return parent, [*others, *children]

    return place


def _among(ranks: Sequence[int], rank: int, among: Callable[[int], Topology]) -> Place:
    """The place of one of some ranks, of which the first is the root."""
    size = len(ranks)
    parent, children = among(size)(ranks.index(rank), 0, size)
    return None if parent is None else ranks[parent], [ranks[each] for each in children]


@functools.lru_cache(maxsize=256)  # as ``tree``
def whole_below(root: int, hosts: tuple[int, ...]) -> int:
    """Messages of fewer bytes go whole along the tree for small ones, if their link carries them.

    A message does not go whole if it would reach another host twice, or if it is long enough for a
    line of hosts and ``root``'s network card would carry a copy for each of several hosts.

    Args:
        root: where the tree begins.
        hosts: of each rank, as a number.
    """
    far = [host for host in hosts if host != hosts[root]]
    if len(hosts) <= STAR_MAX_SIZE and len(far) > len(set(far)):
        return 0
    return sys.maxsize if len(set(far)) < 2 else len(hosts) * _LINE_CHUNK_MIN_NBYTES  # noqa: PLR2004  # several


class Branch(NamedTuple):
    """One rank's place in the tree along which small messages go down from a root, and up to it.

    Attributes:
        parent: from whom it hears; None for the root.
        children: to whom it passes on.
        below: of each child, all ranks that it reaches, in their order in the tree; itself first.
    """

    parent: int | None
    children: tuple[int, ...]
    below: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=256)  # at 4,096 ranks one takes some milliseconds
def tree(rank: int, root: int, hosts: tuple[int, ...]) -> Branch:
    """Where a rank is in the tree of all ranks.

    A few ranks hear from the root itself. Of more, one rank of each host does so, or hears from
    another host's, and serves those beside it; no rank has more than sixteen others below it that
    it serves itself.

    Args:
        rank: whose place.
        root: where the tree begins.
        hosts: of each rank, as a number.
    """
    size = len(hosts)
    if size <= STAR_MAX_SIZE:
        parent, children = star(rank, root, size)
        return Branch(parent, tuple(children), tuple((child,) for child in children))
    beside: dict[int, list[int]] = {first: [] for first in firsts(hosts, root).values()}
    first_of = {hosts[first]: first for first in beside}
    for each, host in enumerate(hosts):
        if each != first_of[host]:
            beside[first_of[host]].append(each)
    own = first_of[hosts[rank]]
    parent, local = _descend(rank, [own, *beside[own]])
    if rank != own:
        return Branch(parent, tuple(each[0] for each in local), tuple(map(tuple, local)))
    parent, far = _descend(rank, list(beside))
    below = [_in_order(part, beside) for part in far] + local
    return Branch(parent, tuple(each[0] for each in below), tuple(map(tuple, below)))


def _descend(rank: int, ranks: list[int]) -> tuple[int | None, list[list[int]]]:
    """From whom one of some ranks hears, the first of which is the root, and who is below it."""
    parent = None
    while True:
        parts = list(_cut(ranks[1:]))
        if ranks[0] == rank:
            return parent, parts
        parent = ranks[0]
        ranks = next(part for part in parts if rank in part)


def _in_order(firsts: list[int], beside: dict[int, list[int]]) -> list[int]:
    """All ranks of some hosts: the first of the first, then other hosts', then those beside it."""
    further = [each for part in _cut(firsts[1:]) for each in _in_order(part, beside)]
    return [firsts[0], *further, *beside[firsts[0]]]


def _cut(ranks: list[int]) -> Iterator[list[int]]:
    """Some ranks in up to ``_BRANCHES_MAX`` parts of nearly the same length."""
    count = min(_BRANCHES_MAX, len(ranks))
    for at in range(count):
        yield ranks[at * len(ranks) // count : (at + 1) * len(ranks) // count]


def for_head(size: int) -> Topology:
    """How a small message reaches some ranks that share a host, or of which each has its own."""
    return star if size <= STAR_MAX_SIZE else binomial


def for_payload(nbytes: int, hosts: Sequence[int]) -> tuple[Topology, int]:
    """How ``nbytes`` reach all ranks, and in pieces of how many bytes they are passed on.

    On one host every copy costs the same memory traffic, and a tree has the fewest hops. Between
    hosts each network card is the limit: a line of hosts lets it carry everything once, and is as
    fast as one copy once it is filled, which takes as many pieces as there are ranks at most.

    Args:
        nbytes: how many.
        hosts: of each rank, as a number.
    """
    size, is_one_host = len(hosts), len(set(hosts)) <= 1
    least = _CHUNK_MIN_NBYTES if is_one_host else _LINE_CHUNK_MIN_NBYTES
    chunk_nbytes = min(max(nbytes // (4 * size), least), CHUNK_MAX_NBYTES)
    if is_one_host:
        return binomial, chunk_nbytes
    is_long = nbytes >= size * chunk_nbytes
    return host_by_host(hosts, _in_line if is_long else for_head), chunk_nbytes


def _in_line(_: int) -> Topology:
    return line


def _powers_below(size: int) -> list[int]:
    return [1 << bit for bit in range(size.bit_length()) if 1 << bit < size]
