"""Which rank an error names when a connection has ended."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from objcomm._failures.liveness import KILLED
from objcomm._failures.losses import by_name_here, local, loss_among
from objcomm._failures.verdict import Cause, Verdict
from objcomm._transport.link import LinkClosed
from objcomm._wire.message import compose
from objcomm.errors import TransportError, TransportTimeout
from tests.unit.memory_link import Arrival, MemoryLink, header_of, sent_to_rank_0
from tests.unit.whereabouts import mesh_like


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
def test_a_lost_rank_is_none_that_is_late_though_it_is_noticed_after_the_limit(
    *, has_expired: bool
) -> None:
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
def test_a_limit_that_passes_as_a_death_is_noticed_blames_nobody_else(
    cause: Cause, ranks: tuple[int, ...]
) -> None:
    """Without a store, a rank adds the ranks that it waited for only if the cause is a limit."""
    link = SimpleNamespace(closed_by=lambda: [2])
    mesh = mesh_like(*(0, 1, 2), others=(1, 2), link=link)
    verdict = Verdict.of(cause, ranks=(2,), reason="its process has ended", is_store_silent=True)
    assert local(mesh, verdict, TransportTimeout("all_gather", (1,), 1.0)).ranks == ranks


@pytest.mark.parametrize("cause", [Cause.LEFT, Cause.LOST])
def test_who_leaves_by_itself_is_told_in_its_own_words(cause: Cause) -> None:
    """Guesses such as "it is alive" are only for a rank that closed its connections silently."""
    mesh = mesh_like(0, 1)
    mesh.board_thread.processes.note(0, mesh.board_thread.processes.own)
    reason = "its program ended with ValueError: boo"
    told = by_name_here(mesh, Verdict.of(cause, ranks=(0,), reason=reason)).reason
    assert (told == reason) == (cause is Cause.LEFT)
    assert told.startswith("it is alive") == (cause is Cause.LOST)


def test_a_rank_that_gave_its_reason_and_then_ended_is_not_the_cause() -> None:
    """Rank 2 of another host died, so rank 1 raised and ended; the store told neither."""
    mesh = mesh_like(*(0, 1, 2), others=(1, 2), blamed_by=lambda peer: (2,) if peer == 1 else ())
    mesh.board_thread.processes.note_end(1, f"{KILLED}11, has ended")
    found = loss_among(mesh, needs=(1, 2), patience_seconds=0.0)
    assert found is not None
    assert found.ranks == (2,)
    assert by_name_here(mesh, found).ranks == (2,)
    assert KILLED not in by_name_here(mesh, found).reason
