"""What is said of a work that nobody waits for, and what a work keeps alive."""

import asyncio
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from objcomm import Work, as_completed, wait_all
from objcomm._transport.threads import SerialExecutor
from tests.unit.flights import PLACE, Begun


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
    assert f"{told.filename}:{told.lineno}" == PLACE
    assert str(told.message) == "gather was started here but never waited for"


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
    assert [str(told.message) for told in caught] == [
        "gather was started here but never waited for"
    ]


class Held:
    pass


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_once_a_work_has_ended(*, fails: bool) -> None:
    gc.disable()
    try:
        held, result = Held(), Held()
        kept = [weakref.ref(held), weakref.ref(result)]
        work: Work[Any] = Work("gather", PLACE)
        line = SerialExecutor("test line")

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
