"""Links measured between real ranks: all of them, those that fit into the time, and none."""

import torch.distributed as dist

import objcomm
from objcomm._bootstrap.doctor.facts import Measured
from objcomm._bootstrap.doctor.links import measure
from tests.ranks import ranks
from tests.workers import here


def store() -> dist.Store:
    return here().store("links")


@ranks(3, joined=False)
def test_each_rank_measures_what_it_sends() -> None:
    rank = here().rank
    found = measure(store(), rank, ["one", "one", "other"], 60.0, 60.0)
    assert not found.problem
    assert sorted(link.dst for link in found.links) == [peer for peer in range(3) if peer != rank]
    for link in found.links:
        assert link.src == rank
        assert 0 < link.latency_seconds < 60
        assert link.nbytes_per_second > 0
    assert not objcomm.is_initialized()


@ranks(3, joined=False)
def test_pairs_without_time_are_left_out() -> None:
    assert measure(store(), here().rank, ["one"] * 3, 60.0, -1.0) == Measured()


@ranks(2, joined=False)
def test_a_group_that_cannot_be_made_is_a_problem_and_no_hang() -> None:
    if here().rank == 0:
        found = measure(store(), 0, ["one", "other"], 1.0, 1.0)
        assert found.problem
        assert not found.links
        assert not objcomm.is_initialized()
