"""What is reported about a work that nothing waits for, and what a work keeps alive."""

import asyncio
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from objcomm import Work, as_completed, wait_all
from tests.unit.flights import Begun

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
def test_a_work_whose_outcome_was_taken_is_not_reported(way: str) -> None:
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
def test_looking_at_a_work_does_not_count_as_waiting(look: Callable[[Work[Any]], object]) -> None:
    flight = Begun()
    look(flight.end())
    with pytest.warns(RuntimeWarning, match="never waited for"):
        del flight


def test_a_dropped_work_continues_and_is_reported_at_its_end() -> None:
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
    (warning,) = caught
    assert str(warning.message) == "gather was started here but never waited for"


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
