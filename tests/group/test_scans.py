"""scan and exscan: order, copies, sizes, prefix means and failures."""

import collections
import functools
import itertools
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

# Operands of this size are combined by all ranks, smaller ones on one rank.
LARGE = 3_000_000


def join(left: Any, right: Any) -> Any:
    """Combine associatively, but not commutatively."""
    return left + right


def merge(left: list[Any], right: list[Any]) -> list[Any]:
    """Mutate the left operand, as a user's ``merge`` often does."""
    left.extend(right)
    return left


def check(mine: Any, op: Any, want: list[Any], **options: Any) -> None:
    """Compare both scans of ``mine`` with ``want``, the inclusive results in rank order."""
    rank = objcomm.rank(options.get("group"))
    assert objcomm.scan(mine, op, **options) == want[rank]
    assert objcomm.exscan(mine, op, **options) == ([None, *want])[rank]


@ranks(1, 2, 3, 4)
def test_operands_stay_in_rank_order_whatever_their_sizes() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    of_all: tuple[set[int], ...] = (set(range(size)), set(), {0}, {1}, {size - 1})
    for small, large in itertools.product((10, 100_000), of_all):
        operands = [bytes([65 + i]) * ((LARGE if i in large else small) + i) for i in range(size)]
        with case(small, large):
            check(operands[rank], join, list(itertools.accumulate(operands)))
    assert_group_works()


@ranks(2)
def test_sixty_four_mebibytes_are_scanned() -> None:
    mine = torch.full((16 << 20,), float(objcomm.rank() + 1))
    got = objcomm.scan(mine, "sum")
    assert torch.equal(got, torch.full_like(mine, [1.0, 3.0][objcomm.rank()]))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("side", [2, 400])
def test_matrices_are_multiplied_in_rank_order(side: int) -> None:
    def matrix(i: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(i)
        return torch.randint(-2, 3, (side, side), generator=generator)

    rank = objcomm.rank()
    matrices = [matrix(i) for i in range(objcomm.world_size())]
    got = objcomm.scan(matrix(rank), torch.matmul)
    assert torch.equal(got, functools.reduce(torch.matmul, matrices[: rank + 1]))
    before = objcomm.exscan(matrix(rank), torch.matmul)
    assert (before is None) == (rank == 0)
    if before is not None:
        assert torch.equal(before, functools.reduce(torch.matmul, matrices[:rank]))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("length", [1, 50_000])
def test_an_operation_may_change_its_left_operand_but_nobodys_input(length: int) -> None:
    rank = objcomm.rank()
    mine = [rank] * length
    operands = [[i] * length for i in range(objcomm.world_size())]
    for _ in range(2):
        check(mine, merge, list(itertools.accumulate(operands)))
        assert mine == [rank] * length


@ranks(2, 3, 4)
@pytest.mark.parametrize("numel", [2, 500_000])
def test_an_operation_in_place_on_tensors_changes_nobodys_input(numel: int) -> None:
    rank = objcomm.rank()
    held = {"weight": torch.full((numel,), rank + 1)}

    def add(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> Any:
        left["weight"] += right["weight"]
        return left

    for scan, count in ((objcomm.scan, rank + 1), (objcomm.exscan, rank)):
        got: Any = scan(held, add)
        if count:
            want = torch.full((numel,), count * (count + 1) // 2)
            assert torch.equal(got["weight"], want)
        if rank and count:
            got["weight"].zero_()  # an independent copy on all ranks but the first
        assert torch.equal(held["weight"], torch.full((numel,), rank + 1))
    objcomm.barrier()
    assert torch.equal(held["weight"], torch.full((numel,), rank + 1))


@ranks(3, 4)
def test_a_combination_that_grows_beyond_a_message_may_be_changed_in_place() -> None:
    # The operands are small, so one rank combines them; it must not change what it has sent.
    def accumulate(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
        if "total" not in left:
            left["total"] = torch.full((100_000,), left["value"])
        left["total"] += right["value"]
        return left

    rank = objcomm.rank()
    for scan, count in ((objcomm.scan, rank + 1), (objcomm.exscan, rank)):
        got: Any = scan({"value": rank + 1}, accumulate)
        if count > 1:
            assert torch.equal(got["total"], torch.full((100_000,), count * (count + 1) // 2))


@ranks(2, 3, 4)
@pytest.mark.parametrize("nbytes", [10, LARGE])
def test_a_result_is_no_part_of_the_callers_operand(nbytes: int) -> None:
    mine = {"list": [bytes(nbytes)]}
    got = objcomm.scan(mine, lambda _, right: right)
    if objcomm.rank() == 0:
        assert got is mine
    else:
        got["list"].clear()
        assert mine == {"list": [bytes(nbytes)]}


@ranks(1, 2, 3, 4)
def test_the_mean_is_that_of_the_prefix() -> None:
    rank = objcomm.rank()
    prefix = list(range(rank + 1))
    assert objcomm.scan(rank, "mean") == sum(prefix) / len(prefix)
    for numel in (1, 200_000):
        before = objcomm.exscan(torch.full((numel,), float(rank)), "mean")
        assert (before is None) == (rank == 0)
        if before is not None:
            assert torch.equal(before, torch.full((numel,), sum(prefix[:-1]) / rank))


@ranks(1, 2, 3, 4)
def test_named_operators_are_exact() -> None:
    rank = objcomm.rank()
    assert objcomm.scan(2**70, "sum") == (rank + 1) * 2**70
    assert objcomm.scan(-rank, "max") == 0
    assert objcomm.exscan(rank == 1, "any") == (None if rank == 0 else rank > 1)
    assert objcomm.exscan(10 + rank) == (None, 10, 21, 33)[rank]


@ranks(1, 2, 3, 4)
def test_an_op_may_be_slow_and_have_an_identity() -> None:
    rank = objcomm.rank()
    for slow in (False, True):
        op = objcomm.Op(join, identity="", slow=slow)
        assert objcomm.scan(f"{rank}", op) == "0123"[: rank + 1]
        assert objcomm.exscan(f"{rank}", op) == "0123"[:rank]


@ranks(1, 2, 3, 4)
def test_named_operators_on_whole_objects_are_scanned() -> None:
    rank = objcomm.rank()
    least: Any = objcomm.scan([5, 3, 3, 1][rank], "argmin")
    assert (least.value, least.rank) == [(5, 0), (3, 1), (3, 1), (1, 3)][rank]
    assert objcomm.exscan([rank], "concat") == (list(range(rank)) or None)
    counts: Any = objcomm.scan(["a"] * rank + ["b"], "counter")
    assert counts == collections.Counter(a=rank * (rank + 1) // 2, b=rank + 1)
    assert objcomm.scan({rank}, "union") == set(range(rank + 1))


@ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["scan", "exscan"])
def test_an_operation_that_raises_for_one_operand_fails_every_rank(name: str) -> None:
    for nbytes in (1, LARGE):
        with case(nbytes):
            check_that_an_operand_fails_every_rank(name, nbytes)


def check_that_an_operand_fails_every_rank(name: str, nbytes: int) -> None:
    size = objcomm.world_size()
    # The last operand that is combined: in any order, it ends one of two that are combined.
    culprit = size - 2 if name == "exscan" else size - 1

    def refuse(left: bytes, right: bytes) -> bytes:
        if bytes([culprit]) in (left[-1:], right[-1:]):
            raise ArithmeticError("not this one")
        return left + right

    mine = bytes([objcomm.rank()]) * nbytes
    if culprit == 0:  # exscan of two ranks combines nothing
        assert objcomm.exscan(mine, refuse) == (None, bytes(nbytes))[objcomm.rank()]
        return
    with pytest.raises(CollectiveError) as caught:
        getattr(objcomm, name)(mine, refuse)
    assert caught.value.operation == name
    for failed, told in caught.value.failures.items():
        assert told.type_name.endswith("ArithmeticError")
        assert "refuse" in told.traceback
        if failed == objcomm.rank():
            assert isinstance(caught.value.__cause__, ArithmeticError)
    heard = sorted(caught.value.failures)
    assert objcomm.all_gather(heard) == [heard] * size
    assert_group_works()


@ranks(2, 3, 4)
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_an_operation_that_raises_on_one_rank_gives_all_the_same_outcome(nbytes: int) -> None:
    def add(left: bytes, right: bytes) -> bytes:
        if here().rank == failing:
            raise ArithmeticError("only here")
        return left + right

    size = objcomm.world_size()
    failures = 0
    for failing in range(size):
        for scan in (objcomm.scan, objcomm.exscan):
            outcome: list[Any] = ["returned"]
            try:
                scan(bytes(nbytes), add)
            except CollectiveError as error:
                outcome = ["failed on", *error.failures]
                failures += 1
            assert outcome in (["returned"], ["failed on", failing])
            assert objcomm.all_gather(outcome) == [outcome] * size
    assert failures
    assert_group_works()


@ranks(2, 3, 4)
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_an_operand_that_cannot_be_encoded_fails_every_rank(nbytes: int) -> None:
    for culprit in range(objcomm.world_size()):
        mine: Any = threading.Lock() if objcomm.rank() == culprit else bytes(nbytes)
        for scan in (objcomm.scan, objcomm.exscan):
            with pytest.raises(CollectiveError) as caught:
                scan(mine, join)
            assert list(caught.value.failures) == [culprit]
    assert_group_works()


@ranks(3)
def test_a_combination_that_cannot_be_sent_fails_every_rank() -> None:
    def chain(left: Any, right: Any) -> Any:
        return (number for number in [*left, *right])

    with pytest.raises(CollectiveError):
        objcomm.scan([1], chain)
    with pytest.raises(CollectiveError):
        objcomm.exscan([1], chain)
    assert_group_works()


@ranks(2, 3)
def test_a_named_operator_that_refuses_an_operand_fails_every_rank() -> None:
    with pytest.raises(CollectiveError) as caught:
        objcomm.scan({} if objcomm.rank() == 1 else 1, "sum")
    assert list(caught.value.failures) == [1]
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_scans_can_be_confirmed(nbytes: int) -> None:
    operands = [bytes([i]) * nbytes for i in range(objcomm.world_size())]
    wanted = list(itertools.accumulate(operands))
    check(operands[objcomm.rank()], join, wanted, confirm=True)
    with objcomm.configure(key="a secret of this test alone"):
        check(operands[objcomm.rank()], join, wanted, confirm=True)
        check(operands[objcomm.rank()], join, wanted)


@ranks(4)
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_a_subgroup_without_rank_zero_scans_in_its_own_order(nbytes: int) -> None:
    with subgroup(1, 3) as group:
        if here().rank in {1, 3}:
            mine = bytes([64 + here().rank]) * nbytes
            check(mine, join, [b"A" * nbytes, b"A" * nbytes + b"C" * nbytes], group=group)
    assert_group_works()


@ranks(2, 3, 4)
@pytest.mark.parametrize("length", [1, 100_000])
def test_scans_in_flight_may_be_waited_for_in_any_order(length: int) -> None:
    rank = objcomm.rank()
    operands = [[10 * turn + rank] * length for turn in range(6)]
    works: list[Any] = []
    for turn, operand in enumerate(operands):
        scan: Any = objcomm.exscan if turn % 2 else objcomm.scan
        works.append(scan(operand, merge, async_op=True))
        if rank:
            operand.clear()  # it is already encoded
    for turn in sorted(range(6), key=lambda turn: (turn * (rank + 1)) % 7):
        count = rank + 1 - turn % 2
        want = [10 * turn + i for i in range(count) for _ in range(length)]
        assert works[turn].wait() == (want or None)


@ranks(1, 2)
def test_an_operation_that_is_neither_known_nor_callable_is_refused() -> None:
    ops: list[Any] = ["add", "", 3, None]
    for op in ops:
        for scan in (objcomm.scan, objcomm.exscan):
            with case(op), pytest.raises(UsageError):
                scan(1, op)
    assert_group_works()


@solo()
def test_alone_nothing_is_combined() -> None:
    def refuse(*_: object) -> Any:
        raise ArithmeticError("there is nothing to combine")

    mine = [1]
    assert objcomm.scan(mine, refuse) is mine
    assert objcomm.exscan(mine, refuse) is None
    with pytest.raises(CollectiveError):
        objcomm.scan({}, "sum")
