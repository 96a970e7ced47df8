"""Asynchronous errors that the program has not retrieved yet; calls until then fail with them.

Another rank may have started the matching call before the error, so both have to fail. Once the
error is retrieved, the next calls use new connections, on every rank.
"""

import asyncio
import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, DesyncError, Work
from objcomm._world import store_of
from tests.group.control import fail
from tests.group.helpers import (
    assert_group_works,
    assert_no_verdict_stays,
    error_in,
    hear,
    say,
    subgroup,
    tell_all,
    when_main_thread_waits,
)
from tests.group.in_flight import meanwhile, soon
from tests.group.watched import closely, patiently
from tests.ranks import ranks
from tests.waits import wait_until
from tests.workers import here


def _start_mismatched(group: dist.ProcessGroup | None = None) -> Work[Any]:
    """Start a work that fails on every rank, because rank 1 starts a different operation."""
    operation: Any = objcomm.all_gather if here().rank == 1 else objcomm.all_reduce
    work: Work[Any] = operation(1, group=group, async_op=True)
    return work


def _until_failed(work: Work[Any]) -> Work[Any]:
    """Wait until this rank has the work's error, without retrieving it."""
    wait_until(work.done, "the error to be here")
    return work


def _assert_all_raise(*works: Work[Any]) -> None:
    for work in works:
        assert isinstance(soon(work), DesyncError)


@contextlib.contextmanager
def _rank_0_retrieves_last(work: Work[Any], *others: int) -> Iterator[bool]:
    """Hold rank 0 here until the others have left the block, with their calls started and failed.

    By then the work's error has reached rank 0 too, but rank 0 has not retrieved it.

    Yields:
        Whether this is rank 0.
    """
    with closely(), patiently():
        if here().rank == 0:
            for rank in others:
                hear(f"raised {rank}")
            _until_failed(work)
            yield True
        else:
            yield False
            say(f"raised {here().rank}")


@ranks(2, 3)
@pytest.mark.parametrize("is_async", [True, False])
def test_a_call_behind_an_error_fails_with_it_as_on_the_ranks_that_began_it_before(
    *, is_async: bool
) -> None:
    objcomm.barrier()
    earlier = objcomm.all_gather(1, async_op=True)
    works = [_start_mismatched()]
    with _rank_0_retrieves_last(works[0], *range(1, here().world_size)) as is_last:
        if is_last and not is_async:
            error_in(DesyncError, lambda: objcomm.all_gather(2))
        else:
            works += [objcomm.all_gather(each, async_op=True) for each in (2, 3)]
        _assert_all_raise(*works)
    assert earlier.wait() == [1] * here().world_size
    tell_all("all have raised", "")
    assert_group_works()


async def _answer_of(work: Work[Any]) -> Any:
    return await work


#: The ways to retrieve a work's error; each raises it.
WAYS: dict[str, Callable[[Work[Any]], object]] = {
    "wait": Work.wait,
    "result": lambda work: _until_failed(work).result(),
    "await": lambda work: asyncio.run(_answer_of(work)),
    "as_completed": lambda work: [done.result() for done in objcomm.as_completed([work])],
    "exception": lambda work: fail(_until_failed(work).exception() or AssertionError("no error")),
    "wait_all": lambda work: objcomm.wait_all([work]),
}


@ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_retrieved_the_error_in_any_way_continues(way: str) -> None:
    objcomm.barrier()
    works = [_start_mismatched(), objcomm.all_gather(2, async_op=True)]
    with closely(), patiently():
        error_in(DesyncError, lambda: WAYS[way](works[0]))
    tell_all("all have raised", "")
    assert objcomm.all_gather(here().rank, async_op=True).wait() == [0, 1]
    _assert_all_raise(works[1])  # retrieved late, without effect
    assert_group_works()


@ranks(2)
def test_a_wait_that_ends_before_the_work_has_not_retrieved_the_error() -> None:
    objcomm.barrier()
    if here().rank == 1:
        hear("rank 0 has waited in vain")
    work = _start_mismatched()
    if here().rank == 0:
        with pytest.raises(TimeoutError, match="still running"):
            work.wait(0)
        say("rank 0 has waited in vain")
    with _rank_0_retrieves_last(work, 1):
        _assert_all_raise(work, objcomm.all_gather(2, async_op=True))
    assert_group_works()


@ranks(2)
def test_the_error_of_a_work_that_was_dropped_is_raised_by_the_next_call() -> None:
    objcomm.barrier()
    with warnings.catch_warnings(), closely(), patiently():
        warnings.simplefilter("ignore")  # "never waited for" is expected here
        _until_failed(_start_mismatched())
        error_in(DesyncError, objcomm.barrier)
    tell_all("all have raised", "")
    assert_group_works()


@ranks(2)
@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_leaving_a_failed_block_retrieves_all_errors_in_it(
    *, raises: bool, is_elsewhere: bool
) -> None:
    with subgroup(0, 1) as other:
        group = other if is_elsewhere else None
        for each in (None, other):
            objcomm.barrier(group=each)
        works: list[Work[Any]] = []

        def block() -> None:
            works.append(_until_failed(_start_mismatched(group)))
            if here().rank == 1:
                works[0].wait()
            if raises:
                raise LookupError("no such shard")
            hear("left 1")

        with closely(), patiently():
            with pytest.raises(CollectiveError), objcomm.fail_together():
                block()
            say(f"left {here().rank}")
        for each in (None, other):
            assert_group_works(each)
        _assert_all_raise(works[0])
        for each in (None, other):
            assert_group_works(each)


@ranks(2, disposable=True)
def test_a_block_behind_a_work_that_fails_is_entered_by_every_rank_and_fails() -> None:
    """Rank 0 enters before the error and waits there for its work; rank 1 enters after it."""
    entered: list[int] = []

    def block() -> None:
        with objcomm.fail_together():
            entered.append(here().rank)
            objcomm.barrier()

    with subgroup(0, 1) as other:
        for each in (None, other):
            objcomm.barrier(group=each)
        with closely(), patiently():
            if here().rank == 1:
                hear("rank 0 waits")
            work = _start_mismatched()
            if here().rank == 1:
                _until_failed(work)
            else:
                when_main_thread_waits(lambda: say("rank 0 waits"))
            with pytest.raises(CollectiveError, match="out of step"):
                block()
        assert entered == [here().rank]
        _assert_all_raise(work)
        tell_all("all have left", "")
        for each in (None, other):
            assert_group_works(each)
    assert_no_verdict_stays(store_of(dist.group.WORLD))


@ranks(3, disposable=True)
def test_a_deadlock_through_the_end_of_a_block_ends_with_it() -> None:
    """Rank 0 waits for rank 1 in the block's group; ranks 1 and 2 wait for rank 0 in the world.

    The test needs a disposable world: rank 0 raises the desync and not the failure of the block on
    rank 1, so its next message to or from rank 1 would raise that failure.
    """
    with subgroup(0, 1) as pair:

        def block() -> None:
            with objcomm.fail_together(group=pair):
                if here().rank == 1:
                    objcomm.barrier()
                works.append(objcomm.all_gather(0, group=pair, async_op=True))

        works: list[Work[Any]] = []
        objcomm.barrier()
        with closely(), patiently():
            if here().rank == 2:
                error_in(DesyncError, objcomm.barrier)
            else:
                objcomm.barrier(group=pair)
                error_in(DesyncError if here().rank == 0 else CollectiveError, block)
        tell_all("all have left", "")
        assert_group_works()
        if here().rank < 2:
            assert_group_works(pair)
        _assert_all_raise(*works)


@ranks(2)
def test_a_cancelled_task_has_not_retrieved_the_error() -> None:
    """The task is cancelled after the error arrives and before the task runs again."""

    async def program(work: Work[Any]) -> None:
        task = asyncio.ensure_future(_answer_of(work))
        await asyncio.sleep(0)  # the task now awaits the work
        _until_failed(work)
        await asyncio.sleep(0)  # the task is now scheduled to receive the error
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    objcomm.barrier()
    work = _start_mismatched()
    with _rank_0_retrieves_last(work, 1) as is_last:
        if is_last:
            asyncio.run(program(work))
        _assert_all_raise(objcomm.all_gather(2, async_op=True), work)
    assert_group_works()


@ranks(2)
def test_retrieving_an_error_that_ends_no_connections_does_not_count_for_one_that_does() -> None:
    def divide(_left: int, _right: int) -> int:
        raise ZeroDivisionError("by design")

    objcomm.barrier()
    failed = objcomm.all_reduce(1, divide, async_op=True)
    work = _start_mismatched()
    with _rank_0_retrieves_last(work, 1):
        with pytest.raises(CollectiveError, match="by design"):
            failed.wait()
        _assert_all_raise(work, objcomm.all_gather(2, async_op=True))
    assert_group_works()


@ranks(2)
def test_retrieving_an_old_error_again_does_not_count_for_a_new_one() -> None:
    objcomm.barrier()
    old = [_start_mismatched(), objcomm.all_gather(2, async_op=True)]
    with closely(), patiently():
        _assert_all_raise(old[0])
    tell_all("all have raised", "")
    objcomm.barrier()
    work = _start_mismatched()
    with _rank_0_retrieves_last(work, 1) as is_last:
        if is_last:
            _assert_all_raise(old[1])
        _assert_all_raise(work, objcomm.all_gather(3, async_op=True))
    assert_group_works()


@ranks(2)
def test_a_thread_that_has_new_connections_leaves_the_other_threads_theirs() -> None:
    """One thread raises the error and continues before the main thread retrieves its own."""

    def beside() -> None:
        with objcomm.lane("beside"):
            objcomm.barrier()
            say(f"met {here().rank}")
            hear("ended")
            error_in(DesyncError, objcomm.barrier)
            assert_group_works()
            say(f"continues {here().rank}")

    objcomm.barrier()
    with meanwhile(beside):
        for rank in (0, 1):
            hear(f"met {rank}")
        work = _start_mismatched()
        with closely(), patiently():
            _until_failed(work)
            tell_all("the error is at both", "")
            say("ended")
            for rank in (0, 1):
                hear(f"continues {rank}")
            _assert_all_raise(work, objcomm.all_gather(2, async_op=True))
    assert_group_works()
