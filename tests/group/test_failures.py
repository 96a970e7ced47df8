"""One rank fails: which ranks raise, what the error reports, and that the group keeps working."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import objcomm
from objcomm import CollectiveError, EncodeError, UsageError
from tests.cases import case
from tests.group.helpers import (
    RefusesToPickle,
    assert_group_works,
    subgroup,
)
from tests.group.operations import FROM_ONE, OBJECT_OPERATIONS, OPERATIONS, is_told
from tests.ranks import ranks
from tests.samples import TwoArgumentError
from tests.workers import here


@ranks(2, 3)
@pytest.mark.parametrize("name", OBJECT_OPERATIONS)
def test_an_object_that_cannot_be_sent_fails_those_who_wait_for_it(name: str) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    codec = "pickle" if size == 3 else "msgpack"
    for failing in range(1 if name in FROM_ONE else size):
        mine: Any = {"cb": [threading.Lock()]} if rank == failing else "fine"
        if not is_told(name, failing, rank):
            assert OPERATIONS[name](mine, codec=codec) in (None, "fine")
        else:
            with pytest.raises(CollectiveError) as caught:
                OPERATIONS[name](mine, codec=codec)
            _check_told(caught.value, name, failing)
            cause = caught.value.__cause__
            if rank == failing:
                assert isinstance(cause, EncodeError)
                assert cause.type_name == "lock"
                assert cause.path.endswith("['cb'][0]")
            else:
                assert cause is None
        assert_group_works()


@ranks(1)
@pytest.mark.parametrize("name", OBJECT_OPERATIONS)
def test_a_world_of_one_sends_nothing_and_so_takes_anything(name: str) -> None:
    lock = threading.Lock()
    got = OPERATIONS[name](lock)
    if name == "exscan":
        assert got is None
    else:
        assert (got[0] if isinstance(got, list) else got) is lock


def _check_told(error: CollectiveError, operation: str, failing: int) -> None:
    assert error.operation == operation
    assert list(error.failures) == [failing]
    failure = error.failures[failing]
    assert failure.rank == failing
    assert failure.type_name.endswith("EncodeError")
    assert "['cb']" in failure.message
    assert "lock" in failure.message
    assert "Traceback" in failure.traceback
    for told in (operation, f"rank {failing}", "EncodeError", "['cb']"):
        assert told in str(error)


@ranks(3)
def test_all_failing_ranks_are_named_at_once() -> None:
    mine = threading.Lock() if objcomm.rank() != 1 else "fine"
    with pytest.raises(CollectiveError) as caught:
        objcomm.all_gather(mine)
    assert sorted(caught.value.failures) == [0, 2]
    assert str(caught.value).startswith("all_gather failed on ranks 0, 2: ")
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("extra", [0, 5_000_000])
def test_a_failure_beside_large_contributions_leaves_nothing_behind(extra: int) -> None:
    mine = [bytes(extra), threading.Lock()] if objcomm.rank() == 1 else bytes(extra)
    with pytest.raises(CollectiveError) as caught:
        objcomm.all_gather(mine)
    assert list(caught.value.failures) == [1]
    if objcomm.rank() < 2:
        assert (objcomm.rank() == 1) == isinstance(caught.value.__cause__, EncodeError)
    assert_group_works()


@ranks(3)
@pytest.mark.parametrize("length", [0, 2, 4])
def test_a_scatter_of_the_wrong_length_fails_every_rank_alike(length: int) -> None:
    with pytest.raises(CollectiveError) as caught:
        objcomm.scatter(list(range(length)) if objcomm.rank() == 1 else None, src=1)
    assert list(caught.value.failures) == [1]
    assert str(length) in caught.value.failures[1].message
    assert "3" in caught.value.failures[1].message
    assert_group_works()


@ranks(1, 2)
def test_a_wrong_number_of_objects_is_a_usage_error_in_a_group_of_one() -> None:
    group = objcomm.split(here().rank)
    calls: list[Any] = [objcomm.scatter, objcomm.all_to_all, objcomm.reduce_scatter]
    wrong: list[Any] = [None, [], [1, 2], iter(()), itertools.count(), "x"]
    for call, objs in itertools.product(calls, wrong):
        with pytest.raises(ValueError, match="give one object for each of 1 ranks") as caught:
            call(objs, group=group)
        assert isinstance(caught.value, UsageError)
    with pytest.raises(CollectiveError, match="of the program's own"):
        objcomm.scatter(_failing(), group=group)
    assert_group_works(group)


@ranks(1, 3)
def test_any_iterable_of_the_right_length_serves() -> None:
    rank, size = here().rank, here().world_size
    root = size - 1
    kinds: dict[str, Callable[[], Any]] = {
        "generator": lambda: (10 * rank + peer for peer in range(size)),
        "range": lambda: range(10 * rank, 10 * rank + size),
        "map": lambda: map(int, [10 * rank + peer for peer in range(size)]),
        "deque": lambda: deque(10 * rank + peer for peer in range(size)),
        "values": lambda: dict(enumerate(range(10 * rank, 10 * rank + size))).values(),
        "keys": lambda: dict.fromkeys(10 * rank + peer for peer in range(size)).keys(),
    }
    for kind, make in kinds.items():
        with case(kind):
            assert objcomm.scatter(make(), root) == 10 * root + rank
            assert objcomm.all_to_all(make()) == [10 * peer + rank for peer in range(size)]
            assert objcomm.reduce_scatter(make()) == sum(10 * peer + rank for peer in range(size))
    mine = object() if rank == root else None
    got = objcomm.scatter(iter([None] * root + [mine]), root)
    assert got is mine
    assert_group_works()


def _failing() -> Iterator[int]:
    yield 1
    raise TypeError("of the program's own iterable")


@ranks(2)
def test_an_iterable_that_does_not_serve_fails_every_rank_alike() -> None:
    is_last = here().rank == 1
    wrong: dict[str, Any] = {
        "generator of 1": (n for n in range(1)),
        "count of more than 2": itertools.count(),
        "set": {1, 2},
        "dict": {0: "a", 1: "b"},
        "str": "ab",
        "int": 5,
        "list of 3": [1, 2, 3],
    }
    for kind, objs in wrong.items():
        with pytest.raises(CollectiveError, match=f"not a {kind}") as caught:
            objcomm.scatter(objs if is_last else None, 1)
        assert isinstance(caught.value.__cause__, UsageError) == is_last
    for call in (objcomm.all_to_all, objcomm.reduce_scatter):
        with pytest.raises(CollectiveError, match="of the program's own") as caught:
            call(_failing() if is_last else [1, 2])
        assert isinstance(caught.value.__cause__, TypeError) == is_last
    assert_group_works()


@ranks(3)
@pytest.mark.parametrize("objs", [None, 3, {0, 1, 2}], ids=repr)
def test_a_scatter_of_no_sequence_fails_every_rank_alike(objs: Any) -> None:
    with pytest.raises(CollectiveError) as caught:
        objcomm.scatter(objs if objcomm.rank() == 0 else None)
    assert list(caught.value.failures) == [0]
    assert_group_works()


class UnprintableError(Exception):
    """An exception whose ``str`` raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class LockedError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


ERRORS: dict[str, BaseException] = {
    "plain": ValueError("no"),
    "two arguments": TwoArgumentError(3, "no"),
    "unprintable": UnprintableError(),
    "holding a lock": LockedError(),
    "of two megabytes": ValueError("é" * 1_000_000),
    "with odd text": ValueError("\ud800 \0 \N{GRINNING FACE}"),
    "KeyboardInterrupt": KeyboardInterrupt("pressed"),
    "SystemExit": SystemExit(3),
    "MemoryError": MemoryError(),
}


@ranks(1, 3)
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("stage", ["encode", "fn1", "fn2"])
def test_whatever_is_raised_reaches_every_rank(kind: str, stage: str) -> None:
    failing = 0 if stage == "fn2" else objcomm.world_size() - 1
    error = ERRORS[kind]
    if stage == "encode" and objcomm.world_size() == 1:
        return  # a world of one sends nothing

    def fail(*_: object) -> Any:
        if stage == "encode":
            return RefusesToPickle(error)
        raise error

    fn1 = fail if objcomm.rank() == failing and stage != "fn2" else lambda: 1
    fn2 = fail if stage == "fn2" else sum
    expected = CollectiveError
    is_own = objcomm.rank() == failing
    if is_own and not isinstance(error, Exception):
        expected = type(error)  # type: ignore[assignment]  # its own interrupt is re-raised
    with pytest.raises(expected) as caught:
        objcomm.reduce_and_broadcast(fn1, fn2)
    if expected is CollectiveError:
        assert list(caught.value.failures) == [failing]
        told = caught.value.failures[failing]
        assert isinstance(told.message, str)
        named = "EncodeError" if stage == "encode" and isinstance(error, Exception) else None
        assert told.type_name.endswith(named or type(error).__name__)
        assert str(caught.value)
    assert_group_works()


@ranks(4)
def test_a_failure_in_a_subgroup_is_told_in_its_ranks_and_to_its_members_only() -> None:
    with subgroup(1, 3) as group:
        if here().rank in {1, 3}:
            mine = threading.Lock() if here().rank == 3 else 1
            with pytest.raises(CollectiveError) as caught:
                objcomm.all_gather(mine, group=group)
            assert list(caught.value.failures) == [1]
            assert_group_works(group)
        assert_group_works()
