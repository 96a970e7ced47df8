"""Which rank an error names when a connection has ended, and when a silent rank counts as dead."""

import itertools
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from objcomm._failures import losses
from objcomm._failures.liveness import KILLED
from objcomm._failures.losses import by_name_here, local, loss_among
from objcomm._failures.verdict import Cause, Verdict
from objcomm._transport.link import LinkClosed
from objcomm._wire.message import compose
from objcomm.errors import TransportError, TransportTimeout
from tests.unit.memory_link import Arrival, MemoryLink, header_of, sent_to_rank_0
from tests.unit.whereabouts import board_like, mesh_like


class _Lost(Arrival):
    def wait(self, _: timedelta) -> None:
        raise LinkClosed("Connection closed by peer")


class _WithoutRank2(MemoryLink):
    def recv(self, flat: torch.Tensor, peer: int, tag: int = -1) -> Arrival:
        return _Lost(flat) if peer == 2 else super().recv(flat, peer, tag)


def test_only_the_rank_whose_connection_has_ended_is_named() -> None:
    messages = {rank: compose(header_of(rank), b"") for rank in (1, 3)}
    waiting = sent_to_rank_0(messages, 4, _WithoutRank2)
    with pytest.raises(TransportError, match="Connection closed by peer") as caught:
        waiting.recv_heads([1, 2, 3])
    assert not isinstance(caught.value, TransportTimeout)
    assert caught.value.peers == (2,)


@pytest.mark.parametrize("has_expired", [False, True], ids=["not seen", "seen by the watchdog"])
def test_a_rank_lost_after_the_limit_is_not_late(*, has_expired: bool) -> None:
    """A busy machine may delay the waiting thread; the first rank to report informs all ranks."""
    waiting = sent_to_rank_0({}, 4, _WithoutRank2, seconds=0.0)
    waiting.entry.has_expired = has_expired
    with pytest.raises(TransportError) as caught:
        waiting.recv_heads([2])
    assert isinstance(caught.value, TransportTimeout) is has_expired
    assert caught.value.peers == (2,)


@pytest.mark.parametrize(
    ("cause", "ranks"), [(Cause.TIMEOUT, (1, 2)), (Cause.LOST, (2,))], ids=["a limit", "a death"]
)
def test_a_death_at_the_limit_blames_no_other_rank(cause: Cause, ranks: tuple[int, ...]) -> None:
    """Without a store, a rank adds the ranks that it waited for only if the cause is a limit."""
    link = SimpleNamespace(closed_by=lambda: [2])
    mesh = mesh_like(*(0, 1, 2), others=(1, 2), link=link)
    verdict = Verdict.of(cause, ranks=(2,), reason="its process has ended", is_store_silent=True)
    assert local(mesh, verdict, TransportTimeout("all_gather", (1,), 1.0)).ranks == ranks


@pytest.mark.parametrize("cause", [Cause.LEFT, Cause.LOST])
def test_a_rank_that_leaves_by_itself_is_reported_in_its_own_words(cause: Cause) -> None:
    """Guesses such as "it is alive" are only for a rank that closed its connections silently."""
    mesh = mesh_like(0, 1)
    mesh.board_thread.processes.note(0, mesh.board_thread.processes.own)
    reason = "its program ended with ValueError: boo"
    text = by_name_here(mesh, Verdict.of(cause, ranks=(0,), reason=reason)).reason
    assert (text == reason) == (cause is Cause.LEFT)
    assert text.startswith("it is alive") == (cause is Cause.LOST)


def test_a_rank_that_gave_its_reason_and_then_ended_is_not_the_cause() -> None:
    """Rank 2 of another host died, so rank 1 raised and ended; the store reported neither."""
    mesh = mesh_like(*(0, 1, 2), others=(1, 2), blamed_by=lambda peer: (2,) if peer == 1 else ())
    mesh.board_thread.processes.note_end(1, f"{KILLED}11, has ended")
    found = loss_among(mesh, needs=(1, 2), patience_seconds=0.0)
    assert found is not None
    assert found.ranks == (2,)
    assert by_name_here(mesh, found).ranks == (2,)
    assert KILLED not in by_name_here(mesh, found).reason


class _Waiting:
    """Rank 0, which waits for ranks 1 and 2 and may lose rank 2; it looks once a second.

    Attributes:
        is_lost: whether the world's connection to rank 2 has ended.
        is_out_of_reach: whether an outage ended that connection.
        answered: the latest question that ranks 1 and 2 have answered.
        called: the ranks that the world was asked to connect to.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_lost, self.is_out_of_reach, self.answered = True, False, 0
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


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> _Waiting:
    return _Waiting(monkeypatch)


def test_a_silent_rank_without_a_connection_is_dead(rank_0: _Waiting) -> None:
    """Not before the fourth look, because the store may be slow, although 2 s have passed."""
    assert rank_0.dead_after(9) == 4


def test_the_answer_of_a_rank_that_was_cut_off_may_be_late(rank_0: _Waiting) -> None:
    """What its system sent during an outage may be retransmitted up to two minutes afterwards."""
    rank_0.is_out_of_reach = True
    assert rank_0.dead_after(120) is None
    assert rank_0.dead_after(9) == 2


def test_a_rank_that_answers_is_alive_though_its_connection_has_ended(rank_0: _Waiting) -> None:
    rank_0.answered = 1_000_000
    assert rank_0.dead_after(200) is None


def test_a_rank_that_answered_before_it_was_lost_may_have_died_since(rank_0: _Waiting) -> None:
    rank_0.is_lost = False
    rank_0.answered = 5
    assert rank_0.dead_after(5) is None
    rank_0.is_lost = True
    assert rank_0.dead_after(9) == 4


def test_a_rank_that_is_awaited_and_does_not_answer_is_called(rank_0: _Waiting) -> None:
    """It may have died before the two ranks had any contact."""
    rank_0.is_lost = False
    assert rank_0.dead_after(1) is None
    assert rank_0.called == []
    assert rank_0.dead_after(2) is None
    assert rank_0.called == [1, 2] * 2  # each look calls some of the other ranks, here both
    rank_0.answered = 1_000_000
    assert rank_0.dead_after(5) is None
    assert rank_0.called == [1, 2] * 2
