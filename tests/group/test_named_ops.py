"""The named operations on numbers, tensors, arrays and whole objects, and Op."""

import collections
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, UsageError
from tests.cases import case
from tests.group.helpers import assert_group_works, error_in, subgroup
from tests.ranks import ranks
from tests.same import assert_same
from tests.workers import here

LARGE = 2_000_000

# One operand per rank, and the results of the first one, two, three and four of them.
NUMBERS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "ints": ("sum", [2**70, 1, -5, 2**53 + 1], [2**70, 2**70 + 1, 2**70 - 4, 2**70 + 2**53 - 3]),
    "floats": ("sum", [0.5, 0.25, -1.0, 4.0], [0.5, 0.75, -0.25, 3.75]),
    "bools are counted": ("sum", [True, False, True, True], [1, 1, 2, 3]),
    "complex": ("sum", [1 + 2j, 1j, 2 + 0j, 0j], [1 + 2j, 1 + 3j, 3 + 3j, 3 + 3j]),
    "int and float": ("sum", [1, 0.5, 2, 0.25], [1, 1.5, 3.5, 3.75]),
    "product of ints": ("prod", [2**40, 2**40, 3, -1], [2**40, 2**80, 3 * 2**80, -3 * 2**80]),
    "product of floats": ("prod", [2.0, 0.5, 3.0, -1.0], [2.0, 1.0, 3.0, -3.0]),
    "least int": ("min", [3, 2, 2**70, -(2**70)], [3, 2, 2, -(2**70)]),
    "greatest float": ("max", [-1.0, -2.0, 0.5, math.inf], [-1.0, -1.0, 0.5, math.inf]),
    "mean of ints is not rounded": ("mean", [0, 1, 1, 1], [0.0, 0.5, 2 / 3, 0.75]),
    "mean of floats": ("mean", [1.0, 2.0, 6.0, 7.0], [1.0, 1.5, 3.0, 4.0]),
    "any": ("any", [False, False, True, False], [False, False, True, True]),
    "all": ("all", [True, True, False, True], [True, True, False, False]),
    "any of ints": ("any", [0, 0, 3, 0], [False, False, True, True]),
    "all of ints": ("all", [2, 1, 0, 1], [True, True, False, False]),
    "numpy float32": ("sum", [np.float32(0.5)] * 4, [np.float32(0.5 * n) for n in (1, 2, 3, 4)]),
    "numpy int64": ("max", [*np.array([1, 3, 2, 9])], [*np.array([1, 3, 3, 9])]),
    "numpy mean": ("mean", [*np.array([1.0, 2, 6, 7])], [*np.array([1, 1.5, 3, 4])]),
}


@ranks(1, 2, 3, 4)
def test_numbers_are_reduced_exactly() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for name, (op, operands, results) in NUMBERS.items():
        want = results[size - 1]
        with case(name):
            assert_same(objcomm.all_reduce(operands[rank], op), want)
            reduced = objcomm.reduce(operands[rank], op, dst=size - 1)
            assert_same(reduced, want if rank == size - 1 else None)


def rows(size: int) -> torch.Tensor:
    """One row of integers per rank."""
    return (torch.arange(size * 6) * 7919 % 11 - 5).view(size, 2, 3)


REDUCED = {
    "sum": lambda stack: stack.sum(0, dtype=stack.dtype),
    "prod": lambda stack: stack.prod(0, dtype=stack.dtype),
    "min": lambda stack: stack.amin(0),
    "max": lambda stack: stack.amax(0),
    "any": lambda stack: stack.bool().any(0),
    "all": lambda stack: stack.bool().all(0),
}


@ranks(1, 2, 3, 4)
def test_tensors_and_arrays_are_reduced_elementwise() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    dtypes = (torch.int64, torch.int32, torch.float32, torch.float64)
    for dtype, (op, model) in itertools.product(dtypes, REDUCED.items()):
        with case(op, dtype):
            stack = rows(size).to(dtype)
            want = model(stack)
            mine = stack[rank].clone()
            assert_same(objcomm.all_reduce(mine, op), want)
            assert_same(objcomm.all_reduce(mine.numpy(), op), want.numpy())
            assert_same(objcomm.reduce(mine, op, dst=size - 1), want if rank == size - 1 else None)
            assert torch.equal(mine, stack[rank])


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("numel", [3, 700_000])
def test_the_mean_of_tensors_is_exact_where_it_can_be(numel: int) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    want = torch.full((numel,), size * (size - 1) / 2 / size, dtype=torch.float64)
    mine = torch.full((numel,), rank, dtype=torch.float64)
    assert_same(objcomm.all_reduce(mine, "mean"), want)
    assert_same(objcomm.all_reduce(mine.numpy(), "mean"), want.numpy())
    integers = mine.to(torch.int32)
    assert_same(objcomm.all_reduce(integers, "mean"), want)
    assert_same(objcomm.all_reduce(integers.numpy(), "mean"), want.numpy())


@ranks(1, 3)
def test_a_sum_keeps_the_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.uint8, torch.complex64):
        got = objcomm.all_reduce(torch.ones(3).to(dtype), "sum")
        assert_same(got, torch.full((3,), objcomm.world_size()).to(dtype))


@ranks(2, 3)
def test_a_named_operation_on_an_object_without_it_fails_every_rank() -> None:
    error = error_in(CollectiveError, lambda: objcomm.all_reduce({"a"}, "sum"))
    assert all("set" in failure.message for failure in error.failures.values())
    assert_group_works()


@ranks(1, 2, 3)
def test_numpys_integer_scalars_do_not_wrap_around() -> None:
    size = here().world_size
    cases: list[tuple[Any, Any, int]] = [
        (np.int8(100), "sum", 100 * size),
        (np.int64(2**62), "sum", 2**62 * size),
        (np.uint8(20), "prod", 20**size),
    ]
    for mine, op, exact in cases:
        got = objcomm.all_reduce(mine, op)
        assert got == exact
        fits = np.iinfo(mine.dtype).min <= exact <= np.iinfo(mine.dtype).max
        assert type(got) is (type(mine) if fits else int)


@ranks(2)
def test_torchs_own_operators_are_accepted() -> None:
    ops: Any = dist.ReduceOp
    assert objcomm.all_reduce(here().rank + 1, ops.SUM) == 3
    assert objcomm.all_reduce(here().rank + 1.0, ops.AVG) == 1.5
    with pytest.raises(objcomm.UsageError, match="must be a callable of two objects"):
        objcomm.all_reduce(1, ops.BXOR)


@ranks(1, 2, 3, 4)
def test_argmin_and_argmax_name_the_lowest_rank_of_the_best() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    least: Any = objcomm.all_reduce(0.5 if rank else 0.25, "argmin")
    assert (least.value, least.rank) == (0.25, 0)
    greatest: Any = objcomm.all_reduce(min(rank, 1), "argmax")
    assert tuple(greatest) == (min(size - 1, 1), min(size - 1, 1))
    tied: Any = objcomm.reduce(7, "argmax", dst=size - 1)
    assert (tied and tuple(tied)) == ((7, 0) if rank == size - 1 else None)
    if size == 4:
        with subgroup(1, 3) as group:
            if rank in (1, 3):
                best: Any = objcomm.all_reduce(-rank, "argmin", group=group)
                assert tuple(best) == (-3, 1)


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


@ranks(2)
@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
def test_every_codec_carries_results_of_objcomms_own_types(codec: str) -> None:
    with objcomm.configure(allow=()):
        best: Any = objcomm.all_reduce(objcomm.rank(), "argmin", codec=codec)
        counts = objcomm.all_reduce(["a"], "counter", codec=codec)
    assert (best.value, best.rank) == (0, 0)
    assert_same(counts, collections.Counter(a=2))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("length", [1, LARGE // 40])
def test_concat_joins_in_rank_order(length: int) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    units: list[Any] = [lambda i: [i], lambda i: (i,), lambda i: chr(97 + i), lambda i: bytes([i])]
    for unit in units:
        want: Any = [member for i in range(size) for member in unit(i) * length]
        mine = unit(rank) * length
        got = objcomm.all_reduce(mine, "concat")
        assert type(got) is type(mine)
        assert list(got) == want
        assert mine == unit(rank) * length
        reduced = objcomm.reduce(mine, "concat", dst=size - 1)
        assert reduced is None or list(reduced) == want
    tensor = torch.full((rank + 1, length), rank)
    want = torch.cat([torch.full((i + 1, length), i) for i in range(size)])
    assert_same(objcomm.all_reduce(tensor, "concat"), want)
    assert_same(objcomm.all_reduce(tensor.numpy(), "concat"), want.numpy())


#: For each operation, what the ranks give in turn.
MISFITS: dict[str, list[tuple[Any, Any]]] = {
    "concat": [
        ([1], (1,)),
        ("a", b"a"),
        (torch.ones(2), torch.ones(2).double()),
        (torch.ones(2, 3), torch.ones(2, 2)),
        (torch.ones(2), np.ones(2, np.float32)),
        (torch.tensor(1), torch.tensor(1)),
        (3, 3),
        (None, []),
        ({}, {}),
    ],
    "union": [(3, 3), ([1], [1]), ({1: 1}, {1})],
}


@ranks(2, 3)
@pytest.mark.parametrize("op", MISFITS)
def test_operands_that_do_not_fit_are_refused(op: Any) -> None:
    for operands in MISFITS[op]:
        with case(operands), pytest.raises(CollectiveError):
            objcomm.all_reduce(operands[objcomm.rank() % 2], op)
        assert_group_works()


@ranks(1, 2, 3, 4)
def test_union_of_sets_and_dicts() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    assert_same(objcomm.all_reduce({rank, -1}, "union"), {-1, *range(size)})
    assert_same(objcomm.all_reduce(frozenset({rank}), "union"), frozenset(range(size)))
    shared = {"same": 3, "w": torch.ones(2), "a": np.ones(2), "nan": math.nan}
    mine: dict[str, Any] = {f"r{rank}": rank} | ({"same": 3} if rank else shared)
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
        ([torch.ones(2)], [torch.ones(2)]),  # whose equality has no truth value
    ]
    for pair in pairs:
        with case(pair), pytest.raises(CollectiveError, match="key 'lr' has different values"):
            objcomm.all_reduce({"lr": pair[min(objcomm.rank(), 1)]}, "union")
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


@ranks(2, 3, 4)
@pytest.mark.parametrize("length", [1, LARGE])
def test_a_commutative_op_is_combined_along_a_tree_to_the_destination(length: int) -> None:
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


def test_an_op_is_frozen_and_takes_only_callables() -> None:
    op = objcomm.Op(max, identity=0)
    assert (op.fn, op.commutative, op.identity, op.slow) == (max, False, 0, False)
    with pytest.raises(AttributeError):
        op.slow = True  # type: ignore[misc]  # it is frozen
    wrong: Any = "sum"
    with pytest.raises(UsageError, match="'sum'"):
        objcomm.Op(wrong)
