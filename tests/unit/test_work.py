"""A work by itself: its states, its waits, what it reports and what it keeps alive."""

import asyncio
import contextvars
import functools
import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

import objcomm
from objcomm import UsageError, Work, as_completed, wait_all
from objcomm.transport.line import Line

LIMIT_S = 10.0
PLACE = f"{__file__}:7"


class Waited:
    """What the watcher reads."""

    waiter = 0


class Begun:
    """A work on a line of its own that ends when told to."""

    def __init__(self, outcome: Any = None, line: Line | None = None) -> None:
        self.may_end = threading.Event()
        self.waited = Waited()
        self.line = line or Line("test line")
        self.work: Work[Any] = Work("gather", PLACE, self.waited)
        may_end = self.may_end

        def body() -> Any:
            assert may_end.wait(LIMIT_S)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        self.work.carry_out_on(self.line, body)

    def end(self) -> Work[Any]:
        self.may_end.set()
        self.line.drain()
        return self.work


@pytest.fixture
def begun() -> Iterator[Callable[..., Begun]]:
    made: list[Begun] = []

    def begin(outcome: Any = None) -> Begun:
        made.append(Begun(outcome))
        return made[-1]

    yield begin
    for each in made:
        each.end().exception()


def test_in_flight_then_done(begun: Callable[..., Begun]) -> None:
    flight = begun("result")
    work = flight.work
    assert not work.done()
    for ask in (work.result, work.exception):
        with pytest.raises(UsageError, match="still in flight"):
            ask()
    assert repr(work) == f"<objcomm.Work: gather at {PLACE}, in flight>"
    flight.end()
    assert work.done()
    assert (work.result(), work.exception(), work.wait()) == ("result", None, "result")
    assert repr(work).endswith("done>")


def test_in_flight_then_failed(begun: Callable[..., Begun]) -> None:
    error = objcomm.CollectiveError("gather", {})
    work = begun(error).end()
    assert work.done()
    assert work.exception() is error
    for ask in (work.result, work.wait, work.wait):
        with pytest.raises(objcomm.CollectiveError) as caught:
            ask()
        assert caught.value is error
    assert repr(work).endswith("failed>")


@pytest.mark.parametrize("limit", [0.05, timedelta(milliseconds=50)])
def test_a_wait_that_passes_leaves_the_work_in_flight(
    begun: Callable[..., Begun], limit: Any
) -> None:
    flight = begun("late")
    with pytest.raises(TimeoutError, match=r"gather at .*:7 is still in flight") as caught:
        flight.work.wait(limit)
    assert not isinstance(caught.value, objcomm.ObjcommError)
    assert not flight.work.done()
    flight.may_end.set()
    assert flight.work.wait(LIMIT_S) == "late"


def test_an_operations_own_time_limit_is_not_taken_for_the_waits(
    begun: Callable[..., Begun],
) -> None:
    error = objcomm.TransportTimeout("gather", (1,), 3.0)
    work = begun(error).end()
    with pytest.raises(objcomm.TransportTimeout) as caught:
        work.wait(LIMIT_S)
    assert caught.value is error


@pytest.mark.parametrize("wrong", [-1, float("nan"), "soon"])
def test_a_wait_takes_a_positive_time(begun: Callable[..., Begun], wrong: Any) -> None:
    work = begun().end()
    for ask in (work.wait, lambda limit: wait_all([work], limit)):
        with pytest.raises(UsageError, match="positive"):
            ask(wrong)
    with pytest.raises(UsageError, match="positive"):
        list(as_completed([work], wrong))


def test_the_watcher_is_told_who_waits_without_end(begun: Callable[..., Begun]) -> None:
    """A thread whose wait has a limit can go on, so it is in no circle."""
    flight = begun()
    seen = []

    def look() -> None:
        deadline = time.monotonic() + LIMIT_S
        while flight.waited.waiter == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(flight.waited.waiter)
        flight.may_end.set()

    with pytest.raises(TimeoutError):
        _watched(flight, lambda: flight.work.wait(0.05), seen)
    assert seen == [0]
    looker = threading.Thread(target=look)
    looker.start()
    flight.work.wait()
    looker.join()
    assert seen == [0, threading.get_ident()]
    assert flight.waited.waiter == 0


def _watched(flight: Begun, call: Callable[[], object], seen: list[int]) -> None:
    timer = threading.Timer(0.02, lambda: seen.append(flight.waited.waiter))
    timer.start()
    try:
        call()
    finally:
        timer.join()


@pytest.mark.parametrize("way", ["as_completed", "wait_all"])
def test_the_watcher_is_told_of_waits_for_several(begun: Callable[..., Begun], way: str) -> None:
    flights = [begun(number) for number in range(2)]
    seen: list[int] = []

    def look() -> None:
        seen.append(flights[0].waited.waiter)
        for flight in flights:
            flight.may_end.set()

    timer = threading.Timer(0.05, look)
    timer.start()
    works = [flight.work for flight in flights]
    if way == "wait_all":
        assert wait_all(works) == [0, 1]
    else:
        assert sorted(work.result() for work in as_completed(works)) == [0, 1]
    timer.join()
    assert seen == [threading.get_ident()]
    assert [flight.waited.waiter for flight in flights] == [0, 0]


def test_many_threads_wait_for_one_work(begun: Callable[..., Begun]) -> None:
    flight = begun("shared")
    got: list[str] = []
    threads = [
        threading.Thread(target=lambda: got.append(flight.work.wait(LIMIT_S))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    flight.may_end.set()
    for thread in threads:
        thread.join()
    assert got == ["shared"] * 8


# Several


def test_as_completed_gives_the_first_to_end_first(begun: Callable[..., Begun]) -> None:
    flights = {name: begun(name) for name in "abc"}
    works = as_completed([flights[name].work for name in "abc"])
    for name in "cab":
        flights[name].may_end.set()
        assert next(works).result() == name
    assert list(works) == []


def test_as_completed_gives_failed_ones_too_and_nothing_for_nothing(
    begun: Callable[..., Begun],
) -> None:
    error = ValueError("bad")
    (work,) = as_completed([begun(error).end()])
    assert work.exception() is error
    assert list(as_completed([])) == []


def test_as_completed_gives_up_at_its_limit(begun: Callable[..., Begun]) -> None:
    early, late = begun("early"), begun("late")
    early.end()
    works = as_completed([late.work, early.work], 0.1)
    assert next(works).result() == "early"
    with pytest.raises(TimeoutError):
        next(works)
    assert late.end().wait() == "late"


def test_wait_all_gives_results_in_the_order_given(begun: Callable[..., Begun]) -> None:
    flights = [begun(number) for number in range(3)]
    for flight in reversed(flights):
        flight.end()
    assert wait_all(flight.work for flight in flights) == [0, 1, 2]
    assert wait_all([]) == []


def test_wait_all_raises_the_first_error_after_all_have_ended(begun: Callable[..., Begun]) -> None:
    errors = [ValueError("first"), KeyError("second")]
    flights = [begun(errors[0]), begun("fine"), begun(errors[1])]
    flights[0].end()
    ended: list[Work[Any]] = []

    def end_others() -> None:
        ended.extend(flight.end() for flight in flights[1:])

    timer = threading.Timer(0.1, end_others)
    timer.start()
    with pytest.raises(ValueError, match="first"):
        wait_all([flight.work for flight in flights])
    assert all(flight.work.done() for flight in flights)
    timer.join()
    assert flights[2].work.exception() is errors[1]


def test_wait_all_gives_up_at_its_limit_for_all_together(begun: Callable[..., Begun]) -> None:
    flights = [begun(number) for number in range(3)]
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="still in flight"):
        wait_all([flight.work for flight in flights], 0.2)
    assert time.monotonic() - began < 3 * 0.2 + LIMIT_S / 2
    for flight in flights:
        flight.may_end.set()
    assert wait_all([flight.work for flight in flights], LIMIT_S) == [0, 1, 2]


# asyncio


def test_works_are_awaitable_together_with_coroutines(begun: Callable[..., Begun]) -> None:
    flights = [begun(number) for number in range(3)]

    async def end_them() -> str:
        await asyncio.sleep(0.01)
        for flight in reversed(flights):
            flight.may_end.set()
        return "told"

    async def main() -> list[Any]:
        return await asyncio.gather(*[flight.work for flight in flights], end_them())

    assert asyncio.run(main()) == [0, 1, 2, "told"]


def test_an_error_is_raised_where_it_is_awaited(begun: Callable[..., Begun]) -> None:
    error = objcomm.TransportTimeout("gather", (1,), 3.0)
    flight = begun(error)

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.01, flight.may_end.set)
        with pytest.raises(objcomm.TransportTimeout) as caught:
            await flight.work
        assert caught.value is error
        with pytest.raises(objcomm.TransportTimeout):
            await flight.work

    asyncio.run(main())


def test_a_limit_or_a_cancellation_ends_the_awaiting_and_not_the_work(
    begun: Callable[..., Begun],
) -> None:
    flight = begun("late")

    async def awaiting() -> Any:
        return await flight.work

    async def main() -> Any:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(awaiting(), 0.02)
        task = asyncio.ensure_future(awaiting())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not flight.work.done()
        flight.may_end.set()
        return await awaiting()

    assert asyncio.run(main()) == "late"


def test_a_work_that_ends_after_its_loop_was_closed_says_nothing(
    begun: Callable[..., Begun], caplog: pytest.LogCaptureFixture
) -> None:
    flight = begun("late")

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(_awaiting(flight.work)), 0.02)

    async def _awaiting(work: Work[Any]) -> Any:
        return await work

    asyncio.run(main())
    assert flight.end().wait() == "late"
    assert caplog.records == []


def test_an_awaited_work_that_ended_before_is_there(begun: Callable[..., Begun]) -> None:
    work = begun("early").end()

    async def main() -> Any:
        return await work

    assert asyncio.run(main()) == "early"


# What is never waited for


def _dropped(outcome: Any) -> list[warnings.WarningMessage]:
    flight = Begun(outcome)
    flight.end()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.disable()  # a failed work must not wait for the collector
        try:
            del flight
        finally:
            gc.enable()
    return caught


def test_what_is_never_waited_for_is_reported_at_the_users_line() -> None:
    (told,) = _dropped("unread")
    assert told.category is RuntimeWarning
    assert (told.filename, told.lineno) == (__file__, 7)
    assert str(told.message) == "gather was begun here but never waited for"


def test_what_has_failed_and_is_never_waited_for_is_reported_with_its_error() -> None:
    (told,) = _dropped(LookupError("no such shard"))
    assert "never waited for, and ended by" in str(told.message)
    assert "no such shard" in str(told.message)


ASKS: dict[str, Callable[[Work[Any]], object]] = {
    "wait": lambda work: work.wait(),
    "result": lambda work: work.result(),
    "exception": lambda work: work.exception(),
    "wait_all": lambda work: wait_all([work]),
    "as_completed": lambda work: [each.result() for each in as_completed([work])],
    "await": lambda work: asyncio.run(_await(work)),
}


async def _await(work: Work[Any]) -> Any:
    return await work


@pytest.mark.parametrize("way", ASKS)
def test_what_was_asked_is_not_reported(way: str) -> None:
    flight = Begun("read")
    flight.end()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ASKS[way](flight.work)
        kept = weakref.ref(flight.work)
        del flight
        gc.collect()
        assert kept() is None


@pytest.mark.parametrize("look", [Work.done, repr])
def test_looking_is_not_asking(look: Callable[[Work[Any]], object]) -> None:
    flight = Begun()
    look(flight.end())
    with pytest.warns(RuntimeWarning, match="never waited for"):
        del flight


def test_a_work_in_flight_that_was_dropped_goes_on_and_is_reported_at_its_end() -> None:
    flight = Begun("unread")
    kept = weakref.ref(flight.work)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flight.work = None  # type: ignore[assignment]  # dropped
        assert caught == []
        assert kept() is not None
        flight.may_end.set()
        flight.line.drain()
        flight.line.submit(lambda: None)
        flight.line.drain()
    assert kept() is None
    assert [str(told.message) for told in caught] == ["gather was begun here but never waited for"]


# What is kept


class Held:
    pass


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_once_a_work_has_ended(*, fails: bool) -> None:
    gc.disable()
    try:
        held, result = Held(), Held()
        kept = [weakref.ref(held), weakref.ref(result)]
        work: Work[Any] = Work("gather", PLACE)
        line = Line("test line")

        def body(held: Held, result: Held) -> Held:
            if fails:
                raise LookupError(f"no such shard: {held}")
            return result

        work.carry_out_on(line, functools.partial(body, held, result))
        line.drain()
        line.submit(lambda: None)
        line.drain()
        del held
        if not fails:
            assert kept[0]() is None
            assert work.wait() is result
        else:
            with pytest.raises(LookupError):
                work.wait()
        kept.append(weakref.ref(work))  # type: ignore[arg-type]  # anything may die
        del work, result
        assert [each() for each in kept] == [None] * 3
    finally:
        gc.enable()


def test_an_error_that_is_caught_and_dropped_leaves_nothing() -> None:
    gc.disable()
    try:
        work = Begun(LookupError("no such shard")).end()
        kept = weakref.ref(work)
        for ask in (work.wait, work.result, functools.partial(wait_all, [work])):
            with pytest.raises(LookupError):
                ask()
        del work, ask
        assert kept() is None
    finally:
        gc.enable()


# Threads


def test_the_body_runs_with_the_context_of_the_call() -> None:
    setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting", default="unset")
    line = Line("test line")
    work: Work[str] = Work("gather", PLACE)
    token = setting.set("at the call")
    work.carry_out_on(line, setting.get)
    setting.reset(token)
    assert work.wait(LIMIT_S) == "at the call"
    assert setting.get() == "unset"


def test_a_job_that_waits_for_one_behind_it_is_refused() -> None:
    line = Line("test line")
    told: list[str] = []
    is_begun = threading.Event()
    works: list[Work[Any]] = []

    def impatient() -> None:
        assert is_begun.wait(LIMIT_S)
        with pytest.raises(UsageError, match="comes after") as caught:
            works[1].wait()
        told.append(str(caught.value))

    for body in (impatient, lambda: "second"):
        works.append(Work("gather", PLACE))
        works[-1].carry_out_on(line, body)
    is_begun.set()
    assert wait_all(works, LIMIT_S) == [None, "second"]
    assert len(told) == 1


def test_only_works_can_be_waited_for() -> None:
    calls: list[Callable[[Any], Any]] = [wait_all, lambda works: list(as_completed(works))]
    for call in calls:
        with pytest.raises(objcomm.UsageError, match="give a list of works"):
            call([None])


def test_a_limit_of_zero_asks_once() -> None:
    done = objcomm.all_gather(1, async_op=True)
    pending = objcomm.irecv(0, tag=71)
    for nothing in (0, 0.0, timedelta(0)):
        assert done.wait(nothing) == [1]
        with pytest.raises(TimeoutError, match="still in flight"):
            pending.wait(nothing)
    objcomm.send("late", 0, tag=71)
    assert pending.wait() == "late"


def test_a_receive_from_oneself_ends_at_its_limit() -> None:
    work = objcomm.irecv(0, tag=72, timeout=0.05)
    with pytest.raises(objcomm.TransportTimeout):
        work.wait(20)
    objcomm.send("later", 0, tag=72)
    assert objcomm.recv(0, tag=72) == "later"
