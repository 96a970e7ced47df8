"""Which rank tries which: every pair once, no host twice at a time, and a cap for large worlds."""

import pytest

from objcomm._bootstrap.doctor.links import PAIRS_MAX, PEERS_MAX, distances, pairs, peers_of, rounds

SIZES = [1, 2, 3, 4, 5, 8, 17, 64]


@pytest.mark.parametrize("size", SIZES)
def test_every_pair_is_measured_once(size: int) -> None:
    found = pairs(size)
    assert sorted(found) == [(one, two) for one in range(size) for two in range(one + 1, size)]


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_tries_all_others(size: int) -> None:
    for rank in range(size):
        assert sorted(peers_of(rank, size)) == [each for each in range(size) if each != rank]


def test_in_a_large_world_each_rank_tries_some_others_including_rank_0() -> None:
    for rank in (0, 1, 500, 999):
        peers = peers_of(rank, 1000)
        assert len(peers) == len(set(peers)) == PEERS_MAX
        assert (0 in peers) == (rank != 0)
        assert rank not in peers


def test_in_a_large_world_every_rank_is_in_some_pair() -> None:
    found = pairs(1000)
    assert len(found) == len(set(found)) == PAIRS_MAX
    assert {rank for pair in found for rank in pair} == set(range(1000))
    assert all(one < two for one, two in found)


def test_neighbors_come_before_distant_ranks() -> None:
    assert distances(16) == [1, 8, 2, 4, 3, 5, 6, 7]


@pytest.mark.parametrize("per_host", [1, 2, 4])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_no_host_has_two_pairs_in_one_round(size: int, per_host: int) -> None:
    machines = [f"host{rank // per_host}" for rank in range(size)]
    laid = rounds(pairs(size), machines)
    assert sorted(pair for together in laid for pair in together) == sorted(pairs(size))
    for together in laid:
        here = [machine for pair in together for machine in {machines[rank] for rank in pair}]
        assert len(here) == len(set(here))


def test_hosts_with_nothing_in_common_are_measured_at_once() -> None:
    laid = rounds([(0, 1), (2, 3)], ["a", "b", "c", "d"])
    assert laid == [[(0, 1), (2, 3)]]


def test_one_host_measures_one_pair_after_the_other() -> None:
    assert rounds(pairs(3), ["a"] * 3) == [[pair] for pair in pairs(3)]
