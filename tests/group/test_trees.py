"""Named reductions of containers, leaf by leaf: the resulting values."""

import collections
import decimal
import fractions
import functools
import itertools
import math
import operator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import objcomm
from tests.cases import case
from tests.group.containers import LARGE, Loss, Stats
from tests.group.helpers import assert_group_works, subgroup
from tests.ranks import ranks, run_on_ranks
from tests.same import assert_same
from tests.workers import here


def nested(rank: int) -> dict[str, Any]:
    """Return a small container with one of everything."""
    return {
        "stats": Stats(2**70 + rank, Loss(0.5 * rank, [rank, 1])),
        "exact": (fractions.Fraction(1, 3 + rank), decimal.Decimal("0.1"), 1j * rank),
        "ordered": collections.OrderedDict(b=rank, a=-rank),
        "tensors": [torch.full((2, 3), rank), torch.tensor(float(rank)), torch.empty(0, 4)],
        "array": np.full((3,), rank, np.float32),
        "tag": "run",
        "none": None,
        "by key": {("a", 1): rank, 7: float(rank)},
    }


@ranks(1, 2, 3, 4)
def test_a_nested_container_is_summed_leaf_by_leaf() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    total = size * (size - 1) // 2
    want = {
        "stats": Stats(size * 2**70 + total, Loss(0.5 * total, [total, size])),
        "exact": (
            sum((fractions.Fraction(1, 3 + i) for i in range(size)), fractions.Fraction(0)),
            decimal.Decimal("0.1") * size,
            1j * total,
        ),
        "ordered": collections.OrderedDict(b=total, a=-total),
        "tensors": [
            torch.full((2, 3), total),
            torch.tensor(float(total)),
            torch.empty(0, 4),
        ],
        "array": np.full((3,), total, np.float32),
        "tag": "run",
        "none": None,
        "by key": {("a", 1): total, 7: float(total)},
    }
    mine = nested(rank)
    assert_same(objcomm.all_reduce(mine, "sum"), want, sharing=False)
    on_last = objcomm.reduce(mine, "sum", dst=size - 1)
    assert_same(on_last, want if rank == size - 1 else None, sharing=False)
    assert_same(mine, nested(rank), sharing=False)


@ranks(1, 2, 3)
def test_every_leaf_of_a_mean_is_a_true_mean() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    mean = (size - 1) / 2
    got = objcomm.all_reduce(
        {"n": rank, "t": torch.tensor([rank]), "f": [fractions.Fraction(rank)]}, "mean"
    )
    want = {
        "n": mean,
        "t": torch.tensor([mean], dtype=torch.float64),
        "f": [fractions.Fraction(size - 1, 2)],
    }
    assert_same(got, want)


@ranks(1, 2, 3)
def test_a_leaf_that_is_not_a_number_is_contagious() -> None:
    mine = float("nan") if objcomm.rank() == objcomm.world_size() - 1 else 1.0
    large = torch.ones(LARGE)
    large[-1] = mine
    tree: dict[str, Any] = {"loss": mine, "t": torch.tensor(mine), "large": large}
    for op in ("min", "max"):
        got = objcomm.all_reduce(tree, op)
        assert math.isnan(got["loss"])
        assert bool(got["t"].isnan())
        assert bool(got["large"][-1].isnan())
        assert not bool(got["large"][:-1].isnan().any())


@ranks(2, 3)
def test_key_order_does_not_matter_and_the_lowest_rank_has_its_way() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    keys = ["a", "b", "c"] if rank == 0 else ["c", "a", "b"]
    counts = collections.defaultdict(int, {key: ord(key) for key in keys})
    large = {key: torch.full((LARGE // 10,), float(ord(key))) for key in keys}
    tree: dict[str, Any] = {"counts": counts, "large": large}
    got = objcomm.all_reduce(tree, "sum")
    assert list(got["counts"]) == list(got["large"]) == ["a", "b", "c"]
    assert got["counts"].default_factory is int
    for key in "abc":
        assert got["counts"][key] == size * ord(key)
        assert bool((got["large"][key] == size * ord(key)).all())
    assert list(counts) == keys


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]

OPS: list[Any] = ["sum", "prod", "min", "max", "mean", "any", "all"]


@ranks(2, 3, 4)
def test_a_large_tensor_gives_what_its_small_parts_give() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    cycle = torch.arange(1000)
    for (at, dtype), (turn, op) in itertools.product(enumerate(DTYPES), enumerate(OPS)):
        if (at + turn) % 3 != size - 2:
            continue  # a third of the pairs in each of the three world sizes
        if dtype.is_complex and op in ("min", "max"):
            continue  # they have no order
        small = ((cycle * (rank + 3)) % 7 - (0 if dtype is torch.uint8 else 2)).to(dtype)
        with case(op, dtype):
            want = objcomm.all_reduce(small, op)
            large = small.repeat(300)
            for _ in range(2):
                got = objcomm.all_reduce({"w": large, "b": [small]}, op)
                assert_same(got, {"w": want.repeat(300), "b": [want]}, sharing=False)
                assert torch.equal(large, small.repeat(300))


@ranks(2, 3, 4)
def test_leaves_of_all_sizes_and_kinds_travel_together() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    sizes = [0, 1, 3, 1000, 30_000, 100_000, LARGE, 7]

    def tree(factor: int) -> dict[str, Any]:
        return {
            "floats": [torch.arange(n).float() * factor for n in sizes],
            "ints": {n: torch.arange(n, dtype=torch.int64) * factor for n in sizes},
            "arrays": tuple(np.arange(n, dtype=np.float64) * factor for n in sizes),
            "scalar": torch.tensor(factor),
            "column": (torch.arange(90_000).float() * factor).view(300, 300)[:, 5],
            "fortran": np.asfortranarray(np.arange(60_000).reshape(200, 300) * factor),
            "turned": (torch.arange(90_000).float() * factor).view(300, 300).t(),
            "wide": torch.full((1, 200), float(factor)).expand(500, 200),
            "n": factor,
        }

    mine = tree(rank + 1)
    total = size * (size + 1) // 2
    want = tree(total)
    for key in ("column", "turned", "wide"):
        want[key] = want[key].contiguous()
    want["fortran"] = np.ascontiguousarray(want["fortran"])
    assert_same(objcomm.all_reduce(mine, "sum"), want, sharing=False)
    for root in range(size):
        got = objcomm.reduce(mine, "sum", dst=root)
        assert_same(got, want if rank == root else None, sharing=False)
    assert_same(mine["floats"], tree(rank + 1)["floats"], sharing=False)
    assert_group_works()


@ranks(2, 3, 4)
@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
def test_a_large_result_has_the_same_bits_on_every_rank_and_in_rank_order(op: Any) -> None:
    def operand(i: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(i)
        return torch.randn(LARGE, generator=generator) * 1e3

    size = objcomm.world_size()
    got = objcomm.all_reduce({"w": operand(objcomm.rank())}, op)["w"]
    operands = [operand(i) for i in range(size)]
    if op == "mean":
        doubles = [each.double() for each in operands]
        want = (functools.reduce(operator.add, doubles) / size).float()
    else:
        want = functools.reduce(operator.add if op == "sum" else operator.mul, operands)
    assert torch.equal(got, want)


@ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_halves_are_rounded_once(dtype: torch.dtype) -> None:
    for numel in (5, 400_000):
        with case(numel):
            check_sums_of_halves(dtype, numel)


def check_sums_of_halves(dtype: torch.dtype, numel: int) -> None:
    # 60000 + 60000 is beyond float16; the mean is not, nor is the last sum.
    size = objcomm.world_size()
    mean = objcomm.all_reduce([torch.full((numel,), 60000.0, dtype=dtype)], "mean")[0]
    assert_same(mean, torch.full((numel,), 60000.0, dtype=dtype))
    last = objcomm.rank() == size - 1
    mine = torch.full((numel,), -60000.0 * (size - 2) if last else 60000.0, dtype=dtype)
    got = objcomm.all_reduce([mine], "sum")[0]
    exact = mine.new_tensor(60000.0).float() * (size - 1) + torch.tensor(
        -60000.0 * (size - 2), dtype=dtype
    )
    assert_same(got, torch.full((numel,), float(exact)).to(dtype))


@ranks(2, 3)
@pytest.mark.parametrize("numel", [5, 400_000])
def test_dtype_sets_the_type_of_the_accumulator(numel: int) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    mine = torch.full((numel,), 2.0**24 if rank == 0 else 1.0)
    got = objcomm.all_reduce({"w": mine, "n": torch.tensor(3)}, "sum", dtype=torch.float64)
    want = torch.tensor(2.0**24 + size - 1, dtype=torch.float64).float()
    assert_same(got, {"w": torch.full((numel,), float(want)), "n": torch.tensor(3 * size)})
    if size == 3:  # in float32 both ones are lost
        assert float(got["w"][0]) != float(objcomm.all_reduce(mine, "sum")[0])


@ranks(1, 2)
def test_any_and_all_take_every_leaf_by_its_truth() -> None:
    mine = {"found": [None, "x", 0][objcomm.rank()], "n": 3, "t": torch.tensor([0, 2])}
    alone = objcomm.world_size() == 1
    got = objcomm.all_reduce(mine, "any")
    assert_same(got, {"found": not alone, "n": True, "t": torch.tensor([False, True])})
    got = objcomm.all_reduce(mine, "all")
    assert_same(got, {"found": False, "n": True, "t": torch.tensor([False, True])})


@ranks(2, 3)
@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
def test_every_codec_carries_a_tree(codec: str) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    mine = {"s": Stats(rank, Loss(1.0, [2])), "w": torch.ones(LARGE // 10), 3: torch.ones(2)}
    got = objcomm.all_reduce(mine, codec=codec)
    want = {
        "s": Stats(sum(range(size)), Loss(float(size), [2 * size])),
        "w": torch.full((LARGE // 10,), float(size)),
        3: torch.full((2,), float(size)),
    }
    assert_same(got, want, sharing=False)


@ranks(2)
def test_with_a_key_all_is_signed() -> None:
    with objcomm.configure(key=b"0123456789abcdef"):
        got = objcomm.all_reduce({"w": torch.ones(LARGE // 10)})
    assert_same(got, {"w": torch.full((LARGE // 10,), 2.0)})


@ranks(1, 2, 3)
def test_a_tree_in_flight_keeps_the_containers_that_it_was_given() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    works = []
    for numel in (3, LARGE // 10):
        mine: dict[str, Any] = {"w": [torch.full((numel,), float(rank))], "n": rank}
        works.append(objcomm.all_reduce(mine, async_op=True))
        last = objcomm.reduce(mine, "max", dst=size - 1, async_op=True)
        if size > 1:
            mine["w"].clear()
            mine["n"] = "gone"
        got = last.wait()
        if rank == size - 1:
            assert got is not None
            assert_same(got["w"][0], torch.full((numel,), float(size - 1)))
    total = size * (size - 1) // 2
    for numel, work in zip((3, LARGE // 10), works, strict=True):
        assert_same(work.wait(), {"w": [torch.full((numel,), float(total))], "n": total})


@ranks(2)
def test_a_result_keeps_no_history_of_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(LARGE // 10))
    got = objcomm.all_reduce({"w": weight, "s": weight.sum()})
    assert not got["w"].requires_grad
    assert not got["s"].requires_grad
    with torch.inference_mode():
        inside = objcomm.all_reduce({"w": weight})
    assert not inside["w"].is_inference()


@ranks(4)
def test_a_subgroup_reduces_a_tree() -> None:
    with subgroup(1, 3) as group:
        if here().rank in (1, 3):
            mine = {"w": torch.full((LARGE // 10,), float(here().rank)), "n": here().rank}
            got = objcomm.all_reduce(mine, group=group)
            assert_same(got, {"w": torch.full((LARGE // 10,), 4.0), "n": 4})
            on_last = objcomm.reduce(mine, "max", dst=3, group=group)
            if here().rank == 3:
                assert_same(on_last, {"w": torch.full((LARGE // 10,), 3.0), "n": 3})


def _members() -> st.SearchStrategy[Any]:
    leaves = st.sampled_from(["int", "float", "small", "large", "array"])
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
        ),
        max_leaves=8,
    )


def _filled(plan: Any, rank: int, seed: int) -> Any:
    """Build the object that a plan describes for one rank."""
    if isinstance(plan, dict):
        return {key: _filled(each, rank, seed + ord(key)) for key, each in plan.items()}
    if isinstance(plan, (list, tuple)):
        return type(plan)(_filled(each, rank, seed + 7 * at) for at, each in enumerate(plan))
    number = (seed * 31 + rank * 17) % 23 - 11
    return {
        "int": number * 2**66,
        "float": float(number),
        "small": torch.full((2,), number),
        "large": torch.full((20_000,), float(number)),
        "array": np.full((3, 2), number, np.float64),
    }[plan]


def _model(op: str, objs: list[Any]) -> Any:
    """Reduce in one process."""
    first = objs[0]
    if isinstance(first, dict):
        return {key: _model(op, [each[key] for each in objs]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(_model(op, list(members)) for members in zip(*objs, strict=True))
    if op == "sum":
        return functools.reduce(operator.add, objs)
    if isinstance(first, torch.Tensor):
        return functools.reduce(torch.maximum, objs)
    if isinstance(first, np.ndarray):
        return functools.reduce(np.maximum, objs)
    return max(objs)


def reduce_plan(plan: Any, op: Any) -> None:
    """Compare a reduction with the model, on every rank."""
    rank, size = objcomm.rank(), objcomm.world_size()
    want = _model(op, [_filled(plan, i, 1) for i in range(size)])
    assert_same(objcomm.all_reduce(_filled(plan, rank, 1), op), want, sharing=False)


@pytest.mark.parametrize("world_size", [2, 3])
# A busy machine also draws slowly.
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=st.lists(_members(), max_size=4), op=st.sampled_from(["sum", "max"]))
def test_any_tree_gives_what_one_process_gives(world_size: int, plan: Any, op: str) -> None:
    run_on_ranks(world_size, reduce_plan, plan=plan, op=op)
