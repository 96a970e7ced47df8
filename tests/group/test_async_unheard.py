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
from tests.group.helpers import (
    assert_group_works,
    assert_no_verdict_stays,
    hear,
    in_thread,
    say,
    subgroup,
    tell_all,
    when_main_thread_waits,
)
from tests.group.in_flight import LIMIT_S, soon
from tests.group.watched import closely, patiently
from tests.ranks import ranks
from tests.waits import wait_until
from tests.workers import here


def _begun_apart(group: dist.ProcessGroup | None = None) -> Work[Any]:
    """Start a work that fails on every rank, because rank 1 starts a different operation."""
    operation: Any = objcomm.all_gather if here().rank == 1 else objcomm.all_reduce
    work: Work[Any] = operation(1, group=group, async_op=True)
    return work


@contextlib.contextmanager
def _last_to_hear(work: Work[Any], *others: int) -> Iterator[bool]:
    """Hold rank 0 here until the others have left the block, with their calls started and failed.

    By then the work's error has reached rank 0 too, but rank 0 has not retrieved it.
    """
    with closely(), patiently():
        if here().rank == 0:
            for rank in others:
                hear(f"heard {rank}")
            wait_until(work.done, "the error to be here")
            yield True
        else:
            yield False
            say(f"heard {here().rank}")


@ranks(2, 3)
@pytest.mark.parametrize("is_async", [True, False])
def test_a_call_behind_an_error_fails_with_it_as_on_the_ranks_that_began_it_before(
    *, is_async: bool
) -> None:
    objcomm.barrier()
    works = [_begun_apart()]
    with _last_to_hear(works[0], *range(1, here().world_size)) as is_last:
        if is_last and not is_async:
            with pytest.raises(DesyncError):
                objcomm.all_gather(2)
        else:
            works += [objcomm.all_gather(each, async_op=True) for each in (2, 3)]
        for work in works:
            assert isinstance(soon(work), DesyncError)
    tell_all("all have heard", "")
    assert_group_works()


@ranks(3)
def test_a_call_behind_an_error_fails_with_it_in_a_subgroup() -> None:
    with subgroup(0, 1) as group:
        if here().rank < 2:
            objcomm.barrier(group=group)
            works = [_begun_apart(group)]
            with _last_to_hear(works[0], 1):
                works.append(objcomm.all_gather(2, group=group, async_op=True))
                for work in works:
                    assert isinstance(soon(work), DesyncError)
            assert_group_works(group)
    assert_group_works()


def _awaited(work: Work[Any]) -> Any:
    async def program() -> Any:
        return await work

    return asyncio.run(program())


def _first_of(work: Work[Any]) -> Any:
    (done,) = objcomm.as_completed([work])
    return done.result()


def _all_of(work: Work[Any]) -> Any:
    return objcomm.wait_all([work])


def _result_of(work: Work[Any]) -> Any:
    wait_until(work.done, "the error to be here")
    return work.result()


def _looked_at(work: Work[Any]) -> Any:
    wait_until(work.done, "the error to be here")
    error = work.exception()
    assert error is not None
    raise error


@ranks(2)
@pytest.mark.parametrize(
    "way",
    [Work.wait, _result_of, _awaited, _first_of, _looked_at, _all_of],
    ids=["wait", "result", "await", "as_completed", "exception", "wait_all"],
)
def test_a_rank_that_retrieved_the_error_in_any_way_continues(
    way: Callable[[Work[Any]], Any],
) -> None:
    objcomm.barrier()
    works = [_begun_apart(), objcomm.all_gather(2, async_op=True)]
    with closely(), patiently(), pytest.raises(DesyncError):
        way(works[0])
    tell_all("all have heard", "")
    assert objcomm.all_gather(here().rank, async_op=True).wait() == [0, 1]
    assert isinstance(soon(works[1]), DesyncError)  # retrieved late, without effect
    assert_group_works()


@ranks(2)
def test_a_wait_that_ends_before_the_work_does_has_taken_nothing() -> None:
    objcomm.barrier()
    if here().rank == 1:
        hear("rank 0 has waited in vain")
    work = _begun_apart()
    if here().rank == 0:
        with pytest.raises(TimeoutError, match="still running"):
            work.wait(0)
        say("rank 0 has waited in vain")
    with _last_to_hear(work, 1):
        behind = objcomm.all_gather(2, async_op=True)
        assert isinstance(soon(work), DesyncError)
        assert isinstance(soon(behind), DesyncError)
    assert_group_works()


@ranks(2)
def test_a_work_that_nobody_asks_is_heard_of_in_the_next_call() -> None:
    objcomm.barrier()
    with warnings.catch_warnings(), closely(), patiently():
        warnings.simplefilter("ignore")  # "never waited for" is expected here
        work = _begun_apart()
        wait_until(work.done, "the error to be here")
        del work
        with pytest.raises(DesyncError):
            objcomm.barrier()
    tell_all("all have heard", "")
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
            works.append(_begun_apart(group))
            wait_until(works[0].done, "the error to be here")
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
        assert isinstance(soon(works[0]), DesyncError)
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
            work = _begun_apart()
            if here().rank == 1:
                wait_until(work.done, "the error to be here")
            else:
                when_main_thread_waits(lambda: say("rank 0 waits"))
            with pytest.raises(CollectiveError, match="out of step"):
                block()
        assert entered == [here().rank]
        assert isinstance(soon(work), DesyncError)
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
                with pytest.raises(DesyncError):
                    objcomm.barrier()
            else:
                objcomm.barrier(group=pair)
                with pytest.raises(DesyncError if here().rank == 0 else CollectiveError):
                    block()
        tell_all("all have left", "")
        assert_group_works()
        if here().rank < 2:
            assert_group_works(pair)
        for work in works:
            assert isinstance(soon(work), DesyncError)


@ranks(2)
def test_a_cancelled_task_has_not_retrieved_the_error() -> None:
    """The task is cancelled after the error arrives and before the task runs again."""

    async def program(work: Work[Any]) -> None:
        task = asyncio.ensure_future(_answer_of(work))
        await asyncio.sleep(0)  # the task now awaits the work
        wait_until(work.done, "the error to be here")
        await asyncio.sleep(0)  # the task is now scheduled to receive the error
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def _answer_of(work: Work[Any]) -> Any:
        return await work

    objcomm.barrier()
    work = _begun_apart()
    with _last_to_hear(work, 1) as is_last:
        if is_last:
            asyncio.run(program(work))
        behind = objcomm.all_gather(2, async_op=True)
        assert isinstance(soon(behind), DesyncError)
        assert isinstance(soon(work), DesyncError)
    assert_group_works()


@ranks(2)
def test_an_error_of_another_kind_that_is_taken_stands_for_no_end_of_connections() -> None:
    def divide(_left: int, _right: int) -> int:
        raise ZeroDivisionError("by design")

    objcomm.barrier()
    failed = objcomm.all_reduce(1, divide, async_op=True)
    works = [_begun_apart()]
    with _last_to_hear(works[0], 1):
        with pytest.raises(CollectiveError, match="by design"):
            failed.wait()
        works.append(objcomm.all_gather(2, async_op=True))
        for work in works:
            assert isinstance(soon(work), DesyncError)
    assert_group_works()


@ranks(2)
def test_retrieving_an_old_error_again_does_not_count_for_a_new_one() -> None:
    objcomm.barrier()
    old = [_begun_apart(), objcomm.all_gather(2, async_op=True)]
    with closely(), patiently():
        assert isinstance(soon(old[0]), DesyncError)
    tell_all("all have heard", "")
    objcomm.barrier()
    works = [_begun_apart()]
    with _last_to_hear(works[0], 1) as is_last:
        if is_last:
            assert isinstance(soon(old[1]), DesyncError)
        works.append(objcomm.all_gather(3, async_op=True))
        for work in works:
            assert isinstance(soon(work), DesyncError)
    assert_group_works()


@ranks(2)
def test_another_thread_that_has_new_connections_leaves_the_others_theirs() -> None:
    """One thread raises the error and continues before the main thread retrieves its own."""

    def beside() -> None:
        with objcomm.lane("beside"):
            objcomm.barrier()
            say(f"met {here().rank}")
            hear("ended")
            with pytest.raises(DesyncError):
                objcomm.barrier()
            assert_group_works()
            say(f"goes on {here().rank}")

    objcomm.barrier()
    thread = in_thread(beside)
    for rank in (0, 1):
        hear(f"met {rank}")
    works = [_begun_apart()]
    with closely(), patiently():
        wait_until(works[0].done, "the error to be here")
        tell_all("the error is at both", "")
        say("ended")
        for rank in (0, 1):
            hear(f"goes on {rank}")
        works.append(objcomm.all_gather(2, async_op=True))
        for work in works:
            assert isinstance(soon(work), DesyncError)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert_group_works()
