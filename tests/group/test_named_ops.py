"""The named operations on numbers, tensors and arrays: values, types and shapes."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError
from tests.cases import case
from tests.group.helpers import assert_group_works
from tests.ranks import ranks
from tests.same import assert_same
from tests.workers import here

# One operand per rank, and the results of the first one, two, three and four of them.
NUMBERS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "ints": ("sum", [2**70, 1, -5, 2**53 + 1], [2**70, 2**70 + 1, 2**70 - 4, 2**70 + 2**53 - 3]),
    "floats": ("sum", [0.5, 0.25, -1.0, 4.0], [0.5, 0.75, -0.25, 3.75]),
    "bools are counted": ("sum", [True, False, True, True], [None, 1, 2, 3]),
    "complex": ("sum", [1 + 2j, 1j, 2 + 0j, 0j], [1 + 2j, 1 + 3j, 3 + 3j, 3 + 3j]),
    "int and float": ("sum", [1, 0.5, 2, 0.25], [1, 1.5, 3.5, 3.75]),
    "product of ints": ("prod", [2**40, 2**40, 3, -1], [2**40, 2**80, 3 * 2**80, -3 * 2**80]),
    "product of floats": ("prod", [2.0, 0.5, 3.0, -1.0], [2.0, 1.0, 3.0, -3.0]),
    "least int": ("min", [3, 2, 2**70, -(2**70)], [3, 2, 2, -(2**70)]),
    "greatest float": ("max", [-1.0, -2.0, 0.5, math.inf], [-1.0, -1.0, 0.5, math.inf]),
    "mean of ints is no floor": ("mean", [0, 1, 1, 1], [None, 0.5, 2 / 3, 0.75]),
    "mean of floats": ("mean", [1.0, 2.0, 6.0, 7.0], [1.0, 1.5, 3.0, 4.0]),
    "any": ("any", [False, False, True, False], [False, False, True, True]),
    "all": ("all", [True, True, False, True], [True, True, False, False]),
    "any of ints": ("any", [0, 0, 3, 0], [None, False, True, True]),
    "all of ints": ("all", [2, 1, 0, 1], [None, True, False, False]),
    "numpy float32": ("sum", [np.float32(0.5)] * 4, [np.float32(0.5 * n) for n in (1, 2, 3, 4)]),
    "numpy int64": (
        "max",
        [np.int64(n) for n in (1, 3, 2, 9)],
        [np.int64(n) for n in (1, 3, 3, 9)],
    ),
    "numpy mean": (
        "mean",
        [np.float64(n) for n in (1, 2, 6, 7)],
        [np.float64(n) for n in (1, 1.5, 3, 4)],
    ),
}


@ranks(1, 2, 3, 4)
def test_numbers_are_reduced_exactly() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for name, (op, operands, results) in NUMBERS.items():
        want = results[size - 1]
        if want is not None:
            with case(name):
                assert_same(objcomm.all_reduce(operands[rank], op), want)
                reduced = objcomm.reduce(operands[rank], op, dst=size - 1)
                assert_same(reduced, want if rank == size - 1 else None)


@ranks(1, 2, 3)
def test_the_type_of_a_named_result_does_not_depend_on_the_world_size() -> None:
    assert type(objcomm.all_reduce(True, "sum")) is int  # noqa: FBT003  # the operand is the point
    assert type(objcomm.all_reduce(3, "mean")) is float
    assert type(objcomm.all_reduce(3, "any")) is bool
    assert type(objcomm.all_reduce(3, "all")) is bool
    assert type(objcomm.all_reduce(3, "sum")) is int
    mean = objcomm.all_reduce(torch.tensor([3]), "mean")
    assert mean.is_floating_point()
    assert objcomm.all_reduce(np.array([3]), "mean").dtype == np.float64
    assert objcomm.all_reduce(torch.tensor([3]), "any").dtype == torch.bool
    assert objcomm.all_reduce(np.array([3]), "all").dtype == np.bool_


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
    integers = objcomm.all_reduce(mine.to(torch.int32), "mean")
    assert torch.equal(integers, want.to(integers.dtype))


@ranks(2, 3, 4)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_large_tensors_are_reduced_exactly(op: Any) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    stack = torch.stack([torch.arange(600_000) * (i + 1) % 1009 for i in range(size)])
    assert_same(objcomm.all_reduce(stack[rank], op), REDUCED[op](stack))
    assert torch.equal(stack[rank], torch.arange(600_000) * (rank + 1) % 1009)


@ranks(1, 3)
def test_a_sum_keeps_the_dtype() -> None:
    size = objcomm.world_size()
    for dtype in (torch.bfloat16, torch.float16, torch.uint8, torch.complex64):
        got = objcomm.all_reduce(torch.ones(3).to(dtype), "sum")
        assert_same(got, torch.full((3,), size).to(dtype))


@ranks(2)
def test_a_bool_tensor_answers_any_and_all() -> None:
    mine = torch.tensor([True, objcomm.rank() == 1, False])
    assert objcomm.all_reduce(mine, "any").tolist() == [True, True, False]
    assert objcomm.all_reduce(mine, "all").tolist() == [True, False, False]


@ranks(2, 3)
def test_tensors_whose_shapes_do_not_fit_fail_every_rank() -> None:
    with pytest.raises(CollectiveError):
        objcomm.all_reduce(torch.ones(2 + objcomm.rank()), "sum")
    assert_group_works()


@ranks(2, 3)
def test_a_named_operation_on_what_has_none_fails_every_rank() -> None:
    with pytest.raises(CollectiveError) as caught:
        objcomm.all_reduce({"a"}, "sum")
    assert all("set" in failure.message for failure in caught.value.failures.values())
    assert_group_works()


@ranks(1, 2, 3)
def test_numpys_integer_scalars_do_not_wrap_around() -> None:
    size = here().world_size
    mine: Any
    op: Any
    for mine, op, exact in (
        (np.int8(100), "sum", 100 * size),
        (np.int64(2**62), "sum", 2**62 * size),
        (np.uint8(20), "prod", 20**size),
    ):
        got = objcomm.all_reduce(mine, op)
        assert got == exact
        fits = np.iinfo(mine.dtype).min <= exact <= np.iinfo(mine.dtype).max
        assert type(got) is (type(mine) if fits else int)


@ranks(2)
def test_torchs_own_names_of_operators_will_do() -> None:
    ops: Any = dist.ReduceOp
    assert objcomm.all_reduce(here().rank + 1, ops.SUM) == 3
    assert objcomm.all_reduce(here().rank + 1.0, ops.AVG) == 1.5
    with pytest.raises(objcomm.UsageError, match="must be a callable of two objects"):
        objcomm.all_reduce(1, ops.BXOR)


@ranks(2)
def test_unions_compare_what_has_no_truth() -> None:
    alike = {"a": [torch.ones(2)]}
    with pytest.raises(objcomm.CollectiveError, match="key 'a' has different values"):
        objcomm.all_reduce(alike, "union")


@ranks(2)
def test_a_shape_is_no_tuple_of_operands() -> None:
    with pytest.raises(objcomm.CollectiveError, match=r"obj\['v'\]"):
        objcomm.all_reduce({"v": torch.Size([2, 3])}, "mean")
