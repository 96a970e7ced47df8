"""Lanes: how they separate the calls of threads, and which thread may use which lane."""

import itertools
import threading

import pytest
import torch.distributed as dist

import objcomm
from objcomm import DesyncError, UsageError
from objcomm._transport.link import LANE_BITS
from objcomm._wire.header import fingerprint
from tests.group.helpers import assert_group_works, in_thread, subgroup
from tests.group.watched import closely, patiently
from tests.ranks import ranks
from tests.waits import PATIENCE_S
from tests.workers import here


@ranks(2, 3)
def test_a_background_lane_does_not_mix_with_the_main_threads_barriers() -> None:
    size, rank = objcomm.world_size(), objcomm.rank()

    def evaluate() -> None:
        with objcomm.lane("eval"):
            for turn in range(60):
                assert objcomm.all_gather((turn, rank)) == [(turn, i) for i in range(size)]

    thread = in_thread(evaluate)
    for _ in range(60):
        objcomm.barrier()
    thread.join()
    assert_group_works()


@ranks(1, 2)
def test_a_second_live_thread_without_a_lane_is_refused() -> None:
    objcomm.barrier()
    for call in (lambda: objcomm.all_gather(1), objcomm.barrier, lambda: objcomm.broadcast(1)):
        if objcomm.world_size() == 1:
            in_thread(call).join()  # there is no other rank to be out of step with
        else:
            with pytest.raises(UsageError, match="lane"):
                in_thread(call).join()
    assert_group_works()


@ranks(2)
def test_a_thread_with_its_own_group_needs_no_lane() -> None:
    objcomm.barrier()
    with subgroup(0, 1) as group:

        def checkpoint() -> None:
            for _ in range(20):
                assert objcomm.all_gather("saved", group=group) == ["saved"] * 2

        thread = in_thread(checkpoint)
        for _ in range(20):
            objcomm.barrier()
        thread.join()


@ranks(2)
def test_a_lane_may_be_taken_over_when_its_thread_has_ended() -> None:
    def gather_in_lane() -> None:
        with objcomm.lane("shared"):
            assert objcomm.all_gather(here().rank) == [0, 1]

    for _ in range(3):
        in_thread(gather_in_lane).join()
    gather_in_lane()
    with subgroup(0, 1) as group:
        in_thread(lambda: objcomm.all_gather("on the default lane", group=group)).join()
        assert_group_works(group)
    assert_group_works()


@ranks(2)
def test_two_live_threads_cannot_hold_one_lane() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with objcomm.lane("mine"):
            objcomm.barrier()
            held.set()
            done.wait()
            objcomm.barrier()

    thread = in_thread(hold)
    held.wait()
    try:
        with pytest.raises(UsageError, match="lane"), objcomm.lane("mine"):
            objcomm.barrier()
    finally:
        done.set()
        thread.join()
    assert_group_works()


@ranks(2)
def test_an_error_inside_a_lane_leaves_the_lane() -> None:
    with pytest.raises(KeyError), objcomm.lane("left early"):
        raise KeyError("inside")
    assert_group_works()
    with objcomm.lane("left early"):
        assert objcomm.all_gather(1) == [1, 1]


@ranks(1, 2)
@pytest.mark.parametrize("name", ["", None], ids=repr)
def test_a_lane_needs_a_name(name: str) -> None:
    with pytest.raises(UsageError), objcomm.lane(name):
        objcomm.barrier()
    assert_group_works()


@ranks(2)
def test_one_failing_lane_leaves_the_others_in_step() -> None:
    def fail() -> None:
        with objcomm.lane("failing"):
            for turn in range(20):
                mine = threading.Lock() if objcomm.rank() == turn % 2 else turn
                with pytest.raises(objcomm.CollectiveError):
                    objcomm.all_gather(mine)

    thread = in_thread(fail)
    for turn in range(50):
        assert objcomm.all_gather(turn) == [turn, turn]
    thread.join()
    assert_group_works()


@ranks(2, 3)
def test_each_thread_raises_an_error_in_its_next_call() -> None:
    begun, go_on = threading.Event(), threading.Event()
    with subgroup(*range(here().world_size)) as group:

        def keep_a_lane() -> None:
            with objcomm.lane("kept"):
                objcomm.barrier(group=group)
                begun.set()
                assert go_on.wait(PATIENCE_S)
                with pytest.raises(DesyncError):
                    objcomm.barrier(group=group)
                objcomm.barrier(group=group)

        thread = in_thread(keep_a_lane)
        assert begun.wait(PATIENCE_S)
        use_three_lanes(group)
        with closely(), patiently(), pytest.raises(DesyncError):
            objcomm.barrier("a" if here().rank == 0 else "b", group=group)
        use_three_lanes(group)  # renews the connections before the other thread has raised
        go_on.set()
        thread.join()
        use_three_lanes(group)


def use_three_lanes(group: dist.ProcessGroup) -> None:
    assert_group_works(group)
    for name in ("one", "another"):
        with objcomm.lane(name):
            assert_group_works(group)


@ranks(2)
def test_calls_after_a_block_are_on_the_lane_before_it() -> None:
    with objcomm.lane("outer"):
        with objcomm.lane("inner"):
            assert objcomm.all_gather("inner") == ["inner"] * 2
        assert objcomm.all_gather("outer") == ["outer"] * 2
    assert objcomm.all_gather("default") == ["default"] * 2
    (world,) = objcomm.recorder.dump(group=dist.group.WORLD)["groups"]
    assert [each["lane_name"] for each in world["entries"][-3:]] == ["inner", "outer", ""]


@ranks(2)
def test_two_lanes_with_the_same_number_are_refused() -> None:
    by_number: dict[int, str] = {}
    for name in map("lane {}".format, itertools.count()):
        other = by_number.setdefault(fingerprint(name) % (1 << LANE_BITS), name)
        if other != name:
            break
    with objcomm.lane(name):
        objcomm.barrier()
    with objcomm.lane(other), pytest.raises(UsageError, match="collide; rename one of them"):
        objcomm.barrier()
    assert_group_works()
