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


def fail() -> None:
    raise LookupError("no such shard")


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
    objcomm.barrier()

    def block() -> None:
        if here().rank == 1:
            fail()
        objcomm.all_gather(1)

    tell_all("all have met", "")
    with within(2.0), pytest.raises(CollectiveError), objcomm.fail_together():
        block()
    assert_group_works()


@ranks(3)
@pytest.mark.parametrize("where", WAITS)
def test_an_error_reaches_ranks_that_wait(where: str) -> None:
    last = objcomm.world_size() - 1

    def block() -> None:
        if here().rank == last:
            fail()
        WAITS[where]()

    error = raises_together(block)
    failure = error.failures[last]
    assert (failure.type_name, failure.message) == ("LookupError", "no such shard")
    assert "in fail" in failure.traceback
    assert isinstance(error.__cause__, LookupError) == (here().rank == last)
    assert_group_works()


@ranks(2)
@pytest.mark.parametrize("name", INDESCRIBABLE)
def test_an_error_that_cannot_be_described_reaches_the_others_all_the_same(name: str) -> None:
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
                fail()
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
def test_a_rank_that_computes_hears_of_it_in_its_next_call() -> None:
    def block() -> None:
        if here().rank == 0:
            fail()
        if here().rank == 1:
            hear("rank 2 has raised")
        objcomm.all_gather(1)

    raises_together(block)
    if here().rank == 2:
        say("rank 2 has raised")
    assert_group_works()


@ranks(2)
def test_ranks_that_failed_both_hear_of_one() -> None:
    def both_fail() -> None:
        tell_all("inside", "")  # a rank that enters later would see the other's failure on entry
        fail()

    error = raises_together(both_fail)
    assert len(error.failures) == 1
    assert isinstance(error.__cause__, LookupError)
    assert_group_works()


@ranks(2)
def test_a_failed_operation_inside_is_everybodys() -> None:
    """A gather's failure is known to its destination and to the rank that failed."""
    with objcomm.fail_together():
        objcomm.barrier()

    def block() -> None:
        objcomm.gather(threading.Lock() if here().rank == 1 else 1, dst=1)

    error = raises_together(block)
    assert "cannot pickle" in str(error)
    assert_group_works()


@ranks(2)
def test_what_is_caught_inside_is_not_told() -> None:
    with objcomm.fail_together():
        with contextlib.suppress(LookupError):
            fail()
        assert objcomm.all_gather(here().rank) == [0, 1]
    assert_group_works()


@ranks(2)
def test_an_error_that_is_caught_inside_comes_again_at_the_end() -> None:
    def block() -> None:
        if here().rank == 1:
            fail()
        with pytest.raises(CollectiveError):
            objcomm.barrier()

    raises_together(block)
    assert_group_works()


@ranks(2)
@pytest.mark.parametrize("failing", ["inner", "outer"])
def test_blocks_nest(failing: str) -> None:
    def inner() -> None:
        if here().rank == 1 and failing == "inner":
            fail()
        objcomm.all_gather(1)

    def outer() -> None:
        with objcomm.fail_together():
            inner()
        if here().rank == 1:
            fail()
        objcomm.barrier()

    raises_together(outer)
    assert_group_works()


@ranks(3)
def test_a_block_of_a_subgroup_leaves_the_others_alone() -> None:
    with subgroup(1, 2) as pair:
        if here().rank > 0:
            raises_together(
                lambda: fail() if here().rank == 2 else objcomm.barrier(group=pair), pair
            )
            assert_group_works(pair)
        assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("failing", [0, -1])
def test_a_group_that_was_first_used_in_a_failed_block_works_afterwards(failing: int) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    with subgroup(*range(size)) as group:

        def body() -> None:
            if rank == failing % size:
                raise ValueError("before it came to the group")
            objcomm.barrier(group=group)

        with (
            patiently(),
            pytest.raises(CollectiveError, match="before it came"),
            objcomm.fail_together(),
        ):
            body()
        # The others may not have reached the meeting of the group when this rank does.
        assert objcomm.all_gather(rank, group=group) == list(range(size))


@ranks(2)
def test_an_interrupt_is_raised_itself_where_it_happened() -> None:
    def block() -> None:
        if here().rank == 0:
            raise KeyboardInterrupt
        objcomm.barrier()

    if here().rank == 0:
        with patiently(), pytest.raises(KeyboardInterrupt), objcomm.fail_together():
            block()
    else:
        assert raises_together(block).failures[0].type_name == "KeyboardInterrupt"
    assert_group_works()


@ranks(2, disposable=True)
def test_blocks_leave_no_keys_behind() -> None:
    store = store_of(dist.group.WORLD)
    for _ in range(5):
        raises_together(lambda: fail() if here().rank == 1 else objcomm.barrier())
        assert_group_works()
    tell_all("no more blocks", "")
    assert_no_verdict_stays(store)


@ranks(2, disposable=True)
def test_who_hears_of_a_failed_block_outside_of_it_leaves_no_keys_behind() -> None:
    store = store_of(dist.group.WORLD)
    objcomm.barrier()
    if here().rank == 1:
        raises_together(fail)
        say("rank 1 has failed")
    else:
        hear("rank 1 has failed")  # entering a block does not wait for other ranks
        with pytest.raises(CollectiveError, match="no such shard"):
            objcomm.barrier()
    assert_group_works()
    tell_all("all have raised", "")
    assert_no_verdict_stays(store)


@ranks(2)
def test_a_block_of_one_rank_is_looked_up_by_no_other() -> None:
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
    error = raises_together(fail)
    assert error.failures[0].type_name == "LookupError"
    assert isinstance(error.__cause__, LookupError)
    with objcomm.fail_together():
        assert objcomm.all_gather(1) == [1]
