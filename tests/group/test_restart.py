"""Recreated process groups and forked processes: nothing stale is used."""

import gc
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import objcomm
from objcomm import TransportTimeout, UsageError
from objcomm._observe import recorder
from objcomm._p2p import peer
from tests.endings import BEGIN, Program, run_to_the_end
from tests.group.helpers import (
    assert_group_works,
    assert_in_child,
    error_in,
    in_thread,
    keys_in,
    outcome_of,
    tell_all,
)
from tests.group.watched import patiently
from tests.ranks import ranks, solo
from tests.waits import PATIENCE_S
from tests.workers import here, join


def forget_torchs_own_keys(topic: str, store: dist.Store) -> None:
    """Keep only objcomm's keys of an earlier group: torch's own keys would mislead Gloo."""
    tell_all(f"{topic} is over", "")
    for key in keys_in(store):
        if here().rank == 0 and "objcomm" not in key:
            store.delete_key(key)
    tell_all(f"{topic} is forgotten", "")


@ranks(2, joined=False)
@pytest.mark.parametrize("same_store", [True, False])
def test_a_process_group_made_again_under_its_name_starts_clean(*, same_store: bool) -> None:
    place = here()
    for turn in range(4):
        name = "rendezvous" if same_store else f"rendezvous {turn}"
        join(place, name)
        # The number of calls differs in each turn, so an old sequence number would show.
        for _ in range(turn):
            objcomm.barrier()
        assert objcomm.all_gather((turn, place.rank)) == [(turn, 0), (turn, 1)]
        assert objcomm.broadcast(bytes(100_000 + turn), src=1) == bytes(100_000 + turn)
        assert objcomm.stats()["all_gather"].calls == 1
        dist.destroy_process_group()
        forget_torchs_own_keys(f"turn {turn}", place.store(name))


_AGAIN = """
for _ in range(3):
    objcomm.init("gloo", timeout=200)
    {use}
    if rank == 0:
        time.sleep(0.1)  # the others leave first
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "use", ["objcomm.all_gather(rank)", "objcomm.sendrecv(rank, (rank + 1) % world)"]
)
def test_the_next_world_does_not_meet_in_the_store_of_the_last(use: str) -> None:
    begin = BEGIN.replace('objcomm.init("gloo", timeout=200)', "")
    (ended,) = run_to_the_end([Program([_AGAIN.format(use=use)] * 3, begin=begin)])
    assert [each.status for each in ended] == [0] * 3, ended


@ranks(2, joined=False)
def test_the_last_figures_outlive_the_group() -> None:
    place = here()
    join(place, "rendezvous")
    objcomm.gather(place.rank, dst=1)
    pair = dist.new_group([1, 0])
    objcomm.barrier(group=pair)
    world, of_pair = objcomm.stats(), objcomm.stats(pair)
    tell_all("counted", "")
    dist.destroy_process_group()
    gc.collect()
    with mock.patch.dict(os.environ, RANK=str(place.rank), WORLD_SIZE="2"):
        for _ in range(2):
            assert set(world) == {"gather"}
            assert objcomm.stats() == world
            with pytest.raises(UsageError, match="says that there are other ranks"):
                objcomm.barrier()  # not counted anywhere
    assert objcomm.stats(pair) == of_pair != {}
    given: Any
    for given in ("pair", dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(UsageError):
            objcomm.stats(given)
    objcomm.reset_stats(pair)
    assert (objcomm.stats(), objcomm.stats(pair)) == (world, {})
    # A call without a world starts new statistics, and so does the next world.
    objcomm.barrier()
    assert set(objcomm.stats()) == {"barrier"}
    join(place, "another")
    assert objcomm.stats() == {}
    assert_group_works()
    objcomm.reset_stats()
    assert objcomm.stats() == {}


@solo(environment={"RANK": "0", "WORLD_SIZE": "2"})
def test_without_statistics_the_error_names_the_missing_ranks() -> None:
    for call in (objcomm.stats, objcomm.reset_stats):
        with pytest.raises(UsageError, match="says that there are other ranks"):
            call()


@ranks(2, joined=False)
def test_after_a_timeout_a_new_group_works_and_one_under_the_old_name() -> None:
    place = here()
    join(place, "rendezvous")
    objcomm.barrier()
    if place.rank == 0:
        with patiently(), pytest.raises(TransportTimeout):
            objcomm.all_gather(1, timeout=0.2)
    tell_all("broken", "")
    assert_group_works(dist.new_group([0, 1]))
    dist.destroy_process_group()
    forget_torchs_own_keys("the broken one", place.store("rendezvous"))
    join(place, "rendezvous")
    assert_group_works()


@ranks(2, joined=False)
def test_a_subgroup_made_again_under_its_name_starts_clean() -> None:
    join(here(), "rendezvous")
    names = set()
    for turn in range(4):
        group: Any = dist.new_group([0, 1], use_local_synchronization=True)
        names.add(group.group_name)
        for _ in range(turn):
            objcomm.barrier(group=group)
        assert objcomm.all_gather((turn, here().rank), group=group) == [(turn, 0), (turn, 1)]
        dist.destroy_process_group(group)
        del group
        forget_torchs_own_keys(f"turn {turn}", here().store("rendezvous"))
    assert len(names) in {1, 4}  # torch 2.15 does not reuse names


@ranks(2, disposable=True)
def test_a_forked_child_is_refused_its_parents_sockets() -> None:
    assert objcomm.all_gather(here().rank) == [0, 1]

    def is_refused() -> bool:
        outcome = outcome_of(lambda: objcomm.all_gather("from the child", timeout=3))
        # What a logging filter in a worker process needs never raises.
        asked = (objcomm.rank(), objcomm.world_size(), objcomm.is_main(), objcomm.is_initialized())
        return outcome == "UsageError" and len(asked) == 4

    assert_in_child(is_refused)
    assert_group_works()


@ranks(2, joined=False)
def test_a_child_that_is_forked_before_the_first_call_is_not_a_rank_either() -> None:
    join(here(), "rendezvous")
    group = dist.new_group([0, 1])

    def is_refused() -> bool:
        calls = [partial(objcomm.barrier, group=each, timeout=3) for each in (None, group)]
        text = f"forked by rank {here().rank}, and is not a rank itself"
        return all(text in str(error_in(UsageError, call)) for call in calls)

    assert_in_child(is_refused)
    assert_group_works(group)
    assert_group_works()


def check_in_child_forked_during(
    module: Any, constructor: str, call: Callable[[], object], holds: Callable[[], bool]
) -> None:
    """Fork while another thread's call is in a constructor; no thread of the child leaves it."""
    is_inside, may_go_on = threading.Event(), threading.Event()
    construct = getattr(module, constructor)

    def construct_slowly(*given: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            is_inside.set()
            may_go_on.wait(PATIENCE_S)
        return construct(*given)

    with mock.patch.object(module, constructor, construct_slowly):
        thread = in_thread(call)
        assert is_inside.wait(PATIENCE_S)
        assert_in_child(holds)
        may_go_on.set()
        thread.join()


@ranks(2, disposable=True)
def test_a_child_that_is_forked_during_a_threads_first_message_is_refused_its_own() -> None:
    """No thread of the child releases the locks that the parent's thread held at the fork."""
    if here().rank == 0:
        check_in_child_forked_during(
            peer,
            "Mailbox",
            lambda: objcomm.iprobe(1),
            lambda: outcome_of(lambda: objcomm.send(1, 1)) == "UsageError",
        )
    tell_all("the child has ended", "")
    assert_group_works()


@ranks(2, disposable=True)
def test_a_child_that_is_forked_during_a_groups_first_call_can_read_its_figures() -> None:
    """Every call looks up its recorder, without a lock that a fork could leave locked."""
    assert_group_works()
    group = dist.new_group([0, 1])
    if here().rank == 0:
        check_in_child_forked_during(
            recorder,
            "Recorder",
            lambda: objcomm.barrier(group=group),
            lambda: "all_gather" in objcomm.exporters.stats_to_prometheus(),
        )
    else:
        objcomm.barrier(group=group)
    assert_group_works(group)
    assert_group_works()
