"""When a rank that does not answer counts as dead, before the group's first use."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from objcomm._failures import losses
from tests.unit.whereabouts import board_like, mesh_like


class _Waiting:
    """Rank 0, which waits for ranks 1 and 2 and may lose rank 2; it looks once a second.

    Attributes:
        is_lost: whether the world's connection to rank 2 has ended.
        is_out_of_reach: whether an outage ended that connection.
        answered: the latest question that ranks 1 and 2 have answered.
        called: the ranks that the world was asked to connect to.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_out_of_reach: bool = False) -> None:
        self.is_lost, self.is_out_of_reach, self.answered = True, is_out_of_reach, 0
        self._asked = itertools.count(1)
        seconds = itertools.count(1000.0, 1.0)
        monkeypatch.setattr(losses, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
        self._board = board_like(read=lambda _, asked: self.answered >= asked or None)
        self.called: list[int] = []
        link = SimpleNamespace(
            call=self.called.append,
            is_closed=lambda peer: peer == 2 and self.is_lost,
            is_out_of_reach=lambda _: self.is_out_of_reach,
        )
        self._world = mesh_like(*(0, 1, 2), others=(1, 2), link=link, is_world=True)
        self._mesh = mesh_like(*(0, 1, 2), others=(1, 2))
        self._entry: Any = SimpleNamespace(unanswered=None, first_asked=1, awaits=1)

    def dead_after(self, looks: int) -> int | None:
        """Return the look, of at most so many, that found rank 2 dead, or None."""
        meshes = [self._world, self._mesh]
        for look in range(1, looks + 1):
            asked = next(self._asked)
            dead = losses._dead(self._board, self._mesh, meshes, self._entry, asked)  # noqa: SLF001  # needs no ranks
            if dead:
                assert dead == (2,)
                return look
        return None


def test_who_has_closed_its_connection_and_does_not_answer_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _Waiting(monkeypatch).dead_after(9) == 4


def test_a_store_that_answers_nobody_for_long_is_no_silence_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = _Waiting(monkeypatch)
    assert waiting.dead_after(3) is None  # 2 s have passed, which would be enough otherwise


def test_who_was_cut_off_may_be_there_again_and_its_answer_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What its system sent during an outage may be retransmitted up to two minutes afterwards."""
    waiting = _Waiting(monkeypatch, is_out_of_reach=True)
    assert waiting.dead_after(120) is None
    assert waiting.dead_after(9) == 2


def test_who_answers_lives_though_its_connection_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = _Waiting(monkeypatch)
    waiting.answered = 1_000_000
    assert waiting.dead_after(200) is None


def test_who_answered_before_it_was_lost_may_have_died_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = _Waiting(monkeypatch)
    waiting.is_lost = False
    waiting.answered = 5
    assert waiting.dead_after(5) is None
    waiting.is_lost = True
    assert waiting.dead_after(9) == 4


def test_who_is_awaited_and_does_not_answer_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have died before the two ranks had any contact."""
    waiting = _Waiting(monkeypatch)
    waiting.is_lost = False
    assert waiting.dead_after(1) is None
    assert waiting.called == []
    assert waiting.dead_after(2) is None
    assert waiting.called == [1, 2] * 2  # each look calls some of the other ranks, here both
    waiting.answered = 1_000_000
    assert waiting.dead_after(5) is None
    assert waiting.called == [1, 2] * 2
