"""The executor that runs asynchronous calls one after another."""

import functools
import threading
import weakref
from unittest import mock

import pytest

from objcomm._transport import threads as line_module
from objcomm._transport.threads import SerialExecutor
from tests.waits import PATIENCE_S

LIMIT_S = PATIENCE_S


def living(name: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == name]


def test_a_line_without_jobs_has_no_thread_and_is_drained() -> None:
    line = SerialExecutor("unused line")
    line.drain()
    assert line.is_idle
    assert living("unused line") == []


def test_all_jobs_share_one_thread_which_ends_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "_LINGER_SECONDS", 0.05)
    line, may_end = SerialExecutor("ending line"), threading.Event()
    threads = []
    line.submit(functools.partial(_wait_for, may_end))  # or it may be idle before the next job
    for _ in range(3):
        line.submit(lambda: threads.append(threading.current_thread()))
    assert len(living("ending line")) == 1
    may_end.set()
    line.drain()
    assert len(set(threads)) == 1
    threads[0].join(LIMIT_S)
    assert not threads[0].is_alive()
    line.submit(lambda: threads.append(threading.current_thread()))
    line.drain()
    assert threads[-1] is not threads[0]


def test_no_job_is_lost_while_the_thread_is_about_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "_LINGER_SECONDS", 0.0)  # it ends whenever it can
    line, done = SerialExecutor("restless line"), list[int]()
    for number in range(500):
        line.submit(functools.partial(done.append, number))
        if number % 3 == 0:
            line.drain()
    line.drain()
    assert done == list(range(500))


def test_drain_waits_for_the_job_that_runs() -> None:
    line, may_end, drained = SerialExecutor("slow line"), threading.Event(), threading.Event()

    def drain() -> None:
        line.drain()
        drained.set()

    line.submit(functools.partial(_wait_for, may_end))
    waiter = threading.Thread(target=drain)
    waiter.start()
    assert not drained.wait(0.1)
    assert not line.is_idle
    may_end.set()
    waiter.join(LIMIT_S)
    assert drained.is_set()


def test_a_job_knows_that_it_runs_on_the_line() -> None:
    line, other, seen = SerialExecutor("own line"), SerialExecutor("other line"), list[bool]()

    def look() -> None:
        seen.extend((line.is_here, other.is_here))

    line.submit(look)
    line.drain()
    assert seen == [True, False]
    assert not line.is_here


def test_an_idle_line_holds_no_job() -> None:
    held = {"held"}
    kept = weakref.ref(held)
    line = SerialExecutor("idle line")
    line.submit(held.clear)
    del held
    line.drain()
    assert kept() is None


def test_a_thread_that_cannot_start_takes_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    line, done = SerialExecutor("starved line"), list[str]()
    refuse = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            line.submit(lambda: done.append("never"))
    assert line.is_idle
    line.submit(lambda: done.append("later"))
    line.drain()
    assert done == ["later"]


def _wait_for(event: threading.Event) -> None:
    """A job that ends when the event is set."""
    event.wait(LIMIT_S)
