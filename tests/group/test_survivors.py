"""survivors: a group of the ranks that are alive, which agree on its list."""

import contextlib
import itertools
import os
import signal
import threading
from functools import partial
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, NotInGroupError, TransportError, TransportTimeout, _world
from objcomm._calls.group import resolve
from objcomm._collectives import split
from objcomm._collectives import survivors as module
from objcomm._failures.liveness import Processes
from objcomm._failures.noticeboard import Board, BoardThread, StoreSilentError
from objcomm._failures.verdict import Cause, Verdict
from objcomm._world import store_of
from tests.group.helpers import (
    assert_group_works,
    assert_no_verdict_stays,
    error_in,
    hear,
    in_thread,
    join_over_tcp,
    keys_in,
    say,
)
from tests.group.membership import members
from tests.open_files import open_files
from tests.ranks import ranks
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here


def die(*_: object, **__: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def meet_and_lose(*dead: int) -> None:
    """Let these ranks die once all have met; the others notice it in no particular order."""
    objcomm.barrier()
    if here().rank in dead:
        die()


def wait_until_the_list_is_removed(store: dist.Store) -> None:
    wait_until(lambda: not any("survivors" in key for key in keys_in(store)), "its removal")


def assert_all_works(group: Any, listed: list[int]) -> None:
    """Check the list, objcomm's calls and torch's."""
    assert members(group) == listed
    assert_group_works(group)
    total = torch.tensor([here().rank])
    dist.all_reduce(total, group=group)
    assert total.item() == sum(listed)


def continue_without(*dead: int) -> None:
    """Let these ranks die; the others continue twice, and nothing of the agreement is left."""
    meet_and_lose(*dead)
    alive = [rank for rank in range(here().world_size) if rank not in dead]
    if here().rank % 2:  # nothing has been raised on the others
        error_in(TransportError, objcomm.barrier)
    for _ in range(2):
        group: Any = objcomm.survivors(timeout=PATIENCE_S)
        assert dist.get_backend(group) == dist.get_backend()
        assert_all_works(group, alive)
        dist.destroy_process_group(group)
    mesh: Any = resolve(None).mesh
    assert mesh.is_closed
    assert_no_verdict_stays(store_of(dist.group.WORLD))


@ranks(2, 3, 4, expect_dead={1})
def test_the_ranks_that_live_get_one_group_without_the_dead() -> None:
    continue_without(1)


@ranks(2, 3, 4, expect_dead={0})
def test_rank_0_may_die_if_it_does_not_host_the_store() -> None:
    continue_without(0)


@ranks(4, expect_dead={0, 3})
def test_several_ranks_may_die() -> None:
    continue_without(0, 3)


@ranks(1, 2, 3, 4)
def test_without_a_death_all_ranks_are_in_it_and_nothing_is_left() -> None:
    store = store_of(dist.group.WORLD)

    def agree() -> None:
        group: Any = objcomm.survivors()
        assert_all_works(group, list(range(here().world_size)))
        dist.destroy_process_group(group)
        objcomm.barrier()

    agree()
    wait_until_the_list_is_removed(store)
    objcomm.barrier()
    keys, files, threads = len(keys_in(store)), open_files(), threading.active_count()
    for _ in range(3):
        agree()
    wait_until(lambda: len(keys_in(store)) <= keys, "the keys to be removed")
    wait_until(lambda: open_files() <= files, "the connections to be closed")
    wait_until(lambda: threading.active_count() <= threads, "the threads to end")
    assert_group_works()


@ranks(4, joined=False, expect_dead={2})
def test_a_subgroup_without_rank_0_over_a_tcp_store() -> None:
    store = join_over_tcp()
    group: Any = dist.new_group([1, 2, 3])
    if here().rank:
        objcomm.barrier(group=group)
        if here().rank == 2:
            die()
        assert_all_works(objcomm.survivors(group, timeout=PATIENCE_S), [1, 3])
        wait_until_the_list_is_removed(store)
    else:
        with pytest.raises(NotInGroupError):
            objcomm.survivors(group)
        for rank in (1, 3):
            hear(f"{rank} is done")
    say(f"{here().rank} is done")
    dist.destroy_process_group()


# Deaths during the agreement


def die_before(target: Any, name: str) -> Any:
    """Kill this rank when it calls a function."""
    return mock.patch.object(target, name, die)


def die_after(target: Any, name: str) -> Any:
    """Kill this rank when it has called a function."""
    original = getattr(target, name)

    def ended(*given: Any, **named: Any) -> None:
        original(*given, **named)
        die()

    return mock.patch.object(target, name, ended)


STEPS = {
    "it has begun": partial(die_after, Board, "propose"),
    "it is about to meet": partial(die_before, module, "connected"),
    "all have met": partial(die_before, split, "see_room_for"),
    "the others connect": partial(die_before, split, "create"),
    "its group is there": partial(die_after, split, "create"),
    "all groups are there": partial(die_before, Board, "revise"),
    "the list is final": partial(die_after, Board, "revise"),
}


@pytest.mark.parametrize("step", STEPS)
@ranks(4, expect_dead={1, 2})
def test_a_second_death_during_the_agreement(step: str) -> None:
    meet_and_lose(1)
    with STEPS[step]() if here().rank == 2 else contextlib.nullcontext():
        group: Any = objcomm.survivors(timeout=PATIENCE_S)
    say(f"list of {here().rank}", str(members(group)))
    assert hear("list of 0") == hear("list of 3")
    if 2 in members(group):  # it died once all had agreed
        group = objcomm.survivors(group, timeout=PATIENCE_S)
    assert_all_works(group, [0, 3])


@ranks(4, expect_dead={1})
def test_no_verdict_of_a_round_stays_that_failed_before_a_rank_joined() -> None:
    objcomm.barrier()
    if here().rank == 1:
        hear("0 begins round 1")
        hear("2 begins round 1")
        die()
    if here().rank == 3:
        hear("0 begins round 2")
        hear("2 begins round 2")
    rounds = itertools.count(1)

    def begin(*given: Any, **named: Any) -> Any:
        say(f"{here().rank} begins round {next(rounds)}")
        return split.connected(*given, **named)

    with mock.patch.object(module, "connected", begin):
        assert_all_works(objcomm.survivors(timeout=PATIENCE_S), [0, 2, 3])
    assert_no_verdict_stays(store_of(dist.group.WORLD))


# Ranks that do not come, or come too late


#: A busy machine may take seconds for the first answer of the store: not too late yet.
LIMIT_S = 15


@ranks(4, expect_dead={1})
def test_a_live_rank_that_does_not_call_is_named_and_all_may_call_again() -> None:
    meet_and_lose(1)
    if here().rank == 3:
        hear("0 has given up")
        hear("2 has given up")
    else:
        error = error_in(TransportTimeout, lambda: objcomm.survivors(timeout=LIMIT_S))
        assert (error.missing, error.seconds) == ((3,), LIMIT_S)
        assert error.operation.startswith("survivors")
        assert error.positions.keys() <= {0, 2, 3}
        say(f"{here().rank} has given up")
    assert_all_works(objcomm.survivors(timeout=PATIENCE_S), [0, 2, 3])


@ranks(3)
def test_a_call_after_a_failed_one_connects_its_group_under_another_name() -> None:
    """Torch never removes the addresses that ranks have stored under the first name."""
    names: list[str] = []

    def created(parent: Any, name: str, *given: Any, **named: Any) -> Any:
        names.append(name)
        if len(names) == 1 and here().rank == 1:
            raise RuntimeError("no network card")
        if len(names) > 1 and here().rank == 0:  # the others look up its address first
            hear("1 connects")
            hear("2 connects")
        say(f"{here().rank} connects" * (len(names) > 1))
        return _world.create(parent, name, *given, **named)

    with mock.patch.object(split, "create", created):
        error = error_in(CollectiveError, lambda: objcomm.survivors(timeout=LIMIT_S))
        assert "no network card" in error.failures[1].message
        group: Any = objcomm.survivors(timeout=PATIENCE_S)
    assert_all_works(group, [0, 1, 2])
    assert len(set(names)) == 2


def refuse_brief_waits(call: Any) -> Any:
    """Behave like a store that needs a moment to answer."""

    def refused(self: BoardThread, job: Any, seconds: float = PATIENCE_S) -> Any:
        if seconds < 0.1:
            raise StoreSilentError from TimeoutError()
        return call(self, job, seconds)

    return refused


@ranks(3)
def test_the_error_has_the_limit_of_the_rank_that_timed_out_first() -> None:
    if here().rank == 2:
        hear("0 has given up")
        hear("1 has given up")
    else:
        limit = LIMIT_S if here().rank == 0 else PATIENCE_S
        with mock.patch.object(BoardThread, "call", refuse_brief_waits(BoardThread.call)):
            error = error_in(TransportTimeout, lambda: objcomm.survivors(timeout=limit))
        assert error.missing == (2,)
        assert error.seconds <= LIMIT_S
        say(f"{here().rank} has given up")
    assert_all_works(objcomm.survivors(timeout=PATIENCE_S), [0, 1, 2])


@pytest.mark.parametrize("is_silent", [False, True])
@ranks(3, disposable=True)
def test_a_rank_that_the_old_group_has_lost_is_excluded_only_if_it_does_not_answer(
    *, is_silent: bool
) -> None:
    objcomm.barrier()
    if here().rank == 2 and is_silent:
        with mock.patch.object(BoardThread, "answer", return_value=None):
            hear("they continue")
        for _ in range(2):
            with pytest.raises(NotInGroupError, match=r"global rank 2 is alive.*not answer"):
                objcomm.survivors(timeout=PATIENCE_S)
        return
    lost = Verdict.of(Cause.LOST, ranks=(2,), reason="out of reach")
    resolve(None).mark_raised(lost, (0, 1, 2))
    with mock.patch.object(Processes, "is_beside", return_value=False):  # on another host
        group = objcomm.survivors(timeout=PATIENCE_S)
    assert_all_works(group, [0, 1] if is_silent else [0, 1, 2])
    say("they continue")


@ranks(3, expect_dead={2})
def test_a_rank_that_waits_for_a_survivor_in_the_old_group_is_released() -> None:
    meet_and_lose(2)
    if here().rank == 1:
        assert error_in(TransportError, lambda: objcomm.recv(0)).peers == (2,)
    assert_all_works(objcomm.survivors(timeout=PATIENCE_S), [0, 1])


@ranks(2, 3, joined=False, expect_dead={0})
def test_without_the_store_the_error_says_what_hosts_it() -> None:
    join_over_tcp()
    meet_and_lose(0)
    error = error_in(TransportError, lambda: objcomm.survivors(timeout=PATIENCE_S))
    assert "the process that hosts torch's store has ended" in str(error)
    assert "torchrun" in error.reason


@ranks(2)
def test_threads_agree_on_their_own_lanes() -> None:
    def agree() -> None:
        with objcomm.lane("second"):
            assert_all_works(objcomm.survivors(timeout=PATIENCE_S), [0, 1])

    second = in_thread(agree)
    group: Any = objcomm.survivors(timeout=PATIENCE_S)
    second.join()
    assert_all_works(group, [0, 1])
    assert_group_works()
