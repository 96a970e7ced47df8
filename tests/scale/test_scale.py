"""24 ranks on six hosts: every operation is right, and all ranks notice a fault."""

from pathlib import Path

import pytest

from tests.once import once
from tests.scale.rank import STOPPED_LIMIT_S, Seen, faulty
from tests.scale.run import run

pytestmark = pytest.mark.long

HOSTS, RANKS = 6, 4
SIZE = HOSTS * RANKS


def _run(folder: Path) -> dict[int, Seen]:
    return run(folder, HOSTS, RANKS)


@pytest.fixture
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Seen]:
    """Return each rank's results."""
    return once(tmp_path_factory, "scale", _run)


def test_every_operation_is_right_at_several_roots(seen: dict[int, Seen]) -> None:
    assert {rank: each.wrong for rank, each in seen.items() if each.wrong} == {}


def test_a_different_call_is_reported_to_all_ranks(seen: dict[int, Seen]) -> None:
    rank = faulty(SIZE)["other call"]
    for each in seen.values():
        heard = each.heard["other call"]
        assert heard.kind == "DesyncError"
        assert rank in heard.ranks
        assert f"rank {rank} called gather" in heard.text


@pytest.mark.timed  # if the store takes half a second to answer, a rank names the one it waits for
def test_a_stopped_rank_is_named_to_all_others_at_their_limit(seen: dict[int, Seen]) -> None:
    rank = faulty(SIZE)["stopped"]
    for other, each in seen.items():
        if other != rank:
            heard = each.heard["stopped"]
            assert (heard.kind, heard.ranks) == ("TransportTimeout", (rank,))
            assert heard.seconds >= STOPPED_LIMIT_S


def test_a_killed_rank_is_named_to_all_others(seen: dict[int, Seen]) -> None:
    rank = faulty(SIZE)["killed"]
    assert set(seen) == set(range(SIZE)) - {rank}
    for each in seen.values():
        heard = each.heard["killed"]
        assert (heard.kind, heard.ranks) == ("TransportError", (rank,))
