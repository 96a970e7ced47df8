"""What a rank must see, and how often, before it believes that a wait can never end."""

import functools
import gc
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from objcomm._failures import inquiry, losses
from objcomm._failures.deadlock import MEETING, LaneWait, WaitSnapshot
from objcomm._failures.liveness import Process
from objcomm._failures.verdict import Cause, Verdict
from objcomm._observe.history import CallRecord
from objcomm._wire.header import Operation
from tests.unit.memory_link import header_of
from tests.unit.whereabouts import MAIN, board_like, lane_like, mesh_like, recv
from tests.waits import PATIENCE_S


class Looks:
    """Rank 1 waits for rank 0's message, and looks repeatedly at rank 0's position."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.entry = CallRecord(header_of(1, operation=Operation.RECV), "recv")
        self.entry.awaits = 0
        self.mine = recv(1, 0, since=self.entry.waits_since)
        self.asked = 0
        self.theirs: LaneWait
        self.settled: list[Any] = []
        patch.setattr(inquiry, "wait_snapshot", self._mine)
        lane = lane_like(waits=lambda: [self.entry], has_waiting=lambda entry: entry is self.entry)
        mesh = mesh_like(0, 1, name=self.mine.group, link=object())
        mesh.settle_on = lambda _, verdict: self.settled.append(verdict)
        self._waiting: Any = (mesh, lane, self.entry)
        self._board = board_like(ask=self._ask, read=lambda rank, _: self._of(rank))

    def _ask(self) -> int:
        self.asked += 1
        return self.asked

    def _mine(self, _meshes: Any, asked: int) -> WaitSnapshot:
        return WaitSnapshot(asked, MAIN, (self.mine,), is_single=True)

    def _of(self, rank: int) -> WaitSnapshot:
        lanes = (self.mine,) if rank else (self.theirs,)
        return WaitSnapshot(self.asked, MAIN, lanes, is_single=True)

    def look(self, since: float) -> bool:
        """Return whether rank 1 ends its wait if rank 0 has waited since ``since``."""
        self.theirs = recv(0, 1, since=since)
        inquiry.investigate(self._board, [self._waiting[0]], [self._waiting])
        return bool(self.settled)


def test_two_looks_at_one_wait_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    assert not looks.look(5.0)
    assert looks.look(5.0)


def test_consecutive_waits_are_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    for poll in range(10):
        assert not looks.look(5.0 + poll)
    assert looks.look(14.0)


class Meeting:
    """Rank 1 meets rank 0 in a group, and has lost its connection to rank 0 in the world."""

    def __init__(self) -> None:
        self.entry = CallRecord(header_of(1, sequence=MEETING), "barrier")
        # The board's thread did not run before.
        self.entry.waits_since = time.monotonic() - PATIENCE_S
        self.answer: WaitSnapshot | None = None
        self.settled: list[Verdict] = []
        group = functools.partial(
            mesh_like, *(0, 1), settle_on=lambda _, verdict: self.settled.append(verdict)
        )
        lost = SimpleNamespace(is_closed=lambda _: True, is_out_of_reach=lambda _: False)
        world, mesh = group(name="world", link=lost, is_world=True), group(name="group")
        self.processes = world.board_thread.processes = mesh.board_thread.processes
        self._meshes, self._waiting = [mesh, world], [(mesh, lane_like(), self.entry)]
        self._board = board_like(read=lambda _rank, _asked: self.answer)

    def look(self) -> list[Verdict]:
        """Look once as rank 1, and return the verdicts that have ended the meeting."""
        inquiry.investigate(self._board, self._meshes, self._waiting)
        return self.settled


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    monkeypatch.setattr(losses, "SURELY_ANSWERED_SECONDS", 0.0)
    return Meeting()


def test_a_rank_that_has_lost_its_connections_gets_time_to_answer(meeting: Meeting) -> None:
    for _ in range(losses._LOOKS_IN_VAIN):  # noqa: SLF001  # however quickly they follow
        assert not meeting.look()
    (verdict,) = meeting.look()
    assert (verdict.cause, verdict.ranks) == (Cause.LOST, (0,))


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "is seen by the kernel"])
def test_a_rank_that_lives_is_not_lost(meeting: Meeting, *, answers: bool) -> None:
    if answers:
        meeting.answer = WaitSnapshot(1, MAIN, ())
    else:
        meeting.processes.note(0, Process.own())
    for _ in range(9):
        assert not meeting.look()


@pytest.mark.parametrize("is_collecting", [True, False])
def test_nothing_is_collected_while_python_looks_where_threads_are(
    monkeypatch: pytest.MonkeyPatch, *, is_collecting: bool
) -> None:
    """Before 3.11.9 a collection then may crash the process; the program's setting is restored."""
    seen, frames = [], sys._current_frames  # noqa: SLF001  # documented by CPython

    def watched() -> Any:
        seen.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", watched)
    was_collecting = gc.isenabled()
    (gc.enable if is_collecting else gc.disable)()
    try:
        assert not inquiry.is_idle_in_a_pool(threading.current_thread())
        assert gc.isenabled() is is_collecting
    finally:
        (gc.enable if was_collecting else gc.disable)()
    assert seen == [False]
