"""Whatever happens to one rank, all others raise, name it, and leave nothing behind."""

from contextlib import nullcontext

import pytest

from tests.faults.plan import (
    DEADLY,
    DIVISIONS,
    LIMIT_SECONDS,
    STOP_SECONDS,
    UNANSWERED,
    Case,
    Fault,
    Phase,
    limit_of,
    quick_cases,
    suite_cases,
)
from tests.faults.run import Outcome, carry_out
from tests.forked import EXIT_UNKNOWN
from tests.waits import Slowness

# Promised after a death, after a timeout, and for any later call on a broken group.
_DEATH_SECONDS, _LIMIT_MORE_SECONDS, _BROKEN_SECONDS = 2.0, 1.0, 1.0
_OF_MEETINGS = ("hellos", "joined/", "welcome/", "go/", "verdict/", "known/")
#: The cases in which these promises are checked.
_TIMED = {
    "broadcast-killed-first_use-root_1_of_3-large",
    "irecv-killed-after_error-1_of_3-large",
    "reduce_and_broadcast-killed-before-1_of_3-large",
    "scan-killed-between-1_of_3-large",
    "scan-stopped-payload-1_of_3-large",
    "probe-absent-before-1_of_3-large",
}
#: The victim's last call, where it is not the barrier with which all met.
_LAST = {"new_group": "new_group (call 2)"}
_QUICK = {str(case) for case in quick_cases()}


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    # A victim that does not reach its phase within the timeout cannot be stopped there.
    is_race = case.fault in {Fault.STOPPED, Fault.STORE_STOPPED}
    timed = [pytest.mark.timed] if is_race or str(case) in _TIMED else []
    return timed if str(case) in _QUICK else [*timed, pytest.mark.long]


def test_some_quick_cases_hold_the_promised_durations() -> None:
    assert _TIMED <= _QUICK


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=_marks(case)) for case in suite_cases()]
)
def test_the_others_raise_and_name_it_and_a_new_group_works(case: Case) -> None:
    is_timed = str(case) in _TIMED
    with Slowness() if is_timed else nullcontext() as slowness:
        outcome = carry_out(case, is_patient=not is_timed)
    assert set(outcome.seen) >= set(case.survivors), f"some hang: {outcome.printed}"
    if case.fault is Fault.RESUMED:
        _check_that_it_went_on(outcome)
    else:
        ends = f"some hang or end later: {outcome.exits} {outcome.printed}"
        assert set(outcome.later) == set(case.survivors), ends
        for rank in case.concerned:
            if case.is_survived:
                assert outcome.seen[rank].error == "returned", outcome.seen[rank]
            else:
                _check_error(outcome, rank)
        members = case.survivors
        if case.is_between_two:
            _check_that_the_others_talk(outcome)
        else:
            # The victim is in no list of the members of a new group, so no rank waits for it.
            later = str(members) if case.is_apart else "BrokenGroupError"
            assert [outcome.later[rank][0] for rank in members] == [later] * len(members)
        anew = [members, 100_000] if len(members) == 1 else [members, members, 100_000]
        assert outcome.anew == dict.fromkeys(members, anew), ends
    if slowness is not None:
        _check_durations(outcome, slowness.factor)
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
    if case.is_awaited:
        assert seen.error == "TransportTimeout", seen
        # Divisions have used some of the time when they connect.
        is_shared = case.operation in DIVISIONS
        limit = limit_of(case, is_patient=str(case) not in _TIMED)
        assert seen.seconds_of_limit <= limit
        assert is_shared or seen.seconds_of_limit == limit
        _check_whereabouts(outcome, rank)
        if case.operation == "survivors" and case.is_stores_host:
            return  # no rank knows which others have called
    else:
        assert seen.error == "TransportError", seen
    if case.fault is Fault.DISCONNECTED:
        assert outcome.seen[case.victim].error == "TransportError"
    named = {case.victim}
    if case.fault is Fault.DISCONNECTED and case.is_between_two:
        named.add(rank)  # between two ranks it is unknown whose connection it was
    if case.could_be_any:
        assert set(seen.ranks) == set(range(case.world_size)) - {rank}
        return
    late = _late(outcome) if case.fault in UNANSWERED else set()
    assert len(set(seen.ranks) - late) == 1
    assert named.issuperset(set(seen.ranks) - late), seen
    assert all(f"rank {each}" in seen.text for each in seen.ranks)


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
        assert case.could_be_any or f"rank {case.victim} is in no call" in seen.text
        last = _LAST.get(case.operation, "barrier (call 0)")
        is_elsewhere = case.is_between_two or case.operation == "survivors"
        assert is_elsewhere or f"its last was {last}" in seen.text
    # A group connects once its members have announced themselves and met; one was created before.
    number = (3 if case.is_apart else 1) + 2 * (case.phase is Phase.CONNECTING)
    if case.operation == "survivors":  # in a round of its own, as the first call
        number = int(case.phase is Phase.CONNECTING)
    where = f"{case.operation} (call {number})"
    if case.operation == "stream" and case.phase is Phase.PAYLOAD:
        where = "stream 'step' (call 0)"
    in_time = [] if case.is_between_two else sorted(set(case.survivors) - _late(outcome))
    for peer in in_time:
        if outcome.seen[peer].call == 0:
            assert f"rank {peer} is in {where}" in seen.places[peer]
            assert ".py:" in seen.places[peer]


def _late(outcome: Outcome) -> set[int]:
    """Return survivors that arrived after half of the first one's timeout, as on a busy machine.

    The position that the others got of them may be older.
    """
    case = outcome.case
    began = {rank: outcome.seen[rank].began for rank in case.survivors}
    half = limit_of(case, is_patient=str(case) not in _TIMED) / 2
    return {rank for rank in began if began[rank] - min(began.values()) > half}


def _check_durations(outcome: Outcome, factor: float) -> None:
    """Check the promised durations, scaled to the current speed of this machine."""
    case = outcome.case
    is_limited = case.fault in UNANSWERED
    promised = LIMIT_SECONDS + _LIMIT_MORE_SECONDS if is_limited else _DEATH_SECONDS
    for rank in case.concerned:
        assert outcome.seconds(rank) <= promised * factor, factor
    for rank in [] if case.is_between_two else case.survivors:
        assert outcome.later[rank][1] <= _BROKEN_SECONDS * factor, factor


def _check_that_the_others_talk(outcome: Outcome) -> None:
    """A rank that does not talk to the victim notices nothing until the next collective."""
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
        assert left.sockets == [] or (case.is_stores_host and rank == case.victim), rank
    assert set(outcome.left) == set(case.living)
    # A counter of questions stays as long as the store; a killed rank deletes nothing.
    dead = {f"where/{case.victim}"} if case.fault in DEADLY else set()
    # Ranks that gave up may call again, and then find the list of the ranks that are alive.
    is_to_continue = case.operation == "survivors" and case.is_awaited
    stays = {"asked", *["verdict/survivors/0//0"] * is_to_continue} | dead
    keys = [key.rpartition("objcomm/")[2] for key in outcome.keys]
    # Of a meeting that never took place, or unread by the victim.
    if case.is_disconnected or case.operation == "survivors":
        keys = [key for key in keys if not key.startswith(_OF_MEETINGS)]
    assert [key for key in keys if key not in stays] == []
    for rank, code in outcome.exits.items():
        if rank != case.victim or case.fault not in DEADLY:
            assert code in {0, EXIT_UNKNOWN}, outcome.printed[rank]
        assert "terminate called" not in outcome.printed[rank]
