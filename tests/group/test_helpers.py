"""gather_scalar, reduce_and_broadcast and ddp_broadcast."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import objcomm
from objcomm import CollectiveError
from tests.cases import case
from tests.group.helpers import assert_group_works
from tests.ranks import ranks, solo
from tests.same import assert_same

SCALARS: dict[str, Any] = {
    **{repr(value): value for value in (None, True, False, 0, 1, -1, 2**24 + 1, 2**53 + 1)},
    **{f"int {value}": value for value in (2**63 - 1, 2**63, -(2**63) - 1, 2**64, 2**70, 10**400)},
    **{f"float {value}": value for value in (0.0, -0.0, 1.0, 2.0, 0.1, math.nan, math.inf, 5e-324)},
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
def test_a_scalar_arrives_with_its_value_and_type() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for name, mine in SCALARS.items():
        with case(name):
            for got in objcomm.metrics.all_gather_scalar(mine):
                assert_same(got, mine)
            for root in range(size):
                gathered = objcomm.gather_scalar(mine, dst=root)
                assert (gathered is None) == (rank != root)
                assert len(gathered or [None] * size) == size
                for got in gathered or []:
                    assert_same(got, mine)


@ranks(2, 3, 4)
def test_each_rank_may_pass_a_scalar_of_another_type() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    values = list(SCALARS.values())
    for turn in range(len(values)):
        want = [values[(turn + i) % len(values)] for i in range(size)]
        got = objcomm.metrics.all_gather_scalar(want[rank])
        assert_same(got, want, sharing=False)
        gathered = objcomm.gather_scalar(want[rank], dst=size - 1)
        assert_same(gathered, want if rank == size - 1 else None, sharing=False)


@ranks(2, 3)
def test_numpy_on_one_rank_and_python_on_the_others_is_kept_apart() -> None:
    mine = np.float64(0.5) if objcomm.rank() == 1 else 0.5
    got = objcomm.metrics.all_gather_scalar(mine)
    assert [type(value) for value in got[:2]] == [float, np.float64]
    mine = True if objcomm.rank() == 1 else 1
    assert [type(value) for value in objcomm.metrics.all_gather_scalar(mine)[:2]] == [int, bool]


@ranks(1, 2)
def test_a_scalar_costs_one_exchange() -> None:
    objcomm.barrier()
    objcomm.reset_stats()
    objcomm.gather_scalar(0.5)
    stats = objcomm.stats()["gather_scalar"]
    assert stats.calls == 1
    assert stats.exchanges == (0 if objcomm.world_size() == 1 else 1)
    assert stats.sent_nbytes < 1024


@ranks(2, 3)
def test_what_is_no_scalar_is_refused_on_all_ranks_that_wait() -> None:
    rank = objcomm.rank()
    for wrong in ([1], {"a": 1}, torch.ones(2), b"x", ValueError):
        with case(wrong):
            with pytest.raises(CollectiveError) as caught:
                objcomm.metrics.all_gather_scalar(wrong if rank == 1 else 0.5)
            assert list(caught.value.failures) == [1]
            assert type(wrong).__name__ in caught.value.failures[1].message
            if rank == 1:
                assert caught.value.__cause__ is not None
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
@pytest.mark.parametrize("nbytes", [1, 2_000_000])
def test_reduce_and_broadcast_carries_any_values(nbytes: int) -> None:
    def fn2(parts: list[Any]) -> Any:
        tensors = [part["t"] for part in parts]
        return {"size": sum(map(len, tensors)), "tensors": tensors}

    got = objcomm.reduce_and_broadcast(lambda: {"t": torch.zeros(nbytes, dtype=torch.uint8)}, fn2)
    assert got["size"] == nbytes * objcomm.world_size()
    assert [len(t) for t in got["tensors"]] == [nbytes] * objcomm.world_size()
    numbers = objcomm.reduce_and_broadcast(lambda: 2**70, lambda parts: parts[0] * len(parts))
    assert numbers == 2**70 * objcomm.world_size()
    assert objcomm.reduce_and_broadcast(lambda: None, lambda _: None) is None


@ranks(1, 2, 3)
@pytest.mark.parametrize("failing", [0, -1])
def test_a_raise_in_fn1_is_raised_on_all_and_fn2_is_not_called(failing: int) -> None:
    failing %= objcomm.world_size()

    def fn1() -> int:
        if objcomm.rank() == failing:
            raise LookupError("no such key")
        return 1

    def fn2(_: list[int]) -> int:
        raise AssertionError("fn2 was called without all parts")

    with pytest.raises(CollectiveError) as caught:
        objcomm.reduce_and_broadcast(fn1, fn2)
    assert list(caught.value.failures) == [failing]
    assert caught.value.failures[failing].message == "no such key"
    assert "in fn1" in caught.value.failures[failing].traceback
    assert isinstance(caught.value.__cause__, LookupError) == (objcomm.rank() == failing)
    assert_group_works()


@ranks(1, 2, 3)
def test_a_raise_in_fn2_is_raised_on_all() -> None:
    def fn2(_: list[int]) -> int:
        raise ZeroDivisionError("no batches")

    with pytest.raises(CollectiveError) as caught:
        objcomm.reduce_and_broadcast(lambda: 1, fn2)
    assert [f.message for f in caught.value.failures.values()] == ["no batches"]
    assert_group_works()


@ranks(2, 3)
def test_a_result_of_fn2_that_cannot_be_sent_is_raised_on_all() -> None:
    with pytest.raises(CollectiveError) as caught:
        objcomm.reduce_and_broadcast(lambda: 1, lambda parts: (part for part in parts))
    assert "EncodeError" in next(iter(caught.value.failures.values())).type_name
    assert_group_works()


@ranks(1, 2, 3)
def test_ddp_broadcast_shares_the_sources_object() -> None:
    for src in range(objcomm.world_size()):
        mine = {"epoch": 3, "state": torch.arange(30_000)} if objcomm.rank() == src else None
        got: Any = objcomm.ddp_broadcast(mine, src)
        assert_same(got, {"epoch": 3, "state": torch.arange(30_000)})
        assert (got is mine) == (objcomm.rank() == src)
        assert objcomm.ddp_broadcast(communication_object=src, src=src) == src
    assert objcomm.ddp_broadcast(objcomm.rank()) == 0


@solo()
def test_alone_a_scalar_is_checked_and_returned_too() -> None:
    gathers: list[Any] = [objcomm.gather_scalar, objcomm.metrics.all_gather_scalar]
    for gather in gathers:
        assert_same(gather(np.float32(0.1)), [np.float32(0.1)])
        with pytest.raises(objcomm.ObjcommError):
            gather([1])
