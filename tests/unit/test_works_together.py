"""Waiting for several works, and awaiting them beside coroutines."""

import asyncio
import threading
from typing import Any

import pytest

import objcomm
from objcomm import Work, as_completed, wait_all
from tests.unit.flights import LIMIT_S, Begin


def test_as_completed_yields_works_as_they_end(begun: Begin) -> None:
    flights = [begun("first"), begun("second"), begun(ValueError("bad"))]
    works = as_completed([flight.work for flight in flights])
    for flight in (flights[2], flights[0], flights[1]):
        flight.may_end.set()
        assert next(works) is flight.work
    assert list(works) == []
    assert list(as_completed([])) == []


def test_as_completed_raises_at_its_limit(begun: Begin) -> None:
    early, late = begun("early"), begun("late")
    early.end()
    works = as_completed([late.work, early.work], 0.1)
    assert next(works).result() == "early"
    with pytest.raises(TimeoutError):
        next(works)
    assert late.end().wait() == "late"


def test_wait_all_returns_results_in_the_order_given(begun: Begin) -> None:
    flights = [begun(number) for number in range(3)]
    for flight in reversed(flights):
        flight.end()
    assert wait_all(flight.work for flight in flights) == [0, 1, 2]
    assert wait_all([]) == []


def test_wait_all_raises_the_first_error_after_all_have_ended(begun: Begin) -> None:
    errors = [ValueError("first"), KeyError("second")]
    flights = [begun(errors[0]), begun("fine"), begun(errors[1])]
    flights[0].end()

    def end_others() -> None:
        for flight in flights[1:]:
            flight.end()

    timer = threading.Timer(0.1, end_others)
    timer.start()
    with pytest.raises(ValueError, match="first"):
        wait_all([flight.work for flight in flights])
    assert all(flight.work.done() for flight in flights)
    timer.join()
    assert flights[2].work.exception() is errors[1]


def test_wait_all_raises_at_its_limit(begun: Begin) -> None:
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


async def awaiting(work: Work[Any]) -> Any:
    return await work


def test_a_limit_or_a_cancellation_ends_the_await_but_not_the_work(begun: Begin) -> None:
    flight = begun("late")

    async def main() -> Any:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(awaiting(flight.work), 0.02)
        task = asyncio.ensure_future(awaiting(flight.work))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not flight.work.done()
        flight.may_end.set()
        return await flight.work

    assert asyncio.run(main()) == "late"


def test_a_work_that_ends_after_its_loop_was_closed_logs_nothing(
    begun: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    flight = begun("late")

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(awaiting(flight.work), 0.02)

    asyncio.run(main())
    assert flight.end().wait() == "late"
    assert caplog.records == []
