"""A single work: its states, its waits, and what the watchdog learns about them."""

import contextlib
import contextvars
import copy
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import objcomm
from objcomm import UsageError, Work, as_completed, wait_all
from objcomm._transport.threads import SerialExecutor
from tests.unit.flights import LIMIT_S, PLACE, Begin
from tests.waits import wait_until


def test_a_work_that_succeeds(begun: Begin) -> None:
    flight = begun("result")
    work = flight.work
    assert not work.done()
    for ask in (work.result, work.exception):
        with pytest.raises(UsageError, match="still running"):
            ask()
    assert repr(work) == f"<objcomm.Work: gather at {PLACE}, running>"
    flight.end()
    assert work.done()
    assert (work.result(), work.exception(), work.wait()) == ("result", None, "result")
    assert repr(work).endswith("done>")


@pytest.mark.parametrize(
    "use",
    [
        sum,
        lambda work: work[0],
        lambda work: work.keys(),
        copy.copy,
        lambda work: objcomm.to_tensor([work], codec="pickle"),
    ],
)
def test_a_work_used_as_its_result_says_what_to_call(begun: Begin, use: Any) -> None:
    work = begun([1]).end()
    with pytest.raises(Exception, match=r"Work.*; its wait\(\) gives the result$") as caught:
        use(work)
    assert caught.type in {TypeError, AttributeError, objcomm.EncodeError}
    assert not hasattr(work, "keys")


@pytest.mark.parametrize(
    "error",
    [objcomm.CollectiveError("gather", {}), objcomm.TransportTimeout("gather", (1,), 3.0)],
    ids=["failed", "its own time limit"],
)
def test_a_work_that_fails(begun: Begin, error: objcomm.ObjcommError) -> None:
    work = begun(error).end()
    assert work.done()
    assert work.exception() is error
    for ask in (work.result, work.wait, lambda: work.wait(LIMIT_S)):
        with pytest.raises(type(error)) as caught:
            ask()
        assert caught.value is error
    assert repr(work).endswith("failed>")


@pytest.mark.parametrize("limit", [0.05, timedelta(milliseconds=50)])
def test_a_wait_that_times_out_leaves_the_work_running(begun: Begin, limit: Any) -> None:
    flight = begun("late")
    with pytest.raises(TimeoutError, match=r"gather at .*:7 is still running") as caught:
        flight.work.wait(limit)
    assert not isinstance(caught.value, objcomm.ObjcommError)
    assert not flight.work.done()
    flight.may_end.set()
    assert flight.work.wait(LIMIT_S) == "late"


def test_the_watchdog_does_not_see_a_thread_whose_wait_has_a_limit(begun: Begin) -> None:
    """It can continue, so it is in no deadlock."""
    flight = begun()
    seen: set[int] = set()
    is_over = threading.Event()

    def look_again_and_again() -> None:
        while not is_over.wait(0.001):
            seen.add(flight.waited.waiter)

    looker = threading.Thread(target=look_again_and_again)
    looker.start()
    wait_until(lambda: seen, "the first look")
    with pytest.raises(TimeoutError):
        flight.work.wait(0.2)
    is_over.set()
    looker.join()
    assert seen == {0}


WAITS: dict[str, Callable[[list[Work[Any]]], list[Any]]] = {
    "wait": lambda works: [work.wait() for work in works],
    "wait_all": wait_all,
    "as_completed": lambda works: sorted(work.result() for work in as_completed(works)),
}


@pytest.mark.parametrize("way", WAITS)
def test_the_watchdog_sees_a_thread_that_waits_without_a_limit(begun: Begin, way: str) -> None:
    flights = [begun(number) for number in range(2)]

    def look() -> int:
        seen = wait_until(lambda: flights[0].waited.waiter, "the thread that waits")
        for flight in flights:
            flight.may_end.set()
        return seen

    with ThreadPoolExecutor(1) as looker:
        seen = looker.submit(look)
        assert WAITS[way]([flight.work for flight in flights]) == [0, 1]
    assert seen.result() == threading.get_ident()
    assert [flight.waited.waiter for flight in flights] == [0, 0]


def _failed(on_error: Callable[[], None]) -> Work[Any]:
    def body() -> None:
        raise LookupError("no such shard")

    return Work[Any]("gather", PLACE, on_error=on_error).carry_out_here(body)


def test_taking_an_error_is_reported_once() -> None:
    on_error = Mock()
    work = _failed(on_error)
    on_error.assert_not_called()
    for _ in range(2):
        with pytest.raises(LookupError):
            work.wait()
        assert isinstance(work.exception(), LookupError)
        on_error.assert_called_once()


def test_taking_a_result_is_not_reported_as_an_error() -> None:
    on_error = Mock()
    work: Work[int] = Work("gather", PLACE, on_error=on_error)
    work.carry_out(lambda: 3)
    assert work.wait() == 3
    on_error.assert_not_called()


def test_an_error_taken_in_a_forked_process_is_reported_in_its_parent_only() -> None:
    on_error = Mock()
    work = _failed(on_error)
    if not (child := os.fork()):
        try:
            work.exception()
        finally:
            os._exit(on_error.call_count)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    work.exception()
    on_error.assert_called_once()


def test_the_body_runs_with_the_context_of_the_call() -> None:
    setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting", default="unset")
    line = SerialExecutor("test line")
    work: Work[str] = Work("gather", PLACE)
    token = setting.set("at the call")
    work.carry_out_on(line, setting.get)
    setting.reset(token)
    assert work.wait(LIMIT_S) == "at the call"
    assert setting.get() == "unset"


def test_a_job_that_waits_for_one_behind_it_is_refused() -> None:
    line, is_begun = SerialExecutor("test line"), threading.Event()
    works: list[Work[Any]] = [Work("gather", PLACE) for _ in range(2)]

    def impatient() -> str:
        assert is_begun.wait(LIMIT_S)
        with pytest.raises(UsageError, match="comes after"):
            works[1].wait()
        return "first"

    for work, body in zip(works, (impatient, lambda: "second"), strict=True):
        work.carry_out_on(line, body)
    is_begun.set()
    assert wait_all(works, LIMIT_S) == ["first", "second"]


@pytest.mark.parametrize("way", ["wait_all", "as_completed"])
def test_only_works_can_be_waited_for(way: str) -> None:
    nothing: Any = [None]
    with pytest.raises(UsageError, match=r"works= lists objcomm\.Work, not"):
        WAITS[way](nothing)


def test_a_limit_of_zero_asks_once() -> None:
    done = objcomm.all_gather(1, async_op=True)
    pending = objcomm.irecv(0, tag=71)
    for nothing in (0, 0.0, timedelta(0)):
        assert done.wait(nothing) == [1]
        with pytest.raises(TimeoutError, match="still running"):
            pending.wait(nothing)
    objcomm.send("late", 0, tag=71)
    assert pending.wait() == "late"


def test_a_receive_from_oneself_ends_at_its_limit() -> None:
    work = objcomm.irecv(0, tag=72, timeout=0.05)
    with pytest.raises(objcomm.TransportTimeout):
        work.wait(LIMIT_S)
    objcomm.send("later", 0, tag=72)
    assert objcomm.recv(0, tag=72) == "later"


class FakeStreams(threading.local):
    """An accelerator of two devices, as torch's generic functions show it to each thread."""

    def __init__(self) -> None:
        self.index = 0
        self.streams = ["0 by default", "1 by default"]

    def current_stream(self, index: int | None = None) -> Any:
        at = self.index if index is None else index
        return SimpleNamespace(device_index=at, name=self.streams[at])

    def set_stream(self, stream: Any) -> None:
        self.index = stream.device_index
        self.streams[self.index] = stream.name

    @contextlib.contextmanager
    def device_index(self, index: int) -> Iterator[None]:
        before, self.index = self.index, index
        yield
        self.index = before


@pytest.mark.parametrize("is_initialized", [True, False])
def test_a_work_continues_with_the_callers_device_and_stream(
    monkeypatch: pytest.MonkeyPatch, *, is_initialized: bool
) -> None:
    fake = FakeStreams()
    module = SimpleNamespace(is_initialized=lambda: is_initialized)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    for name in ("current_stream", "set_stream", "device_index"):
        monkeypatch.setattr(torch.accelerator, name, getattr(fake, name))
    fake.set_stream(SimpleNamespace(device_index=1, name="the caller's"))
    line = SerialExecutor("test line")
    seen: list[tuple[int, list[str]]] = []

    def look() -> None:
        seen.append((fake.index, list(fake.streams)))

    line.submit(look)
    work: Work[None] = Work("gather", PLACE)
    work.carry_out_on(line, look)
    line.submit(look)
    work.wait(LIMIT_S)
    line.drain()
    before = (0, ["0 by default", "1 by default"])
    # Before the accelerator's first use it has no device or stream to ask for.
    within = (1, ["0 by default", "the caller's"]) if is_initialized else before
    assert seen == [before, within, before]


def test_an_accelerator_without_a_driver_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> Any:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", absent)
    work: Work[int] = Work("gather", PLACE)
    work.carry_out_on(SerialExecutor("test line"), lambda: 3)
    assert work.wait(LIMIT_S) == 3


def test_dir_shows_what_is_public() -> None:
    work = objcomm.all_gather(1, async_op=True)
    work.wait()
    shown = {name for name in dir(work) if name[:2] != "__"}
    assert shown >= {"wait", "done", "cancel", "operation", "call_site"}
    assert not [name for name in shown if name.startswith("_")]
