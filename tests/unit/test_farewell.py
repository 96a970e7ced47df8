"""The end of the program waits for threads that are about to return from C++."""

import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from objcomm._failures import watchdog
from objcomm._failures.watchdog import end_waits
from objcomm._transport.threads import SerialExecutor
from tests.waits import PATIENCE_S


class Looks:
    """Counts the looks for meshes, of which there are none; the second look ends a wait."""

    def __init__(self, leave: threading.Event) -> None:
        self._leave = leave
        self.count = 0

    def __call__(self) -> Any:
        self.count += 1
        if self.count > 1:
            self._leave.set()
        return [], []


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that lets threads end; it is set after the test in any case."""
    monkeypatch.setattr(watchdog, "FAREWELL_SECONDS", PATIENCE_S)
    event = threading.Event()
    yield event
    event.set()


def thread_of(leave: threading.Event, name: str) -> threading.Thread:
    """Start a thread that runs until it may leave."""
    thread = threading.Thread(target=leave.wait, args=(PATIENCE_S,), name=name)
    thread.start()
    return thread


@pytest.mark.parametrize("name", ["objcomm-listen", "objcomm-connect"])
def test_a_thread_whose_mesh_is_gone_is_waited_for(leave: threading.Event, name: str) -> None:
    """The thread may be in the mesh's destructor, and nothing else reports it."""
    thread, look = thread_of(leave, name), Looks(leave)
    assert end_waits(look)
    assert look.count > 1
    assert not thread.is_alive()


def test_nothing_waits_if_there_are_no_such_threads(leave: threading.Event) -> None:
    assert end_waits(Looks(leave))  # threads of earlier tests may be about to end
    look = Looks(leave)
    assert end_waits(look)
    assert look.count == 1


def test_a_thread_that_drops_a_job_is_waited_for(leave: threading.Event) -> None:
    """The job may have held the last reference to a mesh."""
    line, look = SerialExecutor("objcomm-line"), Looks(leave)

    class Held:
        def __del__(self) -> None:
            leave.wait(PATIENCE_S)

    line.submit(functools.partial(_do_nothing, Held()))
    assert end_waits(look)
    assert look.count > 1
    line.drain()


def test_a_thread_that_does_not_return_in_time_is_reported(
    leave: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "FAREWELL_SECONDS", 0.0)
    thread = thread_of(leave, "objcomm-listen")
    assert not end_waits(lambda: ([], []))
    leave.set()
    thread.join()


def _do_nothing(_: object) -> None:
    """A job that only holds its argument."""
