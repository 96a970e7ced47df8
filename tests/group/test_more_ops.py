"""The named operations on whole objects, and Op: values, ties, conflicts and refusals."""

import collections
import itertools
import math
import operator
from typing import Any

import numpy as np
import pytest
import torch

import objcomm
from objcomm import CollectiveError, DesyncError, UsageError
from tests.cases import case
from tests.group.helpers import assert_group_works, subgroup
from tests.ranks import ranks
from tests.same import assert_same
from tests.workers import here

LARGE = 2_000_000


@ranks(1, 2, 3, 4)
def test_argmin_and_argmax_name_the_lowest_rank_of_the_best() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    least: Any = objcomm.all_reduce(0.5 if rank else 0.25, "argmin")
    assert (least.value, least.rank) == (0.25, 0)
    greatest: Any = objcomm.all_reduce(min(rank, 1), "argmax")
    value, holder = greatest
    assert (value, holder) == (min(size - 1, 1), min(size - 1, 1))
    tied: Any = objcomm.reduce(7, "argmax", dst=size - 1)
    assert (tied and tuple(tied)) == ((7, 0) if rank == size - 1 else None)


@ranks(1, 2, 3, 4)
def test_not_a_number_is_the_least_and_the_greatest() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for op in ("argmin", "argmax"):
        best: Any = objcomm.all_reduce(math.nan if rank >= size - 2 else 1.0, op)
        assert math.isnan(best.value)
        assert best.rank == max(0, size - 2)
        tensors: Any = objcomm.all_reduce(torch.tensor([1.0, math.nan if rank else 1.0]), op)
        assert tensors.rank.tolist() == [0, min(1, size - 1)]


@ranks(1, 2, 3, 4)
def test_argmin_of_tensors_and_arrays_is_elementwise() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    mine = torch.tensor([[rank, -rank, 3, (rank - 1) ** 2]])
    got: Any = objcomm.all_reduce(mine, "argmin")
    assert_same(got.value, torch.tensor([[0, 1 - size, 3, 0 if size > 1 else 1]]))
    assert_same(got.rank, torch.tensor([[0, size - 1, 0, 1 if size > 1 else 0]]))
    array: Any = objcomm.all_reduce(mine.numpy(), "argmax")
    assert_same(array.value, np.array([[size - 1, 0, 3, max(1, (size - 2) ** 2)]]))
    assert array.rank.tolist() == [[size - 1, 0, 0, 3 if size == 4 else 0]]


@ranks(4)
def test_the_rank_that_argmin_names_is_one_of_the_group() -> None:
    with subgroup(1, 3) as group:
        if here().rank in (1, 3):
            best: Any = objcomm.all_reduce(-here().rank, "argmin", group=group)
            assert tuple(best) == (-3, 1)


@ranks(2)
@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
def test_every_codec_carries_what_has_a_type_of_its_own(codec: str) -> None:
    with objcomm.configure(allow=()):
        best: Any = objcomm.all_reduce(objcomm.rank(), "argmin", codec=codec)
        counts = objcomm.all_reduce(["a"], "counter", codec=codec)
    assert (best.value, best.rank) == (0, 0)
    assert_same(counts, collections.Counter(a=2))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("length", [1, LARGE // 40])
def test_concat_joins_in_rank_order(length: int) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for make in (
        lambda i: [i] * length,
        lambda i: (i,) * length,
        lambda i: chr(97 + i) * length,
        lambda i: bytes([i]) * length,
    ):
        want: Any = [member for i in range(size) for member in make(i)]
        mine = make(rank)
        got = objcomm.all_reduce(mine, "concat")
        assert type(got) is type(mine)
        assert list(got) == want
        assert mine == make(rank)
        reduced = objcomm.reduce(mine, "concat", dst=size - 1)
        assert reduced is None or list(reduced) == want
    tensor = torch.full((rank + 1, length), rank)
    want = torch.cat([torch.full((i + 1, length), i) for i in range(size)])
    assert_same(objcomm.all_reduce(tensor, "concat"), want)
    assert_same(objcomm.all_reduce(tensor.numpy(), "concat"), want.numpy())


@ranks(2, 3)
def test_concat_refuses_what_does_not_fit() -> None:
    misfits: list[tuple[Any, Any]] = [
        ([1], (1,)),
        ("a", b"a"),
        (torch.ones(2), torch.ones(2).double()),
        (torch.ones(2, 3), torch.ones(2, 2)),
        (torch.ones(2), np.ones(2, np.float32)),
        (torch.tensor(1), torch.tensor(1)),
        (3, 3),
        (None, []),
        ({}, {}),
    ]
    for operands in misfits:
        with case(operands), pytest.raises(CollectiveError):
            objcomm.all_reduce(operands[objcomm.rank() % 2], "concat")
        assert_group_works()


@ranks(1, 2, 3, 4)
def test_union_of_sets_and_dicts() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    assert_same(objcomm.all_reduce({rank, -1}, "union"), {-1, *range(size)})
    assert_same(objcomm.all_reduce(frozenset({rank}), "union"), frozenset(range(size)))
    shared = {"same": 3, "w": torch.ones(2), "a": np.ones(2), "nan": math.nan}
    mine: dict[str, Any] = (
        {f"r{rank}": rank, **shared} if rank == 0 else {f"r{rank}": rank, "same": 3}
    )
    got = objcomm.all_reduce(mine, "union")
    assert list(got) == ["r0", *shared, *(f"r{i}" for i in range(1, size))]
    equal = objcomm.all_reduce({"w": torch.ones(2), "n": [1]}, "union")
    assert_same(equal, {"w": torch.ones(2), "n": [1]})


@ranks(2, 3)
def test_a_key_with_two_values_is_an_error_that_names_it() -> None:
    pairs: list[tuple[Any, Any]] = [
        (1, 2),
        (torch.ones(2), torch.zeros(2)),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), 1),
        ("a", None),
    ]
    for pair in pairs:
        with case(pair), pytest.raises(CollectiveError, match="key 'lr' has different values"):
            objcomm.all_reduce({"lr": pair[min(objcomm.rank(), 1)]}, "union")
        assert_group_works()


@ranks(2)
def test_union_refuses_what_does_not_fit() -> None:
    for mine in (3, [1], {1} if objcomm.rank() else {1: 1}):
        with pytest.raises(CollectiveError):
            objcomm.all_reduce(mine, "union")
    assert_group_works()


@ranks(1, 2, 3, 4)
def test_counter_counts_members_of_any_iterable() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    got: Any = objcomm.all_reduce(["cat"] * (rank + 1) + ["dog"], "counter")
    assert_same(got, collections.Counter(cat=size * (size + 1) // 2, dog=size))
    mine = collections.Counter(a=-1, b=rank)
    got = objcomm.all_reduce(mine, "counter")
    assert_same(got, collections.Counter(a=-size, b=size * (size - 1) // 2))
    assert_same(mine, collections.Counter(a=-1, b=rank))
    with pytest.raises(CollectiveError, match="put the 'cat' into a list"):
        objcomm.all_reduce("cat", "counter")
    assert_group_works()


@ranks(1, 2, 3, 4)
def test_an_op_of_ones_own_keeps_rank_order() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for slow, length in itertools.product((False, True), (1, LARGE)):
        join = objcomm.Op(operator.add, slow=slow, identity="")
        want = "".join(chr(97 + i) * length for i in range(size))
        with case(slow, length):
            assert objcomm.all_reduce(chr(97 + rank) * length, join) == want
            for root in range(size):
                got = objcomm.reduce(chr(97 + rank) * length, join, dst=root)
                assert got == (want if rank == root else None)


@ranks(2, 3, 4)
@pytest.mark.parametrize("length", [1, LARGE])
def test_a_commutative_op_ends_where_it_is_wanted(length: int) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    calls = []

    def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return left + right

    for root in range(size):
        calls.clear()
        mine = torch.full((length,), rank)
        got = objcomm.reduce(mine, objcomm.Op(add, commutative=True, slow=True), dst=root)
        want = torch.full((length,), size * (size - 1) // 2)
        assert got is None if rank != root else torch.equal(got, want)
        combined = objcomm.all_gather(len(calls))
        assert sum(combined) == size - 1
        assert combined[root] == (size - 1).bit_length(), "a tree of its own"


@ranks(2)
def test_ranks_with_other_kinds_of_op_are_out_of_step() -> None:
    with pytest.raises(DesyncError):
        objcomm.all_reduce(1, objcomm.Op(operator.add, slow=objcomm.rank() == 1))
    assert_group_works()


def test_an_op_is_frozen_and_takes_only_callables() -> None:
    op = objcomm.Op(max, identity=0)
    assert (op.fn, op.commutative, op.identity, op.slow) == (max, False, 0, False)
    with pytest.raises(AttributeError):
        op.slow = True  # type: ignore[misc]  # it is frozen
    wrong: Any = "sum"
    with pytest.raises(UsageError, match="'sum'"):
        objcomm.Op(wrong)
