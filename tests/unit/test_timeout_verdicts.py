"""What a passed limit is blamed on, given the other ranks' answers."""

import pytest

from objcomm._failures import inquiry
from objcomm._failures.deadlock import MEETING, WaitSnapshot
from objcomm._observe.history import CallRecord
from objcomm._wire.header import Operation
from tests.unit.memory_link import header_of
from tests.unit.whereabouts import MAIN, lane_like, meeting, mesh_like, recv


@pytest.mark.parametrize("stopped", [frozenset(), {5}], ids=["all run", "one is stopped"])
def test_an_answer_of_a_rank_that_is_stopped_does_not_count(stopped: frozenset[int]) -> None:
    mesh = mesh_like(4, 5, others=(1,))
    mesh.board_thread.processes.stopped = lambda: stopped
    entry = CallRecord(header_of(0, operation=Operation.RECV), "recv")
    entry.awaits = 1
    answers = {
        rank: WaitSnapshot(1, MAIN, (recv(rank, 1 - rank, since=5.0),), is_single=True)
        for rank in (0, 1)
    }
    verdict = inquiry.timeout_verdict(mesh, lane_like(), entry, answers)
    assert verdict.silent == ((1,) if stopped else ())
    assert [each.rank for each in verdict.positions] == ([0] if stopped else [0, 1])


def test_a_rank_that_was_asked_before_it_met_the_others_does_not_wait_for_itself() -> None:
    mesh = mesh_like(4, 5, others=(1,), nonce="met since")
    entry = CallRecord(header_of(0, sequence=MEETING), "gather")
    entry.awaits = 1
    answers = {0: WaitSnapshot(1, MAIN, (meeting("", awaits=5),)), 1: WaitSnapshot(1, MAIN, ())}
    verdict = inquiry.timeout_verdict(mesh, lane_like(), entry, answers)
    assert verdict.ranks == (1,)


def test_only_one_of_a_thousand_waits_of_the_same_kind_is_examined() -> None:
    def entry(number: int, awaits: int = 1) -> CallRecord:
        made = CallRecord(header_of(0, operation=Operation.RECV), "recv")
        made.awaits, made.waits_since = awaits, 1000.0 - number
        return made

    entries = [entry(number) for number in range(1000)]
    others, waited = entry(0, awaits=2), entry(0)
    waited.waiter = MAIN
    found = inquiry.of_each_kind([*entries, others, waited])
    assert found == [entries[-1], others, waited]  # the longest of its kind
