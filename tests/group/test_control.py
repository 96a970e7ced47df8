"""run_on_main and related functions: which rank computes, what they share, what they refuse.

Only tests of time limits set one for their calls. If waiting ranks were not notified of an error,
their calls would end only after half an hour.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, UsageError
from objcomm._training import once
from tests.cases import case
from tests.group.control import (
    BLOCKS,
    ORDERED,
    SHARES,
    OwnExit,
    OwnInterrupt,
    fail,
    raised_together,
)
from tests.group.helpers import RefusesToArrive, assert_group_works, error_in, subgroup, tell_all
from tests.ranks import ranks
from tests.samples import TwoArgumentError
from tests.workers import here


@ranks(1, 2, 4)
def test_a_result_is_computed_once_and_shared() -> None:
    for name, share in SHARES.items():
        calls: list[str] = []

        def compute(name: str = name, calls: list[str] = calls) -> dict[str, Any]:
            calls.append(name)
            return {"name": name, "exact": 2**70, "whole": 2.0, "yes": True}

        assert share(compute) == {"name": name, "exact": 2**70, "whole": 2.0, "yes": True}
        assert len(calls) == (here().rank == 0)
        # The computing rank keeps its own object, and None costs no more than one message.
        made: list[object] = [object()]
        got = share(lambda made=made: made)
        assert (got is made) == (here().rank == 0)
        assert share(lambda: None) is None
    assert objcomm.run_on_main(max, [3, 5], {"key": lambda number: -number}) == 3
    assert objcomm.run_on_main(dict, kwargs={"lr": 0.1}) == {"lr": 0.1}
    assert objcomm.run_on_main(max, np.array([3, 5])) == 5  # type: ignore[arg-type]  # an array is a sequence except to the type checker
    assert_group_works()


@ranks(2, 4)
@pytest.mark.parametrize("name", SHARES)
def test_an_error_of_the_rank_that_computes_is_raised_on_all(name: str) -> None:
    share = SHARES[name]
    for error in (ValueError("no such file"), TwoArgumentError(3, "failed")):
        raised = raised_together(partial(share, partial(fail, error)), 0, operation=name)
        failure = raised.failures[0]
        assert failure.type_name.rpartition(".")[2] == type(error).__name__
        assert failure.message == str(error)
        assert here().rank > 0 or raised.__cause__ is error
        assert_group_works()
    for interrupt in (OwnInterrupt("stop"), OwnExit(3)):
        with pytest.raises((type(interrupt), CollectiveError)) as caught:
            share(partial(fail, interrupt))
        assert (caught.value is interrupt) == (here().rank == 0)
        assert here().rank == 0 or type(interrupt).__name__ in str(caught.value)
        assert_group_works()
    with pytest.raises(CollectiveError, match="cannot pickle"):
        share(threading.Lock)
    assert_group_works()


@ranks(4)
def test_helpers_work_in_subgroups_and_with_sources() -> None:
    rank, fails = here().rank, partial(fail, OSError())
    with subgroup(1, 3) as pair:
        if rank in {1, 3}:
            for name, share in SHARES.items():
                assert share(lambda: rank, group=pair) == 1, name
                raised_together(partial(share, fails, group=pair), 0, operation=name, group=pair)
            assert objcomm.compute_and_broadcast(lambda: rank, 3, group=pair) == 3
            assert objcomm.compute_and_broadcast(here, group_src=1, group=pair).rank == 3
            call = partial(objcomm.compute_and_broadcast, fails, 3, group=pair)
            error = raised_together(call, 1, operation="compute_and_broadcast", group=pair)
            assert error.failures[1].rank == 1
            assert objcomm.is_main(pair, scope="node") == (rank == 1)
            assert_group_works(pair)
        else:
            for share in SHARES.values():
                with pytest.raises(objcomm.NotInGroupError):
                    share(lambda: 1, group=pair)
            for block in (objcomm.main_first, objcomm.node_first, once.zero_only):
                with pytest.raises(objcomm.NotInGroupError), block(group=pair):
                    pass
    assert objcomm.compute_and_broadcast(lambda: rank, 2) == 2
    assert_group_works()


@ranks(1, 3)
def test_a_rank_other_than_the_first_may_be_the_one_that_runs_it() -> None:
    rank, last = here().rank, here().world_size - 1
    made = object() if rank == last else None
    named: Any
    for named in ({"rank": last}, {"group_rank": last}):
        for share in (SHARES["run_on_main"], SHARES["main_process_only"]):
            assert share(lambda: here().rank, **named) == last
            got = share(lambda: made or "of another rank", **named)
            assert (got is made) == (rank == last)
        ran: list[str] = []
        objcomm.run_on_main(ran.append, ["func"], None, ran.append, ["post"], **named)
        assert ran == (["func"] if rank == last else ["post"])
        both: Any = {"post_func": ran.append, "post_args": ["post"], "run_post_on_main": True}
        objcomm.run_on_main(int, **both, **named)
        assert ran[1:] == ["post"]
    for name in ("run_on_main", "main_process_only"):
        call = partial(SHARES[name], partial(fail, OSError("disk full")), rank=last)
        raised_together(call, last, operation=name)
        assert_group_works()


def must_be_refused(name: str, **options: Any) -> None:
    """Call a function or enter a block with wrong arguments, so that neither may run anything."""
    if name in SHARES:
        SHARES[name](pytest.fail, **options)
        return
    with ORDERED[name](**options):
        pytest.fail("it was entered")


@ranks(1, 2)
@pytest.mark.parametrize("name", ["run_on_main", "main_process_only", "main_first", "zero_first"])
def test_a_rank_that_does_not_exist_is_refused_before_any_traffic(name: str) -> None:
    size = here().world_size
    for named, reason in (
        ({"rank": size}, f"rank={size} is not in this group"),
        ({"group_rank": size}, f"group_rank={size} is not in this group of {size}"),
        ({"rank": "main"}, r"rank must be an integer \(a rank\), not 'main'"),
        ({"group_rank": 0.0}, r"group_rank must be an integer \(a rank\), not 0\.0"),
        ({"rank": 0, "group_rank": 0}, "rank=0 and group_rank=0 were both given"),
    ):
        if here().rank == 0:  # no other rank is involved
            with pytest.raises(UsageError, match=f"{name}: {reason}"):
                must_be_refused(name, **named)
    assert_group_works()


@ranks(3)
@pytest.mark.parametrize("name", ["run_on_main", "main_process_only"])
def test_ranks_that_name_different_ones_raise_a_desync(name: str) -> None:
    def call() -> None:
        SHARES[name](int, rank=2 if here().rank == 1 else 1)
        objcomm.barrier()  # for a rank that returned early

    with pytest.raises(objcomm.DesyncError, match="different roots"):
        call()
    assert_group_works()


@ranks(1, 2, 4)
@pytest.mark.parametrize(
    ("name", "keyword"),
    [("run_on_main", "run_post_on_main"), ("run_once_per_node", "run_post_on_all")],
)
def test_a_post_function_runs_on_the_other_ranks_or_on_all(name: str, keyword: str) -> None:
    run, everywhere = getattr(objcomm, name), {keyword: True}
    rank, last = here().rank, here().world_size - 1
    events: list[Any] = []

    def post(place: str, *, sign: str) -> str:
        events.append(place + sign)
        return "dropped"

    assert run(events.append, [1], None, post, ["b"], {"sign": "!"}) is None
    assert events == ([1] if rank == 0 else ["b!"])
    assert run(lambda: 7, None, None, post, ["c"], {"sign": "?"}, *(True,)) == 7
    assert events[1:] == ["c?"]
    objcomm.barrier()

    def talks() -> None:
        events.append(objcomm.all_gather(rank))

    run(lambda: None, None, None, talks, **everywhere)
    assert events[2:] == [list(range(here().world_size))]

    def fails_on_last(body: Callable[[], None]) -> None:
        if rank == last:
            fail(ValueError("no such file"))
        body()

    # If the last rank fails, all ranks raise, including those that wait for it in a call.
    failing = {"post_func": fails_on_last, "post_args": [lambda: None]}
    calling = {"post_func": fails_on_last, "post_args": [talks]}
    for options in (failing | everywhere, calling | everywhere, *([failing] if last else [])):
        raised_together(partial(run, lambda: 1, **options), last, operation=name)
        assert_group_works()


@ranks(2)
def test_a_post_function_may_not_need_a_rank_that_waits() -> None:
    with pytest.raises(CollectiveError, match=r"global rank 1 is inside run_on_main"):
        objcomm.run_on_main(int, post_func=objcomm.barrier)
    assert_group_works()


@ranks(2)
def test_a_result_that_cannot_be_decoded_raises_on_its_rank_or_on_all() -> None:
    """If all ranks meet afterwards, all raise; otherwise only that rank does, as in broadcast."""
    make = partial(RefusesToArrive, 1)
    for call in (
        partial(objcomm.run_once_per_node, make),
        partial(objcomm.run_on_main, make, post_func=int),
        partial(objcomm.run_on_main, make, post_func=int, run_post_on_main=True),
    ):
        with pytest.raises(CollectiveError, match="rebuilt on rank 1"):
            call()
        assert_group_works()
    with pytest.raises(objcomm.DecodeError) if here().rank else contextlib.nullcontext():
        objcomm.run_on_main(make)
    assert_group_works()


@ranks(2)
def test_slow_work_needs_a_longer_limit_and_no_other_group() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("objcomm._calls.group.timeout_of", lambda _: 0.3)
        short = dist.new_group()
        objcomm.barrier(group=short, timeout=60)

    def slow() -> str:
        time.sleep(0.5)  # any time beyond the group's limit
        return "done"

    assert objcomm.run_on_main(slow, group=short, timeout=60) == "done"
    with objcomm.main_first(group=short, timeout=60):
        slow()
    assert objcomm.all_gather(here().rank, group=short, timeout=60) == [0, 1]
    if here().rank == 0:
        with pytest.raises(objcomm.TransportTimeout):  # the call sets no limit
            objcomm.barrier(group=short)
    tell_all("it has ended", "")
    # A verdict stays until all ranks have read it; rank 0's message for the first call has arrived.
    error_in(objcomm.TransportError, lambda: [objcomm.barrier(group=short) for _ in range(2)])
    dist.destroy_process_group(short)


@ranks(1, 2, 4)
def test_decorated_functions_call_each_other() -> None:
    """SpeechBrain's own example, and a once_per_node function that calls main_process_only ones."""
    counts = {"fibonacci": 0, "inner": 0}

    @objcomm.main_process_only
    def fibonacci(number: int) -> int:
        """Documented."""
        counts["fibonacci"] += 1
        return number if number < 2 else fibonacci(number - 1) + fibonacci(number - 2)

    @objcomm.main_process_only(timeout=30)
    def inner(text: str) -> str:
        counts["inner"] += 1
        return text.upper()

    @objcomm.once_per_node
    def outer(text: str) -> str:
        return inner(text) + objcomm.run_on_main(inner, [text])

    assert fibonacci(6) == 8
    assert outer("a") == "AA"
    is_main = here().rank == 0
    assert counts == ({"fibonacci": 25, "inner": 2} if is_main else {"fibonacci": 0, "inner": 0})
    assert (fibonacci.__name__, fibonacci.__doc__) == ("fibonacci", "Documented.")
    with pytest.raises(CollectiveError) as caught:
        fibonacci("x")  # type: ignore[arg-type]  # fails on rank 0, in the outer call or the nested one
    assert caught.value.failures[0].type_name == "TypeError"
    assert_group_works()


def test_a_function_without_a_result_to_share_is_not_decorated() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None:
        pass

    for decorate in (objcomm.main_process_only, objcomm.once_per_node):
        with pytest.raises(UsageError, match="a generator"):
            decorate(generator)
        with pytest.raises(UsageError, match="is async"):
            decorate(coroutine)
        with pytest.raises(UsageError, match="not callable"):
            decorate(classmethod(int))  # type: ignore[arg-type, call-overload]  # decorators in the wrong order


@ranks(2)
def test_a_wrong_argument_is_refused_before_any_traffic() -> None:
    for name in (*SHARES, *BLOCKS, "zero_only"):
        with case(name), pytest.raises(UsageError, match=f"{name}: timeout=0"):
            must_be_refused(name, timeout=0)
    if here().rank == 0:  # no other rank is involved
        for name, share in SHARES.items():
            with case(name), pytest.raises(UsageError, match=f"{name}: .*callable"):
                share("no function")
    else:
        for name in ("run_on_main", "run_once_per_node"):
            for arguments in ({"args": 5}, {"kwargs": 5}, {"post_func": "no function"}):
                with case(name), pytest.raises(UsageError, match=name):
                    SHARES[name](int, **arguments)
    assert_group_works()
