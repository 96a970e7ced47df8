"""Which rank receives from which when one rank's bytes go to all: pure arithmetic on ranks.

A topology takes the rank, the root and the number of ranks. It returns the rank to receive from
(``None`` for the root) and the ranks to send to, in that order. All ranks compute the same result,
from values that all of them know.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

Place = tuple[int | None, list[int]]
Topology = Callable[[int, int, int], Place]

#: Up to this many ranks, small messages take one hop, unless that would carry one to another host
#: twice. That is cheaper than a tree if ranks share cores (measured with 2, 4 and 8 ranks).
STAR_MAX_SIZE = 8

#: In a tree for small messages, a rank serves up to this many hosts, and this many ranks of its own
#: host. With 512 hosts, the last is three hops away.
_BRANCHES_MAX = 8

#: Large payloads are passed on in pieces of at most this size, which are then still in the
#: processor's cache.
CHUNK_MAX_NBYTES = 4 << 20
_CHUNK_MIN_NBYTES = 1 << 20
#: The minimum in a line of hosts, where the first piece is passed on while the others arrive. 1 MiB
#: to three other hosts, four ranks on 2 cores, took 10.1 ms in such pieces over 1 Gbit/s cards and
#: 24.6 ms as a whole; over 5 Gbit/s, 7.3 and 4.9 ms.
_LINE_CHUNK_MIN_NBYTES = 256 << 10


def star(rank: int, root: int, size: int) -> Place:
    """The root sends to every other rank."""
    if rank != root:
        return root, []
    return None, [peer for peer in range(size) if peer != root]


def binomial(rank: int, root: int, size: int) -> Place:
    """A binomial tree: k steps reach 2**k ranks. The largest subtree is served first."""
    place = (rank - root) % size
    lowest = place & -place if place else 1 << size.bit_length()
    steps = [step for step in _powers_below(size) if step < lowest and place + step < size]
    children = [(place + step + root) % size for step in reversed(steps)]
    return ((place - lowest + root) % size if place else None), children


@functools.lru_cache(maxsize=256)  # for the same reason as ``tree``
def in_order(rank: int, root: int, hosts: tuple[int, ...]) -> Place:
    """Return a rank's place in a tree whose subtrees are contiguous runs of ranks.

    So values can be combined in the order of ranks, counted from ``root``. Consecutive ranks of one
    host first combine among themselves. Both within a host and between hosts, trees are binomial.

    Args:
        rank: the rank.
        root: root of the tree.
        hosts: host number of each rank.

    Returns:
        The rank that receives this rank's run, and the ranks whose runs follow this rank's own, in
        order. Must not be modified.
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
    """Each rank passes the bytes on to the next; none sends anything twice."""
    place = (rank - root) % size
    parent = (rank - 1) % size if place else None
    return parent, [(rank + 1) % size] if place + 1 < size else []


def firsts(hosts: Sequence[int], root: int) -> dict[int, int]:
    """Return the rank of each host that a root's bytes reach first; the root's host comes first."""
    first = {hosts[root]: root}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    return first


def by_host(hosts: Sequence[int]) -> dict[int, list[int]]:
    """Return the ranks of each host; hosts and ranks are in order."""
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return ranks


def host_by_host(hosts: Sequence[int], among: Callable[[int], Topology]) -> Topology:
    """One rank of each host receives the bytes and passes them on to the others on that host.

    Args:
        hosts: host number of each rank.
        among: returns the topology for a number of first ranks, or of ranks on one host.
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
    """Return the place of one of ``ranks``, the first of which is the root."""
    size = len(ranks)
    parent, children = among(size)(ranks.index(rank), 0, size)
    return None if parent is None else ranks[parent], [ranks[each] for each in children]


@functools.lru_cache(maxsize=256)  # for the same reason as ``tree``
def whole_below(root: int, hosts: tuple[int, ...]) -> int:
    """Return the size below which a broadcast is one message, if its link can carry it.

    A longer one is passed on along a line of hosts, so that ``root``'s network card does not have
    to carry a copy for each of several hosts.

    Args:
        root: root of the broadcast.
        hosts: host number of each rank.
    """
    far = {host for host in hosts if host != hosts[root]}
    return sys.maxsize if len(far) < 2 else len(hosts) * _LINE_CHUNK_MIN_NBYTES  # noqa: PLR2004  # several


class Branch(NamedTuple):
    """A rank's place in the tree in which small messages go down from a root, or up to it.

    Attributes:
        parent: the rank to receive from; None for the root.
        children: the ranks to pass messages on to.
        below: for each child, all ranks that it reaches, in tree order, starting with itself.
    """

    parent: int | None
    children: tuple[int, ...]
    below: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=256)  # at 4,096 ranks, one call takes a few milliseconds
def tree(rank: int, root: int, hosts: tuple[int, ...]) -> Branch:
    """Return a rank's place in the tree of all ranks.

    A few ranks are connected directly to the root. If there are more, one rank of each host is
    connected to the root or to a rank of another host, and serves the others on its host. No rank
    serves more than sixteen others directly.

    Args:
        rank: the rank.
        root: root of the tree.
        hosts: host number of each rank.
    """
    size = len(hosts)
    if size > STAR_MAX_SIZE:
        return _by_host(rank, root, hosts)
    parent, children = star(rank, root, size)
    return Branch(parent, tuple(children), tuple((child,) for child in children))


@functools.lru_cache(maxsize=256)  # for the same reason as ``tree``
def broadcast_tree(rank: int, root: int, hosts: tuple[int, ...]) -> Branch:
    """Return a rank's place in the tree for a message that all ranks get.

    It is ``tree``, unless that would carry the message to another host twice. For two ranks on each
    of two hosts, 100 kB then take 0.6 of the time over a fast network, and 1 MiB 0.8 over 1 Gbit/s.
    300 B take the same.

    Args:
        rank: the rank.
        root: root of the tree.
        hosts: host number of each rank.
    """
    far = [host for host in hosts if host != hosts[root]]
    is_once = len(far) == len(set(far))
    return tree(rank, root, hosts) if is_once else _by_host(rank, root, hosts)


def _by_host(rank: int, root: int, hosts: tuple[int, ...]) -> Branch:
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
    """Return the parent of one of ``ranks``, the first of which is the root, and its subtrees."""
    parent = None
    while True:
        parts = list(_cut(ranks[1:]))
        if ranks[0] == rank:
            return parent, parts
        parent = ranks[0]
        ranks = next(part for part in parts if rank in part)


def _in_order(firsts: list[int], beside: dict[int, list[int]]) -> list[int]:
    """List the ranks of some hosts: the first one, those of hosts below, then those beside it."""
    further = [each for part in _cut(firsts[1:]) for each in _in_order(part, beside)]
    return [firsts[0], *further, *beside[firsts[0]]]


def _cut(ranks: list[int]) -> Iterator[list[int]]:
    """Cut ranks into up to ``_BRANCHES_MAX`` parts of nearly equal length."""
    count = min(_BRANCHES_MAX, len(ranks))
    for at in range(count):
        yield ranks[at * len(ranks) // count : (at + 1) * len(ranks) // count]


def for_head(size: int) -> Topology:
    """Return how a small message reaches the ranks of one host, or one rank of each host."""
    return star if size <= STAR_MAX_SIZE else binomial


def for_payload(nbytes: int, hosts: Sequence[int]) -> tuple[Topology, int]:
    """Return how ``nbytes`` reach all ranks, and the size of the pieces.

    On one host, every copy costs the same memory traffic, and a tree has the fewest hops. Between
    hosts, the network cards are the limit. A line of hosts lets each card carry everything once.
    Once the line is filled, which takes at most as many pieces as there are ranks, it is as fast as
    a single copy.

    Args:
        nbytes: number of bytes.
        hosts: host number of each rank.
    """
    size, is_one_host = len(hosts), len(set(hosts)) <= 1
    least = _CHUNK_MIN_NBYTES if is_one_host else _LINE_CHUNK_MIN_NBYTES
    chunk_nbytes = min(max(nbytes // (4 * size), least), CHUNK_MAX_NBYTES)
    if is_one_host:
        return binomial, chunk_nbytes
    is_long = nbytes >= size * chunk_nbytes
    return host_by_host(hosts, _in_line if is_long else for_head), chunk_nbytes


def reduction_groups(nbytes: int, hosts: Sequence[int]) -> list[list[int]]:
    """Return groups of ranks, each of which combines its operands and passes the total to the next.

    If ranks share hosts, each host is a group. Otherwise every operand would cross to another host:
    twice as many bytes for each network card with two hosts of two ranks, eight times with two
    hosts of eight. Small operands are combined by one group, because they would wait for the
    latency of each host. So are those of hosts that do not have consecutive ranks: operands are
    combined in rank order.

    Args:
        nbytes: number of bytes of each rank's operand.
        hosts: host number of each rank.
    """
    groups, ranks = list(by_host(hosts).values()), list(range(len(hosts)))
    is_long = nbytes >= len(hosts) * _LINE_CHUNK_MIN_NBYTES
    is_in_order = list(itertools.chain(*groups)) == ranks
    return groups if is_long and is_in_order and len(groups) < len(hosts) else [ranks]


def _in_line(_: int) -> Topology:
    return line


def _powers_below(size: int) -> list[int]:
    return [1 << bit for bit in range(size.bit_length()) if 1 << bit < size]
