"""Large tensors that one host's ranks combine in shared memory."""

import gc
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import Parameter, ParameterList

import objcomm
from objcomm import TransportError
from objcomm._algorithms import shared_reduction, shared_relay
from objcomm._algorithms.exchange import Exchange
from objcomm._transport.share import Share
from tests.group.helpers import assert_group_works, error_in
from tests.ranks import ranks
from tests.same import assert_same
from tests.waits import wait_until
from tests.workers import here

DTYPES = [torch.float32, torch.float16, torch.int8, torch.bool, torch.complex64, torch.float64]


def tree(owner: int) -> dict[str, Any]:
    """Return leaves of many dtypes and sizes, and a strided one."""
    generator = torch.Generator().manual_seed(owner)
    leaves: dict[str, Any] = {
        f"{dtype} {numel}": torch.randint(0, 2, (numel,), generator=generator).to(dtype)
        for dtype in DTYPES
        for numel in (3, 40_000, 300_001)
    }
    return leaves | {"strided": torch.arange(400_000.0).view(2, -1).t() + owner}


def sent(obj: Any, op: Any, **options: Any) -> Any:
    """Reduce without shared memory."""
    with mock.patch.object(Exchange, "workspace", return_value=None):
        return objcomm.reduce(obj, op, **options)


@pytest.mark.parametrize("op", ["sum", "mean", "any"])
@ranks(2, 3)
def test_shared_memory_gives_bitwise_the_same_results_as_sending(op: Any) -> None:
    mine = tree(here().rank)
    want = sent(mine, op, dst=1)
    with mock.patch.object(
        shared_reduction, "reduce_tensors", wraps=shared_reduction.reduce_tensors
    ) as used:
        assert_same(objcomm.reduce(mine, op, dst=1), want)
        got = objcomm.all_reduce(mine, op)
    assert used.call_count == 2
    if here().rank == 1:
        assert_same(got, want)
    assert_same(mine, tree(here().rank))  # unchanged
    assert (
        len(
            set(
                objcomm.all_gather(
                    repr([leaf.double().sum() for leaf in got.values() if not leaf.is_complex()])
                )
            )
        )
        == 1
    )


@ranks(2, 4)
def test_gradients_are_averaged_in_place() -> None:
    size = here().world_size
    shapes = [(700, 700), (3,), (1000, 50), (900_000,)]
    parameters = ParameterList([Parameter(torch.zeros(shape)) for shape in shapes])
    for turn in range(3):
        for each in parameters:
            each.grad = torch.full_like(each, float(here().rank + turn))
        places = [each.grad.data_ptr() for each in parameters if each.grad is not None]
        objcomm.models.sync_gradients(parameters)
        for each, place in zip(parameters, places, strict=True):
            assert each.grad is not None
            assert each.grad.data_ptr() == place
            assert torch.equal(each.grad, torch.full_like(each, (size - 1) / 2 + turn))


@pytest.mark.parametrize("src", [0, 1])
@ranks(2, 3)
def test_a_model_is_copied_from_one_rank_to_all_others(src: int) -> None:
    """The pieces do not end where its tensors end, and the last piece is short."""

    def model(owner: int) -> ParameterList:
        numels = [1, 700_001, 3, 2_000_000, 130_000, 1_234_567]
        return ParameterList([Parameter(torch.arange(float(n)) + owner) for n in numels])

    mine, want = model(here().rank), model(src)
    places = [each.data_ptr() for each in mine]
    with mock.patch.object(shared_relay, "relay", wraps=shared_relay.relay) as used:
        objcomm.models.broadcast_model(mine, src=src)
    assert used.called
    assert [each.data_ptr() for each in mine] == places
    assert_same([each.detach() for each in mine], [each.detach() for each in want])
    assert_group_works()


@ranks(3, disposable=True)
def test_a_rank_without_such_memory_makes_all_send() -> None:
    lacking = mock.patch.object(Share, "fixed", side_effect=OSError("refused"))
    with lacking if here().rank == 1 else nullcontext():
        got = objcomm.all_reduce(torch.ones(600_000), "sum")
    assert torch.equal(got, torch.full((600_000,), 3.0))
    assert_group_works()


def mappings() -> set[str]:
    """Return this process's mappings of shared memory, by address and file."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return {line for line in maps.splitlines() if "memfd:objcomm" in line}


@ranks(2, disposable=True)
def test_it_is_kept_for_the_next_call_and_goes_with_the_group() -> None:
    before = mappings()
    group = objcomm.dup()
    found = []
    for _ in range(3):
        objcomm.all_reduce(torch.ones(600_000), "sum", group=group)
        found.append(mappings() - before)
    assert len(found[0]) == 2  # this rank's and the other's
    assert found[0] == found[1] == found[2]
    objcomm.shutdown()
    del group
    gc.collect()
    wait_until(lambda: mappings() == before, "those who looked at the group")


@ranks(3, expect_dead={1})
def test_a_death_in_the_middle_is_named() -> None:
    objcomm.all_reduce(torch.ones(600_000), "sum")
    if here().rank == 1:
        combine = shared_reduction._Run.combine  # noqa: SLF001  # where it dies
        calls: list[None] = []

        def die(*given: Any) -> None:
            combine(*given)
            calls.append(None)
            if len(calls) == 2:
                os._exit(1)

        with mock.patch.object(shared_reduction._Run, "combine", die):  # noqa: SLF001  # as above
            objcomm.all_reduce(torch.ones(3_000_000), "sum")
    error = error_in(TransportError, lambda: objcomm.all_reduce(torch.ones(3_000_000), "sum"))
    assert error.peers == (1,)
