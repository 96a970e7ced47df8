"""Waiting for several works, and awaiting them beside coroutines."""

import asyncio
import threading
from typing import Any

import pytest

import objcomm
from objcomm import Work, as_completed, wait_all
from tests.unit.flights import LIMIT_S, Begin


def test_as_completed_gives_the_first_to_end_first(begun: Begin) -> None:
    flights = {name: begun(name) for name in "abc"}
    works = as_completed([flights[name].work for name in "abc"])
    for name in "cab":
        flights[name].may_end.set()
        assert next(works).result() == name
    assert list(works) == []


def test_as_completed_gives_failed_ones_too_and_nothing_for_nothing(begun: Begin) -> None:
    error = ValueError("bad")
    (work,) = as_completed([begun(error).end()])
    assert work.exception() is error
    assert list(as_completed([])) == []


def test_as_completed_gives_up_at_its_limit(begun: Begin) -> None:
    early, late = begun("early"), begun("late")
    early.end()
    works = as_completed([late.work, early.work], 0.1)
    assert next(works).result() == "early"
    with pytest.raises(TimeoutError):
        next(works)
    assert late.end().wait() == "late"


def test_wait_all_gives_results_in_the_order_given(begun: Begin) -> None:
    flights = [begun(number) for number in range(3)]
    for flight in reversed(flights):
        flight.end()
    assert wait_all(flight.work for flight in flights) == [0, 1, 2]
    assert wait_all([]) == []


def test_wait_all_raises_the_first_error_after_all_have_ended(begun: Begin) -> None:
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


def test_wait_all_gives_up_at_its_limit(begun: Begin) -> None:
    flights = [begun(number) for number in range(3)]
    with pytest.raises(TimeoutError, match="still running"):
        wait_all([flight.work for flight in flights], 0.2)
    for flight in flights:
        flight.may_end.set()
    assert wait_all([flight.work for flight in flights], LIMIT_S) == [0, 1, 2]


def test_an_error_is_raised_where_it_is_awaited(begun: Begin) -> None:
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


def test_a_limit_or_a_cancellation_ends_the_awaiting_and_not_the_work(begun: Begin) -> None:
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
    begun: Begin, caplog: pytest.LogCaptureFixture
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


def test_an_awaited_work_that_ended_before_is_there(begun: Begin) -> None:
    work = begun("early").end()

    async def main() -> Any:
        return await work

    assert asyncio.run(main()) == "early"
