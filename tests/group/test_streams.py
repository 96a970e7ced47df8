"""stream: what each rank gets, how a stream ends, and what the source may be ahead."""

import asyncio
import contextlib
import itertools
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

import objcomm
from objcomm import (
    BrokenGroupError,
    CollectiveError,
    DecodeError,
    DesyncError,
    EncodeError,
    ObjcommError,
    TransportError,
    TransportTimeout,
    UsageError,
)
from objcomm._calls.group import resolve
from objcomm._wire.failure_message import failures_in
from tests.cases import case
from tests.group.helpers import (
    RefusesToArrive,
    assert_group_works,
    error_in,
    hear,
    in_thread,
    is_said,
    outcome_of,
    say,
    subgroup,
    tell_all,
    when_main_thread_waits,
)
from tests.ranks import ranks, solo
from tests.waits import wait_until
from tests.workers import here


def stream(objs: Any, src: int = 0, **options: Any) -> Any:
    """A stream of what rank ``src`` of the group iterates over."""
    is_source = objcomm.rank(options.get("group")) == src
    return objcomm.stream(objs if is_source else None, group_src=src, **options)


def take(
    objs: Any, src: int = 0, *, is_async: bool = False, got: Any = None, **options: Any
) -> list[Any]:
    """All objects that this rank gets, added to ``got``, which keeps those before an error."""
    taken: list[Any] = [] if got is None else got

    async def loop() -> None:
        async for each in stream(objs, src, **options):
            taken.append(each)  # noqa: PERF401  # one by one, so that an error keeps the others

    if is_async:
        asyncio.run(loop())
    else:
        taken.extend(stream(objs, src, **options))
    return taken


def of_all_ranks(mine: Any, group: Any = None) -> list[Any]:
    """The objects that all ranks got together, sorted."""
    return sorted(itertools.chain.from_iterable(objcomm.all_gather(mine, group=group)))


async def slowly(objs: Any) -> AsyncIterator[Any]:
    """An asynchronous iterable that lets other tasks run."""
    for each in objs:
        await asyncio.sleep(0)
        yield each


def failing_after(count: int) -> Iterator[int]:
    """An iterable that raises after so many objects."""
    yield from range(count)
    raise LookupError("no more")


#: A busy machine takes seconds until all ranks have begun.
LIMIT_S = 5

#: depth, batch
SHAPES = [(1, 1), (2, 1), (3, 1), (4, 1), (4, 4), (9, 2)]


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("scatter", [False, True])
def test_each_object_goes_to_all_ranks_or_to_one_in_order(*, scatter: bool, is_async: bool) -> None:
    for src, (depth, batch) in itertools.product(range(objcomm.world_size()), SHAPES):
        options = {"depth": depth, "batch": batch, "scatter": scatter}
        for count in (0, 1, depth, 2 * depth + 1, 20):
            with case(src, options, count):
                want = [{"at": at, "text": "x" * at} for at in range(count)]
                mine = take(iter(want), src, is_async=is_async, **options)
                if scatter:
                    places = [each["at"] for each in mine]
                    assert mine == [want[at] for at in sorted(places)]
                    assert of_all_ranks(places) == list(range(count))
                else:
                    assert mine == want
    assert_group_works()


@ranks(3, 4)
@pytest.mark.parametrize("scatter", [False, True])
def test_a_subgroup_without_rank_0_has_its_own_stream(*, scatter: bool) -> None:
    with subgroup(1, 2) as group:
        if here().rank in {1, 2}:
            for src in range(2):
                mine = take("abc", src, group=group, scatter=scatter)
                assert of_all_ranks(mine, group) == sorted("abc" * (1 if scatter else 2))
            error = error_in(CollectiveError, lambda: take(failing_after(0), 1, group=group))
            assert set(error.failures) == {1}
    assert_group_works()


@ranks(2)
def test_an_object_is_the_sources_own_there_and_a_copy_elsewhere() -> None:
    given: list[Any] = [np.arange(250_000) + at for at in range(5)]  # large enough to be shared
    for at, got in enumerate(stream(given, batch=2)):
        assert (got is given[at]) == (here().rank == 0)
        assert np.array_equal(got, np.arange(250_000) + at)
        if here().rank == 1:
            got[:] = 0
    for mine in take(iter(given), scatter=True):
        assert mine[1] == mine[0] + 1
    assert_group_works()


# ---------------------------------------------------------------------- errors at their place


@ranks(1, 2, 3)
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_of_the_iterable_is_raised_on_all_ranks_after_the_objects_before(
    *, scatter: bool, is_async: bool
) -> None:
    times = 1 if scatter else objcomm.world_size()
    for src, (depth, batch) in itertools.product(range(objcomm.world_size()), SHAPES):
        options: Any = {"depth": depth, "batch": batch, "scatter": scatter, "is_async": is_async}
        for count in (0, 1, 5):
            got: list[int] = []
            with case(src, options, count):
                call = partial(take, failing_after(count), src, got=got, **options)
                error = error_in(CollectiveError, call)
                assert set(error.failures) == {src}
                assert error.failures[src].type_name == "LookupError"
                assert isinstance(error.__cause__, LookupError) == (here().rank == src)
                assert of_all_ranks(got) == sorted([*range(count)] * times)
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("scatter", [False, True])
def test_an_object_that_cannot_be_sent_fails_on_all_ranks(*, scatter: bool) -> None:
    for src in range(objcomm.world_size()):
        objs: list[Any] = [1, 2, (each for each in ""), 4]
        error = error_in(CollectiveError, partial(take, iter(objs), src, scatter=scatter))
        assert set(error.failures) == {src}
        assert isinstance(error.__cause__, EncodeError) == (here().rank == src)
        assert "cannot encode obj, a 'generator'" in error.failures[src].message
        assert take("ok", src) == ["o", "k"]


@ranks(3)
def test_an_object_that_one_rank_cannot_rebuild_raises_there_and_the_loop_may_go_on() -> None:
    objs = [0, RefusesToArrive(2), 2]
    numbers = stream(objs)
    assert next(numbers) == 0
    if here().rank == 2:
        error_in(DecodeError, lambda: next(numbers))
    else:
        next(numbers)
    assert list(numbers) == [2]
    assert_group_works()


REFUSALS: dict[str, dict[str, Any]] = {
    "its class": {},
    "the codec": {"accept": ["msgpack"]},
    "the type": {"allow": []},
}


@ranks(2, 3)
@pytest.mark.parametrize("why", REFUSALS)
@pytest.mark.parametrize("scatter", [False, True])
def test_a_rank_that_leaves_because_it_refuses_an_object_is_named_on_all(
    why: str, *, scatter: bool
) -> None:
    size = objcomm.world_size()
    for src, depth, batch in ((0, 1, 1), (0, 4, 1), (size - 1, 4, 2)):
        refusing = (src + 1) % size
        is_here = here().rank == refusing
        options = {"depth": depth, "batch": batch, "scatter": scatter}
        objs = (RefusesToArrive(refusing) for _ in itertools.count())

        def loop() -> None:
            for _ in stream(objs, src, **options, **(REFUSALS[why] if is_here else {})):  # noqa: B023  # called here
                assert not is_here  # noqa: B023  # likewise

        with case(src, depth, batch):
            if is_here:
                # The error is not kept: its traceback would keep the stream open.
                assert outcome_of(loop) in {"DecodeError", "ForbiddenTypeError"}
            else:
                error = error_in(CollectiveError, loop)
                assert list(error.failures) == [refusing]
                assert "cannot decode what rank" in error.failures[refusing].message
                assert f"rank {src} gave to stream" in error.failures[refusing].message
            assert take("ok", src) == ["o", "k"]
    assert_group_works()


@ranks(2)
def test_the_source_names_that_rank_even_if_it_looks_while_a_thread_takes_the_report() -> None:
    pulled = 0
    first = threading.Lock()

    def objs() -> Iterator[Any]:
        nonlocal pulled
        while True:
            pulled += 1
            yield RefusesToArrive(1)

    def later(messages: Any) -> Any:
        is_apart = threading.current_thread() is not threading.main_thread()
        if is_apart and first.acquire(blocking=False):
            before = pulled
            wait_until(lambda: pulled > before + 1, "the source's next look")
        return failures_in(messages)

    with mock.patch("objcomm._training.stream.failures_in", later):
        if here().rank:
            with contextlib.closing(stream(None, scatter=True)) as refused:
                error_in(DecodeError, lambda: next(refused))
        else:
            error = error_in(CollectiveError, lambda: take(objs(), scatter=True))
            assert set(error.failures) == {1}
    assert_group_works()


@ranks(3)
def test_a_refused_object_in_a_block_that_fails_together_is_raised_once_on_all() -> None:
    def loop() -> None:
        with objcomm.fail_together():
            for _ in stream(RefusesToArrive(2) for _ in itertools.count()):
                pass

    error = error_in(CollectiveError, loop)
    assert set(error.failures) == {2}
    assert take("ok") == ["o", "k"]


# ---------------------------------------------------------------------- leaving early


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("how", ["break", "raise", "close"])
def test_a_rank_that_leaves_ends_the_loops_of_all(how: str) -> None:
    class Stop(Exception):
        pass

    size = objcomm.world_size()
    for leaver, src, place in itertools.product(range(size), {0, size - 1}, (0, 1, 2, 5)):
        for depth, batch, scatter in ((1, 1, False), (4, 1, False), (4, 2, False), (2, 1, True)):
            if scatter and leaver == src:
                continue  # it may get none, while the others are fast
            count = 0
            with case(leaver, src, place, depth, batch, scatter), contextlib.suppress(Stop):
                numbers = stream(itertools.count(), src, depth=depth, batch=batch, scatter=scatter)
                if how != "close":  # only the loop refers to it
                    box = [numbers]
                    del numbers
                for _ in numbers if how == "close" else box.pop():
                    if here().rank == leaver and count == place:
                        if how == "raise":
                            raise Stop
                        if how == "close":
                            numbers.close()
                        break
                    count += 1
            if not scatter:
                counts = objcomm.all_gather(count)
                assert counts[leaver] == place
                assert all(place <= each <= place + depth for each in counts), counts
            assert take("ok", src) == ["o", "k"]
    assert_group_works()


@ranks(3)
@pytest.mark.parametrize("failing", range(3))
def test_a_block_that_fails_together_raises_what_a_body_raises_on_all(failing: int) -> None:
    def loop() -> None:
        with objcomm.fail_together():
            for each in stream(itertools.count()):
                if here().rank == failing and each == 3:
                    raise LookupError("bad batch")

    assert set(error_in(CollectiveError, loop).failures) == {failing}
    assert take("ok") == ["o", "k"]


# ---------------------------------------------------------------------- what may be ahead


@ranks(2)
@pytest.mark.parametrize(("depth", "batch"), SHAPES)
@pytest.mark.parametrize("scatter", [False, True])
def test_the_source_is_at_most_depth_objects_ahead(
    depth: int, batch: int, *, scatter: bool
) -> None:
    topic = f"ahead {depth} {batch} {scatter}"
    sent = 0

    def counted() -> Iterator[int]:
        nonlocal sent
        for sent in itertools.count(1):  # noqa: UP028  # sent is read outside
            yield sent

    numbers = stream(counted(), depth=depth, batch=batch, scatter=scatter)
    most = depth // batch * batch
    first = next(numbers)
    if here().rank == 1:
        assert first == 1
        hear(topic)
    elif scatter:  # it gets what the other rank has no room for
        assert first == most + 1
        say(topic)
    else:
        reached = []

        def is_full() -> None:
            reached.append(sent)
            say(topic)

        watch = when_main_thread_waits(is_full)
        for _ in numbers:
            assert sent <= most or is_said(topic)
        watch.join()
        assert reached == [most]
    numbers.close()
    assert_group_works()


@ranks(2)
def test_a_busy_rank_does_not_keep_the_source_from_large_objects() -> None:
    arrays = (np.full(500_000, at) for at in range(6))
    mine = []
    for array in stream(arrays, scatter=True, depth=1):
        mine.append(int(array[0]))
        if here().rank == 1:
            hear("the source is done")
        elif len(mine) == 4:
            say("the source is done")
    assert of_all_ranks(mine) == list(range(6))


# ---------------------------------------------------------------------- several streams


@ranks(2, 3)
@pytest.mark.parametrize("scatter", [False, True])
def test_streams_may_be_open_at_the_same_time_and_inside_each_other(*, scatter: bool) -> None:
    size = objcomm.world_size()
    lanes = []
    for _ in range(2):
        pairs = list(zip(stream("abc"), stream(range(10), size - 1), strict=False))
        assert pairs == [("a", 0), ("b", 1), ("c", 2)]
        found = []
        for outer in stream("ab", 1):
            objcomm.barrier()
            found.append(of_all_ranks(take([outer + each for each in "xyz"], 0, scatter=scatter)))
            for each in stream("left early", size - 1):
                assert each == "l"
                break
        once = 1 if scatter else size
        assert found == [sorted([at + each for each in "xyz"] * once) for at in "ab"]
        mesh: Any = resolve(None).mesh
        lanes.append(set(mesh.lanes))
    assert lanes[0] == lanes[1]


@ranks(1, 2, 3)
@pytest.mark.parametrize("scatter", [False, True])
def test_tasks_that_open_streams_at_the_same_time_have_their_own(*, scatter: bool) -> None:
    async def taken(name: str, src: int) -> list[tuple[str, int]]:
        objs = [(name, at) for at in range(9)]
        return [each async for each in stream(objs, src, scatter=scatter)]

    async def main() -> list[list[tuple[str, int]]]:
        last = objcomm.world_size() - 1
        return list(await asyncio.gather(taken("a", 0), taken("b", 0), taken("c", last)))

    once = 1 if scatter else objcomm.world_size()
    for name, mine in zip("abc", asyncio.run(main()), strict=True):
        assert of_all_ranks(mine) == sorted([(name, at) for at in range(9)] * once)
    assert_group_works()


@ranks(2)
def test_a_second_thread_has_its_own_streams() -> None:
    def other() -> None:
        with objcomm.lane("other"):
            assert take(range(100), 1) == list(range(100))

    assert take("before") == list("before")
    thread = in_thread(other)
    assert take(range(100)) == list(range(100))
    thread.join()
    assert take("after") == list("after")


# ---------------------------------------------------------------------- asyncio


@ranks(1, 2, 3)
@pytest.mark.parametrize("scatter", [False, True])
def test_the_event_loop_runs_while_a_stream_waits(*, scatter: bool) -> None:
    async def main() -> list[int]:
        went: list[int] = []
        waits = asyncio.Event()

        async def given() -> AsyncIterator[int]:
            for at in range(5):
                await waits.wait()
                yield at

        async def loop() -> None:
            async for each in stream(given(), scatter=scatter):
                went[:] += [each]

        task = asyncio.create_task(loop())
        await asyncio.sleep(0.05)
        assert not went or here().rank > 0
        waits.set()
        await task
        return went

    times = 1 if scatter else objcomm.world_size()
    assert of_all_ranks(asyncio.run(main())) == sorted([*range(5)] * times)


@ranks(2)
def test_a_cancelled_step_loses_no_object() -> None:
    async def main() -> list[int]:
        numbers = stream(slowly(range(8)), depth=1)
        got = []
        if here().rank == 1:
            task = asyncio.ensure_future(anext(numbers))
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                got.append(await task)
        return [*got, *[each async for each in numbers]]

    assert asyncio.run(main()) == list(range(8))
    assert_group_works()


@ranks(3)
def test_an_asynchronous_loop_may_be_left_early() -> None:
    async def main(leaver: int) -> None:
        async with contextlib.aclosing(stream(slowly(itertools.count()))) as numbers:
            async for each in numbers:
                if here().rank == leaver and each == 3:
                    break

    for leaver in range(3):
        asyncio.run(main(leaver))
        assert take("ok") == ["o", "k"]


# ---------------------------------------------------------------------- other calls, and deaths


@ranks(3)
def test_a_rank_that_makes_another_call_instead_is_named_with_both_lines() -> None:
    objcomm.barrier()  # otherwise a slow rank is named with the last call of an earlier test
    call: Any = objcomm.barrier if here().rank == 1 else lambda: take(itertools.count())
    error = error_in(DesyncError, call)
    assert {each.operation for each in error.positions.values()} == {"stream", "barrier"}
    assert_group_works()


@ranks(2, 3)
def test_a_rank_that_forgets_its_open_stream_is_named() -> None:
    numbers = stream(itertools.count(), depth=2)

    def loop() -> None:
        for _ in numbers:
            if here().rank == 1:
                objcomm.barrier()

    error = error_in(DesyncError, loop)
    assert {each.operation for each in error.positions.values()} >= {"stream", "barrier"}
    numbers.close()
    tell_all("all have raised", "")
    assert_group_works()


@ranks(2)
def test_ranks_with_other_options_differ() -> None:
    assert "depth=" in error_in(DesyncError, lambda: take("abc", depth=2 + here().rank)).reason
    assert_group_works()


@ranks(2, disposable=True)
def test_a_stream_does_not_survive_its_connections() -> None:
    numbers = stream(itertools.count())
    assert next(numbers) == 0
    error_in(DesyncError, objcomm.barrier if here().rank else lambda: objcomm.gather(1))
    assert "open a new stream" in str(error_in(UsageError, lambda: next(numbers)))
    numbers.close()
    assert take("ok") == ["o", "k"]


@ranks(2, disposable=True)
def test_a_body_that_takes_longer_than_the_limit_is_named() -> None:
    numbers = stream(itertools.count(), depth=1, timeout=0.5)
    next(numbers)
    if here().rank == 0:
        assert error_in(TransportTimeout, lambda: next(numbers)).peers == (1,)
        say("raised")
    else:
        hear("raised")
        error_in(TransportTimeout, lambda: next(numbers))
    numbers.close()


def _dies(victim: int, place: int, *, scatter: bool) -> None:
    def given() -> Iterator[int]:
        for at in itertools.count():
            if victim == here().rank and at == place:
                os.kill(os.getpid(), signal.SIGKILL)
            yield at

    def loop() -> None:
        for count, _ in enumerate(stream(given(), scatter=scatter)):
            if here().rank == victim and count == place:
                os.kill(os.getpid(), signal.SIGKILL)

    assert error_in(TransportError, loop).peers == (victim,)
    error_in(BrokenGroupError, objcomm.barrier)


@ranks(3, expect_dead={0})
@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("scatter", [False, True])
def test_a_source_that_is_killed_is_named_on_all_ranks(place: int, *, scatter: bool) -> None:
    _dies(0, place, scatter=scatter)


@ranks(3, expect_dead={2})
@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("scatter", [False, True])
def test_a_reader_that_is_killed_is_named_on_all_ranks(place: int, *, scatter: bool) -> None:
    _dies(2, place, scatter=scatter)


@ranks(4, disposable=True)
def test_a_timeout_names_a_reader_by_its_rank_in_the_group() -> None:
    def loop() -> None:
        for _ in stream(range(20), 2, scatter=True, depth=1, timeout=LIMIT_S):
            if here().rank == 3:
                hear("the source has raised")

    if here().rank in {2, 3}:
        error = error_in(TransportTimeout, loop)
        assert error.missing == (3,)
        assert error.positions.keys() <= {2, 3}
        say("the source has raised")
    else:
        loop()  # they got the end of the stream before
    assert error_in(ObjcommError, objcomm.barrier)


@ranks(2, 3)
def test_ctrl_c_in_the_sources_iterable_leaves_the_ranks_in_step() -> None:
    def interrupted() -> Iterator[int]:
        yield from range(7)
        raise KeyboardInterrupt

    for _ in range(2):
        kind: Any = KeyboardInterrupt if here().rank == 0 else CollectiveError
        with pytest.raises(kind):
            take(interrupted())
        assert take("abc") == ["a", "b", "c"]
    assert_group_works()
    mesh: Any = resolve(None).mesh
    calls = [lane.sequence for name, lane in sorted(mesh.lanes.items()) if name]
    assert objcomm.all_gather(calls) == [calls] * objcomm.world_size()


# ---------------------------------------------------------------------- arguments


@ranks(2)
def test_a_wrong_argument_is_an_error_before_any_traffic() -> None:
    rank = here().rank
    objs = "abc" if rank == 0 else None
    wrong: list[Any] = [{"depth": 0}, {"depth": 2.5}, {"depth": True}, {"batch": -1}]
    wrong += [{"depth": 2, "batch": 3}, {"timeout": 0}, {"group_src": 2}]
    for options in wrong:
        with case(options):
            error_in(UsageError, partial(objcomm.stream, objs, **options))
    not_iterable: list[Any] = [None, 5]
    for given in not_iterable:
        error = error_in(UsageError, partial(objcomm.stream, given, rank))
        assert "must pass an iterable" in str(error)
    error = error_in(UsageError, lambda: objcomm.stream("abc", 1 - rank))
    assert "pass None on all other ranks" in str(error)
    assert take("ok", codec="msgpack", accept=iter(["msgpack"])) == ["o", "k"]
    assert take(["with a key"], timeout=60, name="named") == ["with a key"]


@ranks(2, disposable=True, environment={"OBJCOMM_CHECK": "1"})
def test_a_stream_works_where_every_call_is_checked() -> None:
    for scatter in (False, True):
        mine = take(range(9), scatter=scatter)
        assert of_all_ranks(mine) == sorted([*range(9)] * (1 if scatter else 2))


@solo()
def test_without_a_process_group_the_objects_come_back() -> None:
    assert take(iter("abc")) == ["a", "b", "c"]
    assert take(slowly("abc"), is_async=True, scatter=True) == ["a", "b", "c"]
    error = error_in(CollectiveError, lambda: take(failing_after(1)))
    assert isinstance(error.__cause__, LookupError)
    for each in objcomm.stream(itertools.count()):
        if each == 3:
            break
