"""Whatever happens to one rank, all others raise, name it, and leave nothing behind."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.ahead import begun_ahead
from tests.faults.plan import (
    DEADLY,
    LIMIT_SECONDS,
    STOP_SECONDS,
    UNANSWERED,
    Case,
    Fault,
    suite_cases,
)
from tests.faults.run import EXIT_UNKNOWN, Outcome, carry_out

# Promised within 2 s of a death, within 1 s of a limit; a loaded machine gets more.
SOON_SECONDS = 8.0
AT_ONCE_SECONDS = 1.0


@pytest.fixture(scope="module")
def carried_out(request: pytest.FixtureRequest) -> Iterator[Callable[[Case], Outcome]]:
    """Gives the outcome of a case."""
    jobs = {str(case): partial(carry_out, case) for case in suite_cases()}
    with begun_ahead(request, jobs) as outcome_of:
        yield lambda case: outcome_of(str(case))


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in suite_cases()])
def test_the_others_raise_and_name_it_and_a_new_group_works(
    case: Case, carried_out: Callable[[Case], Outcome]
) -> None:
    outcome = carried_out(case)
    assert set(outcome.seen) >= set(case.survivors), f"some hang: {outcome.printed}"
    if case.fault is Fault.RESUMED:
        _check_that_it_went_on(outcome)
    else:
        for rank in case.concerned:
            _check_error(outcome, rank)
        if case.is_between_two:
            _check_that_the_others_talk(outcome)
        else:
            _check_that_the_group_is_broken(outcome)
        members = case.survivors
        anew = [members, 100_000] if len(members) == 1 else [members, members, 100_000]
        assert outcome.anew == dict.fromkeys(members, anew)
    _check_that_nothing_is_left(outcome)


def _check_that_it_went_on(outcome: Outcome) -> None:
    assert {seen.error for seen in outcome.seen.values()} == {"returned"}
    assert len(outcome.seen) == outcome.case.world_size
    assert max(map(outcome.seconds, outcome.seen)) >= STOP_SECONDS


def _check_error(outcome: Outcome, rank: int) -> None:
    case, seen = outcome.case, outcome.seen[rank]
    if case.fault is Fault.INTERRUPTED and case.is_resumable:
        assert seen.error == "returned", seen
        return
    if case.fault in UNANSWERED:
        assert seen.error == "TransportTimeout", seen
        assert seen.seconds_of_limit == LIMIT_SECONDS
        assert outcome.seconds(rank) < LIMIT_SECONDS + SOON_SECONDS
        _check_whereabouts(outcome, rank)
    else:
        assert seen.error == "TransportError", seen
        assert outcome.seconds(rank) < SOON_SECONDS
    if case.fault is Fault.DISCONNECTED:
        assert outcome.seen[case.victim].error == "TransportError"
    named = {case.victim}
    if case.fault is Fault.DISCONNECTED and case.is_between_two:
        named.add(rank)  # of two nobody can tell whose connection it was
    assert len(seen.ranks) == 1
    assert named.issuperset(seen.ranks), seen
    assert f"rank {seen.ranks[0]}" in seen.text


def _check_whereabouts(outcome: Outcome, rank: int) -> None:
    case, seen = outcome.case, outcome.seen[rank]
    if case.is_stores_host:
        assert seen.is_store_silent
        assert "store: no answer" in seen.text
        return
    assert not seen.is_store_silent
    if case.fault is Fault.STOPPED:
        assert seen.silent == (case.victim,)
        assert f"rank {case.victim}: no answer" in seen.text
    else:
        assert seen.silent == ()
        assert f"rank {case.victim} is in no call" in seen.text
        assert case.is_between_two or "its last was barrier (call 0)" in seen.text
    for peer in [] if case.is_between_two else case.survivors:
        if outcome.seen[peer].call == 0:
            assert f"rank {peer} is in {case.operation} (call 1)" in seen.places[peer]
            assert ".py:" in seen.places[peer]


def _check_that_the_group_is_broken(outcome: Outcome) -> None:
    for rank in outcome.case.survivors:
        error, seconds = outcome.later[rank]
        assert error == "BrokenGroupError"
        assert seconds < AT_ONCE_SECONDS


def _check_that_the_others_talk(outcome: Outcome) -> None:
    """Who has nothing to do with the victim hears nothing of it, up to the next collective."""
    case = outcome.case
    for rank in set(case.survivors) - set(case.concerned):
        assert outcome.seen[rank].error == "returned"
    is_lost = case.fault in DEADLY | {Fault.DISCONNECTED}
    then = f", then TransportError naming {(case.victim,)}" * is_lost
    for rank in case.survivors:
        assert outcome.later[rank][0] == f"returned{then}"


def _check_that_nothing_is_left(outcome: Outcome) -> None:
    case = outcome.case
    for rank, left in outcome.left.items():
        assert left.threads == [], rank
        assert left.sockets == 0 or (case.is_stores_host and rank == case.victim), rank
    assert set(outcome.left) == set(case.living)
    # A counter of questions stays as long as the store; a rank that was killed takes nothing back.
    dead = {f"where/{case.victim}"} if case.fault in DEADLY else set()
    stays = {"asked"} | dead
    assert [key for key in outcome.keys if key.rpartition("objcomm/")[2] not in stays] == []
    for rank, code in outcome.exits.items():
        if rank != case.victim or case.fault not in DEADLY:
            assert code in {0, EXIT_UNKNOWN}, outcome.printed[rank]
        assert "terminate called" not in outcome.printed[rank]
