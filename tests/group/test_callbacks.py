"""Callbacks that call objcomm, and errors too long for one message."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError
from objcomm._transport.lane import Lane
from tests.group.helpers import RefusesToPickle, assert_group_works, error_in, outcome_of, tell_all
from tests.ranks import ranks
from tests.waits import PATIENCE_S


@ranks(2, 3)
def test_a_callback_that_communicates_fails_the_call_on_every_rank() -> None:
    def nested(left: Any, right: Any) -> Any:
        objcomm.barrier()
        return left + right

    def nested_in_flight(left: Any, right: Any) -> Any:
        objcomm.barrier(async_op=True)
        return left + right

    calls: list[Callable[[], object]] = [
        lambda: objcomm.all_reduce(1, nested),
        lambda: objcomm.all_reduce(1, nested, async_op=True).wait(PATIENCE_S),
        lambda: objcomm.all_reduce(1, nested_in_flight, async_op=True).wait(PATIENCE_S),
        lambda: objcomm.reduce_and_broadcast(int, lambda _: objcomm.all_gather(1)),
    ]
    for call in calls:
        with pytest.raises(CollectiveError, match="communicate before or after") as caught:
            call()
        assert list(caught.value.failures) == [0]
        assert_group_works()


@ranks(2, 3)
def test_a_callback_that_runs_before_the_traffic_may_communicate() -> None:
    total = objcomm.reduce_and_broadcast(lambda: objcomm.all_reduce(1), sum)
    assert total == objcomm.world_size() ** 2
    assert_group_works()


@ranks(2, 4)
def test_long_errors_of_all_ranks_reach_all_ranks() -> None:
    for confirm, letter in itertools.product((False, True), "x😀"):
        verbose = RefusesToPickle(ValueError(letter * 50_000))
        with pytest.raises(CollectiveError) as caught:
            objcomm.all_gather(verbose, confirm=confirm)
        assert sorted(caught.value.failures) == list(range(objcomm.world_size()))
        assert_group_works()


@ranks(2, 3)
def test_a_message_of_more_than_8000_bytes_is_cut_in_the_middle() -> None:
    """So is a traceback, which ends with the message."""

    def fail() -> None:
        raise ValueError(text)

    for length, is_cut in ((2_000, False), (50_000, True)):
        text = f"begins here{'é' * length}ends here"
        failure = error_in(CollectiveError, lambda: objcomm.run_on_main(fail)).failures[0]
        message, traceback = failure.message, failure.traceback
        assert (message == text) != is_cut
        assert message.startswith("begins hereé")
        assert traceback.lstrip().startswith(("File ", "Traceback "))
        for shown in (message, traceback.rstrip()):
            assert shown.endswith("éends here")
            assert (" […] " in shown) == is_cut
        cut = message.replace(" […] ", "").encode()
        assert 7990 < len(cut) <= 8000 or not is_cut
        assert len(traceback.encode()) < 8000 + 600  # with the line of the user's call
    assert_group_works()


@ranks(2)
def test_large_integers_and_nans_have_extremes() -> None:
    rank = objcomm.rank()
    assert objcomm.all_reduce(10**400 + rank, "max") == 10**400 + 1
    lowest = objcomm.all_reduce(float("nan") if rank else 1.0, "min")
    assert lowest != lowest  # noqa: PLR0124  # not a number


#: Calls that two ranks make with each other and finish together.
ENDS: dict[str, Callable[[Any], object]] = {
    "all_gather": lambda group: objcomm.all_gather(1, group=group),
    "confirmed": lambda group: objcomm.all_gather(1, group=group, confirm=True),
    "send": lambda group: objcomm.send(1, 1 - objcomm.rank(), group=group),
}


@ranks(2)
@pytest.mark.parametrize("moment", ["begin", "end"])
@pytest.mark.parametrize("name", ENDS)
def test_an_interrupt_at_the_edge_of_a_wait_leaves_no_rank_in_its_call(
    name: str, moment: str
) -> None:
    """The group keeps working if every rank has what it waited for; otherwise the others raise."""
    group: Any = dist.new_group()
    assert_group_works(group)
    objcomm.sendrecv(1, 1 - objcomm.rank(), 1 - objcomm.rank(), group=group)
    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        if objcomm.rank() == 1:
            patch.setattr(Lane, moment, _then_interrupted(getattr(Lane, moment)))
        try:
            outcomes.append(outcome_of(lambda: ENDS[name](group)))
        except KeyboardInterrupt:
            outcomes.append("interrupted")
    assert (outcomes == ["interrupted"]) == (objcomm.rank() == 1)
    tell_all("rank 1 was interrupted", "")
    outcomes.append(outcome_of(lambda: ENDS["send"](group)))
    outcomes.append(outcome_of(lambda: objcomm.barrier(group=group)))
    keeps_working = moment == "end" and name != "confirmed"
    assert (outcomes[1:] == ["returned"] * 2) == keeps_working, outcomes
    assert_group_works()


def _then_interrupted(function: Callable[..., object]) -> Callable[..., object]:
    """Wrap a function so that Ctrl-C arrives at its end, once."""
    left = [KeyboardInterrupt()]

    def interrupted(*arguments: object) -> object:
        returned = function(*arguments)
        if left:
            raise left.pop()
        return returned

    return interrupted
