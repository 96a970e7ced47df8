"""new_group: a group of listed ranks, created by its members alone."""

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import DesyncError, NotInGroupError, TransportTimeout, UsageError
from objcomm._calls.group import resolve
from objcomm._failures import inquiry, watchdog
from objcomm._training import once
from objcomm._transport import rendezvous
from tests.group.helpers import (
    assert_group_works,
    error_in,
    exit_at_once,
    hear,
    is_said,
    say,
    subgroup,
    tell_all,
)
from tests.group.membership import NOBODY, members
from tests.group.watched import patiently
from tests.open_files import open_files
from tests.ranks import ranks
from tests.waits import wait_until
from tests.workers import here


@ranks(1, 3)
def test_the_listed_ranks_form_a_group_that_works() -> None:
    everyone = list(range(here().world_size))
    for listed in (everyone, everyone[::-1], everyone[-1:]):
        group = objcomm.new_group(listed)
        if here().rank not in listed:
            assert group == NOBODY
            with pytest.raises(NotInGroupError):
                objcomm.barrier(group=group)
            continue
        assert isinstance(group, dist.ProcessGroup)
        assert members(group) == listed
        assert_group_works(group)
        assert objcomm.all_gather(here().rank, group=group) == listed
        tensor = torch.tensor([here().rank])
        dist.broadcast(tensor, src=listed[-1], group=group)
        assert tensor.item() == listed[-1]
        dist.destroy_process_group(group)
    assert_group_works()


@ranks(4)
def test_members_need_no_other_rank_whatever_groups_they_had_before() -> None:
    rank = here().rank
    alone = objcomm.split(rank)
    spare = [objcomm.dup(group=alone) for _ in range(rank)]  # torch counts a process's groups
    if rank in {1, 3}:
        groups = [objcomm.new_group(listed) for listed in ([3, 1], [1, 3], [3, 1])]
        assert [members(each) for each in groups] == [[3, 1], [1, 3], [3, 1]]
        assert len(set(groups)) == len(groups)
        for group in groups:
            assert objcomm.broadcast(rank, group=group) == members(group)[0]
            assert objcomm.broadcast(rank, 3, group=group) == 3
            assert_group_works(group)
            dist.barrier(group)
            dist.destroy_process_group(group)
        say(f"made by {rank}")
    for other in (1, 3):
        hear(f"made by {other}")  # meanwhile the others make no call
    for group in spare:
        dist.destroy_process_group(group)
    assert_group_works()


@ranks(4)
def test_groups_without_a_common_member_are_made_at_the_same_time() -> None:
    rank = here().rank
    assert_group_works(objcomm.new_group([rank // 2 * 2, rank // 2 * 2 + 1]))
    crossed = objcomm.new_group(iter((3 - rank, rank) if rank > 1 else (rank, 3 - rank)))
    assert members(crossed) == [min(rank, 3 - rank), max(rank, 3 - rank)]
    assert_group_works(crossed)


@ranks(4)
def test_ranks_are_global_in_a_subgroup_without_rank_zero() -> None:
    with subgroup(1, 2, 3) as three:
        if here().rank in {1, 3}:
            group = objcomm.new_group([3, 1], group=three)
            assert members(group) == [3, 1]
            assert_group_works(group)
            dist.destroy_process_group(group)
        elif here().rank == 0:
            with pytest.raises(NotInGroupError):
                objcomm.new_group([1, 3], group=three)
            with pytest.raises(UsageError, match="has 7, which are not in this group"):
                objcomm.new_group([0, 7])
        if here().rank == 1:
            with pytest.raises(UsageError, match=r"has 0, which are not in .* are 1-3"):
                objcomm.new_group([0, 1], group=three)
    assert_group_works()


@ranks(1, 2)
def test_only_a_list_of_different_ranks_is_accepted() -> None:
    wrong: list[Any] = ["01", b"01", 1, None, [0.0], [True], ["0"], [[0]], objcomm.rank]
    for listed in wrong:
        with pytest.raises(UsageError, match="new_group: ranks must be a list of global ranks"):
            objcomm.new_group(listed)
    with pytest.raises(UsageError, match=r"new_group: ranks=\[\] names no rank"):
        objcomm.new_group([])
    with pytest.raises(UsageError, match=r"new_group: ranks=\[0, 0\] has 0 more than once"):
        objcomm.new_group([0, 0])
    assert_group_works()


@ranks(3)
@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("other", [[0, 1], [0, 2, 1]])
def test_members_with_other_lists_raise_and_do_not_wait(other: list[int], *, looks: bool) -> None:
    """Two ranks wait for each other, and a third waits in the meeting of one of them.

    Args:
        other: rank 0's list; the others have all three.
        looks: whether the third rank looks for deadlocks itself or learns of them from others.
    """
    append, look = rendezvous._append, inquiry.investigate  # noqa: SLF001  # the third rank's hello

    def append_and_say_so(*given: Any) -> None:
        append(*given)
        say("the rank beside has come")

    def look_when_all_wait(*given: Any) -> None:
        if is_said("the rank beside has come"):
            look(*given)

    rank, beside = here().rank, 2 if other == [0, 1] else 1
    parent = objcomm.dup()  # its ranks have not created a group yet
    with pytest.MonkeyPatch.context() as patch:
        if rank == beside:
            patch.setattr(rendezvous, "_append", append_and_say_so)
        if rank != beside:
            patch.setattr(watchdog, "investigate", look_when_all_wait)
        elif not looks:
            patch.setattr(watchdog, "investigate", lambda *_: None)
        with pytest.raises(DesyncError, match="each waits for another") as caught:
            objcomm.new_group(other if rank == 0 else [0, 1, 2], group=parent)
    assert "new_group" in str(caught.value)
    assert_group_works(parent)
    assert_group_works(objcomm.new_group([0, 1, 2], group=parent))
    with pytest.raises(DesyncError, match="each waits for another"):  # over connections they have
        objcomm.new_group(other if rank == 0 else [0, 1, 2], group=parent)
    assert_group_works(objcomm.new_group([0, 1, 2], group=parent))
    dist.destroy_process_group(parent)


@ranks(3)
def test_a_rank_that_was_refused_for_other_lists_may_make_the_group_immediately() -> None:
    """A message left by a rank in one meeting must not end the next."""
    pause = rendezvous._sleep  # noqa: SLF001  # after it a rank looks whether to leave

    def long_pause(seconds: float, size: int = 1) -> float:
        time.sleep(0.3)
        return pause(seconds, size)

    rank = here().rank
    slow = mock.patch.object(rendezvous, "_sleep", long_pause if rank == 1 else pause)
    with slow:
        with pytest.raises(DesyncError, match="each waits for another"):
            objcomm.new_group([0, 1] if rank == 0 else [0, 1, 2])
        if rank == 0:
            time.sleep(0.6)  # the host comes last
        assert_group_works(objcomm.new_group([0, 1, 2]))


@ranks(3)
def test_a_member_that_does_not_come_is_named_in_time_and_may_come_later() -> None:
    parent, ask = objcomm.dup(), inquiry.expire
    make = partial(objcomm.new_group, [2, 1, 0], group=parent)

    def ask_when_both_wait(*given: Any) -> None:
        """Otherwise a rank that arrives after the other's timeout is missing as well."""
        say(f"rank {here().rank} waits {turn}")
        hear(f"rank {1 - here().rank} waits {turn}")
        ask(*given)

    for turn in range(2):  # at first they have never met
        if here().rank < 2:
            with patiently(), mock.patch.object(inquiry, "expire", ask_when_both_wait):
                error = error_in(TransportTimeout, partial(make, timeout=0.3))
            assert error.operation.startswith("new_group")
            assert error.missing == (0,)  # in the new group
        tell_all(f"given up {turn}", "")
        if turn == 1 and here().rank == 2:  # they had met before: its next call raises, too
            wait_until(is_cut_off(parent), "the end of the connection")
            error_in(objcomm.TransportError, make)
        assert_group_works(make())
    assert_group_works(parent)
    dist.destroy_process_group(parent)


def is_cut_off(parent: Any) -> Callable[[], bool]:
    """Whether others have closed the connections over which a list's members have met."""
    (mesh,) = (part._whole.mesh for part in resolve(parent).parts)  # noqa: SLF001  # nothing public has it
    return lambda: bool(mesh and mesh.link and mesh.link.closed())


@ranks(2)
def test_connections_over_which_members_have_met_are_closed_once_they_are_broken() -> None:
    parent = objcomm.dup()
    make = partial(objcomm.new_group, [0, 1], group=parent)
    gc.collect()
    before = open_files()
    for turn in range(5):
        dist.destroy_process_group(make())
        tell_all(f"made {turn}", "")
        if here().rank == 0:
            error_in(TransportTimeout, partial(make, timeout=0.1))
        else:
            wait_until(is_cut_off(parent), "the end of the connection")
            error_in(objcomm.TransportError, make)
    # Later, because what was to end a wait that has expired holds its connections for up to 0.9 s.
    wait_until(lambda: gc.collect() >= 0 and open_files() <= before + 6, "what two turns have open")
    dist.destroy_process_group(parent)


@ranks(3, expect_dead={1})
def test_a_member_that_dies_is_named_and_the_others_continue_without_it() -> None:
    objcomm.barrier()
    if here().rank == 1:
        exit_at_once()
    assert error_in(objcomm.TransportError, lambda: objcomm.new_group([2, 1, 0])).peers == (1,)
    error_in(objcomm.TransportError, objcomm.barrier)
    group = objcomm.new_group([2, 0])
    assert objcomm.all_gather(here().rank, group=group) == [2, 0]
    assert_group_works(group)


@ranks(2)
def test_within_a_region_a_group_of_its_ranks_can_be_created() -> None:
    rank = here().rank
    with once.MainProcessContext():
        alone = objcomm.new_group([rank])
        assert objcomm.all_gather(rank, group=alone) == [rank]
        with pytest.raises(UsageError, match=f"new_group: global rank {rank} is inside"):
            objcomm.new_group([0, 1])
    dist.destroy_process_group(alone)
    assert_group_works()


@ranks(2, disposable=True)
def test_its_calls_are_counted_with_its_parents_and_recorded() -> None:
    objcomm.new_group([0, 1])
    objcomm.new_group([1, 0])
    # Each announces itself, meets, and confirms that it has connected.
    assert objcomm.stats()["new_group"].calls == 6
    assert objcomm.exporters.stats_to_prometheus().count('calls_total{operation="new_group"') == 1
    groups = {each["name"]: each for each in objcomm.recorder.dump()["groups"]}
    (group,) = (groups[name] for name in groups if name.endswith("a group of 1,0"))
    assert (group["ranks"], group["rank"]) == ([1, 0], 1 - here().rank)
    assert group["description"] == "part of default_pg"
    assert {each["operation"] for each in group["entries"]} == {"new_group"}


@ranks(2)
def test_a_parents_end_closes_the_connections_over_which_members_have_met() -> None:
    parent = objcomm.dup()
    assert_group_works(objcomm.new_group([1, 0], group=parent))
    objcomm.barrier()
    if here().rank == 0:
        dist.destroy_process_group(parent)
        hear("raised")
    else:
        error_in(objcomm.TransportError, lambda: objcomm.new_group([1, 0], group=parent))
        say("raised")
        dist.destroy_process_group(parent)
    assert_group_works()
