"""Circles through groups that were used before, and waits that no circle goes through."""

import pytest

from tests.unit.test_conflict import OTHER, conflict_of, lane, meeting, step


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


@pytest.mark.parametrize("start", [0, 1])
def test_a_wait_on_a_mesh_that_has_ended_is_in_no_circle(start: int) -> None:
    """Rank 0 is busy: the error that rank 1 has raised, and left behind, is yet to reach it."""
    behind = lane("world", step(0), awaits=1, nonce="old")
    ended = lane("world", step(0), nonce="old")._replace(has_ended=True)
    assert conflict_of({0: [behind], 1: [meeting("world", awaits=0), ended]}, start) is None
    elsewhere = lane("other", step(0), awaits=0)
    assert conflict_of({0: [behind], 1: [elsewhere, ended]}, start) is None
    stands = lane("world", nonce="old")
    assert conflict_of({0: [behind], 1: [elsewhere, stands]}, start) is not None
