"""The end of the program waits for threads that are about to come back from C++."""

import functools
import threading

import pytest

from objcomm._failures import watchdog
from objcomm._failures.watchdog import end_waits
from objcomm._transport.threads import SerialExecutor
from tests.waits import PATIENCE_S


@pytest.mark.parametrize("name", ["objcomm-listen", "objcomm-connect"])
def test_a_thread_whose_mesh_is_no_more_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It may be in the mesh's destructor, and nothing else tells of it."""
    monkeypatch.setattr(watchdog, "FAREWELL_SECONDS", PATIENCE_S)
    looks: list[threading.Thread] = []
    leave = threading.Event()

    def look() -> tuple[list[object], list[object]]:
        looks.append(thread)
        if len(looks) > 1:
            leave.set()
        return [], []

    thread = threading.Thread(target=leave.wait, args=(PATIENCE_S,), name=name)
    thread.start()
    try:
        assert end_waits(look)  # type: ignore[arg-type]  # there is nothing to be looked at
        assert len(looks) > 1
        assert not thread.is_alive()
    finally:
        leave.set()
        thread.join()


def test_without_such_threads_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "FAREWELL_SECONDS", PATIENCE_S)
    looks: list[int] = []

    def look() -> tuple[list[object], list[object]]:
        looks.append(1)
        return [], []

    # Those of tests before may be about to end.
    assert end_waits(look)  # type: ignore[arg-type]  # there is nothing to be looked at
    looks.clear()
    assert end_waits(look)  # type: ignore[arg-type]  # likewise
    assert looks == [1]


def test_a_line_that_lets_go_of_a_job_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the job held may be the last of a mesh."""
    monkeypatch.setattr(watchdog, "FAREWELL_SECONDS", PATIENCE_S)
    line, leave, looks = SerialExecutor("objcomm-line"), threading.Event(), []

    class Held:
        def __del__(self) -> None:
            leave.wait(PATIENCE_S)

    def look() -> tuple[list[object], list[object]]:
        looks.append(1)
        if len(looks) > 1:
            leave.set()
        return [], []

    line.submit(functools.partial(_do_nothing, Held()))
    try:
        assert end_waits(look)  # type: ignore[arg-type]  # there is nothing to be looked at
        assert len(looks) > 1
    finally:
        leave.set()
        line.drain()


def test_who_does_not_come_back_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "FAREWELL_SECONDS", 0.0)
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, args=(PATIENCE_S,), name="objcomm-listen")
    thread.start()
    try:
        assert not end_waits(lambda: ([], []))
    finally:
        leave.set()
        thread.join()


def _do_nothing(_: object) -> None:
    """A job that only holds something."""
