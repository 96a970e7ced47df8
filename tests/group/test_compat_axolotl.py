"""``objcomm.compat.axolotl``: axolotl's functions, and the defects fixed in them."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import objcomm
from objcomm import CollectiveError, StartError, UsageError
from objcomm.compat import axolotl as distributed
from tests.group.helpers import assert_group_works, error_in, tell_all
from tests.group.test_start import start_as
from tests.ranks import ranks, solo
from tests.same import assert_same
from tests.workers import here


def _fail_on(rank: int) -> Callable[[], int]:
    def fn() -> int:
        if objcomm.rank() == rank:
            raise LookupError("no batches")
        return 1

    return fn


# In axolotl, float32 changed the first three, and types were guessed from the values.
SCALARS: list[Any] = [2**24 + 1, 2**31, 0.1, 2.0, True]


@ranks(1, 2, 4)
def test_values_arrive_as_they_are() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for value in SCALARS:
        want = [value] * size if rank == 0 else None
        assert_same(distributed.gather_scalar_from_all_ranks(lambda: value), want, sharing=False)  # noqa: B023  # called immediately
        assert_same(distributed.compute_and_broadcast(lambda: value), value)  # noqa: B023  # called immediately
        shared = distributed.reduce_and_broadcast(lambda: value, lambda values: values)  # noqa: B023  # called immediately
        assert_same(shared, [value] * size, sharing=False)
    # Axolotl needed the right world size, and documents a `rank` that it does not accept.
    for world_size in (1, size, 99):
        got = distributed.gather_from_all_ranks(lambda: [rank, "x"], world_size, rank=rank)
        assert got == ([[each, "x"] for each in range(size)] if rank == 0 else None)
        scalars = distributed.gather_scalar_from_all_ranks(lambda: rank, world_size=world_size)
        assert scalars == (list(range(size)) if rank == 0 else None)
    vals = {"lr": 0.1, "n": 2**40, "w": torch.ones(2), "rank": rank}
    assert_same(distributed.broadcast_dict(vals), vals | {"rank": 0})
    distributed.barrier()


@ranks(1, 2, 4)
def test_a_raise_on_one_rank_is_raised_on_all_where_axolotl_hung() -> None:
    rank, last = objcomm.rank(), objcomm.world_size() - 1
    calls: list[tuple[int, Callable[[], object]]] = [
        (last, lambda: distributed.gather_scalar_from_all_ranks(_fail_on(last))),
        (last, lambda: distributed.gather_from_all_ranks(_fail_on(last))),
        (0, lambda: distributed.compute_and_broadcast(_fail_on(0))),
        (last, lambda: distributed.reduce_and_broadcast(_fail_on(last), len)),
        (0, lambda: distributed.reduce_and_broadcast(lambda: 1, lambda _: _fail_on(0)())),
        (0, lambda: _pass_first(_fail_on(0))),
        (last, lambda: _pass_first(_fail_on(last))),
        (0, lambda: _pass_zero_only(_fail_on(0))),
    ]
    for failing, call in calls:
        error = error_in(CollectiveError, call)
        assert list(error.failures) == [failing]
        assert error.failures[failing].message == "no batches"
        assert isinstance(error.__cause__, LookupError) == (rank == failing)
        # Axolotl let fn's error propagate on the failing rank; the others got torch's own error.
        assert isinstance(error, LookupError) == (rank == failing)
        assert isinstance(error, RuntimeError) == (rank != failing)
    with pytest.raises(CollectiveError, match="is not a scalar"):
        distributed.gather_scalar_from_all_ranks(lambda: [1, 2])
    assert_group_works()


def _pass_first(fn: Callable[[], object]) -> None:
    with distributed.zero_first(distributed.is_main_process()):
        fn()


def _pass_zero_only(fn: Callable[[], object]) -> None:
    with distributed.zero_only() as is_zero:
        if is_zero:
            fn()


@ranks(1, 2, 4)
def test_rank_zero_is_first_and_alone() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    store = here().store("order")
    askers: list[Callable[[], bool]] = [distributed.is_main_process, lambda: rank == 0]
    for number, is_main in enumerate(askers):
        with (
            distributed.zero_first(is_main()),
            distributed.zero_first(is_main()),  # nested, as in axolotl
        ):
            place = store.add(f"entered{number}", 1)
            if size > 1:
                with pytest.raises(UsageError, match="inside"):  # axolotl hung or mismatched
                    objcomm.all_gather(1)
        assert (place == 1) == (rank == 0)
        assert objcomm.all_gather(place)[0] == 1
    ran = []
    with distributed.zero_only() as is_zero:
        if is_zero:
            ran.append(rank)
    assert ran == ([0] if rank == 0 else [])
    for flag in (rank == size - 1, True, False):  # not true on rank 0 alone
        if size > 1:
            with (
                pytest.raises(UsageError, match="zero_first: is_main is true on") as caught,
                distributed.zero_first(flag),
            ):
                raise AssertionError("no rank may enter")
            assert isinstance(caught.value, RuntimeError)
    assert_group_works()


@ranks(2)
@pytest.mark.parametrize("hosts", [1, 2])
def test_errors_name_what_was_called(hosts: int) -> None:
    rank = objcomm.rank()

    def block(failing: int) -> None:
        with distributed.zero_first(rank == 0 or hosts == 2):
            if rank == failing:
                raise OSError("no disk")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("objcomm._collectives.split.machine", lambda: f"host {rank % hosts}")
        objcomm.node_group()  # detects the hosts again
        for failing in (0, 1):
            error = error_in(CollectiveError, partial(block, failing), "no disk")
            assert error.operation == "zero_first"
            assert isinstance(error, OSError if rank == failing else RuntimeError)
    objcomm.node_group()
    assert_group_works()


@ranks(2, joined=False)
def test_queries_have_no_side_effect_and_calls_join_by_themselves() -> None:
    rank = here().rank
    start_as(rank, 2)
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")  # as if each rank had its own host
    before = (distributed.is_main_process(), distributed.is_local_main_process())
    assert before == (rank == 0, True)  # axolotl read LOCAL_RANK, and later changed its answer
    assert distributed.is_distributed()
    assert distributed.get_world_size() == 2
    assert distributed.get_distributed_state() is None
    assert not objcomm.is_initialized()
    distributed.barrier()
    assert objcomm.is_initialized()
    assert (distributed.is_main_process(), distributed.is_local_main_process()) == before
    assert distributed.get_world_size() == 2
    state = distributed.get_distributed_state()
    assert state is not None
    assert (state.process_index, state.num_processes, state.local_process_index) == (rank, 2, 0)
    assert (state.is_main_process, state.is_local_main_process) == before
    assert state.use_distributed
    distributed.init_distributed_state()
    assert_group_works()
    tell_all("done", "")
    distributed.cleanup_distributed()
    distributed.cleanup_distributed()
    assert not objcomm.is_initialized()


@solo()
def test_one_process_needs_no_torch_distributed() -> None:
    assert distributed.gather_scalar_from_all_ranks(lambda: 2.0) == [2.0]
    assert distributed.gather_from_all_ranks(lambda: [1]) == [[1]]
    assert distributed.compute_and_broadcast(lambda: 2**24 + 1) == 2**24 + 1  # axolotl: an error
    assert distributed.reduce_and_broadcast(lambda: 3, len) == 1
    vals = {"a": 1}
    assert distributed.broadcast_dict(vals) is vals
    with distributed.zero_first(is_main=True), distributed.zero_only() as is_zero:
        assert is_zero
    distributed.barrier()
    assert not distributed.is_distributed()
    assert distributed.is_main_process()
    assert distributed.is_local_main_process()
    assert distributed.get_distributed_state() is None
    assert (distributed.get_world_size(), distributed.get_device_count()) == (1, 1)
    assert distributed.get_device_type() == torch.device("cpu")
    assert distributed.get_current_device() == 0
    distributed.cleanup_distributed()
    assert not objcomm.is_initialized()


@solo()
def test_errors_at_the_start_are_raised() -> None:
    os.environ["AXOLOTL_NCCL_TIMEOUT"] = "soon"
    with pytest.raises(UsageError, match="AXOLOTL_NCCL_TIMEOUT='soon'"):
        distributed.init_distributed_state()
    os.environ["AXOLOTL_NCCL_TIMEOUT"] = "1"
    start_as(1, 2)
    with pytest.raises(StartError):  # no other rank joins
        distributed.barrier()
    os.environ["RANK"] = "7"
    with pytest.raises(UsageError, match="RANK=7"):
        distributed.is_main_process()


def test_every_accelerator_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Axolotl's cleanup supported this type of device, but its queries did not."""
    answers = {"is_available": lambda: True, "device_count": lambda: 4, "current_device": lambda: 2}
    xpu = mock.Mock(spec=["synchronize"], **answers)
    monkeypatch.setattr(torch, "xpu", xpu)
    assert distributed.get_device_type() == torch.device("xpu")
    assert (distributed.get_device_count(), distributed.get_current_device()) == (4, 2)
    distributed.cleanup_distributed()
    xpu.synchronize.assert_called_once_with()


PROGRAM = '''
"""What a trainer does with axolotl's functions."""

import math
from pathlib import Path

from axolotl.utils.distributed import (
    barrier, compute_and_broadcast, gather_scalar_from_all_ranks, get_world_size, is_distributed,
    is_main_process, reduce_and_broadcast, zero_first,
)


def prepared(path):
    """Whoever comes first writes what the others read."""
    if not path.exists():
        path.write_text("7 batches")
    return path.read_text()


def fullest(shares):
    return math.floor(0.99 * max(shares) * 1000) / 1000


with zero_first(is_main_process()):
    text = prepared(Path(folder) / "prepared.txt")
batches = 7 if is_main_process() else 9
counts = gather_scalar_from_all_ranks(lambda: batches, get_world_size())
fewest = reduce_and_broadcast(lambda: batches, min)
packed = reduce_and_broadcast(lambda: 0.9, fullest)
steps = compute_and_broadcast(lambda: fewest * 2**24 + 1)
barrier()
results = [text, counts, fewest, packed, steps, is_distributed()]
'''


@ranks(1, 2, 4)
def test_a_program_for_axolotl_runs_when_only_its_import_is_changed() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    place: dict[str, Any] = {"folder": str(here().folder)}
    renamed = PROGRAM.replace("axolotl.utils.distributed", "objcomm.compat.axolotl")
    exec(renamed, place)  # noqa: S102  # our own text
    counts = [7, *[9] * (size - 1)] if rank == 0 else None
    assert_same(place["results"], ["7 batches", counts, 7, 0.891, 7 * 2**24 + 1, size > 1])
