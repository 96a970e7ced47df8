"""One rank fails: who hears of it, what they are told, and that the group works on."""

import threading
from typing import Any

import pytest

import objcomm
from objcomm import CollectiveError, EncodeError
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
    assert "rank 0" in str(caught.value)
    assert "rank 2" in str(caught.value)
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


@ranks(1)
def test_a_scatter_of_the_wrong_length_fails_in_a_world_of_one_too() -> None:
    with pytest.raises((CollectiveError, objcomm.UsageError)):
        objcomm.scatter([1, 2])
    assert_group_works()


@ranks(3)
@pytest.mark.parametrize("objs", [None, 3, {0, 1, 2}], ids=repr)
def test_a_scatter_of_no_sequence_fails_every_rank_alike(objs: Any) -> None:
    with pytest.raises(CollectiveError) as caught:
        objcomm.scatter(objs if objcomm.rank() == 0 else None)
    assert list(caught.value.failures) == [0]
    assert_group_works()


class UnprintableError(Exception):
    """An exception whose text cannot be had."""

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
