"""Reductions with a user's operation, scans, and reduce_scatter: order, copies, sizes, failures."""

import collections
import functools
import itertools
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import objcomm
from objcomm import CollectiveError, DesyncError
from tests.cases import case
from tests.group.helpers import assert_group_works, error_in, subgroup
from tests.ranks import ranks, solo
from tests.workers import here

# Operands of this size are combined by several ranks, smaller ones on one rank.
LARGE = 3_000_000


def _reduce_scatter(obj: Any, op: Any, **options: Any) -> Any:
    return objcomm.reduce_scatter([obj] * objcomm.world_size(options.get("group")), op, **options)


CALLS: dict[str, Callable[..., Any]] = {
    "reduce": objcomm.reduce,
    "all_reduce": objcomm.all_reduce,
    "scan": objcomm.scan,
    "exscan": objcomm.exscan,
    "reduce_scatter": _reduce_scatter,
}


def check(name: str, operands: Any, op: Any = operator.add, **options: Any) -> None:
    """Compare each rank's result with the sum of the operands, in rank order."""
    rank, size = objcomm.rank(options.get("group")), objcomm.world_size(options.get("group"))
    prefixes = list(itertools.accumulate(operands))
    if name == "reduce":
        for root in range(size):
            got = objcomm.reduce(operands[rank], op, group_dst=root, **options)
            assert got == (prefixes[-1] if rank == root else None)
        return
    first = op.identity if isinstance(op, objcomm.Op) else None
    wanted = {"scan": prefixes[rank], "exscan": [first, *prefixes][rank]}
    assert CALLS[name](operands[rank], op, **options) == wanted.get(name, prefixes[-1])


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", CALLS)
def test_operands_stay_in_rank_order_whatever_their_sizes(name: str) -> None:
    size = objcomm.world_size()
    of_all: tuple[set[int], ...] = (set(range(size)), set(), {0}, {1}, {size - 1})
    for small, large in itertools.product((10, 100_000), of_all):
        operands = [bytes([65 + i]) * ((LARGE if i in large else small) + i) for i in range(size)]
        with case(small, large):
            check(name, operands)
    assert_group_works()


@ranks(2, 3, 4)
@pytest.mark.parametrize("side", [2, 400])
def test_a_function_of_tensors_gets_whole_tensors(side: int) -> None:
    """Small ones are combined on one rank, large ones on several."""
    size, random = objcomm.world_size(), torch.Generator().manual_seed(0)
    matrices = [torch.randint(-2, 3, (side, side), generator=random) for _ in range(size)]
    got = objcomm.all_reduce(matrices[objcomm.rank()], torch.matmul)
    assert torch.equal(got, functools.reduce(torch.matmul, matrices))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", CALLS)
def test_an_op_of_a_users_own_keeps_rank_order(name: str) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for slow, length in itertools.product((False, True), (1, LARGE)):
        operands = [chr(97 + i) * length for i in range(size)]
        with case(slow, length):
            check(name, operands, objcomm.Op(operator.add, slow=slow, identity=""))
    if (name, size) == ("all_reduce", 2):
        with pytest.raises(DesyncError):
            objcomm.all_reduce(1, objcomm.Op(operator.add, slow=rank == 1))
        assert_group_works()


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("length", [1, 50_000])
def test_an_operation_may_change_its_left_operand_but_no_input(length: int, name: str) -> None:
    rank = objcomm.rank()
    operands = [[i] * length for i in range(objcomm.world_size())]
    for _ in range(2):
        check(name, operands, operator.iadd)
        assert operands[rank] == [rank] * length


@ranks(2, 3, 4)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("numel", [2, 500_000])
def test_an_operation_in_place_on_tensors_changes_no_input(numel: int, name: str) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    held = {"weight": torch.full((numel,), rank + 1)}

    def add(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> Any:
        left["weight"] += right["weight"]
        return left

    got = CALLS[name](held, add)
    counts = {"reduce": 0 if rank else size, "scan": rank + 1, "exscan": rank}
    count = counts.get(name, size)
    assert (got is None) == (count == 0)
    if count:
        assert torch.equal(got["weight"], torch.full((numel,), count * (count + 1) // 2))
        if got is not held:  # a scan returns the first rank's own object
            got["weight"].zero_()
    objcomm.barrier()
    assert torch.equal(held["weight"], torch.full((numel,), rank + 1))


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
@pytest.mark.parametrize("name", ["all_reduce", "scan", "exscan"])
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_an_operation_that_raises_fails_every_rank(nbytes: int, name: str) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    always = name == "all_reduce"
    # The last operand that is combined: in any order, it ends one of two that are combined.
    culprit = size - 2 if name == "exscan" else size - 1

    def refuse(left: bytes, right: bytes) -> bytes:
        if always or bytes([culprit]) in (left[-1:], right[-1:]):
            raise ArithmeticError("not this one")
        return left + right

    mine = bytes([rank]) * nbytes
    if culprit == 0:  # exscan of two ranks combines nothing
        assert objcomm.exscan(mine, refuse) == (None, bytes(nbytes))[rank]
        return
    error = error_in(CollectiveError, lambda: CALLS[name](mine, refuse))
    assert error.operation == name
    for failed, failure in error.failures.items():
        assert failure.type_name.endswith("ArithmeticError")
        assert "refuse" in failure.traceback
        if failed == rank:
            assert isinstance(error.__cause__, ArithmeticError)
    reported = sorted(error.failures)
    assert always or objcomm.all_gather(reported) == [reported] * size
    assert_group_works()


@ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["all_reduce", "scan", "exscan", "reduce_scatter"])
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_an_operation_that_raises_on_one_rank_gives_all_the_same_outcome(
    nbytes: int, name: str
) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()

    def add(left: bytes, right: bytes) -> bytes:
        if here().rank == failing:
            raise ArithmeticError("only here")
        return left + right

    failures = []
    for failing in range(size):
        outcome: list[Any] = ["returned"]
        error = None
        try:
            CALLS[name](bytes(nbytes), add)
        except CollectiveError as raised:
            error = raised
        if error is not None:
            outcome = ["failed on", *error.failures]
            failures.append(failing)
            assert error.operation == name
            assert error.failures[failing].type_name.endswith("ArithmeticError")
            assert rank != failing or isinstance(error.__cause__, ArithmeticError)
        assert outcome in (["returned"], ["failed on", failing])
        assert objcomm.all_gather(outcome) == [outcome] * size
    if name == "reduce_scatter":  # every rank combines
        assert failures == list(range(size))
    assert failures or (name, size) == ("exscan", 2)  # which combines nothing
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
            reported = sorted(error.failures)
        else:
            assert got is None
            reported = []
        everyone = objcomm.all_gather(reported)
        assert everyone[root] != []
        for failed in everyone[root]:
            assert failed in everyone[failed]
    assert_group_works()


@ranks(2, 3)
def test_a_combination_that_cannot_be_sent_fails_every_rank() -> None:
    def chain(left: Any, right: Any) -> Any:
        return (number for number in [*left, *right])

    # Scans of two ranks send no combination.
    for name in ["all_reduce"] if objcomm.world_size() == 2 else ["all_reduce", "scan", "exscan"]:
        with case(name), pytest.raises(CollectiveError):
            CALLS[name]([1], chain)
    assert_group_works()


@ranks(4)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_a_subgroup_without_rank_zero_reduces_in_its_own_order(nbytes: int, name: str) -> None:
    for members in ((1, 2, 3), (1, 3)):
        with subgroup(*members) as group:
            if here().rank in members:
                check(name, [bytes([64 + i]) * nbytes for i in members], group=group)
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_reductions_can_be_confirmed_and_signed(nbytes: int, name: str) -> None:
    operands = [bytes([i]) * nbytes for i in range(objcomm.world_size())]
    check(name, operands, confirm=True)
    with objcomm.configure(key="a secret of this test alone"):
        check(name, operands, confirm=True)
        check(name, operands)


@solo()
def test_alone_nothing_is_combined() -> None:
    def refuse(*_: object) -> Any:
        raise ArithmeticError("there is nothing to combine")

    mine = [1]
    assert objcomm.all_reduce(mine, refuse) == objcomm.reduce(mine, refuse) == [1]
    assert objcomm.scan(mine, refuse) is objcomm.reduce_scatter([mine], refuse) is mine
    assert objcomm.exscan(mine, refuse) is None
    assert objcomm.reduce_scatter([3], "mean") == 3.0
    with pytest.raises(CollectiveError):
        objcomm.scan({}, "sum")


# reduce_scatter with other operands for each rank


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_reduce_scatter_gives_each_rank_the_operands_for_it_in_rank_order(nbytes: int) -> None:
    rank, size = here().rank, here().world_size

    def operand(source: int, destination: int) -> bytes:
        return bytes([source, destination]) * (nbytes + source + 100 * destination)

    def check_among(members: Any, **options: Any) -> None:
        operands = [operand(rank, peer) for peer in members]
        got = objcomm.reduce_scatter(operands, operator.add, **options)
        assert got == b"".join(operand(peer, rank) for peer in members)

    check_among(range(size))
    if size == 4:
        with subgroup(1, 3) as group:
            if rank in {1, 3}:
                check_among((1, 3), group=group)
    assert_group_works()


@ranks(2)
def test_reduce_scatter_reduces_sixty_four_mebibytes() -> None:
    shards = [torch.full((8 << 20,), float(objcomm.rank() + 1))] * 2
    assert torch.equal(objcomm.reduce_scatter(shards), torch.full((8 << 20,), 3.0))


@ranks(1, 2, 3, 4)
def test_reduce_scatter_takes_named_operators() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    peers = range(size)
    assert objcomm.reduce_scatter([2**70 + peer for peer in peers]) == size * (2**70 + rank)
    got = objcomm.reduce_scatter([rank * peer for peer in peers], "mean")
    assert got == sum(peer * rank for peer in peers) / size
    same = objcomm.reduce_scatter([torch.tensor([1, rank])] * size, "max")
    assert same.tolist() == [1, size - 1]
    greatest: Any = objcomm.reduce_scatter([rank * peer for peer in peers], "argmax")
    assert (greatest.value, greatest.rank) == ((size - 1) * rank, size - 1 if rank else 0)
    joined = objcomm.reduce_scatter([[(rank, peer)] for peer in peers], "concat")
    assert joined == [(peer, rank) for peer in peers]


@ranks(2, 3, 4)
@pytest.mark.parametrize("numel", [2, 500_000])
def test_a_result_of_reduce_scatter_is_not_part_of_any_operand(numel: int) -> None:
    shared = torch.full((numel,), objcomm.rank() + 1)
    for op in (lambda left, _: left, lambda _, right: right):
        objcomm.reduce_scatter([shared] * objcomm.world_size(), op).zero_()
        objcomm.barrier()
        assert torch.equal(shared, torch.full((numel,), objcomm.rank() + 1))


@ranks(2, 3)
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_an_operand_of_reduce_scatter_that_cannot_be_encoded_fails_every_rank(nbytes: int) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for culprit, place in itertools.product(range(size), repeat=2):
        objs: list[Any] = [bytes(nbytes)] * size
        if rank == culprit:
            objs[place] = threading.Lock()  # also the one that stays here
        error = error_in(
            CollectiveError, functools.partial(objcomm.reduce_scatter, objs, operator.add)
        )
        assert list(error.failures) == [culprit]
    assert_group_works()


@ranks(2, 3, 4)
def test_reduce_scatters_in_flight_may_be_waited_for_in_any_order() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    operands = [[[(turn, rank, peer)] for peer in range(size)] for turn in range(6)]
    works = [objcomm.reduce_scatter(each, operator.add, async_op=True) for each in operands]
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
        objcomm.reduce_scatter(objs, operator.add)
    if isinstance(caught.value, CollectiveError):
        assert caught.value.failures[1].type_name == "KeyboardInterrupt"
    assert_group_works()


# scan and exscan


@ranks(2)
def test_sixty_four_mebibytes_are_scanned() -> None:
    mine = torch.full((16 << 20,), float(objcomm.rank() + 1))
    assert torch.equal(objcomm.scan(mine, "sum"), torch.full_like(mine, [1.0, 3.0][objcomm.rank()]))


@ranks(3, 4)
def test_a_combination_that_outgrows_a_message_may_be_changed_in_place() -> None:
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
def test_a_result_of_a_scan_is_not_part_of_an_operand(nbytes: int) -> None:
    mine = {"list": [bytes(nbytes)]}
    got = objcomm.scan(mine, lambda _, right: right)
    if objcomm.rank() == 0:
        assert got is mine
    else:
        got["list"].clear()
        assert mine == {"list": [bytes(nbytes)]}


@ranks(1, 2, 3, 4)
def test_a_mean_covers_this_rank_and_those_before_it() -> None:
    rank = objcomm.rank()
    prefix = list(range(rank + 1))
    assert objcomm.scan(rank, "mean") == sum(prefix) / len(prefix)
    for numel in (1, 200_000):
        before = objcomm.exscan(torch.full((numel,), float(rank)), "mean")
        assert (before is None) == (rank == 0)
        if before is not None:
            assert torch.equal(before, torch.full((numel,), sum(prefix[:-1]) / rank))


@ranks(1, 2, 3, 4)
def test_scans_take_named_operators() -> None:
    rank = objcomm.rank()
    assert objcomm.scan(2**70, "sum") == (rank + 1) * 2**70
    assert objcomm.scan(-rank, "max") == 0
    assert objcomm.exscan(rank == 1, "any") == (None if rank == 0 else rank > 1)
    assert objcomm.exscan(10 + rank) == (None, 10, 21, 33)[rank]
    least: Any = objcomm.scan([5, 3, 3, 1][rank], "argmin")
    assert (least.value, least.rank) == [(5, 0), (3, 1), (3, 1), (1, 3)][rank]
    assert objcomm.exscan([rank], "concat") == (list(range(rank)) or None)
    counts: Any = objcomm.scan(["a"] * rank + ["b"], "counter")
    assert counts == collections.Counter(a=rank * (rank + 1) // 2, b=rank + 1)
    assert objcomm.scan({rank}, "union") == set(range(rank + 1))


@ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["scan", "exscan"])
@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_an_operand_of_a_scan_that_cannot_be_encoded_fails_every_rank(
    nbytes: int, name: str
) -> None:
    for culprit in range(objcomm.world_size()):
        mine: Any = threading.Lock() if objcomm.rank() == culprit else bytes(nbytes)
        error = error_in(CollectiveError, functools.partial(CALLS[name], mine, operator.add))
        assert list(error.failures) == [culprit]
    assert_group_works()


@ranks(2, 3)
def test_a_named_operator_of_a_scan_that_refuses_an_operand_fails_every_rank() -> None:
    mine: Any = {} if objcomm.rank() == 1 else 1
    assert list(error_in(CollectiveError, lambda: objcomm.scan(mine, "sum")).failures) == [1]
    assert_group_works()


@ranks(2, 3, 4)
@pytest.mark.parametrize("length", [1, 100_000])
def test_scans_in_flight_may_be_waited_for_in_any_order(length: int) -> None:
    rank = objcomm.rank()
    operands = [[10 * turn + rank] * length for turn in range(6)]
    works: list[Any] = []
    for turn, operand in enumerate(operands):
        scan: Any = objcomm.exscan if turn % 2 else objcomm.scan
        works.append(scan(operand, operator.iadd, async_op=True))
        if rank:
            operand.clear()  # it is already encoded
    for turn in sorted(range(6), key=lambda turn: (turn * (rank + 1)) % 7):
        count = rank + 1 - turn % 2
        want = [10 * turn + i for i in range(count) for _ in range(length)]
        assert works[turn].wait() == (want or None)
