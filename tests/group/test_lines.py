"""One call that ranks make on different lines: logged once, or refused, unless it has a name."""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import objcomm
from objcomm import UsageError
from objcomm._observe import lines
from tests.group.helpers import assert_group_works, subgroup
from tests.group.logs import Collecting, collected
from tests.group.operations import OPERATIONS
from tests.group.test_desync import desync_in
from tests.ranks import OVER_GLOO, ranks
from tests.workers import here

HERE = Path(__file__).name


def _calls(size: int) -> dict[str, Callable[..., Any]]:
    """Calls without a line of their own, since a partial has none: the line is their caller's."""
    return {
        "broadcast": partial(objcomm.broadcast, 1),
        "broadcast from the last": partial(objcomm.broadcast, 1, size - 1),
        "gather": partial(objcomm.gather, 1),
        "all_gather": partial(objcomm.all_gather, 1),
        "all_gather of large objects": partial(objcomm.all_gather, bytes(300_000)),
        "scatter": partial(objcomm.scatter, [1] * size),
        "all_to_all": partial(objcomm.all_to_all, [1] * size),
        "reduce": partial(objcomm.reduce, 1),
        "all_reduce": partial(objcomm.all_reduce, 1),
        "scan": partial(objcomm.scan, 1),
        "barrier": objcomm.barrier,
        "agree": partial(objcomm.agree, 1),
        "run_on_main with what follows it": partial(objcomm.run_on_main, int, post_func=int),
        "run_once_per_node": partial(objcomm.run_once_per_node, int),
        "split": partial(objcomm.split, 0),
        "average_tensors": partial(objcomm.models.average_tensors, [torch.ones(1)]),
    }


def _named_calls(size: int) -> dict[str, Callable[..., Any]]:
    """Calls that take a name."""
    module = torch.nn.Linear(1, 1)
    return {
        **{name: partial(call, 1) for name, call in OPERATIONS.items()},
        "agree": partial(objcomm.agree, 1),
        "any_rank": partial(objcomm.any_rank, flag=True),
        "all_ranks": partial(objcomm.all_ranks, flag=True),
        "shared_seed": objcomm.shared_seed,
        "split": partial(objcomm.split, 0),
        "dup": objcomm.dup,
        "node_group": objcomm.node_group,
        "leaders": objcomm.leaders,
        "new_group": partial(objcomm.new_group, range(size)),
        "average_metrics": partial(objcomm.metrics.average_metrics, {"a": 1}),
        "gather_from_all_ranks": partial(objcomm.metrics.gather_from_all_ranks, int),
        "compute_and_broadcast": partial(objcomm.compute_and_broadcast, int),
        "run_on_main": partial(objcomm.run_on_main, int),
        "fail_together": partial(_enter, objcomm.fail_together),
        "sync_buffers": partial(objcomm.models.sync_buffers, [torch.ones(1)]),
        "broadcast_model": partial(objcomm.models.broadcast_model, module),
        "eager_sync_model": partial(_enter, objcomm.models.eager_sync_model, module),
    }


def _enter(block: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    with block(*arguments, **options):
        pass


@contextlib.contextmanager
def _logged() -> Iterator[Collecting]:
    """The warnings of a process that has not yet seen any line."""
    with mock.patch.object(lines, "_known", set()), collected(logging.WARNING) as found:
        yield found


def _mine(kind: str, **options: Any) -> Callable[[], Any]:
    """This rank's call, which the first rank makes on another line than the others."""
    call = _calls(here().world_size)[kind]
    on_two_lines = [
        lambda: call(**options),
        lambda: call(**options),
    ]
    return on_two_lines[min(here().rank, 1)]


def _numbers(text: str) -> list[str]:
    """The line numbers of this file that a text mentions."""
    return re.findall(re.escape(HERE) + r":([0-9]+)", text)


def _pair_by_mistake() -> list[tuple[str, int]]:
    """The first rank makes one call more and gets a value that it did not ask for."""
    rank = here().rank
    for step in range(3 if rank == 0 else 2):
        objcomm.all_gather(("step", step))
    value = objcomm.all_gather(("value", rank))
    if rank > 0:
        objcomm.all_gather(("last", rank))
    return value


@ranks(2, 3)
def test_each_new_pair_of_lines_is_logged_once_on_each_rank() -> None:
    with _logged() as found:
        value = _pair_by_mistake()
        assert value[0] == (("value", 0) if here().rank == 0 else ("step", 2))
        first, second = found.told  # of the loop's call and the next, and of that and the last
        assert first.startswith("rank 0 is in all_gather (call ")
        assert len(set(_numbers(first))) == 2
        assert set(_numbers(first)) != set(_numbers(second))
        assert "give both calls the same name=" in first
        assert "check='lines'" in first
        _pair_by_mistake()
        assert len(found.told) == 2
    assert_group_works()


@ranks(2, environment=OVER_GLOO)
def test_lines_are_compared_over_gloo_too() -> None:
    with _logged() as found:
        _pair_by_mistake()
    assert len(found.told) == 2
    with objcomm.configure(check="lines"):
        assert desync_in(_mine("gather"), objcomm.barrier).reason == "other lines"
        assert_group_works()


@ranks(3)
def test_the_record_says_in_which_group() -> None:
    with subgroup(1, 2) as group, _logged() as found:
        if here().rank == 1:
            objcomm.all_gather(1, group=group)
        elif here().rank == 2:
            objcomm.all_gather(2, group=group)
        groups = [vars(each)["group"] for each in found.records]
        assert groups == ([] if here().rank == 0 else [group.group_name])


@ranks(2, 3)
def test_a_root_in_a_branch_of_its_own_is_not_logged() -> None:
    with _logged() as found:
        if here().rank == 0:
            assert objcomm.broadcast("mine") == "mine"
        else:
            assert objcomm.broadcast(None) == "mine"
        assert not found.told
        _mine("broadcast")()  # two lines without a branch
        assert len(found.told) == (here().rank > 0)  # the source waits for no other rank
    objcomm.barrier()


@ranks(2, 3)
@pytest.mark.parametrize("kind", _calls(2))
def test_different_lines_can_be_an_error_on_every_rank(kind: str) -> None:
    objcomm.barrier()
    with _logged() as found, objcomm.configure(check="lines"):
        error = desync_in(_mine(kind), objcomm.barrier)
        assert error.reason == "other lines"
        assert len(error.positions) >= 2
        assert len(set(_numbers(str(error)))) >= 2  # one more where this rank had returned
        assert str(error).endswith("the same name=")
        assert_group_works()
        assert not found.told
    assert_group_works()


@ranks(2)
def test_one_rank_that_checks_lines_is_enough() -> None:
    objcomm.barrier()
    with _logged(), objcomm.configure(check="lines" if here().rank == 0 else False):
        assert desync_in(_mine("all_gather"), objcomm.barrier).reason == "other lines"
    assert_group_works()


@ranks(2, environment={"OBJCOMM_CHECK": "lines"})
def test_the_environment_can_ask_for_lines() -> None:
    objcomm.broadcast(1)
    assert objcomm.stats()["broadcast"].exchanges == 1  # no ranks have met before
    assert desync_in(_mine("all_gather"), objcomm.barrier).reason == "other lines"
    assert_group_works()
    with objcomm.configure(check=False), _logged() as found:
        _mine("all_gather")()
        assert len(found.told) == 1
    assert_group_works()


@ranks(2)
def test_lines_of_signed_messages_are_compared() -> None:
    with objcomm.configure(key=b"a key of sixteen bytes", check="lines"):
        objcomm.barrier()
        assert desync_in(_mine("broadcast"), objcomm.barrier).reason == "other lines"
        assert_group_works()


@ranks(2)
def test_lines_of_calls_in_flight_are_compared() -> None:
    objcomm.barrier()
    with objcomm.configure(check="lines"):
        work: Any = _mine("all_gather", async_op=True)()
    assert desync_in(work.wait).reason == "other lines"
    assert_group_works()


@ranks(2, 3)
def test_calls_of_one_name_may_be_on_any_lines() -> None:
    with _logged() as found, objcomm.configure(check="lines"):
        for kind in _calls(2):
            _mine(kind, name="the same")()
    assert not found.told
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("operation", _named_calls(2))
def test_names_of_one_call_must_agree(operation: str) -> None:
    objcomm.barrier()
    name = "for all but the last" if here().rank < here().world_size - 1 else "for the last"
    call = _named_calls(here().world_size)[operation]
    error = desync_in(lambda: call(name=name), objcomm.barrier)
    assert error.reason == "different names"
    # A rank that had returned has moved on by now.
    names = {each.name for each in error.positions.values()}
    assert {"for all but the last", "for the last"} == names - {""}
    assert "'for the last' (call " in str(error)
    assert_group_works()


@ranks(2)
def test_a_call_without_a_name_differs_from_a_named_one() -> None:
    objcomm.barrier()
    named: dict[str, Any] = {"name": "x"} if here().rank == 0 else {}
    error = desync_in(lambda: objcomm.all_gather(1, **named))
    assert [error.positions[rank].name for rank in (0, 1)] == ["x", ""]
    assert_group_works()


@ranks(2)
def test_the_name_of_an_operator_is_not_the_name_of_a_call() -> None:
    objcomm.barrier()
    if here().rank == 0:
        error = desync_in(lambda: objcomm.all_reduce(1, max, name="max"))
    else:
        error = desync_in(lambda: objcomm.all_reduce(1, "max"))
    assert error.reason == "different names"
    assert_group_works()


@ranks(2)
def test_lines_of_blocks_are_those_of_their_beginning() -> None:
    """Regardless of how a rank leaves the block."""

    def leave(block: Any) -> int:
        with block():
            if here().rank == 1:
                return 1
            objcomm.rank()
        return 0

    with _logged() as found, objcomm.configure(check="lines"):
        assert leave(objcomm.fail_together) == here().rank
        assert leave(objcomm.main_first) == here().rank
    assert not found.told
    assert_group_works()


@ranks(1)
@pytest.mark.parametrize("given", ["line", 3, "", ["lines"]])
def test_an_unknown_check_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match=r"^configure: check=.* must be True, False or 'lines'"):
        objcomm.configure(check=given)
    assert objcomm.all_gather(1, name="alone") == [1]
