"""Errors of asynchronous operations: which ranks raise them, and when."""

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, DecodeError, DesyncError, TransportError, UsageError, Work
from objcomm._observe.history import CallRecord
from objcomm._observe.recorder import Recorder
from objcomm._transport.threads import SerialExecutor, are_workers_busy
from tests.group.helpers import (
    RefusesToArrive,
    RefusesToPickle,
    assert_group_works,
    error_in,
    hear,
    is_said,
    say,
    tell_all,
    when_main_thread_waits,
)
from tests.group.in_flight import LIMIT_S, meanwhile, own, soon, two_groups
from tests.group.operations import OBJECT_OPERATIONS, OPERATIONS, is_told
from tests.group.watched import after_looks, closely, patiently
from tests.ranks import ranks
from tests.waits import wait_until
from tests.workers import here


@ranks(1, 2)
def test_wrong_arguments_raise_at_the_call() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, call in OPERATIONS.items():
            with pytest.raises(UsageError):
                call(own(name), async_op=True, timeout=-1)
    assert_group_works()


@ranks(3)
@pytest.mark.parametrize("name", OBJECT_OPERATIONS)
def test_an_object_that_cannot_be_encoded_raises_at_the_wait(name: str) -> None:
    mine: Any = RefusesToPickle(LookupError("not me")) if here().rank == 0 else 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        work = OPERATIONS[name](mine, async_op=True)
        if is_told(name, 0, here().rank):
            error = error_in(CollectiveError, work.wait)
            assert "not me" in str(error)
            assert work.exception() is error
            assert error.failures[0].rank == 0
        else:
            assert work.wait() in (None, 1)
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("confirm", [False, True])
def test_an_object_that_cannot_be_decoded_raises_at_the_wait(*, confirm: bool) -> None:
    works = [
        objcomm.broadcast(RefusesToArrive(1), async_op=True, confirm=confirm),
        objcomm.all_gather(here().rank, async_op=True),
    ]
    if confirm or here().rank == 1:
        with pytest.raises(CollectiveError if confirm else DecodeError, match="cannot be rebuilt"):
            works[0].wait()
    else:
        works[0].wait()
    assert works[1].wait() == list(range(here().world_size))
    assert_group_works()


@ranks(3)
def test_an_operations_limit_counts_from_its_turn_and_ends_it() -> None:
    group: Any = dist.new_group()
    objcomm.barrier(group=group)
    if here().rank == 0:
        with patiently():
            works = [
                objcomm.all_gather(1, timeout=0.3, group=group, async_op=True),
                objcomm.all_gather(2, group=group, async_op=True),
            ]
            assert "all_gather" in str(error_in(objcomm.TransportTimeout, works[0].wait))
            error_in(TransportError, works[1].wait)
    tell_all("over", "")
    error_in(TransportError, lambda: objcomm.barrier(group=group))
    dist.destroy_process_group(group)
    assert_group_works()


@ranks(2)
@pytest.mark.parametrize("is_behind", [False, True], ids=["wait", "synchronous call behind it"])
def test_a_deadlock_through_a_work_is_found(*, is_behind: bool) -> None:
    """The ranks wait for each other in different groups, one of them for its work to end."""
    with two_groups() as (one, two):
        with closely(), patiently():
            if here().rank == 0:
                work = objcomm.barrier(group=one, async_op=True)
                if is_behind:
                    error_in(DesyncError, lambda: objcomm.barrier(group=one))
                assert isinstance(soon(work), DesyncError)
            else:
                error_in(DesyncError, lambda: objcomm.barrier(group=two))
        tell_all("all have raised", "")
        for group in (one, two):
            assert_group_works(group)


@ranks(2)
def test_a_wait_with_a_timeout_is_not_part_of_a_deadlock() -> None:
    """Rank 0 waits for rank 1, which waits for rank 0 elsewhere; but rank 0 will get there."""
    with two_groups() as (one, two):
        if here().rank == 0:
            work = objcomm.barrier(group=one, async_op=True)
            while not is_said("rank 1 has looked"):
                with closely(), pytest.raises(TimeoutError, match="still running"):
                    work.wait(0.5)
            objcomm.barrier(group=two)
            work.wait()
        else:
            with after_looks(20, lambda: say("rank 1 has looked")):
                objcomm.barrier(group=two)
            objcomm.barrier(group=one)


@ranks(2)
def test_calls_in_flight_on_several_groups_are_not_a_deadlock() -> None:
    mine = here().rank
    with two_groups() as (one, two), after_looks(20, lambda: say(f"rank {mine} has looked")):
        works = []
        for group in (one, two) if mine == 0 else (two, one):
            works.append(objcomm.barrier(group=group, async_op=True))
            hear(f"rank {1 - mine} has looked")
        objcomm.wait_all(works)


@ranks(3, expect_dead=[2])
def test_a_death_ends_outstanding_works() -> None:
    objcomm.barrier()
    tell_all("alive", "")
    if here().rank == 2:
        os._exit(1)
    works = [objcomm.all_gather(1, async_op=True), objcomm.barrier(async_op=True)]
    for work in works:
        assert isinstance(soon(work), TransportError)
    error_in(objcomm.BrokenGroupError, lambda: objcomm.barrier(async_op=True))


@ranks(2)
def test_messages_of_a_group_of_two_meet_apart_from_its_collectives() -> None:
    """No matter which of the two each rank starts first."""
    for _ in range(3):
        group: Any = dist.new_group([0, 1])
        if here().rank == 0:
            sending = objcomm.isend("message", 1, group=group)
        assert objcomm.all_gather(here().rank, group=group) == [0, 1]
        if here().rank == 0:
            sending.wait()
        else:
            assert objcomm.recv(0, group=group) == "message"
        dist.destroy_process_group(group)


@ranks(2, disposable=True)
def test_an_interrupt_ends_the_wait_and_not_the_work() -> None:
    objcomm.barrier()
    if here().rank == 0:
        work = objcomm.all_gather(0, async_op=True)
        when_main_thread_waits(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        assert not work.done()
    tell_all("interrupted", "")
    if here().rank == 1:
        work = objcomm.all_gather(1, async_op=True)
    assert work.wait() == [0, 1]
    assert_group_works()


@ranks(2, disposable=True)
def test_an_interrupt_of_a_call_that_waits_for_earlier_ones_leaves_no_rank_waiting() -> None:
    objcomm.barrier()
    if here().rank == 0:
        work = objcomm.all_gather(0, async_op=True)
        when_main_thread_waits(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            objcomm.barrier()
        assert isinstance(soon(work), TransportError)
    tell_all("interrupted", "")
    if here().rank == 1:
        error_in(TransportError, lambda: objcomm.all_gather(1))


@ranks(2)
@pytest.mark.parametrize("is_begun", [False, True], ids=["still queued", "already begun"])
def test_a_call_that_is_interrupted_while_it_is_handed_over_is_concluded_once(
    is_begun: bool,  # noqa: FBT001  # pytest passes parameters by name
) -> None:
    """Ctrl-C comes when the lane's thread has the call, but the caller has not returned yet."""
    group = dist.new_group()
    objcomm.barrier(group=group)
    if here().rank == 0:
        before = [] if is_begun else [objcomm.all_gather(0, group=group, async_op=True)]
        with _interrupted_after_submit(is_begun=is_begun) as concluded:
            with pytest.raises(KeyboardInterrupt):
                objcomm.all_reduce(0, group=group, async_op=True)
            for work in before:
                assert isinstance(soon(work), TransportError)
            wait_until(lambda: not are_workers_busy(), "the lane's thread to be done")
        assert concluded.count("all_reduce") == 1
    elif is_begun:
        assert objcomm.all_reduce(1, group=group) == 1
    tell_all("interrupted", "")
    if here().rank == 1 and not is_begun:
        with pytest.raises(TransportError, match="KeyboardInterrupt"):
            objcomm.all_gather(1, group=group)
    if is_begun:
        assert_group_works(group)
    assert_group_works()


@contextmanager
def _interrupted_after_submit(*, is_begun: bool) -> Iterator[list[str]]:
    """Raise Ctrl-C once a job is queued or done; yield the operations concluded meanwhile."""
    submit, conclude = SerialExecutor.submit, Recorder.conclude
    concluded: list[str] = []

    def interrupted(line: SerialExecutor, job: Callable[[], None]) -> None:
        submit(line, job)
        if is_begun:
            line.drain()
        raise KeyboardInterrupt

    def counting(recorder: Recorder, entry: CallRecord, *rest: Any) -> None:
        concluded.append(entry.operation)
        conclude(recorder, entry, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SerialExecutor, "submit", interrupted)
        patch.setattr(Recorder, "conclude", counting)
        yield concluded


@ranks(2, 3)
def test_a_block_that_fails_ends_the_calls_in_flight_inside_it() -> None:
    before = objcomm.all_gather("before", async_op=True)
    works: list[Work[Any]] = []

    def block() -> None:
        with objcomm.fail_together():
            if here().rank == 0:
                raise LookupError("no such shard")
            works.append(objcomm.all_gather("inside", async_op=True))
            works.append(objcomm.barrier(async_op=True))
            works[0].wait()

    with closely(), patiently():
        assert "no such shard" in str(error_in(CollectiveError, block))
    assert before.wait() == ["before"] * here().world_size
    for work in works:
        assert "no such shard" in str(soon(work))
    assert_group_works()


@ranks(2)
def test_a_block_ends_after_the_calls_in_flight_inside_it() -> None:
    with objcomm.fail_together():
        work = objcomm.all_gather(bytes(300_000), async_op=True)
    assert work.done()
    assert len(work.wait()) == 2


class Talkative:
    """Communicates when it is unpickled."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        objcomm.barrier()

    def __getstate__(self) -> dict[str, Any]:
        return {"any": 1}


@ranks(2)
@pytest.mark.parametrize("is_thread_over", [False, True])
def test_an_object_that_communicates_when_it_arrives_is_refused(*, is_thread_over: bool) -> None:
    works: list[Work[Any]] = []

    def call() -> None:
        with objcomm.lane(f"talkative {is_thread_over}"):
            works.append(objcomm.all_gather(Talkative(), async_op=True))

    if is_thread_over:  # so no thread owns the lane when the object arrives
        objcomm.barrier()
        for turn in (0, 1):
            if here().rank == turn:
                with meanwhile(call):
                    pass
            tell_all(f"rank {turn} has called", "")
    else:
        call()
    with pytest.raises(DecodeError):
        works[0].wait(LIMIT_S)
    assert_group_works()


@ranks(2, disposable=True)
def test_without_a_thread_for_it_the_call_fails_on_every_rank() -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with objcomm.lane("no thread"):
        objcomm.barrier()
        if here().rank == 0:
            with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
                warnings.simplefilter("error")
                patch.setattr(threading.Thread, "start", refuse)
                with pytest.raises(RuntimeError, match="new thread"):
                    objcomm.all_gather(0, async_op=True)
        else:
            error_in(objcomm.ObjcommError, lambda: objcomm.all_gather(1))
