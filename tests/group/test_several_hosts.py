"""Groups on several hosts, each of which connects its own ranks; one machine simulates them."""

import gc
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch

import objcomm
from objcomm import TransportError
from objcomm._transport import rendezvous
from objcomm._transport.share import Share
from tests.group.helpers import assert_group_works, error_in, hear, kind_of, say, subgroup
from tests.group.large_objects import CALLS, at_root, pss_nbytes, table
from tests.ranks import ranks
from tests.same import assert_same
from tests.waits import PATIENCE_S
from tests.workers import here

_TCP, _GLOO, _BOTH = "TCP", "Gloo", "Unix sockets and TCP"


@contextmanager
def on_hosts(*hosts: int) -> Iterator[None]:
    """Connect inside this block as if each rank were on its host; every rank must enter."""
    with mock.patch.object(rendezvous, "machine", return_value=f"host{hosts[here().rank]}"):
        yield


@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1, 0), (0, 1, 1)], ids=str)
@ranks(3, disposable=True)
def test_a_rank_has_the_links_that_it_needs(hosts: Sequence[int]) -> None:
    with on_hosts(*hosts), subgroup(0, 1, 2) as group:
        assert_group_works(group)
        is_alone = hosts.count(hosts[here().rank]) == 1
        assert kind_of(group) == (_TCP if is_alone else _BOTH)


@pytest.mark.parametrize("rank", range(4))
@ranks(4, disposable=True)
def test_if_one_rank_chooses_gloo_all_use_it(rank: int) -> None:
    hosts = (0, 1, 0, 1)
    refusal = objcomm.configure(transport="gloo") if here().rank == rank else nullcontext()
    with on_hosts(*hosts), refusal, subgroup(0, 1, 2, 3) as group:
        assert_group_works(group)
        assert kind_of(group) == _GLOO


@pytest.mark.parametrize("name", CALLS)
@ranks(3, 4, disposable=True)
def test_each_operation_carries_large_objects(name: str) -> None:
    with on_hosts(0, 0, 1, 1):
        for _ in range(2):
            got, want = CALLS[name](here().rank, here().world_size)
            assert_same(got, want, sharing=False)
        assert_group_works()


@pytest.mark.parametrize("refused", ["of", "with_room", "seal"])
@ranks(4, disposable=True)
def test_a_host_without_memory_to_share_copies(refused: str) -> None:
    with on_hosts(0, 0, 1, 1), mock.patch.object(Share, refused, side_effect=OSError("refused")):
        assert_same(objcomm.broadcast(at_root(table(0))), table(0), sharing=False)
        assert_group_works()


@pytest.mark.parametrize("refusing", range(1, 4))
@ranks(4, disposable=True)
def test_no_rank_gets_an_object_that_one_refuses(refusing: int) -> None:
    most = 1 << 20 if here().rank == refusing else 1 << 30
    with on_hosts(0, 0, 1, 1), objcomm.configure(max_nbytes=most):
        sent = at_root(torch.arange(500_000))
        error_in(objcomm.ObjcommError, lambda: objcomm.broadcast(sent), "limit")


@ranks(4, disposable=True)
def test_each_host_holds_one_copy() -> None:
    """A host holds one copy of what another one sends, and none once no rank refers to it."""
    sent = torch.arange(8 << 20)
    with on_hosts(0, 1, 1, 1):
        objcomm.broadcast(at_root(torch.arange(1 << 20))).sum()  # what a first call also allocates
        got, copies = sent, list[float]()
        for _ in range(3):  # one-time allocations are not in all of them
            got = sent  # no rank refers to the last result
            objcomm.barrier()
            before = pss_nbytes()
            got = objcomm.broadcast(at_root(sent))
            assert int(got.sum()) == int(sent.sum())
            if here().rank == 2:
                got[0] = -1  # no other rank sees that
            objcomm.barrier()  # pages that only some have read count as theirs
            gained = objcomm.all_gather(pss_nbytes() - before)
            copies.append(sum(gained[1:]) / sent.nbytes)
            assert int(got[0]) == (-1 if here().rank == 2 else 0)
            if copies[-1] < 1.3:
                break
        assert min(copies) < 1.3, copies  # 3 if each rank had its own
        del got
        gc.collect()
        objcomm.barrier()
        assert sum(objcomm.all_gather(pss_nbytes() - before)[1:]) < 0.1 * sent.nbytes


@ranks(3, disposable=True)
def test_a_signal_handler_may_make_calls_that_wait_for_another_host() -> None:
    """The handler runs on the thread that drives the link."""
    large = bytes(3 << 20)

    def meet() -> None:
        with objcomm.lane("of the handler"):
            assert objcomm.all_gather(large) == [large] * 3
            assert objcomm.broadcast(at_root(large)) == large

    with on_hosts(0, 0, 1):
        assert_group_works()
        meet()
        pids = objcomm.all_gather(os.getpid())
        if here().rank == 0:
            signal.signal(signal.SIGUSR1, lambda *_: meet())
            say("rank 0 is about to wait")
            assert objcomm.broadcast(None, src=1) == "last"
        else:
            if here().rank == 1:
                hear("rank 0 is about to wait")
                time.sleep(0.3)  # a signal before the wait does no harm
                os.kill(pids[0], signal.SIGUSR1)
            meet()
            assert objcomm.broadcast("last", src=1) == "last"


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 0, 0)], ids=str)
@ranks(4, expect_dead={1})
def test_the_death_of_a_rank_is_noticed_on_every_host(hosts: Sequence[int]) -> None:
    with on_hosts(*hosts):
        assert_group_works()
        if here().rank == 1:
            os._exit(1)
        error = error_in(TransportError, lambda: objcomm.barrier(timeout=PATIENCE_S))
    assert error.peers == (1,)
