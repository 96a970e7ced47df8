"""Deadlocks through groups that were used before, and waits that are in no deadlock."""

import pytest

from objcomm._failures.deadlock import Deadlock, WaitSnapshot, find_deadlock
from tests.unit.whereabouts import MAIN, conflict_of, lane, meeting, step


def test_a_circle_of_groups_that_were_used_before_is_found() -> None:
    """Each rank has made call 0 of both groups; now it waits in one and is awaited in the other."""
    ranks = {
        0: [lane("a", step(0), step(1), awaits=1), lane("b", step(0))],
        1: [lane("b", step(0), step(1), awaits=0), lane("a", step(0))],
    }
    for start in ranks:
        found = conflict_of(ranks, start)
        assert found is not None
        assert sorted((rank, state.group) for rank, state, _ in found.found) == [(0, "a"), (1, "b")]


@pytest.mark.parametrize("start", [0, 1])
def test_a_wait_on_a_mesh_that_has_ended_is_in_no_circle(start: int) -> None:
    """Rank 0 is busy, and has yet to learn of the error that ended the mesh on rank 1."""
    behind = lane("world", step(0), awaits=1, nonce="old")
    ended = lane("world", step(0), nonce="old")._replace(has_ended=True)
    assert conflict_of({0: [behind], 1: [meeting("world", awaits=0), ended]}, start) is None
    elsewhere = lane("other", step(0), awaits=0)
    assert conflict_of({0: [behind], 1: [elsewhere, ended]}, start) is None
    stands = lane("world", nonce="old")
    assert conflict_of({0: [behind], 1: [elsewhere, stands]}, start) is not None


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize(
    ("known_seconds", "is_over"), [(0.4, True), (1.0, True), (1.1, False), (60.0, False)]
)
def test_who_waited_beside_a_circle_when_it_was_told_is_in_no_other(
    start: int, known_seconds: float, *, is_over: bool
) -> None:
    """Ranks 0 and 1 have raised; rank 2 has met in "b" for a second, and may have left since."""
    deadlock = conflict_of({0: [meeting("a", awaits=1)], 1: [meeting("b", awaits=0)]})
    assert deadlock is not None
    waits = {0: lane("world", step(0), awaits=2), 2: meeting("b", awaits=0)}
    told: dict[int, tuple[Deadlock, ...]] = {0: (deadlock._replace(known_seconds=known_seconds),)}
    known = {
        rank: WaitSnapshot(1, MAIN, (wait,), told.get(rank, ())) for rank, wait in waits.items()
    }
    found = find_deadlock(start, known[start], waits[start], known.get)
    assert (found is None) == is_over


def test_a_wait_that_has_not_ended_long_after_a_circle_was_told_counts() -> None:
    """Whatever has delayed the rank, nothing else would end its wait."""
    waits = {0: lane("world", step(0), awaits=2), 2: meeting("b", awaits=0)._replace(seconds=20.0)}
    deadlock = Deadlock("each waits for another", ((1, waits[2], step(0)),))
    for known_seconds, is_over in ((3.0, True), (10.0, False)):
        told = deadlock._replace(known_seconds=known_seconds)
        known = {
            0: WaitSnapshot(1, MAIN, (waits[0],), (told,)),
            2: WaitSnapshot(1, MAIN, (waits[2],)),
        }
        assert (find_deadlock(0, known[0], waits[0], known.get) is None) == is_over


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("began", [5.0, 5.1])
def test_who_has_raised_and_waits_again_may_be_in_a_next_circle(start: int, began: float) -> None:
    """Rank 1 published the duration of its wait after rank 0 had, so its wait looks older."""
    waits = {
        0: meeting("a", awaits=1)._replace(since=7.0, seconds=0.5),
        1: meeting("b", awaits=0)._replace(since=began, seconds=0.7),
    }
    told = {rank: wait._replace(since=wait.since - 3.0) for rank, wait in waits.items()}
    deadlock = Deadlock(
        "each waits for another", tuple((rank, told[rank], step(0)) for rank in told)
    )._replace(known_seconds=0.6)
    known = {
        0: WaitSnapshot(1, MAIN, (waits[0],), (deadlock,)),
        1: WaitSnapshot(1, MAIN, (waits[1],)),
    }
    found = find_deadlock(start, known[start], waits[start], known.get)
    assert found is not None
    assert found.waits == {(rank, wait.group, 0, wait.since) for rank, wait in waits.items()}


@pytest.mark.parametrize(("began", "is_over"), [(2.9, True), (3.1, False)])
def test_who_was_told_of_a_circle_beside_it_knows_which_of_its_waits_is_older(
    began: float, *, is_over: bool
) -> None:
    """Rank 2 heard of it at 3.0 by its own clock; durations from other processes do not count."""
    ended = ((0, meeting("a", awaits=1), step(0)), (1, meeting("b", awaits=0), step(0)))
    deadlock = Deadlock("each waits for another", ended)
    waits = {
        0: lane("world", step(0), awaits=2, since=8.0),
        2: meeting("b", awaits=0)._replace(since=began),
    }
    known = {
        0: WaitSnapshot(
            1, MAIN, (waits[0],), (deadlock._replace(known_seconds=0.4, known_since=7.0),)
        ),
        2: WaitSnapshot(
            1, MAIN, (waits[2],), (deadlock._replace(known_seconds=0.3, known_since=3.0),)
        ),
    }
    found = find_deadlock(0, known[0], waits[0], known.get)
    assert (found is None) == is_over
