"""A single work: its states, its waits, and what the watchdog learns about them."""

import contextlib
import contextvars
import copy
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import objcomm
from objcomm import UsageError, Work, as_completed, wait_all
from objcomm._transport.threads import SerialExecutor
from tests.unit.flights import LIMIT_S, PLACE, Begin
from tests.waits import wait_until


def test_in_flight_then_done(begun: Begin) -> None:
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
def test_one_that_is_used_as_its_result_says_what_gives_that(
    use: Callable[[Any], object], begun: Begin
) -> None:
    work = begun([1]).end()
    with pytest.raises(Exception, match=r"Work.*; its wait\(\) gives the result$") as caught:
        use(work)
    assert caught.type in {TypeError, AttributeError, objcomm.EncodeError}
    assert not hasattr(work, "keys")


def test_in_flight_then_failed(begun: Begin) -> None:
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
def test_a_wait_that_passes_leaves_the_work_in_flight(begun: Begin, limit: Any) -> None:
    flight = begun("late")
    with pytest.raises(TimeoutError, match=r"gather at .*:7 is still running") as caught:
        flight.work.wait(limit)
    assert not isinstance(caught.value, objcomm.ObjcommError)
    assert not flight.work.done()
    flight.may_end.set()
    assert flight.work.wait(LIMIT_S) == "late"


def test_an_operations_own_time_limit_is_not_taken_for_the_waits(begun: Begin) -> None:
    error = objcomm.TransportTimeout("gather", (1,), 3.0)
    work = begun(error).end()
    with pytest.raises(objcomm.TransportTimeout) as caught:
        work.wait(LIMIT_S)
    assert caught.value is error


def test_the_watcher_is_told_who_waits_without_end(begun: Begin) -> None:
    """A thread whose wait has a limit can continue, so it is in no deadlock."""
    flight = begun()
    seen: set[int] = set()
    is_over, waiter = threading.Event(), threading.get_ident()

    def look_again_and_again() -> None:
        while not is_over.wait(0.001):
            seen.add(flight.waited.waiter)

    def look_and_end() -> None:
        wait_until(lambda: flight.waited.waiter == waiter, "who waits")
        flight.may_end.set()

    looker = threading.Thread(target=look_again_and_again)
    looker.start()
    wait_until(lambda: seen, "the first look")
    with pytest.raises(TimeoutError):
        flight.work.wait(0.2)
    is_over.set()
    looker.join()
    assert seen == {0}
    looker = threading.Thread(target=look_and_end)
    looker.start()
    flight.work.wait()
    looker.join()
    assert flight.waited.waiter == 0


@pytest.mark.parametrize("way", ["as_completed", "wait_all"])
def test_the_watcher_is_told_of_waits_for_several(begun: Begin, way: str) -> None:
    flights = [begun(number) for number in range(2)]
    seen: list[int] = []

    def look() -> None:
        seen.append(wait_until(lambda: flights[0].waited.waiter, "the thread that waits"))
        for flight in flights:
            flight.may_end.set()

    looker = threading.Thread(target=look)
    looker.start()
    works = [flight.work for flight in flights]
    if way == "wait_all":
        assert wait_all(works) == [0, 1]
    else:
        assert sorted(work.result() for work in as_completed(works)) == [0, 1]
    looker.join()
    assert seen == [threading.get_ident()]
    assert [flight.waited.waiter for flight in flights] == [0, 0]


def _failed(on_error: Callable[[], None]) -> Work[Any]:
    def body() -> None:
        raise LookupError("no such shard")

    return Work[Any]("gather", PLACE, on_error=on_error).carry_out_here(body)


def test_that_its_error_was_taken_is_told_once() -> None:
    told: list[str] = []
    work = _failed(lambda: told.append("heard"))
    assert not told
    for _ in range(2):
        with pytest.raises(LookupError):
            work.wait()
        assert isinstance(work.exception(), LookupError)
        assert told == ["heard"]


def test_of_a_result_it_is_not() -> None:
    told: list[str] = []
    work: Work[int] = Work("gather", PLACE, on_error=lambda: told.append("heard"))
    work.carry_out(lambda: 3)
    assert work.wait() == 3
    assert not told


def test_a_forked_process_takes_its_parents_error_for_itself_alone() -> None:
    told: list[str] = []
    work = _failed(lambda: told.append("heard"))
    if not (child := os.fork()):
        try:
            work.exception()
        finally:
            os._exit(len(told))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    work.exception()
    assert told == ["heard"]


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
    line = SerialExecutor("test line")
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
        with pytest.raises(objcomm.UsageError, match=r"works= lists objcomm\.Work, not"):
            call([None])


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
def test_the_rest_goes_on_with_the_callers_device_and_stream(
    monkeypatch: pytest.MonkeyPatch,
    is_initialized: bool,  # noqa: FBT001  # pytest passes it by name
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


def test_an_accelerator_that_cannot_be_asked_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
