"""average_metrics, gather_from_all_ranks and gather_scalar_from_all_ranks."""

import http
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import objcomm
from objcomm import CollectiveError, UsageError
from objcomm._training import metrics
from tests.group.helpers import assert_group_works, subgroup
from tests.ranks import ranks, solo
from tests.same import assert_same


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
    metrics = {
        "bool": True,
        "int": 3,
        "tensor": torch.tensor(0.5, requires_grad=True),
        "half": torch.tensor([0.25], dtype=torch.float16),
        "numpy": np.float32(0.75),
        "array": np.array([[7]]),
        np.str_("by numpy"): 1,
    }
    want = {"bool": 1.0, "int": 3.0, "tensor": 0.5, "half": 0.25, "numpy": 0.75, "array": 7.0}
    want[np.str_("by numpy")] = 1.0
    got = objcomm.metrics.average_metrics(metrics, count=np.float64(2))
    assert_same(got, want)
    assert got is not metrics


@ranks(1, 2, 4)
def test_edge_cases_have_one_meaning_in_every_world() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    assert objcomm.metrics.average_metrics({}) == {}
    assert objcomm.metrics.average_metrics({}, count=0) == {}
    got = objcomm.metrics.average_metrics({"a": 1.0, "b": 2}, count=0)
    assert_same(got, {"a": math.nan, "b": math.nan})
    # A rank without samples does not count, though its mean is nan.
    last = rank == size - 1
    mine = {"loss": 0.5 if last else math.nan}
    assert objcomm.metrics.average_metrics(mine, count=8 if last else 0) == {"loss": 0.5}
    assert math.isnan(
        objcomm.metrics.average_metrics({"loss": 0.5 if last else math.nan})["loss"]
    ) == (size > 1)
    assert objcomm.metrics.average_metrics({"x": math.inf if last else 1})["x"] == math.inf
    both = objcomm.metrics.average_metrics({"x": math.inf if last else -math.inf})["x"]
    assert math.isnan(both) if size > 1 else both == math.inf
    got = objcomm.metrics.average_metrics(
        {"a": rank, "b": 1}, count={"a": int(last), "b": 2, "c": 1}
    )
    assert got == {"a": size - 1, "b": 1}


@ranks(2, 4)
def test_other_names_are_one_error_that_names_them_and_the_ranks() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    mine = {"loss": 1.0, "f1": 0.5} if rank == 1 else {"acc": 1, "loss": 3}
    with pytest.raises(CollectiveError) as caught:
        objcomm.metrics.average_metrics(mine)
    assert list(caught.value.failures) == [1]
    others = "rank 0" if size == 2 else "ranks 0, 2-3"
    assert caught.value.failures[1].message.startswith(
        f"unlike {others} it lacks 'acc' and has also 'f1'; missing='skip'"
    )
    with pytest.raises(CollectiveError) as caught:
        objcomm.metrics.average_metrics({} if rank == 0 else {"loss": 1.0})
    assert len(caught.value.failures) == 1
    got = objcomm.metrics.average_metrics(mine, missing="skip")
    assert list(got) == (["loss", "f1", "acc"] if rank == 1 else ["acc", "loss", "f1"])
    assert got == {"loss": (1 + 3 * (size - 1)) / size, "acc": 1.0, "f1": 0.5}
    assert objcomm.metrics.average_metrics({} if rank else {"x": 2}, missing="skip") == {"x": 2.0}
    assert_group_works()


BROKEN: list[tuple[Any, Any, str]] = [
    ({"x": "0.5"}, 1, "'x' is a str"),
    ({"x": 1j}, 1, "'x' is a complex"),
    ({"x": torch.ones(2)}, 1, ""),
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
def test_what_is_no_number_on_one_rank_fails_on_all() -> None:
    last = objcomm.world_size() - 1
    for given, count, said in BROKEN:
        mine = (given, count) if objcomm.rank() == last else ({"x": 1.0}, 1)
        with pytest.raises(CollectiveError) as caught:
            objcomm.metrics.average_metrics(*mine)
        assert list(caught.value.failures) == [last]
        assert said in caught.value.failures[last].message
    with pytest.raises(UsageError, match="missing="):
        objcomm.metrics.average_metrics({}, missing="ignore")  # type: ignore[arg-type]  # wrong on purpose
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


SCALARS: list[Any] = [2**24 + 1, 2**31, 2**70, 2.0, 0.1, True, None, "x", http.HTTPStatus.OK]


@ranks(1, 2, 4)
def test_functions_run_everywhere_and_one_rank_gets_what_they_return() -> None:
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
    for scalar in SCALARS:
        scalars = metrics.gather_scalar_from_all_ranks(lambda: scalar)  # noqa: B023  # called immediately
        assert_same(scalars, [scalar] * size if rank == 0 else None, sharing=False)


@ranks(1, 2, 4)
def test_a_function_that_raises_on_one_rank_raises_on_all() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    failing = size - 1

    def fn() -> int:
        if rank == failing:
            raise LookupError("no batches")
        return 1

    of_any, of_scalars = "gather_from_all_ranks", "gather_scalar_from_all_ranks"
    for operation, gather in (
        (of_any, lambda: objcomm.metrics.gather_from_all_ranks(fn, 0)),
        (of_any, lambda: objcomm.metrics.gather_from_all_ranks(fn, failing)),
        (of_scalars, lambda: metrics.gather_scalar_from_all_ranks(fn)),
    ):
        with pytest.raises(CollectiveError) as caught:
            gather()
        assert list(caught.value.failures) == [failing]
        assert caught.value.failures[failing].message == "no batches"
        assert "in fn" in caught.value.failures[failing].traceback
        assert caught.value.operation == operation
        assert isinstance(caught.value.__cause__, LookupError) == (rank == failing)
    with pytest.raises(CollectiveError, match="is not a scalar"):
        metrics.gather_scalar_from_all_ranks(lambda: [1] if rank == failing else 1)
    assert_group_works()


@solo()
def test_all_work_without_torch_distributed() -> None:
    assert objcomm.metrics.average_metrics({"x": 2**24 + 1}, count=7) == {"x": 2**24 + 1}
    assert objcomm.metrics.gather_from_all_ranks(lambda: [1]) == [[1]]
    assert metrics.gather_scalar_from_all_ranks(lambda: True) == [True]


@solo(environment={"WORLD_SIZE": "2"})
def test_a_job_that_is_not_initialised_is_told_so() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        objcomm.metrics.average_metrics({"x": 1})
    with pytest.raises(UsageError, match="init_process_group"):
        objcomm.metrics.gather_from_all_ranks(lambda: 1)
