"""Which waits can never end: reasoning on whereabouts, without any process."""

import pytest

from objcomm.frames import Operation
from objcomm.transport.conflict import find_conflict
from objcomm.transport.whereabouts import MEETING, Conflict, LaneState, Step, Whereabouts

MAIN, OTHER = 1, 2


def step(sequence: int, operation: int = Operation.BARRIER, *, root: int = -1) -> Step:
    return Step(sequence, operation, root, 0, f"train.py:{sequence}")


def lane(
    group: str = "world",
    *past: Step,
    awaits: int = -1,
    thread: int = MAIN,
    number: int = 0,
    nonce: str | None = None,
    since: float = 0.0,
) -> LaneState:
    """A lane whose latest call is under way if it awaits somebody."""
    now = past[-1] if past and awaits >= 0 else None
    next_sequence = past[-1].sequence + 1 if past else 0
    name = group if nonce is None else nonce
    return LaneState(
        group, name, number, thread, thread, next_sequence, -1, now, awaits, since, 1.0, past
    )


def meeting(group: str, *, awaits: int, thread: int = MAIN) -> LaneState:
    now = Step(MEETING, Operation.NONE, -1, 0, "train.py:1", "barrier")
    return LaneState(group, "", 0, thread, thread, 0, -1, now, awaits, 0.0, 1.0, ())


def conflict_of(ranks: dict[int, list[LaneState]], start: int = 0) -> Conflict | None:
    """What rank ``start`` finds out about its first lane; ranks that are not listed are silent."""
    known = {rank: Whereabouts(1, MAIN, tuple(lanes)) for rank, lanes in ranks.items()}
    return find_conflict(start, known[start], ranks[start][0], known.get)


def test_two_calls_of_the_same_number_that_differ_are_found() -> None:
    mine, theirs = step(3, Operation.GATHER), step(3, Operation.BARRIER)
    found = conflict_of({0: [lane("world", mine, awaits=1)], 1: [lane("world", theirs, awaits=0)]})
    assert found is not None
    assert found.reason == "other operations"
    assert [(rank, call) for rank, _, call in found.found] == [(0, mine), (1, theirs)]
    assert found.is_of_one_lane


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [
        (step(1, root=0), step(1, root=1), "other roots"),
        (step(1)._replace(fingerprint=7), step(1), "other names"),
    ],
)
def test_roots_and_names_count(mine: Step, theirs: Step, reason: str) -> None:
    found = conflict_of({0: [lane("world", mine, awaits=1)], 1: [lane("world", theirs, awaits=0)]})
    assert found is not None
    assert found.reason == reason


def test_call_sites_do_not_count() -> None:
    mine, theirs = step(1), step(1)._replace(call_site="eval.py:9")
    ranks = {0: [lane("world", mine, awaits=1)], 1: [lane("world", theirs, awaits=0)]}
    assert conflict_of(ranks) is None


def test_a_call_that_the_other_rank_has_left_counts() -> None:
    """It only sent, and is ahead now."""
    theirs = lane("world", step(1, Operation.GATHER), step(2, Operation.BROADCAST))
    found = conflict_of({0: [lane("world", step(1), awaits=1)], 1: [theirs]})
    assert found is not None
    assert found.found[1][2].operation == Operation.GATHER


def test_a_rank_that_has_made_this_call_and_gone_on_is_no_conflict() -> None:
    """What it sent is under way, however slow the network is."""
    theirs = lane("world", step(1), step(2), awaits=0)
    assert conflict_of({0: [lane("world", step(1), awaits=1)], 1: [theirs]}) is None


@pytest.mark.parametrize("other", [[], [lane("world", step(0))]])
def test_a_rank_that_computes_may_still_come(other: list[LaneState]) -> None:
    assert conflict_of({0: [lane("world", step(1), awaits=1)], 1: other}) is None


def test_a_silent_rank_is_no_conflict() -> None:
    assert conflict_of({0: [lane("world", step(1), awaits=1)]}) is None


def test_a_rank_behind_that_waits_for_a_slow_one_is_no_conflict() -> None:
    """Rank 0 only sent in call 1; rank 1 is still in it, because rank 2 has not come."""
    ranks = {
        0: [lane("world", step(1, Operation.GATHER), step(2), awaits=1)],
        1: [lane("world", step(1, Operation.GATHER), awaits=2)],
        2: [],
    }
    assert conflict_of(ranks) is None


def test_two_groups_in_which_two_ranks_wait_for_each_other() -> None:
    ranks = {0: [lane("a", step(0), awaits=1)], 1: [lane("b", step(0), awaits=0)]}
    for start in (0, 1):
        found = conflict_of(ranks, start)
        assert found is not None
        assert found.reason == "each waits for another"
        assert {rank for rank, _, _ in found.found} == {0, 1}
        assert not found.is_of_one_lane


def test_meetings_of_two_groups_count_as_well() -> None:
    ranks = {0: [meeting("a", awaits=1)], 1: [meeting("b", awaits=0)]}
    assert conflict_of(ranks) is not None
    assert conflict_of(ranks, 1) is not None


def test_ranks_in_one_meeting_are_in_step() -> None:
    assert conflict_of({0: [meeting("a", awaits=1)], 1: [meeting("a", awaits=0)]}) is None


def test_a_circle_of_three_is_found_by_each() -> None:
    ranks = {
        0: [lane("a", step(0), awaits=1)],
        1: [lane("b", step(0), awaits=2)],
        2: [lane("c", step(0), awaits=0)],
    }
    for start in ranks:
        found = conflict_of(ranks, start)
        assert found is not None
        assert len(found.found) == 3


def test_a_circle_is_known_from_who_has_left_it() -> None:
    """Rank 0 has raised and waits no more; without its word rank 2 would wait for ever."""
    ranks = {
        0: [lane("a", step(0), awaits=1, since=5.0)],
        1: [lane("b", step(0), awaits=2, since=6.0)],
        2: [lane("c", step(0), awaits=0, since=7.0)],
    }
    told = conflict_of(ranks)
    assert told is not None
    assert not told.is_told
    left = Whereabouts(2, MAIN, (lane("a", step(0)),), (told,))
    for rank in (1, 2):
        known = {each: Whereabouts(2, MAIN, tuple(lanes)) for each, lanes in ranks.items()}
        known[0] = left
        found = find_conflict(rank, known[rank], ranks[rank][0], known.get)
        assert found == told._replace(is_told=True)
    later = ranks[2][0]._replace(since=8.0)  # another wait of the same lane
    assert find_conflict(2, Whereabouts(2, MAIN, (later,)), later, {0: left}.get) is None


def test_other_threads_waits_are_no_conflict() -> None:
    """Rank 1 waits in b on a second thread; its main thread may still come to a."""
    ranks = {
        0: [lane("a", step(0), awaits=1), lane("b", thread=OTHER)],
        1: [lane("b", step(0), awaits=0, thread=OTHER), lane("a", thread=MAIN)],
    }
    assert conflict_of(ranks) is None
    del ranks[1][1]  # nobody has used a on rank 1: its main thread would
    assert conflict_of(ranks) is None


def test_a_wait_that_was_served_and_whose_bytes_are_on_the_way_is_no_conflict() -> None:
    """Rank 0 has sent all of call 0 in b; slow bytes keep rank 1 there."""
    ranks = {
        0: [lane("a", step(0), awaits=1), lane("b", step(0))],
        1: [lane("b", step(0), awaits=0)],
    }
    assert conflict_of(ranks) is None


def test_a_circle_that_this_group_is_not_part_of_is_the_others_matter() -> None:
    ranks = {
        0: [lane("a", step(0), awaits=1)],
        1: [lane("b", step(0), awaits=2)],
        2: [lane("c", step(0), awaits=1)],
    }
    assert conflict_of(ranks) is None
    assert conflict_of(ranks, 1) is not None


def test_an_earlier_mesh_is_not_compared() -> None:
    """After a verdict the numbers begin again, and rank 1 has not heard of it yet."""
    ranks = {
        0: [lane("a", step(0, Operation.GATHER), awaits=1, nonce="new")],
        1: [lane("a", step(0), nonce="old")],
    }
    assert conflict_of(ranks) is None
