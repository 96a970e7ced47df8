"""Memory that one host's ranks share: large members of objects, and sums of large tensors."""

import gc
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import Parameter, ParameterList

import objcomm
from objcomm import TransportError, WireError
from objcomm._algorithms import shared_reduction, shared_relay, transfers
from objcomm._algorithms.exchange import Exchange
from objcomm._transport.share import Share
from objcomm._wire import message
from tests.group.helpers import assert_group_works, error_in
from tests.group.large_objects import CALLS, MIB, at_root, pss_nbytes, table
from tests.open_files import open_files
from tests.ranks import OVER_GLOO, ranks
from tests.same import assert_same
from tests.waits import wait_until
from tests.workers import here


def check(name: str) -> None:
    """Compare the result of a call that carries large objects with the expected one."""
    got, want = CALLS[name](here().rank, here().world_size)
    assert_same(got, want, sharing=False)
    assert_group_works()


@pytest.mark.parametrize("name", CALLS)
@ranks(2, 3, long=[4])
def test_each_operation_hands_over_large_objects(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", CALLS)
@ranks(2, environment=OVER_GLOO)
def test_over_gloo_each_operation_gives_the_same(name: str) -> None:
    check(name)


@ranks(3)
def test_no_other_rank_sees_what_a_receiver_writes() -> None:
    rank, numbers = here().rank, torch.arange(500_000)
    mine: Any = objcomm.broadcast(at_root(numbers.clone()))
    if rank == 1:
        mine.fill_(7)
    objcomm.barrier()
    want = torch.full_like(numbers, 7) if rank == 1 else numbers
    assert torch.equal(mine, want)
    if rank == 0:
        mine.fill_(8)  # the tensor that it sent
    objcomm.barrier()
    assert rank == 0 or torch.equal(mine, want)


@ranks(3, disposable=True)
def test_a_host_holds_one_copy() -> None:
    """It holds one copy of what every rank reads, and none once no rank refers to it."""
    sent = torch.arange(8 * MIB)
    objcomm.broadcast(at_root(torch.arange(MIB))).sum()  # what a first call also allocates
    before = pss_nbytes()
    got: Any = objcomm.broadcast(at_root(sent))
    assert int(got.sum()) == int(sent.sum())
    objcomm.barrier()  # pages that only some have read count as theirs
    gained = sum(objcomm.all_gather(pss_nbytes() - before))
    assert gained < 1.3 * sent.nbytes  # 2 if the receivers had copies
    objcomm.barrier()
    del got
    gc.collect()
    assert sum(objcomm.all_gather(pss_nbytes() - before)) < 0.1 * sent.nbytes


@pytest.mark.parametrize("name", CALLS)
@ranks(3)
def test_where_some_ranks_are_refused_such_files_they_copy(name: str) -> None:
    """A sandbox may refuse them, or there may be no memory for them."""
    refusing = mock.patch.object(os, "memfd_create", side_effect=OSError("refused"))
    with refusing if here().rank != 1 else nullcontext():
        check(name)


@pytest.mark.parametrize("name", CALLS)
@ranks(2)
def test_a_python_without_such_files_copies(name: str) -> None:
    """For example, one that was built on an old system."""
    with mock.patch.object(os, "memfd_create"):
        del os.memfd_create
        check(name)


@ranks(2)
def test_a_process_with_no_room_for_mappings_copies() -> None:
    with mock.patch.object(Share, "mapped", side_effect=OSError("no room")):
        got = objcomm.all_gather(table(here().rank))
    assert_same(got, [table(each) for each in range(2)], sharing=False)
    assert_group_works()


#: What a defective sender may hand over, and the error: a rank that mapped too much would be killed
#: when it reads.
DEFECTS: dict[str, tuple[Callable[[torch.Tensor], Share], str]] = {
    "too short": (lambda flat: Share.of([flat[:5000]]), "smaller than its sender said"),
    "changeable": (lambda flat: Share.fixed(flat.nbytes), "could still change the memory"),
}


@pytest.mark.parametrize("defect", DEFECTS)
@ranks(3, disposable=True)
def test_memory_of_a_defective_sender_is_refused_by_all(defect: str) -> None:
    make, text = DEFECTS[defect]
    with mock.patch.object(transfers, "Share") as defective:
        defective.of = lambda flats: make(flats[0])
        with pytest.raises(objcomm.ObjcommError, match=text):
            objcomm.broadcast(at_root(torch.arange(500_000)))


@ranks(3, disposable=True)
def test_no_rank_gets_what_another_one_refuses() -> None:
    most = 1 << 20 if here().rank == 2 else 1 << 30
    with objcomm.configure(max_nbytes=most), pytest.raises(objcomm.ObjcommError, match="limit"):
        objcomm.broadcast(at_root(torch.arange(500_000)))


@pytest.mark.parametrize("name", ["broadcast", "scatter"])
@ranks(3, disposable=True)
def test_no_rank_gets_what_another_one_has_no_memory_for(name: str) -> None:
    """That rank reports it before the others get their objects."""
    error = WireError("no memory, by design")
    no_memory = mock.patch.object(message, "allocate", side_effect=error)
    raised = pytest.raises(objcomm.ObjcommError, match="by design")
    with no_memory if here().rank == 1 else nullcontext(), raised:
        CALLS[name](here().rank, 3)


@ranks(2)
def test_threads_hand_over_large_objects_at_the_same_time() -> None:
    """Each thread uses its own lane, in both directions at the same time."""

    def swap(name: str) -> None:
        with objcomm.lane(name):
            for turn in range(5):
                sent = torch.full((300_000,), 10 * turn + here().rank)
                for owner, got in enumerate(objcomm.all_gather(sent)):
                    assert torch.equal(got, torch.full((300_000,), 10 * turn + owner))

    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(swap, name) for name in ("one", "other")]:
            each.result()
    assert_group_works()


@ranks(2)
def test_no_file_stays_open() -> None:
    objcomm.all_gather(torch.arange(500_000))
    gc.collect()
    before = open_files()
    for _ in range(20):
        objcomm.all_gather(table(here().rank))
    gc.collect()
    # The watchdog's threads have a file open now and then.
    wait_until(lambda: open_files() <= before, "as few open files as before")


# Sums of large tensors


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
    reduce_tensors = shared_reduction.reduce_tensors
    with mock.patch.object(shared_reduction, "reduce_tensors", wraps=reduce_tensors) as used:
        assert_same(objcomm.reduce(mine, op, dst=1), want)
        got = objcomm.all_reduce(mine, op)
    assert used.call_count == 2
    if here().rank == 1:
        assert_same(got, want)
    assert_same(mine, tree(here().rank))  # unchanged
    sums = repr([leaf.double().sum() for leaf in got.values() if not leaf.is_complex()])
    assert objcomm.all_gather(sums) == [sums] * here().world_size


@ranks(2, 4)
def test_gradients_are_averaged_in_place() -> None:
    size = here().world_size
    shapes = [(700, 700), (3,), (1000, 50), (900_000,)]
    parameters: Any = ParameterList([Parameter(torch.zeros(shape)) for shape in shapes])
    for turn in range(3):
        for each in parameters:
            each.grad = torch.full_like(each, float(here().rank + turn))
        places = [each.grad.data_ptr() for each in parameters]
        objcomm.models.sync_gradients(parameters)
        assert [each.grad.data_ptr() for each in parameters] == places
        for each in parameters:
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
def test_where_one_rank_has_no_shared_memory_all_send() -> None:
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
def test_shared_memory_is_kept_for_the_next_call_and_freed_with_the_group() -> None:
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
    wait_until(lambda: mappings() == before, "threads that used the group to let go of it")


@ranks(3, expect_dead={1})
def test_a_death_in_the_middle_is_named() -> None:
    objcomm.all_reduce(torch.ones(600_000), "sum")
    if here().rank == 1:
        combine = shared_reduction._Run.combine  # noqa: SLF001  # where it dies
        pieces = itertools.count(1)

        def combine_and_die(*given: Any) -> None:
            combine(*given)
            if next(pieces) == 2:
                os._exit(1)

        pytest.MonkeyPatch().setattr(shared_reduction._Run, "combine", combine_and_die)  # noqa: SLF001  # as above
    error = error_in(TransportError, lambda: objcomm.all_reduce(torch.ones(3_000_000), "sum"))
    assert error.peers == (1,)
