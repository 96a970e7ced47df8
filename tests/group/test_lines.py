"""One call that ranks make on different lines: logged once, or refused, unless it has a name."""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import objcomm
from objcomm import DesyncError, UsageError
from objcomm._observe import lines
from tests.group.helpers import assert_group_works, error_in, subgroup
from tests.group.logs import Collecting, collected
from tests.group.operations import OPERATIONS
from tests.group.watched import closely, patiently
from tests.ranks import OVER_GLOO, ranks
from tests.workers import here

HERE = Path(__file__).name
Options = dict[str, Any]

#: The same call on two lines: the call of the first rank and that of the others.
ON_TWO_LINES: dict[str, tuple[Callable[[Options], Any], Callable[[Options], Any]]] = {
    "broadcast": (
        lambda named: objcomm.broadcast(1, **named),
        lambda named: objcomm.broadcast(None, **named),
    ),
    "broadcast from the last": (
        lambda named: objcomm.broadcast(1, objcomm.world_size() - 1, **named),
        lambda named: objcomm.broadcast(2, objcomm.world_size() - 1, **named),
    ),
    "gather": (
        lambda named: objcomm.gather(1, **named),
        lambda named: objcomm.gather(2, **named),
    ),
    "all_gather": (
        lambda named: objcomm.all_gather(1, **named),
        lambda named: objcomm.all_gather(2, **named),
    ),
    "all_gather of large objects": (
        lambda named: objcomm.all_gather(bytes(300_000), **named),
        lambda named: objcomm.all_gather(bytes(300_000), **named),
    ),
    "scatter": (
        lambda named: objcomm.scatter([1] * objcomm.world_size(), **named),
        lambda named: objcomm.scatter(None, **named),
    ),
    "all_to_all": (
        lambda named: objcomm.all_to_all([1] * objcomm.world_size(), **named),
        lambda named: objcomm.all_to_all([2] * objcomm.world_size(), **named),
    ),
    "reduce": (
        lambda named: objcomm.reduce(1, **named),
        lambda named: objcomm.reduce(2, **named),
    ),
    "all_reduce": (
        lambda named: objcomm.all_reduce(1, **named),
        lambda named: objcomm.all_reduce(2, **named),
    ),
    "scan": (
        lambda named: objcomm.scan(1, **named),
        lambda named: objcomm.scan(2, **named),
    ),
    "barrier": (
        lambda named: objcomm.barrier(**named),
        lambda named: objcomm.barrier(**named),
    ),
    "agree": (
        lambda named: objcomm.agree(1, **named),
        lambda named: objcomm.agree(1, **named),
    ),
    "run_on_main with what follows it": (
        lambda named: objcomm.run_on_main(int, post_func=int, **named),
        lambda named: objcomm.run_on_main(int, post_func=int, **named),
    ),
    "run_once_per_node": (
        lambda named: objcomm.run_once_per_node(int, **named),
        lambda named: objcomm.run_once_per_node(int, **named),
    ),
    "split": (
        lambda named: objcomm.split(0, **named),
        lambda named: objcomm.split(0, **named),
    ),
    "average_tensors": (
        lambda named: objcomm.models.average_tensors([torch.ones(1)], **named),
        lambda named: objcomm.models.average_tensors([torch.ones(1)], **named),
    ),
}


def _fail_together(_: object, **options: Any) -> None:
    with objcomm.fail_together(**options):
        pass


def _eager_sync_model(_: object, **options: Any) -> None:
    with objcomm.models.eager_sync_model(torch.nn.Linear(1, 1), **options):
        torch.zeros(1)


#: More operations that take a name, called the same way.
NAMED: dict[str, Callable[..., Any]] = OPERATIONS | {
    "agree": objcomm.agree,
    "any_rank": objcomm.any_rank,
    "all_ranks": objcomm.all_ranks,
    "shared_seed": lambda _, **options: objcomm.shared_seed(**options),
    "split": lambda _, **options: objcomm.split(0, **options),
    "dup": lambda _, **options: objcomm.dup(**options),
    "node_group": lambda _, **options: objcomm.node_group(**options),
    "leaders": lambda _, **options: objcomm.leaders(**options),
    "new_group": lambda _, **options: objcomm.new_group(range(objcomm.world_size()), **options),
    "average_metrics": lambda _, **options: objcomm.metrics.average_metrics({"a": 1}, **options),
    "gather_from_all_ranks": lambda _, **options: objcomm.metrics.gather_from_all_ranks(
        int, **options
    ),
    "compute_and_broadcast": lambda _, **options: objcomm.compute_and_broadcast(int, **options),
    "run_on_main": lambda _, **options: objcomm.run_on_main(int, **options),
    "fail_together": _fail_together,
    "sync_buffers": lambda _, **options: objcomm.models.sync_buffers([torch.ones(1)], **options),
    "broadcast_model": lambda _, **options: objcomm.models.broadcast_model(
        torch.nn.Linear(1, 1), **options
    ),
    "eager_sync_model": _eager_sync_model,
}


@contextlib.contextmanager
def _logged() -> Iterator[Collecting]:
    """The warnings of a process that has not yet seen any line."""
    with mock.patch.object(lines, "_known", set()), collected(logging.WARNING) as found:
        yield found


def _desync_in(*calls: Callable[[], Any]) -> DesyncError:
    """The error that one of these calls must raise; a rank that waits for no other raises later."""

    def make_calls() -> None:
        for call in calls:
            call()

    with closely(), patiently():
        error: DesyncError = error_in(DesyncError, make_calls)
    return error


def _mine(kind: str, **named: Any) -> Callable[[], Any]:
    call = ON_TWO_LINES[kind][min(here().rank, 1)]
    return lambda: call(named)


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
        assert _desync_in(_mine("gather"), objcomm.barrier).reason == "other lines"
        assert_group_works()


@ranks(3)
def test_the_record_says_in_which_group() -> None:
    with subgroup(1, 2) as group, _logged() as found:
        if here().rank == 1:
            objcomm.all_gather(1, group=group)
        elif here().rank == 2:
            objcomm.all_gather(2, group=group)
        told = [vars(each)["group"] for each in found.records]
        assert told == ([] if here().rank == 0 else [group.group_name])


@ranks(2, 3)
def test_a_root_in_a_branch_of_its_own_is_not_logged() -> None:
    with _logged() as found:
        if here().rank == 0:
            assert objcomm.broadcast("mine") == "mine"
        else:
            assert objcomm.broadcast(None) == "mine"
        assert objcomm.scatter(_gathered_early()) == 1
        assert not found.told


def _gathered_early() -> list[int] | None:
    if here().rank != 0:
        objcomm.gather(1)
        return None
    gathered: list[int] = objcomm.gather(1)
    return gathered


@ranks(2, 3)
def test_a_broadcast_too_many_is_logged() -> None:
    with _logged() as found:
        for step in range(3 if here().rank == 0 else 2):
            objcomm.broadcast(("step", step))
        value = objcomm.broadcast(("value", 0))
        if here().rank > 0:
            assert value == ("step", 2)
            objcomm.broadcast(None)
        assert len(found.told) == (0 if here().rank == 0 else 2)  # the source waits for no rank
    objcomm.barrier()


@ranks(2, 3)
@pytest.mark.parametrize("kind", ON_TWO_LINES)
def test_other_lines_can_be_an_error_of_every_rank(kind: str) -> None:
    objcomm.barrier()
    with _logged() as found, objcomm.configure(check="lines"):
        error = _desync_in(_mine(kind), objcomm.barrier)
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
        assert _desync_in(_mine("all_gather"), objcomm.barrier).reason == "other lines"
    assert_group_works()


@ranks(2, environment={"OBJCOMM_CHECK": "lines"})
def test_the_environment_can_ask_for_lines() -> None:
    objcomm.broadcast(1)
    assert objcomm.stats()["broadcast"].exchanges == 1  # no ranks have met before
    assert _desync_in(_mine("all_gather"), objcomm.barrier).reason == "other lines"
    assert_group_works()
    with objcomm.configure(check=False), _logged() as found:
        _mine("all_gather")()
        assert len(found.told) == 1
    assert_group_works()


@ranks(2)
def test_lines_of_signed_messages_are_compared() -> None:
    with objcomm.configure(key=b"a key of sixteen bytes", check="lines"):
        objcomm.barrier()
        assert _desync_in(_mine("broadcast"), objcomm.barrier).reason == "other lines"
        assert_group_works()


@ranks(2)
def test_lines_of_calls_in_flight_are_compared() -> None:
    objcomm.barrier()
    with objcomm.configure(check="lines"):
        work: Any = _mine("all_gather", async_op=True)()
    assert _desync_in(work.wait).reason == "other lines"
    assert_group_works()


@ranks(2, 3)
def test_calls_of_one_name_may_be_on_any_lines() -> None:
    with _logged() as found, objcomm.configure(check="lines"):
        for kind in ON_TWO_LINES:
            _mine(kind, name="the same")()
        assert not found.told
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("operation", NAMED)
def test_names_of_one_call_must_agree(operation: str) -> None:
    objcomm.barrier()
    name = "for all but the last" if here().rank < here().world_size - 1 else "for the last"
    error = _desync_in(lambda: NAMED[operation](1, name=name), objcomm.barrier)
    assert error.reason == "different names"
    # A rank that had returned has moved on by now.
    names = {each.name for each in error.positions.values()}
    assert {"for all but the last", "for the last"} == names - {""}
    assert "'for the last' (call " in str(error)
    assert_group_works()


@ranks(2)
def test_a_call_without_a_name_is_another_one() -> None:
    objcomm.barrier()
    named: Options = {"name": "x"} if here().rank == 0 else {}
    error = _desync_in(lambda: objcomm.all_gather(1, **named))
    assert [error.positions[rank].name for rank in (0, 1)] == ["x", ""]
    assert_group_works()


@ranks(2)
def test_the_name_of_an_operator_is_none_of_a_call() -> None:
    objcomm.barrier()
    if here().rank == 0:
        error = _desync_in(lambda: objcomm.all_reduce(1, max, name="max"))
    else:
        error = _desync_in(lambda: objcomm.all_reduce(1, "max"))
    assert error.reason == "different names"
    assert_group_works()


@ranks(2)
def test_lines_of_blocks_are_those_of_their_beginning() -> None:
    """Regardless of how a rank leaves the block."""
    with _logged() as found, objcomm.configure(check="lines"):
        assert _left(objcomm.fail_together) == here().rank
        assert _left(objcomm.main_first) == here().rank
        assert not found.told
    assert_group_works()


def _left(block: Any) -> int:
    with block():
        if here().rank == 1:
            return 1
        objcomm.rank()
    return 0


@ranks(1)
@pytest.mark.parametrize("given", ["line", 3, "", ["lines"]])
def test_a_check_is_one_that_there_is(given: Any) -> None:
    with pytest.raises(UsageError, match=r"^configure: check=.* must be True, False or 'lines'"):
        objcomm.configure(check=given)
    assert objcomm.all_gather(1, name="alone") == [1]
