"""Who forwards to whom: every rank gets a message exactly once, whatever the size and root."""

import pytest

from objcomm.transport import topology

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("route", [topology.star, topology.binomial, topology.chain])
def test_every_rank_hears_from_its_parent_and_nobody_else(
    route: topology.Topology, size: int
) -> None:
    for root in range(size):
        places = [route(rank, root, size) for rank in range(size)]
        assert [rank for rank, (parent, _) in enumerate(places) if parent is None] == [root]
        heard = {child: rank for rank, (_, children) in enumerate(places) for child in children}
        assert sum(len(children) for _, children in places) == size - 1
        assert heard == {rank: parent for rank, (parent, _) in enumerate(places) if rank != root}


@pytest.mark.parametrize("size", SIZES)
def test_a_binomial_tree_is_as_deep_as_the_logarithm(size: int) -> None:
    for root in range(size):
        for start in range(size):
            rank: int | None = start
            hops = 0
            while (rank := topology.binomial(rank or 0, root, size)[0]) is not None:
                hops += 1
            assert hops <= size.bit_length()


def test_a_large_payload_goes_along_a_tree_on_one_host_and_a_chain_between_hosts() -> None:
    assert topology.for_payload(128 << 20, 4, is_one_host=True)[0] is topology.binomial
    assert topology.for_payload(128 << 20, 4, is_one_host=False)[0] is topology.chain
    assert topology.for_payload(40_000, 4, is_one_host=False)[0] is topology.star
    assert topology.for_payload(40_000, 9, is_one_host=False)[0] is topology.binomial


@pytest.mark.parametrize("nbytes", [1, 1 << 20, 100 << 20, 1 << 40])
def test_a_chain_has_pieces_for_all_its_ranks(nbytes: int) -> None:
    for size in SIZES:
        route, chunk_nbytes = topology.for_payload(nbytes, size, is_one_host=False)
        assert (1 << 20) <= chunk_nbytes <= (4 << 20)
        assert (route is topology.chain) == (nbytes >= size * chunk_nbytes)
