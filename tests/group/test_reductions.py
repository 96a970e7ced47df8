"""reduce and all_reduce with a user-defined operation: order, copies, sizes and failures."""

import functools
import itertools
import random
from typing import Any

import pytest
import torch

import objcomm
from objcomm import CollectiveError, UsageError
from tests.cases import case
from tests.group.helpers import assert_group_works, subgroup
from tests.ranks import ranks, solo
from tests.workers import here

# Operands of this size are combined along a tree, smaller ones on one rank.
LARGE = 3_000_000


def join(left: Any, right: Any) -> Any:
    """Combine associatively, but not commutatively."""
    return left + right


def merge(left: list[Any], right: list[Any]) -> list[Any]:
    """Mutate the left operand, as a user's ``merge`` often does."""
    left.extend(right)
    return left


@ranks(1, 2, 3, 4)
def test_operands_stay_in_rank_order() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    want = "".join(f"<{i}>" for i in range(size))
    assert objcomm.all_reduce(f"<{rank}>", join) == want
    for root in range(size):
        assert objcomm.reduce(f"<{rank}>", join, dst=root) == (want if rank == root else None)
        reduced = objcomm.reduce(f"<{rank}>", join, group_dst=root)
        assert reduced == (want if rank == root else None)


@ranks(2, 3, 4)
def test_operands_stay_in_rank_order_whatever_their_sizes() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    of_all: tuple[set[int], ...] = (set(range(size)), set(), {0}, {1}, {size - 1})
    for large in of_all:
        operands = [bytes([65 + i]) * ((LARGE if i in large else 10) + i) for i in range(size)]
        want = b"".join(operands)
        with case(large):
            assert objcomm.all_reduce(operands[rank], join) == want
            for root in range(size):
                got = objcomm.reduce(operands[rank], join, dst=root)
                assert got == (want if rank == root else None)
    assert_group_works()


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("side", [2, 400])
def test_matrices_are_multiplied_in_rank_order(side: int) -> None:
    def matrix(i: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(i)
        return torch.randint(-2, 3, (side, side), generator=generator)

    want = functools.reduce(torch.matmul, [matrix(i) for i in range(objcomm.world_size())])
    got = objcomm.all_reduce(matrix(objcomm.rank()), torch.matmul)
    assert torch.equal(got, want)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("length", [1, 50_000])
def test_an_operation_may_change_its_left_operand_but_nobodys_input(length: int) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    mine = [rank] * length
    want = [i for i in range(size) for _ in range(length)]
    for _ in range(2):
        assert objcomm.all_reduce(mine, merge) == want
        reduced = objcomm.reduce(mine, merge, dst=size - 1)
        assert reduced == (want if rank == size - 1 else None)
        assert mine == [rank] * length


@ranks(2, 3, 4)
@pytest.mark.parametrize("numel", [2, 500_000])
def test_an_operation_in_place_on_tensors_changes_nobodys_input(numel: int) -> None:
    mine = torch.full((numel,), objcomm.rank() + 1)
    held = {"weight": mine}

    def add(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> Any:
        left["weight"] += right["weight"]
        return left

    size = objcomm.world_size()
    got = objcomm.all_reduce(held, add)
    assert torch.equal(got["weight"], torch.full((numel,), size * (size + 1) // 2))
    assert torch.equal(mine, torch.full((numel,), objcomm.rank() + 1))
    got["weight"].zero_()
    assert torch.equal(mine, torch.full((numel,), objcomm.rank() + 1))


@ranks(1, 2, 3, 4)
def test_the_result_has_the_same_bits_on_every_rank() -> None:
    ops: tuple[Any, ...] = ("sum", "mean", "prod", torch.add)
    for op, numel in itertools.product(ops, (1, 1000, 1_000_000)):
        generator = torch.Generator().manual_seed(objcomm.rank())
        mine = torch.randn(numel, generator=generator) * 1e3
        with case(op, numel):
            got = objcomm.all_reduce(mine, op)
            ends = objcomm.all_gather(got[-1000:])
            assert len({bytes(each.view(torch.uint8).tolist()) for each in ends}) == 1
            sums = objcomm.all_gather(int(got.view(torch.int32).sum(dtype=torch.int64)))
            assert len(set(sums)) == 1


@ranks(2, 3, 4)
def test_sums_of_python_floats_have_the_same_bits_on_every_rank() -> None:
    for seed in range(3):
        number = random.Random(seed * 10 + objcomm.rank()).uniform(-1e9, 1e9)
        got = objcomm.all_gather(objcomm.all_reduce(number, join).hex())
        assert len(set(got)) == 1


class Confusion:
    """A user-defined accumulator."""

    def __init__(self, counts: dict[tuple[int, int], int]) -> None:
        self.counts = counts

    def merge(self, other: "Confusion") -> "Confusion":
        for pair, count in other.counts.items():
            self.counts[pair] = self.counts.get(pair, 0) + count
        return self


@ranks(1, 2, 3, 4)
def test_an_object_of_the_users_own_is_reduced_with_its_method() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    mine = Confusion({(rank, rank): 2, (0, 1): 1})
    got = objcomm.all_reduce(mine, Confusion.merge)
    want = {(i, i): 2 for i in range(size)}
    want[0, 1] = size + want.get((0, 1), 0)
    assert got.counts == want
    assert mine.counts == {(rank, rank): 2, (0, 1): 1}
    on_root = objcomm.reduce(mine, lambda a, b: a.merge(b), dst=size - 1)
    assert (on_root and on_root.counts) == (want if rank == size - 1 else None)


@ranks(2, 3, 4)
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_an_operation_that_always_raises_fails_every_rank(nbytes: int) -> None:
    def refuse(left: bytes, right: bytes) -> bytes:
        raise ArithmeticError(f"cannot add {left[:1]!r} and {right[:1]!r}")

    with pytest.raises(CollectiveError) as caught:
        objcomm.all_reduce(bytes(nbytes), refuse)
    assert caught.value.operation == "all_reduce"
    for failed, told in caught.value.failures.items():
        assert told.type_name.endswith("ArithmeticError")
        assert "refuse" in told.traceback
        if failed == objcomm.rank():
            assert isinstance(caught.value.__cause__, ArithmeticError)
    assert_group_works()


@ranks(2, 3, 4)
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_an_operation_that_raises_on_one_rank_gives_all_the_same_outcome(nbytes: int) -> None:
    outcome: list[Any]

    def add(left: bytes, right: bytes) -> bytes:
        if here().rank == failing:
            raise ArithmeticError("only here")
        return left + right

    for failing in range(objcomm.world_size()):
        try:
            outcome = [len(objcomm.all_reduce(bytes(nbytes), add))]
        except CollectiveError as error:
            outcome = ["failed on", *error.failures]
        assert outcome in ([nbytes * objcomm.world_size()], ["failed on", failing])
        assert objcomm.all_gather(outcome) == [outcome] * objcomm.world_size()
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_a_reduction_that_fails_raises_on_the_destination(nbytes: int) -> None:
    def refuse(*_: bytes) -> bytes:
        raise ArithmeticError("no")

    for root in range(objcomm.world_size()):
        try:
            got = objcomm.reduce(bytes(nbytes), refuse, dst=root)
        except CollectiveError as error:
            heard = sorted(error.failures)
        else:
            assert got is None
            heard = []
        everyone = objcomm.all_gather(heard)
        assert everyone[root] != []
        for failed in everyone[root]:
            assert failed in everyone[failed]
    assert_group_works()


@ranks(2, 3)
def test_a_result_that_cannot_be_sent_fails_every_rank() -> None:
    def chain(left: Any, right: Any) -> Any:
        return (number for number in [*left, *right])

    with pytest.raises(CollectiveError):
        objcomm.all_reduce([1], chain)
    assert_group_works()


@ranks(1, 2)
def test_an_operation_that_is_neither_known_nor_callable_is_refused() -> None:
    ops: list[Any] = ["add", "SUM", "", 3, None]
    for op in ops:
        for call in (objcomm.all_reduce, objcomm.reduce):
            with case(op), pytest.raises(UsageError):
                call(1, op)
    assert_group_works()


@ranks(1, 2)
def test_the_refusal_of_an_unknown_operation_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="addition") as caught:
        objcomm.all_reduce(1, "addition")  # type: ignore[call-overload]  # wrong on purpose
    for name in ("sum", "prod", "min", "max", "mean", "any", "all"):
        assert name in str(caught.value)


@ranks(4)
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_a_subgroup_without_rank_zero_reduces_in_its_own_order(nbytes: int) -> None:
    with subgroup(1, 2, 3) as group:
        if here().rank == 0:
            return
        mine = bytes([64 + here().rank]) * nbytes
        want = b"A" * nbytes + b"B" * nbytes + b"C" * nbytes
        assert objcomm.all_reduce(mine, join, group=group) == want
        for root in (1, 2, 3):
            got = objcomm.reduce(mine, join, dst=root, group=group)
            assert got == (want if here().rank == root else None)


@solo()
def test_alone_nothing_is_combined() -> None:
    def refuse(*_: object) -> Any:
        raise ArithmeticError("there is nothing to combine")

    assert objcomm.all_reduce([1], refuse) == [1]
    assert objcomm.reduce([1], refuse) == [1]
