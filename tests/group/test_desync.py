"""Ranks that are not in the same call: an error that says so, and never a wrong object.

Every test has processes of its own, because it breaks their group.
"""

from pathlib import Path
from typing import Any

import pytest

import objcomm
from objcomm import DesyncError, TransportError
from tests.group.helpers import outcome_of, tell_all
from tests.ranks import ranks
from tests.workers import here

# For the ranks that no header reaches: they find out by waiting.
SHORT_S = 3.0

MISMATCHES: dict[str, tuple[Any, Any]] = {
    "operations": (
        lambda: objcomm.broadcast(1, timeout=SHORT_S),
        lambda: objcomm.all_gather(1, timeout=SHORT_S),
    ),
    "gather and barrier": (
        lambda: objcomm.gather(1, timeout=SHORT_S),
        lambda: objcomm.barrier(timeout=SHORT_S),
    ),
    "barriers of other names": (
        lambda: objcomm.barrier("a", timeout=SHORT_S),
        lambda: objcomm.barrier("b", timeout=SHORT_S),
    ),
    "named ops": (
        lambda: objcomm.all_reduce(1, "sum", timeout=SHORT_S),
        lambda: objcomm.all_reduce(1, "max", timeout=SHORT_S),
    ),
    "gathers to other roots": (
        lambda: objcomm.gather(1, dst=0, timeout=SHORT_S),
        lambda: objcomm.gather(1, dst=1, timeout=SHORT_S),
    ),
    "broadcasts from other roots": (
        lambda: objcomm.broadcast(1, src=1, timeout=SHORT_S),
        lambda: objcomm.broadcast(1, src=0, timeout=SHORT_S),
    ),
}


@ranks(2, disposable=True)
@pytest.mark.parametrize("kind", MISMATCHES)
def test_ranks_that_are_out_of_step_hear_of_it(kind: str) -> None:
    objcomm.barrier()
    try:
        MISMATCHES[kind][here().rank]()
    except (DesyncError, TransportError) as error:
        mine = f"{type(error).__name__}: {error}"
    else:
        mine = "returned"
    outcomes = tell_all("outcome", mine)
    assert any(outcome.startswith(("DesyncError", "TransportTimeout")) for outcome in outcomes)
    if kind not in {"broadcasts from other roots", "gathers to other roots"}:
        assert any(outcome.startswith("DesyncError") for outcome in outcomes), outcomes


@ranks(2, disposable=True)
def test_a_desync_names_both_sides() -> None:
    objcomm.barrier()
    objcomm.barrier()
    call = objcomm.broadcast if here().rank == 0 else objcomm.all_gather
    if here().rank == 0:
        call("x", timeout=SHORT_S)  # a source waits for nobody's data
    else:
        with pytest.raises(DesyncError) as caught:
            call("x", timeout=SHORT_S)
        error = caught.value
        assert (error.mine.operation, error.theirs.operation) == ("all_gather", "broadcast")
        assert (error.mine.rank, error.theirs.rank) == (1, 0)
        assert error.mine.sequence == error.theirs.sequence == 2
        assert Path(__file__).name in error.mine.call_site
        assert Path(__file__).name in error.theirs.call_site
        assert "all_gather" in str(error)
        assert "broadcast" in str(error)


@ranks(2, disposable=True)
def test_one_call_fewer_is_noticed() -> None:
    objcomm.barrier()
    if here().rank == 0:
        objcomm.gather("sent", dst=1, timeout=SHORT_S)
        mine = outcome_of(lambda: objcomm.gather("again", dst=0, timeout=SHORT_S))
    else:
        mine = outcome_of(lambda: objcomm.gather("again", dst=0, timeout=SHORT_S))
    assert set(tell_all("outcome", mine)) & {"DesyncError", "TransportTimeout"}
