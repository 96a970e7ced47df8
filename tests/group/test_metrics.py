"""average_metrics, functions that gather from all ranks, reduce_and_broadcast and ddp_broadcast."""

import http
import math
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import objcomm
from objcomm import CollectiveError
from objcomm._training import metrics
from objcomm.compat import flashy
from tests.cases import case
from tests.group.helpers import assert_group_works, error_in, subgroup
from tests.ranks import ranks
from tests.same import assert_same

SCALARS: dict[str, Any] = {
    **{repr(value): value for value in (None, True, False, 0, 1, -1, 2**24 + 1, 2**31, 2**53 + 1)},
    **{f"int {value}": value for value in (2**63 - 1, 2**63, -(2**63) - 1, 2**64, 2**70, 10**400)},
    **{f"float {value}": value for value in (0.0, -0.0, 1.0, 2.0, 0.1, math.nan, math.inf, 5e-324)},
    "HTTPStatus": http.HTTPStatus.OK,
    "complex": complex(-0.0, math.nan),
    **{f"str {value!a}": value for value in ("", "é", "a\0b", "\ud800", "x" * 40_000)},
    "np.float64": np.float64(0.1),
    "np.float32": np.float32(0.1),
    "np.int64": np.int64(2**62),
    "np.uint64": np.uint64(2**64 - 1),
    "np.bool": np.bool_(1),
    "np.float16 nan": np.float16(np.nan),
    "np.datetime64": np.datetime64("2024-02-29"),
    "tensor float": torch.tensor(0.1),
    "tensor int": torch.tensor(2**60),
    "tensor bool": torch.tensor(True),  # noqa: FBT003  # the operand is the point
    "tensor bfloat16": torch.tensor(0.1, dtype=torch.bfloat16),
}


@ranks(1, 2, 3)
def test_averages_are_exact_floats_in_this_ranks_order() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    got = objcomm.metrics.average_metrics({"epoch": 2**24 + 1, "step": 2**53 - 1, "loss": 0.1})
    assert_same(got, {"epoch": 2.0**24 + 1, "step": 2.0**53 - 1, "loss": 0.1})
    values, counts = [0.1, 0.7, 1e-30][:size], [3, 0.5, 64][:size]
    weighted = sum(Fraction(v) * Fraction(c) for v, c in zip(values, counts, strict=True))
    want = float(weighted / sum(map(Fraction, counts)))
    assert objcomm.metrics.average_metrics({"x": values[rank]}, counts[rank]) == {"x": want}
    order = ["a", "b", "c"][rank:] + ["a", "b", "c"][:rank]
    numbers = {"a": 1, "b": 20, "c": 300}
    got = objcomm.metrics.average_metrics({name: numbers[name] for name in order})
    assert list(got.items()) == [(name, float(numbers[name])) for name in order]
    if size > 1:
        cancelling = objcomm.metrics.average_metrics({"x": [1e17, 1, -1e17][rank]})
        assert cancelling["x"] == (1 / 3 if size == 3 else 5e16 + 0.5)


@ranks(1, 2)
def test_any_number_of_one_element_is_averaged() -> None:
    # Each metric, and its average.
    numbers: dict[Any, tuple[Any, float]] = {
        "bool": (True, 1.0),
        "int": (3, 3.0),
        "tensor": (torch.tensor(0.5, requires_grad=True), 0.5),
        "half": (torch.tensor([0.25], dtype=torch.float16), 0.25),
        "numpy": (np.float32(0.75), 0.75),
        "array": (np.array([[7]]), 7.0),
        np.str_("by numpy"): (1, 1.0),
    }
    mine = {name: given for name, (given, _) in numbers.items()}
    got = objcomm.metrics.average_metrics(mine, count=np.float64(2))
    assert_same(got, {name: average for name, (_, average) in numbers.items()})
    assert got is not mine


@ranks(1, 2, 4)
def test_edge_cases_have_one_meaning_in_every_world() -> None:
    rank, size, average = objcomm.rank(), objcomm.world_size(), objcomm.metrics.average_metrics
    assert average({}) == average({}, count=0) == {}
    assert_same(average({"a": 1.0, "b": 2}, count=0), {"a": math.nan, "b": math.nan})
    # A rank without samples does not count, though its mean is nan.
    last = rank == size - 1
    mine = {"loss": 0.5 if last else math.nan}
    assert average(mine, count=8 if last else 0) == {"loss": 0.5}
    assert math.isnan(average(mine)["loss"]) == (size > 1)
    assert average({"x": math.inf if last else 1})["x"] == math.inf
    both = average({"x": math.inf if last else -math.inf})["x"]
    assert math.isnan(both) if size > 1 else both == math.inf
    got = average({"a": rank, "b": 1}, count={"a": int(last), "b": 2, "c": 1})
    assert got == {"a": size - 1, "b": 1}


@ranks(1, 2)
def test_flashys_averages_of_lists_and_dicts_are_weighted_by_count() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    counts = [3 * each + 1 for each in range(size)]
    mean = sum(each * count for each, count in enumerate(counts)) / sum(counts)
    assert flashy.average([rank, 1.0], counts[rank]) == [mean, 1.0]
    assert flashy.average({"loss": rank}, counts[rank]) == {"loss": mean}
    assert flashy.average_metrics({"loss": rank}, counts[rank]) == {"loss": mean}


@ranks(2, 4)
def test_other_names_are_one_error_that_names_them_and_the_ranks() -> None:
    rank, size, average = objcomm.rank(), objcomm.world_size(), objcomm.metrics.average_metrics
    mine = {"loss": 1.0, "f1": 0.5} if rank == 1 else {"acc": 1, "loss": 3}
    error = error_in(CollectiveError, lambda: average(mine))
    assert list(error.failures) == [1]
    others = "rank 0" if size == 2 else "ranks 0, 2-3"
    text = f"unlike {others} it lacks 'acc' and has also 'f1'; missing='skip'"
    assert error.failures[1].message.startswith(text)
    error = error_in(CollectiveError, lambda: average({} if rank == 0 else {"loss": 1.0}))
    assert len(error.failures) == 1
    got = average(mine, missing="skip")
    assert list(got) == (["loss", "f1", "acc"] if rank == 1 else ["acc", "loss", "f1"])
    assert got == {"loss": (1 + 3 * (size - 1)) / size, "acc": 1.0, "f1": 0.5}
    assert average({} if rank else {"x": 2}, missing="skip") == {"x": 2.0}
    assert_group_works()


BROKEN: list[tuple[Any, Any, str]] = [
    ({"x": "0.5"}, 1, "'x' is a str"),
    ({"x": 1j}, 1, "'x' is a complex"),
    ({"x": 10**400}, 1, "'x' is too large for a float"),
    ({3: 1.0}, 1, "a metric's name must be a string, not 3"),
    ({"x": 1.0}, -1, "count"),
    ({"x": 1.0}, math.nan, "count"),
    ({}, math.inf, "count"),
    ({"x": 1.0}, {"y": 1}, "count= has no entry for 'x'"),
    ({"x": 1.0}, {"x": -2}, "count of 'x'"),
    ({"x": torch.ones(2)}, 1, "'x' is not a single number"),
    ({"x": np.ones(2)}, 1, "'x' is not a single number"),
]


@ranks(1, 2)
def test_a_metric_that_is_not_a_number_on_one_rank_fails_on_all() -> None:
    last = objcomm.world_size() - 1
    for given, count, text in BROKEN:
        mine = (given, count) if objcomm.rank() == last else ({"x": 1.0}, 1)
        error = error_in(CollectiveError, partial(objcomm.metrics.average_metrics, *mine))
        assert list(error.failures) == [last]
        assert text in error.failures[last].message
    assert_group_works()


@ranks(4)
def test_a_subgroup_averages_and_gathers_its_own() -> None:
    rank = objcomm.rank()
    with subgroup(1, 3) as group:
        if rank in (1, 3):
            assert objcomm.metrics.average_metrics({"rank": rank}, group=group) == {"rank": 2.0}
            got = objcomm.metrics.gather_from_all_ranks(lambda: {"rank": rank}, 3, group=group)
            assert got == ([{"rank": 1}, {"rank": 3}] if rank == 3 else None)
            with pytest.raises(CollectiveError):
                objcomm.metrics.gather_from_all_ranks(lambda: 1 // (rank - 1), group=group)
            assert_group_works(group)


@ranks(1, 2, 4)
def test_a_function_runs_on_every_rank_and_one_gets_all_results() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for dst in range(size):
        calls: list[int] = []

        def fn() -> dict[str, Any]:
            calls.append(1)  # noqa: B023  # called within this turn
            return {"rank": objcomm.rank(), "tensor": torch.arange(40_000)}

        got = objcomm.metrics.gather_from_all_ranks(fn, dst)
        assert calls == [1]
        assert (got is not None) == (rank == dst)
        want = [{"rank": each, "tensor": torch.arange(40_000)} for each in range(size)]
        assert_same(got, want if rank == dst else None)
    for scalar in SCALARS.values():
        scalars = metrics.gather_scalar_from_all_ranks(lambda: scalar)  # noqa: B023  # called immediately
        assert_same(scalars, [scalar] * size if rank == 0 else None, sharing=False)


@ranks(1, 2, 4)
def test_a_function_that_raises_on_one_rank_raises_on_all() -> None:
    rank, failing = objcomm.rank(), objcomm.world_size() - 1

    def fn() -> int:
        if rank == failing:
            raise LookupError("no batches")
        return 1

    gathers: list[tuple[str, Any]] = [
        ("gather_from_all_ranks", lambda: objcomm.metrics.gather_from_all_ranks(fn, 0)),
        ("gather_from_all_ranks", lambda: objcomm.metrics.gather_from_all_ranks(fn, failing)),
        ("gather_scalar_from_all_ranks", lambda: metrics.gather_scalar_from_all_ranks(fn)),
    ]
    for operation, gather in gathers:
        error = error_in(CollectiveError, gather)
        assert list(error.failures) == [failing]
        assert error.failures[failing].message == "no batches"
        assert "in fn" in error.failures[failing].traceback
        assert error.operation == operation
        assert isinstance(error.__cause__, LookupError) == (rank == failing)
    with pytest.raises(CollectiveError, match="is not a scalar"):
        metrics.gather_scalar_from_all_ranks(lambda: [1] if rank == failing else 1)
    assert_group_works()


@ranks(1, 2, 3, 4)
def test_each_rank_may_pass_a_scalar_of_another_type() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    values = list(SCALARS.values())
    for turn in range(len(values)):
        want = [values[(turn + i) % len(values)] for i in range(size)]
        assert_same(objcomm.metrics.all_gather_scalar(want[rank]), want, sharing=False)
        for root in range(size):
            gathered = objcomm.gather_scalar(want[rank], dst=root)
            assert_same(gathered, want if rank == root else None, sharing=False)


@ranks(1, 2, 3)
def test_an_object_that_is_not_a_scalar_fails_all_ranks_that_wait() -> None:
    rank, gather = objcomm.rank(), objcomm.metrics.all_gather_scalar
    failing = 1 % objcomm.world_size()
    for wrong in ([1], {"a": 1}, torch.ones(2), b"x", ValueError):
        with case(wrong):
            error = error_in(CollectiveError, partial(gather, wrong if rank == failing else 0.5))
            assert list(error.failures) == [failing]
            assert type(wrong).__name__ in error.failures[failing].message
            assert rank != failing or error.__cause__ is not None
            assert_group_works()


@ranks(1, 2, 3, 4)
def test_reduce_and_broadcast_calls_fn1_everywhere_and_fn2_once() -> None:
    calls: list[str] = []

    def fn1() -> dict[str, int]:
        calls.append("fn1")
        return {"count": objcomm.rank() + 1}

    def fn2(parts: list[dict[str, int]]) -> dict[str, Any]:
        calls.append("fn2")
        return {"total": sum(part["count"] for part in parts), "order": [*parts]}

    size = objcomm.world_size()
    got = objcomm.reduce_and_broadcast(fn1, fn2)
    assert got["total"] == size * (size + 1) // 2
    assert got["order"] == [{"count": i + 1} for i in range(size)]
    everyone = [call for made in objcomm.all_gather(calls) for call in made]
    assert everyone.count("fn1") == size
    assert everyone.count("fn2") == 1


@ranks(1, 2, 3)
def test_ddp_broadcast_is_broadcast_with_other_names_of_arguments() -> None:
    rank = objcomm.rank()
    for src in range(objcomm.world_size()):
        mine = {"state": torch.arange(30_000)} if rank == src else None
        got: Any = objcomm.ddp_broadcast(communication_object=mine, src=src)
        assert_same(got, {"state": torch.arange(30_000)})
        assert (got is mine) == (rank == src)
        assert objcomm.ddp_broadcast(rank, src) == src
    assert objcomm.ddp_broadcast(rank) == 0
