"""``fail_together``: an error on one rank reaches the others wherever they wait.

No test sets a timeout for its calls: without the watchdog they would wait half an hour.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError
from objcomm._failures.verdict import Cause, Verdict
from objcomm._transport.store import pack_record
from objcomm._world import store_of
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
from tests.group.watched import closely, patiently
from tests.indescribable import INDESCRIBABLE
from tests.ranks import ranks, solo
from tests.waits import within
from tests.workers import here


def raises_together(block: Callable[[], Any], group: Any = None) -> CollectiveError:
    """The error that every rank must raise from a block."""
    with (
        closely(),
        patiently(),
        pytest.raises(CollectiveError) as caught,
        objcomm.fail_together(group=group),
    ):
        block()
    assert caught.value.operation == "fail_together"
    return caught.value


def fail_on(rank: int) -> None:
    if here().rank == rank:
        raise LookupError("no such shard")


def failing_on(rank: int, call: Callable[[], object] = objcomm.barrier) -> Callable[[], None]:
    """The body of a block that fails on one rank, while the others make a call."""

    def body() -> None:
        fail_on(rank)
        call()

    return body


WAITS: dict[str, Callable[[], Any]] = {
    "barrier": objcomm.barrier,
    "broadcast": lambda: objcomm.broadcast(None, src=objcomm.world_size() - 1),
    "gather": lambda: objcomm.gather(1),
    "all_gather": lambda: objcomm.all_gather(1),
    "all_reduce": lambda: objcomm.all_reduce(1),
    "the end of the block": lambda: None,
}


@pytest.mark.timed
@ranks(3)
def test_an_error_is_raised_within_2_s_on_ranks_that_wait() -> None:
    block = failing_on(1, lambda: objcomm.all_gather(1))
    objcomm.barrier()
    tell_all("all have met", "")
    with within(2.0), pytest.raises(CollectiveError), objcomm.fail_together():
        block()
    assert_group_works()


@ranks(3)
@pytest.mark.parametrize("where", WAITS)
def test_an_error_reaches_ranks_that_wait(where: str) -> None:
    last = objcomm.world_size() - 1
    error = raises_together(failing_on(last, WAITS[where]))
    failure = error.failures[last]
    assert (failure.type_name, failure.message) == ("LookupError", "no such shard")
    assert "in fail" in failure.traceback
    assert isinstance(error.__cause__, LookupError) == (here().rank == last)
    assert_group_works()


@ranks(2)
@pytest.mark.parametrize("name", INDESCRIBABLE)
def test_an_error_that_cannot_be_described_reaches_the_others_too(name: str) -> None:
    own = INDESCRIBABLE[name]()

    def block() -> None:
        if here().rank == 1:
            raise own
        objcomm.barrier()

    error = raises_together(block)
    assert error.failures[1].type_name.rpartition(".")[2] == name
    assert (error.__cause__ is own) == (here().rank == 1)
    assert_group_works()


@ranks(2, 4)
def test_an_error_reaches_ranks_in_different_operations() -> None:
    """The ranks wait in different calls, and some wait for a rank that is itself waiting."""
    with subgroup(0, 1) as pair:
        objcomm.barrier()

        def block() -> None:
            if here().rank == 1:
                for rank in (0, 2, 3)[: objcomm.world_size() - 1]:
                    hear(f"rank {rank} waits")
                fail_on(1)
            when_main_thread_waits(lambda: say(f"rank {here().rank} waits"))
            if here().rank == 0:
                objcomm.all_gather("in the pair", group=pair)
            else:
                objcomm.broadcast(None, src=0)

        error = raises_together(block)
        assert list(error.failures) == [1]
        assert_group_works()
        if here().rank < 2:
            assert_group_works(pair)


@ranks(3)
def test_a_rank_that_computes_raises_in_its_next_call() -> None:
    def block() -> None:
        fail_on(0)
        if here().rank == 1:
            hear("rank 2 has raised")
        objcomm.all_gather(1)

    raises_together(block)
    if here().rank == 2:
        say("rank 2 has raised")
    assert_group_works()


@ranks(2)
def test_ranks_that_both_failed_raise_one_of_the_failures() -> None:
    def block() -> None:
        tell_all("inside", "")  # a rank that enters later would see the other's failure on entry
        fail_on(here().rank)

    error = raises_together(block)
    assert len(error.failures) == 1
    assert isinstance(error.__cause__, LookupError)
    assert_group_works()


@ranks(2)
def test_the_error_of_a_call_in_a_block_is_raised_on_all_ranks() -> None:
    """A gather's failure is known to its destination and to the rank that failed."""
    with objcomm.fail_together():
        objcomm.barrier()
    mine = threading.Lock() if here().rank == 1 else 1
    assert "cannot pickle" in str(raises_together(lambda: objcomm.gather(mine, dst=1)))
    assert_group_works()


@ranks(2)
def test_an_own_error_that_is_caught_in_a_block_is_not_reported() -> None:
    with objcomm.fail_together():
        with contextlib.suppress(LookupError):
            fail_on(here().rank)
        assert objcomm.all_gather(here().rank) == [0, 1]
    assert_group_works()


@ranks(2)
def test_another_ranks_error_that_is_caught_in_a_block_is_raised_again_at_its_end() -> None:
    raises_together(failing_on(1, lambda: error_in(CollectiveError, objcomm.barrier)))
    assert_group_works()


@ranks(2)
@pytest.mark.parametrize("failing", ["inner", "outer"])
def test_blocks_nest(failing: str) -> None:
    def block() -> None:
        with objcomm.fail_together():
            if failing == "inner":
                fail_on(1)
            objcomm.all_gather(1)
        fail_on(1)
        objcomm.barrier()

    raises_together(block)
    assert_group_works()


@ranks(3)
def test_a_block_of_a_subgroup_leaves_the_others_alone() -> None:
    with subgroup(1, 2) as pair:
        if here().rank > 0:
            raises_together(failing_on(2, lambda: objcomm.barrier(group=pair)), pair)
            assert_group_works(pair)
        assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("failing", [0, -1])
def test_a_group_that_was_first_used_in_a_failed_block_works_afterwards(failing: int) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    with subgroup(*range(size)) as group:
        raises_together(failing_on(failing % size, lambda: objcomm.barrier(group=group)))
        # The others may not have reached the meeting of the group when this rank does.
        assert objcomm.all_gather(rank, group=group) == list(range(size))


@ranks(2)
def test_an_interrupt_is_raised_itself_where_it_happened() -> None:
    if here().rank == 0:
        with patiently(), pytest.raises(KeyboardInterrupt), objcomm.fail_together():
            raise KeyboardInterrupt
    else:
        assert raises_together(objcomm.barrier).failures[0].type_name == "KeyboardInterrupt"
    assert_group_works()


@ranks(2, disposable=True)
def test_blocks_leave_no_keys_behind() -> None:
    store = store_of(dist.group.WORLD)
    for _ in range(5):
        raises_together(failing_on(1))
        assert_group_works()
    tell_all("no more blocks", "")
    assert_no_verdict_stays(store)


@ranks(2, disposable=True)
def test_a_rank_that_raises_outside_the_failed_block_leaves_no_keys_behind() -> None:
    store = store_of(dist.group.WORLD)
    objcomm.barrier()
    if here().rank == 1:
        raises_together(lambda: fail_on(1))
        say("rank 1 has failed")
    else:
        hear("rank 1 has failed")  # entering a block does not wait for other ranks
        with pytest.raises(CollectiveError, match="no such shard"):
            objcomm.barrier()
    assert_group_works()
    tell_all("all have raised", "")
    assert_no_verdict_stays(store)


@ranks(2)
def test_no_other_rank_looks_up_the_verdict_of_a_block_of_one_rank() -> None:
    with subgroup(0) as zero, subgroup(1) as one, subgroup(0, 1) as both:
        store = store_of(dist.group.WORLD)
        if here().rank == 0:
            stray = pack_record(Verdict.of(Cause.FAILED, operation="fail_together"))
            store.set("objcomm/verdict/", stray.decode("latin-1"))
        objcomm.barrier()
        with objcomm.fail_together(group=(zero, one)[here().rank]):
            assert objcomm.all_gather("first use", group=both) == ["first use"] * 2
        if here().rank == 0:
            store.delete_key("objcomm/verdict/")


@solo()
def test_a_world_of_one_raises_in_the_same_form() -> None:
    error = raises_together(lambda: fail_on(0))
    assert error.failures[0].type_name == "LookupError"
    assert isinstance(error.__cause__, LookupError)
    with objcomm.fail_together():
        assert objcomm.all_gather(1) == [1]
