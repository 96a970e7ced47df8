"""Named reductions of containers, leaf by leaf: the values, and the errors where ranks differ."""

import collections
import dataclasses
import decimal
import fractions
import functools
import itertools
import math
import operator
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import objcomm
from objcomm import CollectiveError, DesyncError, TransportError, UsageError
from objcomm._collectives.gather import answered
from objcomm._collectives.reduction import leafwise, operators, structures
from tests.cases import case
from tests.group.helpers import assert_group_works, error_in, exit_at_once, subgroup
from tests.ranks import ranks, run_on_ranks
from tests.same import assert_same
from tests.workers import here

# Elements of float32 that travel outside of messages, and in several pieces.
LARGE = 1_500_000


class Loss(NamedTuple):
    """A user's named tuple."""

    total: Any
    parts: list[int]


@dataclasses.dataclass(frozen=True)
class Stats:
    """A user's frozen dataclass."""

    count: int
    loss: Loss
    name: str = "val"


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
    thirds = sum((fractions.Fraction(1, 3 + i) for i in range(size)), fractions.Fraction(0))
    want = nested(total) | {
        "stats": Stats(size * 2**70 + total, Loss(0.5 * total, [total, size])),
        "exact": (thirds, decimal.Decimal("0.1") * size, 1j * total),
    }
    mine = nested(rank)
    assert_same(objcomm.all_reduce(mine, "sum"), want, sharing=False)
    on_last = objcomm.reduce(mine, "sum", dst=size - 1)
    assert_same(on_last, want if rank == size - 1 else None, sharing=False)
    assert_same(mine, nested(rank), sharing=False)


@ranks(1, 2, 3)
def test_every_leaf_of_a_mean_is_a_true_mean() -> None:
    rank, mean = objcomm.rank(), (objcomm.world_size() - 1) / 2
    mine = {"n": rank, "t": torch.tensor([rank]), "f": [fractions.Fraction(rank)]}
    tensor = torch.tensor([mean], dtype=torch.float64)
    want = {"n": mean, "t": tensor, "f": [fractions.Fraction(mean)]}
    assert_same(objcomm.all_reduce(mine, "mean"), want)


@ranks(1, 2, 3)
def test_a_leaf_that_is_not_a_number_is_contagious() -> None:
    mine = float("nan") if objcomm.rank() == objcomm.world_size() - 1 else 1.0
    large = torch.ones(LARGE)
    large[-1] = mine
    for op in ("min", "max"):
        got: Any = objcomm.all_reduce({"loss": mine, "t": torch.tensor(mine), "large": large}, op)
        assert math.isnan(got["loss"])
        assert bool(got["t"].isnan())
        assert got["large"].isnan().nonzero().tolist() == [[LARGE - 1]]


@ranks(2, 3)
def test_key_order_does_not_matter_and_the_result_has_that_of_the_lowest_rank() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    keys = ["a", "b", "c"] if rank == 0 else ["c", "a", "b"]
    counts = collections.defaultdict(int, {key: ord(key) for key in keys})
    large = {key: torch.full((LARGE // 10,), float(ord(key))) for key in keys}
    got: Any = objcomm.all_reduce({"counts": counts, "large": large}, "sum")
    assert list(got["counts"]) == list(got["large"]) == ["a", "b", "c"]
    assert got["counts"].default_factory is int
    for key in "abc":
        assert got["counts"][key] == size * ord(key)
        assert bool((got["large"][key] == size * ord(key)).all())
    assert list(counts) == keys


DTYPES = ["float32", "float64", "half", "bfloat16", "int64", "int8", "uint8", "bool", "complex64"]

OPS: list[Any] = ["sum", "prod", "min", "max", "mean", "any", "all"]


@ranks(2, 3, 4)
def test_a_large_tensor_gives_what_its_small_parts_give() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    cycle = torch.arange(1000)
    for (at, name), (turn, op) in itertools.product(enumerate(DTYPES), enumerate(OPS)):
        if (at + turn) % 3 != size - 2:
            continue  # a third of the pairs in each of the three world sizes
        if name == "complex64" and op in ("min", "max"):
            continue  # they have no order
        small = ((cycle * (rank + 3)) % 7 - 2 * (name != "uint8")).to(getattr(torch, name))
        with case(op, name):
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
    want = tree(size * (size + 1) // 2)
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
@pytest.mark.parametrize("numel", [5, 400_000])
def test_sums_of_halves_are_rounded_once(numel: int, dtype: torch.dtype) -> None:
    # 60000 + 60000 is beyond float16; the mean is not, nor is the last sum.
    size = objcomm.world_size()
    each = torch.full((numel,), 60000.0, dtype=dtype)
    assert_same(objcomm.all_reduce([each], "mean")[0], each)
    last = torch.full((numel,), -60000.0 * (size - 2), dtype=dtype)
    got = objcomm.all_reduce([last if objcomm.rank() == size - 1 else each], "sum")[0]
    assert_same(got, (each.float() * (size - 1) + last).to(dtype))


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
def test_any_and_all_use_the_truth_value_of_every_leaf() -> None:
    rank = objcomm.rank()
    tensors = [torch.tensor([0, 2]), torch.tensor([True, rank == 1, False])]
    mine: Any = {"found": [None, "x", 0][rank], "n": 3, "t": tensors}
    results: dict[Any, bool] = {"any": objcomm.world_size() > 1, "all": False}
    for op, found in results.items():
        wanted = [torch.tensor([False, True]), torch.tensor([True, found, False])]
        assert_same(objcomm.all_reduce(mine, op), {"found": found, "n": True, "t": wanted})


@ranks(2, 3)
@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
@pytest.mark.parametrize("key", [None, b"0123456789abcdef"])
def test_every_codec_carries_a_tree_with_and_without_a_key(key: Any, codec: str) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    large = torch.ones(LARGE // 10)
    mine = {"s": Stats(rank, Loss(1.0, [2])), "w": large, 3: torch.ones(2)}
    with objcomm.configure(key=key):
        got = objcomm.all_reduce(mine, codec=codec)
    stats = Stats(sum(range(size)), Loss(float(size), [2 * size]))
    assert_same(got, {"s": stats, "w": size * large, 3: torch.full((2,), float(size))})


def weights(number: int, numel: int = LARGE // 10) -> dict[str, Any]:
    return {"w": [torch.full((numel,), float(number))], "n": number}


@ranks(1, 2, 3)
def test_a_tree_in_flight_keeps_the_containers_that_it_was_given() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    works: dict[int, Any] = {}
    for numel in (3, LARGE // 10):
        mine = weights(rank, numel)
        works[numel] = objcomm.all_reduce(mine, async_op=True)
        last = objcomm.reduce(mine, "max", dst=size - 1, async_op=True)
        if size > 1:
            mine["w"].clear()
            mine["n"] = "gone"
        assert_same(last.wait(), weights(size - 1, numel) if rank == size - 1 else None)
    for numel, work in works.items():
        assert_same(work.wait(), weights(size * (size - 1) // 2, numel))


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
    rank = here().rank
    with subgroup(1, 3) as group:
        if rank in (1, 3):
            assert_same(objcomm.all_reduce(weights(rank), group=group), weights(4))
            on_last = objcomm.reduce(weights(rank), "max", dst=3, group=group)
            assert_same(on_last, weights(3) if rank == 3 else None)


PLANS = st.recursive(
    st.sampled_from(["int", "float", "small", "large", "array"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    ),
    max_leaves=8,
)


def filled(plan: Any, of_ranks: Iterable[int], combine: Any, seed: int = 1) -> Any:
    """Build the object that a plan describes, with the combined numbers of some ranks."""
    if isinstance(plan, dict):
        return {key: filled(each, of_ranks, combine, seed + ord(key)) for key, each in plan.items()}
    if isinstance(plan, (list, tuple)):
        members = enumerate(plan)
        return type(plan)(filled(each, of_ranks, combine, seed + 7 * at) for at, each in members)
    number = combine((seed * 31 + rank * 17) % 23 - 11 for rank in of_ranks)
    return {
        "int": number * 2**66,
        "float": float(number),
        "small": torch.full((2,), number),
        "large": torch.full((20_000,), float(number)),
        "array": np.full((3, 2), number, np.float64),
    }[plan]


def reduce_plan(plan: Any, op: Any) -> None:
    """Compare a reduction with the same one of the numbers in each leaf."""
    combine = {"sum": sum, "max": max}[op]
    got = objcomm.all_reduce(filled(plan, [objcomm.rank()], sum), op)
    assert_same(got, filled(plan, range(objcomm.world_size()), combine), sharing=False)


@pytest.mark.parametrize("world_size", [2, 3])
# A busy machine also draws slowly.
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=st.lists(PLANS, max_size=4), op=st.sampled_from(["sum", "max"]))
def test_any_tree_is_reduced_like_the_numbers_in_it(world_size: int, plan: Any, op: str) -> None:
    run_on_ranks(world_size, reduce_plan, plan=plan, op=op)


@ranks(1, 2)
def test_options_that_do_not_fit_together_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"op": "sum", "dtype": torch.int64},
        {"op": "sum", "dtype": "float32"},
        {"op": "max", "dtype": torch.float64},
        {"op": "sum", "missing": "ignore"},
        {"op": operator.add, "missing": "skip"},
        {"op": "concat", "missing": "skip"},
        {"op": operator.add, "dtype": torch.float64},
    ]
    for options in wrong:
        for call in (objcomm.all_reduce, objcomm.reduce):
            with case(options), pytest.raises(UsageError):
                call([1], **options)
    assert_group_works()


@ranks(2)
def test_ranks_with_different_options_are_out_of_step() -> None:
    missing: Any = "skip" if objcomm.rank() else "error"
    with pytest.raises(DesyncError):
        objcomm.all_reduce([1], missing=missing)
    assert_group_works()


# Ranks that differ or fail


ONE, SMALL = torch.ones(1), torch.ones(2)

# The last rank's object, the other ranks' object, and the path that the error names.
DIFFERENCES: dict[str, tuple[Any, Any, str]] = {
    "a key lacks": ({"a": 1}, {"a": 1, "b": 2}, "obj['b']"),
    "a key more": ({"m": {"a": 1, 3: 2}}, {"m": {"a": 1}}, "obj['m'][3]"),
    "a deep member": ([{"v": Loss(SMALL, [])}], [{"v": Loss(ONE, [])}], "obj[0]['v'].total"),
    "a type of container": ({"a": [1]}, {"a": (1,)}, "obj['a']"),
    "a dict's type": ({"a": {}}, {"a": collections.OrderedDict()}, "obj['a']"),
    "a length": ([1, 2], [1, 2, 3], "obj"),
    "a class's field": ([Stats(1, Loss(1, []))], [Stats(1, Loss(ONE, []))], "obj[0].loss.total"),
    "a dtype": ([SMALL], [SMALL.double()], "obj[0]"),
    "a large dtype": ([torch.ones(LARGE)], [torch.ones(LARGE).double()], "obj[0]"),
    "a large shape": ([torch.ones(LARGE)], [torch.ones(LARGE - 1)], "obj[0]"),
    "large and small": ([torch.ones(LARGE)], [ONE], "obj[0]"),
    "an array's dtype": ([np.ones(2)], [np.ones(2, np.float32)], "obj[0]"),
    "array and tensor": ([SMALL], [np.ones(2, np.float32)], "obj[0]"),
    "number and tensor": ([torch.tensor(1.0)], [1.0], "obj[0]"),
    "a leaf and a container": ({"a": 1}, {"a": {"b": 1}}, "obj['a']"),
    "a text": ({"name": "x", "n": 1}, {"name": "y", "n": 1}, "obj['name']"),
    "nothing": ({"loss": None}, {"loss": "a"}, "obj['loss']"),
    "the whole": (3, [3], "obj"),
}


@ranks(2, 3)
def test_structures_that_differ_are_one_error_on_all_ranks() -> None:
    rank, last = objcomm.rank(), objcomm.world_size() - 1
    calls: list[Any] = [objcomm.all_reduce, objcomm.reduce]
    for (name, (of_last, of_others, path)), call in itertools.product(DIFFERENCES.items(), calls):
        objcomm.reset_stats()
        with case(name, call.__name__):
            mine = of_last if rank == last else of_others
            error = error_in(CollectiveError, partial(call, mine, "sum"))
            (failure,) = error.failures.values()
            assert failure.message.startswith(f"{path} differs between rank 0 and rank {last}: ")
            assert set(objcomm.all_gather(str(error))) == {str(error)}
            received = objcomm.stats()[call.__name__].received_nbytes
            assert received < 200_000, "something large moved"
            assert_group_works()


@ranks(1, 2, 3)
def test_a_leaf_that_cannot_be_combined_is_named() -> None:
    members: list[Any] = [{1}, frozenset(), bytearray(b"a")]
    says = r"obj\['a'\]\[1\]: this named op combines numbers"
    for member in members:
        with case(member), pytest.raises(CollectiveError, match=says):
            objcomm.all_reduce({"a": [1, member]}, "sum")
    assert_group_works()


@ranks(2, 3)
def test_a_leaf_whose_type_has_no_such_operation_is_named() -> None:
    with pytest.raises(CollectiveError, match=r"obj\.name\[0\]: .*unsupported operand"):
        objcomm.all_reduce(Stats(1, Loss(1, []), [slice(3)]), "sum")  # type: ignore[arg-type, call-overload]  # wrong on purpose
    with pytest.raises(CollectiveError, match=r"obj\['w'\]: complex"):
        objcomm.all_reduce({"w": torch.ones(LARGE, dtype=torch.complex64)}, "min")
    with pytest.raises(CollectiveError, match=r"obj\['v'\]"):  # it is not a tuple of operands
        objcomm.all_reduce({"v": torch.Size([2, 3])}, "mean")
    assert_group_works()


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("numel", [2, 400_000])
def test_members_that_some_ranks_lack_are_skipped(numel: int) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    mine: dict[str, Any] = {"all": rank, f"only {rank}": {"w": torch.full((numel,), rank + 1.0)}}
    if rank % 2 == 0:
        mine["even"] = [rank, torch.full((numel,), float(rank)), np.full(numel, float(rank))]
    even = list(range(0, size, 2))
    mean = sum(even) / len(even)
    want = {
        "all": (size - 1) / 2,
        "even": [mean, torch.full((numel,), mean), np.full(numel, mean)],
        **{f"only {i}": {"w": torch.full((numel,), i + 1.0)} for i in range(size)},
    }
    got = objcomm.all_reduce(mine, "mean", missing="skip")
    assert set(got) == set(want)
    assert_same({key: got[key] for key in want}, want, sharing=False)
    assert next(iter(got)) == "all"
    total: Any = objcomm.reduce(mine, "sum", dst=size - 1, missing="skip")
    if rank == size - 1:
        assert total["even"][0] == sum(even)
        assert_same(total[f"only {size - 1}"], want[f"only {size - 1}"], sharing=False)
        total[f"only {size - 1}"]["w"].zero_()
    assert bool((mine[f"only {rank}"]["w"] == rank + 1).all())


@ranks(2)
def test_skipping_members_excuses_neither_a_users_class_nor_another_shape() -> None:
    mine = {"a": 1} if objcomm.rank() else {"a": 1, "s": Stats(1, Loss(1, []))}
    with pytest.raises(CollectiveError, match=r"obj\['s'\] differs between rank 0 and rank 1"):
        objcomm.all_reduce(mine, missing="skip")
    with pytest.raises(CollectiveError, match=r"obj\['a'\]"):
        objcomm.all_reduce({"a": torch.ones(1 + objcomm.rank())}, missing="skip")
    assert_group_works()


@ranks(2, 3, 4, expect_dead=[1])
def test_a_rank_that_dies_in_the_middle_is_named() -> None:
    objcomm.barrier()
    last_piece = {2: 1, 3: 0, 4: 3}[objcomm.world_size()]
    combine, pieces = operators.combine_tensors, itertools.count()

    def die_at_last(*given: Any, **options: Any) -> None:
        if next(pieces) == last_piece:
            exit_at_once()
        combine(*given, **options)

    if here().rank == 1:
        pytest.MonkeyPatch().setattr(operators, "combine_tensors", die_at_last)
    tensor = torch.ones(24 << 20, dtype=torch.uint8).view(torch.float32)
    error = error_in(TransportError, lambda: objcomm.all_reduce({"w": tensor}))
    assert (error.operation, error.peers) == ("all_reduce", (1,))


@ranks(2, 3)
@pytest.mark.parametrize("missing", ["error", "skip"])
def test_a_wrong_answer_is_an_error_and_harms_no_rank(missing: Any) -> None:
    """Rank 0 sends a wrong answer: nothing is built from it, and the group still works."""

    def lie(call: Any, exchange: Any, mine: Any, decide: Any, hub: int) -> Any:
        def wrong(messages: Any) -> Any:
            decide(messages)
            return None, (1, 2, 3, 4), ((17, (0, 1)),)

        return answered(call, exchange, mine, wrong, hub)

    lying = mock.patch.object(leafwise, "answered", lie)  # changes only what is sent
    with lying if here().rank == 0 else nullcontext(), pytest.raises(objcomm.ObjcommError):
        objcomm.all_reduce({"a": torch.ones(9000), "b": 1}, "sum", missing=missing)
    assert_group_works()


@ranks(2)
def test_a_leaf_that_a_rank_lacks_counts_against_its_limit() -> None:
    mine = {"a": torch.ones(9000)} if here().rank == 0 else {}
    with objcomm.configure(max_nbytes=20_000), pytest.raises(objcomm.ObjcommError, match="limit"):
        objcomm.all_reduce(mine, "sum", missing="skip")
    assert_group_works()


@ranks(2, 3)
def test_a_rank_without_memory_for_the_result_fails_every_rank() -> None:
    rank, last = here().rank, objcomm.world_size() - 1
    tensor = torch.ones(LARGE)
    no_memory = mock.patch.object(structures, "room_for", side_effect=lambda *_: torch.empty(2**60))
    kind: Any = RuntimeError if rank == last else CollectiveError
    failing = pytest.raises(kind, match=r"memory|size")
    with no_memory if rank == last else nullcontext(), failing as caught:
        objcomm.all_reduce(tensor)
    if isinstance(caught.value, CollectiveError):
        assert list(caught.value.failures) == [last]
    assert not isinstance(caught.value, TransportError)
    assert bool((objcomm.all_reduce(tensor) == last + 1).all())
