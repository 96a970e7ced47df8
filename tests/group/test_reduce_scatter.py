"""reduce_scatter: each rank gets its own combination in rank order; failures reach all ranks."""

import functools
import threading
from typing import Any

import pytest
import torch

import objcomm
from objcomm import CollectiveError, UsageError
from tests.cases import case
from tests.group.helpers import assert_group_works, subgroup
from tests.ranks import ranks, solo
from tests.workers import here

LARGE = 3_000_000


def join(left: Any, right: Any) -> Any:
    """Combine associatively, but not commutatively."""
    return left + right


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_each_rank_gets_what_all_gave_for_it_in_rank_order(nbytes: int) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()

    def operand(source: int, destination: int) -> bytes:
        return bytes([source, destination]) * (nbytes + source + 100 * destination)

    got = objcomm.reduce_scatter([operand(rank, peer) for peer in range(size)], join)
    assert got == b"".join(operand(peer, rank) for peer in range(size))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("side", [2, 300])
def test_matrices_are_multiplied_in_rank_order(side: int) -> None:
    def matrix(source: int, destination: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(source * 10 + destination)
        return torch.randint(-2, 3, (side, side), generator=generator)

    rank, size = objcomm.rank(), objcomm.world_size()
    got = objcomm.reduce_scatter([matrix(rank, peer) for peer in range(size)], torch.matmul)
    want = functools.reduce(torch.matmul, [matrix(peer, rank) for peer in range(size)])
    assert torch.equal(got, want)


@ranks(2)
def test_sixty_four_mebibytes_are_reduced() -> None:
    shards = [torch.full((8 << 20,), float(objcomm.rank() + 1))] * 2
    assert torch.equal(objcomm.reduce_scatter(shards), torch.full((8 << 20,), 3.0))


@ranks(1, 2, 3, 4)
def test_named_operators_finish_with_the_number_of_ranks() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    assert objcomm.reduce_scatter([2**70 + peer for peer in range(size)]) == size * (2**70 + rank)
    got = objcomm.reduce_scatter([rank * peer for peer in range(size)], "mean")
    assert got == sum(peer * rank for peer in range(size)) / size
    same = objcomm.reduce_scatter([torch.tensor([1, rank])] * size, "max")
    assert same.tolist() == [1, max(1, size - 1) if size > 1 else 0]


@ranks(1, 2, 3, 4)
def test_named_operators_on_whole_objects_are_reduced() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    greatest: Any = objcomm.reduce_scatter([rank * peer for peer in range(size)], "argmax")
    assert (greatest.value, greatest.rank) == ((size - 1) * rank, size - 1 if rank else 0)
    assert objcomm.reduce_scatter([[(rank, peer)] for peer in range(size)], "concat") == [
        (peer, rank) for peer in range(size)
    ]
    own = objcomm.Op(join)
    assert objcomm.reduce_scatter([f"{rank}"] * size, own) == "0123"[:size]


@ranks(2, 3, 4)
@pytest.mark.parametrize("numel", [2, 500_000])
def test_an_operation_in_place_changes_nobodys_input(numel: int) -> None:
    size = objcomm.world_size()
    shared = torch.full((numel,), objcomm.rank() + 1)

    def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        left += right
        return left

    for op in (add, lambda left, _: left, lambda _, right: right):
        got = objcomm.reduce_scatter([shared] * size, op)
        got.zero_()
        objcomm.barrier()
        assert torch.equal(shared, torch.full((numel,), objcomm.rank() + 1))


@ranks(2, 3, 4)
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_an_operation_that_raises_on_one_rank_fails_every_rank(nbytes: int) -> None:
    size = objcomm.world_size()

    def add(left: bytes, right: bytes) -> bytes:
        if here().rank == failing:
            raise ArithmeticError("only here")
        return left + right

    for failing in range(size):
        with pytest.raises(CollectiveError) as caught:
            objcomm.reduce_scatter([bytes(nbytes)] * size, add)
        assert caught.value.operation == "reduce_scatter"
        assert list(caught.value.failures) == [failing]
        assert caught.value.failures[failing].type_name.endswith("ArithmeticError")
        if failing == objcomm.rank():
            assert isinstance(caught.value.__cause__, ArithmeticError)
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_an_operand_that_cannot_be_encoded_fails_every_rank(nbytes: int) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for culprit in range(size):
        for place in range(size):  # including the one that stays here
            objs: list[Any] = [bytes(nbytes)] * size
            if rank == culprit:
                objs[place] = threading.Lock()
            with pytest.raises(CollectiveError) as caught:
                objcomm.reduce_scatter(objs, join)
            assert list(caught.value.failures) == [culprit]
    assert_group_works()


@ranks(2, 3)
def test_a_rank_with_another_number_of_operands_fails_every_rank() -> None:
    size = objcomm.world_size()
    with pytest.raises(CollectiveError, match="one object for each of") as caught:
        objcomm.reduce_scatter([1] * (size + (objcomm.rank() == size - 1)), "sum")
    assert list(caught.value.failures) == [size - 1]
    assert_group_works()


@ranks(4)
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_a_subgroup_without_rank_zero_reduces_in_its_own_order(nbytes: int) -> None:
    with subgroup(1, 3) as group:
        rank = here().rank
        if rank in {1, 3}:
            shards = [bytes([rank, to]) * nbytes for to in (1, 3)]
            got = objcomm.reduce_scatter(shards, join, group=group)
            assert got == bytes([1, rank]) * nbytes + bytes([3, rank]) * nbytes
    assert_group_works()


@ranks(2, 3, 4)
def test_reductions_in_flight_may_be_waited_for_in_any_order() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    operands = [[[(turn, rank, peer)] for peer in range(size)] for turn in range(6)]
    works = [objcomm.reduce_scatter(each, join, async_op=True) for each in operands]
    for shards in operands:
        for shard in shards:
            shard.clear()  # it is already encoded
    for turn in sorted(range(6), key=lambda turn: (turn * (rank + 1)) % 7):
        assert works[turn].wait() == [(turn, peer, rank) for peer in range(size)]


class InterruptsItsCopy:
    """Raises KeyboardInterrupt when it is encoded a second time."""

    def __init__(self) -> None:
        self.times = 0

    def __reduce__(self) -> Any:
        self.times += 1
        if self.times > 1:
            raise KeyboardInterrupt
        return InterruptsItsCopy, ()


@ranks(2, 3)
def test_an_interrupt_while_operands_are_encoded_is_that_ranks_failure() -> None:
    rank, size = here().rank, objcomm.world_size()
    objs: list[Any] = [""] * size
    if rank == 1:
        objs[rank] = InterruptsItsCopy()
    with pytest.raises(KeyboardInterrupt if rank == 1 else CollectiveError) as caught:
        objcomm.reduce_scatter(objs, join)
    if isinstance(caught.value, CollectiveError):
        assert caught.value.failures[1].type_name == "KeyboardInterrupt"
    assert_group_works()


@ranks(2, 3)
def test_what_is_signed_is_reduced() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    with objcomm.configure(key="a secret of this test alone"):
        assert objcomm.reduce_scatter([f"{rank}"] * size, join) == "012"[:size]
        assert objcomm.reduce_scatter([f"{rank}"] * size, join, confirm=True) == "012"[:size]


@ranks(1, 2)
def test_an_operation_that_is_neither_known_nor_callable_is_refused() -> None:
    ops: list[Any] = ["add", 3, None]
    for op in ops:
        with case(op), pytest.raises(UsageError):
            objcomm.reduce_scatter([1] * objcomm.world_size(), op)
    assert_group_works()


@solo()
def test_alone_nothing_is_combined() -> None:
    def refuse(*_: object) -> Any:
        raise ArithmeticError("there is nothing to combine")

    mine = [1]
    assert objcomm.reduce_scatter([mine], refuse) is mine
    assert objcomm.reduce_scatter([3], "mean") == 3.0
