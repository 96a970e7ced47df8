"""Which rank forwards to which: every rank gets a message exactly once, for any size and root."""

import sys
from collections import Counter
from collections.abc import Callable

import pytest

from objcomm._algorithms import topology

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33]
SPREADS: dict[str, Callable[[int], list[int]]] = {
    "one host": lambda size: [0] * size,
    "two in blocks": lambda size: [2 * rank // size for rank in range(size)],
    "three in turns": lambda size: [rank % 3 for rank in range(size)],
    "one for each rank": lambda size: list(range(size)),
    "hosts of two": lambda size: [rank // 2 for rank in range(size)],
    "one and all others": lambda size: [min(rank, 1) for rank in range(size)],
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("route", [topology.star, topology.binomial, topology.line])
def test_every_rank_receives_from_its_parent_only(route: topology.Topology, size: int) -> None:
    for root in range(size):
        parents_of(route, size, root)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("nbytes", [40_000, 1 << 30])
def test_each_host_receives_a_payload_once(nbytes: int, spread: str, size: int) -> None:
    hosts = SPREADS[spread](size)
    route, _ = topology.for_payload(nbytes, hosts)
    for root in range(size):
        first = topology.firsts(hosts, root)
        assert first[hosts[root]] == root
        parents = parents_of(route, size, root)
        crossed = {rank: at for rank, at in parents.items() if hosts[rank] != hosts[at]}
        assert crossed.keys() == set(first.values()) - {root}
        assert set(crossed.values()) <= set(first.values())


def places(route: topology.Topology, size: int, root: int = 0) -> list[topology.Place]:
    return [route(rank, root, size) for rank in range(size)]


def parents_of(route: topology.Topology, size: int, root: int) -> dict[int, int]:
    """Return all parents, and check that each rank but the root is a child of its parent only."""
    found = places(route, size, root)
    parents = {rank: parent for rank, (parent, _) in enumerate(found) if parent is not None}
    assert parents.keys() == {*range(size)} - {root}
    listed = [(child, rank) for rank, (_, children) in enumerate(found) for child in children]
    assert sorted(listed) == sorted(parents.items())
    return parents


@pytest.mark.parametrize("size", [*SIZES, 100, 700])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("tree", [topology.tree, topology.broadcast_tree])
def test_the_trees_for_small_messages_reach_all_in_few_hops(
    tree: Callable[[int, int, tuple[int, ...]], topology.Branch], spread: str, size: int
) -> None:
    hosts = tuple(SPREADS[spread](size))
    may_cross_twice = tree is topology.tree and size <= topology.STAR_MAX_SIZE
    for root in {0, size // 3, size - 1}:
        first = topology.firsts(hosts, root)
        branches = [tree(rank, root, hosts) for rank in range(size)]
        assert [rank for rank, each in enumerate(branches) if each.parent is None] == [root]
        for rank, (_, children, below) in enumerate(branches):
            assert len(children) <= topology.STAR_MAX_SIZE - 1 or size > topology.STAR_MAX_SIZE
            assert len(children) <= 16
            assert children == tuple(each[0] for each in below)
            for child, ranks in zip(children, below, strict=True):
                assert branches[child].parent == rank
                reached = [child, *(each for part in branches[child].below for each in part)]
                assert list(ranks) == reached
                is_far = hosts[child] != hosts[rank]
                assert may_cross_twice or (child == first[hosts[child]]) == is_far
        reached = [root, *(each for part in branches[root].below for each in part)]
        assert sorted(reached) == list(range(size))
        assert max(depth_of(rank, branches) for rank in range(size)) <= 6


def depth_of(rank: int, branches: list[topology.Branch]) -> int:
    parent = branches[rank].parent
    return 0 if parent is None else 1 + depth_of(parent, branches)


@pytest.mark.parametrize("size", [*SIZES, 100])
@pytest.mark.parametrize("spread", SPREADS)
def test_values_combined_along_the_tree_stay_in_the_order_of_ranks(spread: str, size: int) -> None:
    hosts = tuple(SPREADS[spread](size))

    def run_of(rank: int, root: int) -> list[int]:
        _, children = topology.in_order(rank, root, hosts)
        return [rank, *(each for child in children for each in run_of(child, root))]

    for root in {0, size // 3, size - 1}:
        assert run_of(root, root) == [(root + at) % size for at in range(size)]
        parents = parents_of(lambda rank, root, _: topology.in_order(rank, root, hosts), size, root)
        most = 2 * size.bit_length()  # rounds within a host plus rounds between hosts
        assert max(Counter(parents.values()).values(), default=0) <= most
        crossings = sum(hosts[rank] != hosts[parent] for rank, parent in parents.items())
        if root == 0 and spread in {"two in blocks", "hosts of two", "one and all others"}:
            assert crossings == len(set(hosts)) - 1


def test_a_large_payload_takes_a_tree_within_a_host_and_a_line_between_hosts() -> None:
    assert topology.for_payload(128 << 20, [0] * 4)[0] is topology.binomial
    large, _ = topology.for_payload(128 << 20, [0, 1, 0, 1])
    assert places(large, 4) == [(None, [1, 2]), (0, [3]), (0, []), (1, [])]
    three, _ = topology.for_payload(128 << 20, [0, 0, 0, 1, 2, 2])
    assert places(three, 6) == [(None, [3, 1]), (0, [2]), (1, []), (0, [4]), (3, [5]), (4, [])]


def test_a_medium_payload_goes_to_one_rank_of_each_host_first() -> None:
    few, _ = topology.for_payload(40_000, [0, 0, 1, 1])
    assert places(few, 4) == [(None, [2, 1]), (0, []), (0, [3]), (2, [])]
    ten_hosts = [rank // 2 for rank in range(20)]
    many, _ = topology.for_payload(40_000, ten_hosts)
    assert places(many, 20)[0] == (None, [16, 8, 4, 2, 1])  # ten first ranks: a binomial tree


@pytest.mark.parametrize(
    ("hosts", "below"),
    [
        ((0, 0, 0), sys.maxsize),
        ((0, 1), sys.maxsize),
        ((0, 0, 1, 1), sys.maxsize),
        ((0, 1, 2, 3), 1 << 20),  # three copies over one network card
        (tuple(range(9)), 9 << 18),
        ((0,) * 5 + (1,) * 5, sys.maxsize),
    ],
)
def test_how_short_a_message_must_be_to_be_sent_whole(hosts: tuple[int, ...], below: int) -> None:
    assert topology.whole_below(0, hosts) == below


@pytest.mark.parametrize("nbytes", [1, 1 << 20, 100 << 20, 1 << 40])
def test_a_line_has_pieces_for_all_its_ranks(nbytes: int) -> None:
    for size in SIZES[1:]:
        route, chunk_nbytes = topology.for_payload(nbytes, range(size))
        assert (256 << 10) <= chunk_nbytes <= (4 << 20)
        is_line = all(len(children) <= 1 for _, children in places(route, size))
        assert is_line == (size == 2 or nbytes >= size * chunk_nbytes)
