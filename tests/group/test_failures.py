"""One rank fails: which ranks raise, what the error reports, and that the group keeps working."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import objcomm
from objcomm import CollectiveError, EncodeError, UsageError
from tests.cases import case
from tests.group.helpers import RefusesToPickle, assert_group_works, error_in
from tests.group.operations import FROM_ONE, OBJECT_OPERATIONS, OPERATIONS, is_told
from tests.indescribable import ToldByAnother
from tests.ranks import ranks
from tests.samples import TwoArgumentError
from tests.workers import here


@ranks(2, 3)
@pytest.mark.parametrize("name", OBJECT_OPERATIONS)
def test_an_object_that_cannot_be_sent_fails_the_ranks_that_wait_for_it(name: str) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    codec = "pickle" if size == 3 else "msgpack"
    for failing in range(1 if name in FROM_ONE else size):
        mine: Any = {"cb": [threading.Lock()]} if rank == failing else "fine"
        call = partial(OPERATIONS[name], mine, codec=codec)
        if not is_told(name, failing, rank):
            assert call() in (None, "fine")
            assert_group_works()
            continue
        error = error_in(CollectiveError, call)
        assert (error.operation, list(error.failures)) == (name, [failing])
        failure = error.failures[failing]
        assert failure.rank == failing
        assert failure.type_name.endswith("EncodeError")
        assert "['cb']" in failure.message
        assert "lock" in failure.message
        assert "Traceback" in failure.traceback
        for named in (name, f"rank {failing}", "EncodeError", "['cb']"):
            assert named in str(error)
        if rank == failing:
            assert isinstance(error.__cause__, EncodeError)
            assert error.__cause__.type_name == "lock"
            assert error.__cause__.path.endswith("['cb'][0]")
        else:
            assert error.__cause__ is None
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


@ranks(2, 3)
@pytest.mark.parametrize("extra", [0, 5_000_000])
def test_a_failure_beside_large_contributions_leaves_nothing_behind(extra: int) -> None:
    mine = [bytes(extra), threading.Lock()] if objcomm.rank() == 1 else bytes(extra)
    error = error_in(CollectiveError, lambda: objcomm.all_gather(mine))
    assert list(error.failures) == [1]
    assert isinstance(error.__cause__, EncodeError) == (objcomm.rank() == 1)
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
def test_any_iterable_of_the_right_length_is_accepted() -> None:
    rank, size = here().rank, here().world_size
    root = size - 1
    kinds: dict[str, Callable[[], Any]] = {
        "generator": lambda: (10 * rank + peer for peer in range(size)),
        "range": lambda: range(10 * rank, 10 * rank + size),
        "map": lambda: map(int, [10 * rank + peer for peer in range(size)]),
        "deque": lambda: deque(10 * rank + peer for peer in range(size)),
        "values": lambda: dict(enumerate(range(10 * rank, 10 * rank + size))).values(),
        "keys": lambda: dict.fromkeys(10 * rank + peer for peer in range(size)).keys(),
        "tensor": lambda: torch.arange(10 * rank, 10 * rank + size),
        "array": lambda: np.arange(10 * rank, 10 * rank + size),
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


@ranks(2, 3)
def test_objects_that_do_not_fit_the_ranks_fail_every_rank_alike() -> None:
    size = here().world_size
    for root in range(size):
        is_root = here().rank == root
        wrong: dict[str, Any] = {
            "None": None,
            "int": 5,
            "str": "ab",
            "set": {0, 1, 2},
            "dict": {0: "a", 1: "b"},
            "list of 0": [],
            f"list of {size - 1}": [0] * (size - 1),
            f"list of {size + 1}": [0] * (size + 1),
            "generator of 0": (n for n in range(0)),
            f"count of more than {size}": itertools.count(),
        }
        scatter = partial(objcomm.scatter, src=root)
        calls: list[Any] = [scatter, objcomm.all_to_all, objcomm.reduce_scatter]
        for (kind, objs), call in itertools.product(wrong.items(), calls):
            reason = f"for each of {size} ranks, not a {kind}"
            with pytest.raises(CollectiveError, match=reason) as caught:
                call(objs if is_root else [1] * size)
            assert list(caught.value.failures) == [root]
            assert isinstance(caught.value.__cause__, UsageError) == is_root
        for call in (objcomm.all_to_all, objcomm.reduce_scatter):
            with pytest.raises(CollectiveError, match="of the program's own") as caught:
                call(_failing() if is_root else [1] * size)
            assert isinstance(caught.value.__cause__, TypeError) == is_root
    assert_group_works()


class LockedError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


ERRORS: dict[str, BaseException] = {
    "plain": ValueError("no"),
    "two arguments": TwoArgumentError(3, "no"),
    "unprintable": ToldByAnother(),
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
    is_own, error = objcomm.rank() == failing, ERRORS[kind]
    if stage == "encode" and objcomm.world_size() == 1:
        return  # a world of one sends nothing

    def fail(*_: object) -> Any:
        if stage == "encode":
            return RefusesToPickle(error)
        raise error

    fn1 = fail if is_own and stage != "fn2" else lambda: 1
    fn2 = fail if stage == "fn2" else sum
    is_interrupt = not isinstance(error, Exception)
    # A rank raises its own interrupt unchanged.
    with pytest.raises(type(error) if is_own and is_interrupt else CollectiveError) as caught:
        objcomm.reduce_and_broadcast(fn1, fn2)
    if isinstance(caught.value, CollectiveError):
        assert list(caught.value.failures) == [failing]
        failure = caught.value.failures[failing]
        assert isinstance(failure.message, str)
        is_wrapped = stage == "encode" and not is_interrupt
        assert failure.type_name.endswith("EncodeError" if is_wrapped else type(error).__name__)
        assert str(caught.value)
    assert_group_works()
