"""Circles through groups that were used before, and waits that no circle goes through."""

from tests.unit.test_conflict import OTHER, conflict_of, lane, step


def test_a_circle_of_groups_that_were_used_before_is_found() -> None:
    """Each rank has made call 0 of both groups; now it is in one and awaited in the other."""
    ranks = {
        0: [lane("a", step(0), step(1), awaits=1), lane("b", step(0))],
        1: [lane("b", step(0), step(1), awaits=0), lane("a", step(0))],
    }
    for start in ranks:
        found = conflict_of(ranks, start)
        assert found is not None
        assert sorted((rank, state.group) for rank, state, _ in found.found) == [(0, "a"), (1, "b")]


def test_a_background_threads_wait_may_be_for_another_background_thread() -> None:
    """Rank 1's main thread waits in b; another thread of it may still come to a."""
    ranks = {
        0: [lane("a", step(0), awaits=1, thread=OTHER), lane("b", thread=OTHER)],
        1: [lane("b", step(0), awaits=0)],
    }
    assert conflict_of(ranks) is None
