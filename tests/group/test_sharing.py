"""Large members of objects, which one host's ranks share instead of copying."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch

import objcomm
from objcomm import WireError
from objcomm._algorithms import transfers
from objcomm._transport.share import Share
from objcomm._wire import message
from tests.group.helpers import assert_group_works
from tests.group.large_objects import CALLS, MIB, at_root, pss_nbytes, table
from tests.open_files import open_files
from tests.ranks import OVER_GLOO, ranks
from tests.same import assert_same
from tests.waits import wait_until
from tests.workers import here


@pytest.mark.parametrize("name", CALLS)
@ranks(2, 3, long=[4])
def test_each_operation_hands_over_what_it_should(name: str) -> None:
    got, want = CALLS[name](here().rank, here().world_size)
    assert_same(got, want, sharing=False)
    assert_group_works()


@pytest.mark.parametrize("name", CALLS)
@ranks(2, environment=OVER_GLOO)
def test_they_do_the_same_over_gloo(name: str) -> None:
    got, want = CALLS[name](here().rank, here().world_size)
    assert_same(got, want, sharing=False)


@ranks(3)
def test_what_a_receiver_writes_nobody_else_sees() -> None:
    mine: Any = objcomm.broadcast(at_root(torch.arange(500_000)))
    if here().rank == 1:
        mine.fill_(7)
    objcomm.barrier()
    want = torch.full((500_000,), 7) if here().rank == 1 else torch.arange(500_000)
    assert torch.equal(mine, want)
    if here().rank == 0:
        mine.fill_(8)  # the tensor that it sent
    objcomm.barrier()
    assert here().rank == 0 or torch.equal(mine, want)


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
    left = sum(objcomm.all_gather(pss_nbytes() - before))
    assert left < 0.1 * sent.nbytes


@pytest.mark.parametrize("name", CALLS)
@ranks(3)
def test_a_system_without_such_files_copies(name: str) -> None:
    """It may refuse them, as a sandbox does, or have no memory for them, on some ranks only."""
    refusing = patch.object(os, "memfd_create", side_effect=OSError("refused"))
    if here().rank != 1:
        refusing.start()
    try:
        got, want = CALLS[name](here().rank, here().world_size)
    finally:
        patch.stopall()
    assert_same(got, want, sharing=False)
    assert_group_works()


@ranks(2)
def test_a_process_with_no_room_for_mappings_copies() -> None:
    with patch.object(Share, "mapped", side_effect=OSError("no room")):
        got = objcomm.all_gather(table(here().rank))
    assert_same(got, [table(each) for each in range(2)], sharing=False)
    assert_group_works()


@ranks(3, disposable=True)
def test_memory_that_is_too_short_is_refused_by_all() -> None:
    """The sender is defective; a rank that mapped too much would be killed when it reads."""

    def short(flats: list[torch.Tensor]) -> Share:
        return Share.of([flats[0][:5000]])

    with patch.object(transfers, "Share") as defective:
        defective.of = short
        with pytest.raises(objcomm.ObjcommError, match="smaller than its sender said"):
            objcomm.broadcast(at_root(torch.arange(500_000)))


@ranks(3, disposable=True)
def test_memory_that_its_sender_could_change_is_refused_by_all() -> None:
    def open_to_change(flats: list[torch.Tensor]) -> Share:
        return Share.fixed(flats[0].nbytes)

    with patch.object(transfers, "Share") as defective:
        defective.of = open_to_change
        with pytest.raises(objcomm.ObjcommError, match="could still change the memory"):
            objcomm.broadcast(at_root(torch.arange(500_000)))


@ranks(3, disposable=True)
def test_no_rank_has_what_another_one_refuses() -> None:
    most = 1 << 20 if here().rank == 2 else 1 << 30
    with objcomm.configure(max_nbytes=most), pytest.raises(objcomm.ObjcommError, match="limit"):
        objcomm.broadcast(at_root(torch.arange(500_000)))


@pytest.mark.parametrize("name", ["broadcast", "scatter"])
@ranks(3, disposable=True)
def test_no_rank_has_what_another_one_has_no_memory_for(name: str) -> None:
    """It reports this before the other ranks get their objects."""
    no_memory = patch.object(message, "allocate", side_effect=WireError("no memory, by design"))
    if here().rank == 1:
        no_memory.start()
    with pytest.raises(objcomm.ObjcommError, match="by design"):
        CALLS[name](here().rank, 3)


@pytest.mark.parametrize("name", CALLS)
@ranks(2)
def test_a_python_without_such_files_copies(name: str) -> None:
    """For example, one that was built on an old system."""
    with patch.object(os, "memfd_create"):
        del os.memfd_create
        got, want = CALLS[name](here().rank, here().world_size)
    assert_same(got, want, sharing=False)
    assert_group_works()


@ranks(2)
def test_threads_hand_over_side_by_side() -> None:
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
def test_nothing_stays_open() -> None:
    objcomm.all_gather(torch.arange(500_000))
    gc.collect()
    before = open_files()
    for _ in range(20):
        objcomm.all_gather(table(here().rank))
    gc.collect()
    # The watchdog's threads have a file open now and then.
    wait_until(lambda: open_files() <= before, "as few open files as before")
