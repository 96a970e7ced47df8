"""Callbacks that call objcomm, and errors too long for one message."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError
from objcomm._transport.lane import Lane
from tests.group.helpers import RefusesToPickle, assert_group_works, outcome_of, tell_all
from tests.ranks import ranks


@ranks(2, 3)
def test_a_callback_that_uses_the_waiting_group_fails_the_call_on_every_rank() -> None:
    def nested(left: Any, right: Any) -> Any:
        objcomm.barrier()
        return left + right

    def one() -> int:
        return 1

    def wrong(_: list[int]) -> list[int]:
        return objcomm.all_gather(1)

    def fold() -> object:
        return objcomm.all_reduce(1, nested)

    def second() -> object:
        shared: list[int] = objcomm.reduce_and_broadcast(one, wrong)
        return shared

    for call in (fold, second):
        with pytest.raises(CollectiveError, match="communicate before or after") as caught:
            call()
        assert list(caught.value.failures) == [0]
        assert_group_works()


@ranks(2, 3)
def test_what_runs_before_the_traffic_may_communicate() -> None:
    def count() -> int:
        return objcomm.all_reduce(1)

    def add(counts: list[int]) -> int:
        return sum(counts)

    total = objcomm.reduce_and_broadcast(count, add)
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
        with pytest.raises(CollectiveError) as caught:
            objcomm.run_on_main(fail)
        message, traceback = caught.value.failures[0].message, caught.value.failures[0].traceback
        assert (message == text) != is_cut
        assert message.startswith("begins hereé")
        assert traceback.lstrip().startswith(("File ", "Traceback "))
        for told in (message, traceback.rstrip()):
            assert told.endswith("éends here")
            assert (" […] " in told) == is_cut
        cut = message.replace(" […] ", "").encode()
        assert 7990 < len(cut) <= 8000 or not is_cut
        assert len(traceback.encode()) < 8000 + 600  # with the line of the user's call
    assert_group_works()


@ranks(2, 3)
def test_an_invalid_rank_is_refused_before_any_traffic() -> None:
    wrong: list[Any] = [1.0, True, "0"]
    for rank in wrong:
        with pytest.raises(objcomm.UsageError, match="broadcast: group_src must be an int"):
            objcomm.broadcast(1, group_src=rank)
        with pytest.raises(objcomm.UsageError, match="gather: dst must be an integer"):
            objcomm.gather(1, rank)
    assert_group_works()


@ranks(2)
def test_large_integers_and_nans_have_extremes() -> None:
    rank = objcomm.rank()
    assert objcomm.all_reduce(10**400 + rank, "max") == 10**400 + 1
    lowest = objcomm.all_reduce(float("nan") if rank else 1.0, "min")
    assert lowest != lowest  # noqa: PLR0124  # not a number


@ranks(2)
def test_an_interrupt_between_two_steps_leaves_nobody_waiting() -> None:
    group = dist.new_group()
    objcomm.barrier(group=group)
    with pytest.MonkeyPatch.context() as patch:
        if objcomm.rank() == 0:
            patch.setattr("objcomm._calls.call.Call.announcement", _interrupted)
        with pytest.raises((KeyboardInterrupt, objcomm.TransportError)) as caught:
            objcomm.barrier(group=group)
    assert caught.type is (KeyboardInterrupt if objcomm.rank() == 0 else objcomm.TransportError)
    with pytest.raises(objcomm.BrokenGroupError):
        objcomm.barrier(group=group)
    assert_group_works()


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


#: The last step before a call waits, and a step after it has waited.
EDGES: dict[str, tuple[Any, str]] = {"begin": (Lane, "begin"), "end": (Lane, "end")}

#: Calls that finish together on two ranks, as this rank makes them with the other one.
ENDS: dict[str, Callable[[Any], object]] = {
    "all_gather": lambda group: objcomm.all_gather(1, group=group),
    "confirmed": lambda group: objcomm.all_gather(1, group=group, confirm=True),
    "send": lambda group: objcomm.send(1, 1 - objcomm.rank(), group=group),
}


@ranks(2)
@pytest.mark.parametrize("moment", EDGES)
@pytest.mark.parametrize("name", ENDS)
def test_an_interrupt_at_the_edge_of_a_wait_leaves_no_rank_in_its_call(
    name: str, moment: str
) -> None:
    """The group continues if every rank has what it waited for; otherwise the other ranks raise."""
    group: Any = dist.new_group()
    assert_group_works(group)
    objcomm.sendrecv(1, 1 - objcomm.rank(), 1 - objcomm.rank(), group=group)
    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        if objcomm.rank() == 1:
            patch.setattr(*EDGES[moment], _then_interrupted(*EDGES[moment]))
        try:
            outcomes.append(outcome_of(lambda: ENDS[name](group)))
        except KeyboardInterrupt:
            outcomes.append("interrupted")
    assert (outcomes == ["interrupted"]) == (objcomm.rank() == 1)
    tell_all("rank 1 was interrupted", "")
    outcomes.append(outcome_of(lambda: ENDS["send"](group)))
    outcomes.append(outcome_of(lambda: objcomm.barrier(group=group)))
    goes_on = moment == "end" and name != "confirmed"
    assert (outcomes[1:] == ["returned"] * 2) == goes_on, outcomes
    assert_group_works()


def _then_interrupted(owner: object, name: str) -> Callable[..., object]:
    """Wrap a function so that Ctrl-C arrives at its end, once."""
    function, left = getattr(owner, name), [KeyboardInterrupt()]

    def interrupted(*arguments: object) -> object:
        returned = function(*arguments)
        if left:
            raise left.pop()
        return returned

    return interrupted
