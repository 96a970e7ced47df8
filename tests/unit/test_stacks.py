"""Which line of the program a thread is on, whatever it has called."""

import concurrent.futures
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from objcomm._observe.stacks import Running, StackSampler

LINES = Path(__file__).read_text(encoding="utf-8").splitlines()
LINE = f"{__file__}:{1 + LINES.index('        end.wait()')}"


@pytest.fixture
def waiting() -> Iterator[int]:
    """Yield a thread that waits in Python's library, called by a function of this file."""
    end, begun = threading.Event(), threading.Event()

    def wait_at_this_line() -> None:
        begun.set()
        end.wait()

    thread = threading.Thread(target=wait_at_this_line)
    thread.start()
    begun.wait()
    sampler, number = StackSampler(), thread.ident or 0
    while sampler.sample([number], 0.0)[0].line != LINE:
        pass
    yield number
    end.set()
    thread.join()


def test_a_thread_in_the_library_is_at_the_line_that_called_it(waiting: int) -> None:
    (found,) = StackSampler().sample([waiting], 5.0)
    function = "waiting.<locals>.wait_at_this_line"
    assert found == Running(waiting, LINE, function, 0.0)
    assert found.text == f"{LINE} in {function}"


def test_seconds_count_consecutive_samples_of_the_same_line(waiting: int) -> None:
    sampler = StackSampler()

    def seconds_at(now: float) -> float:
        return sampler.sample([waiting], now)[0].seconds

    assert [seconds_at(now) for now in (5.0, 6.0, 8.5)] == [0.0, 1.0, 3.5]
    assert seconds_at(3600.0) == 0.0  # no sample was taken in between
    assert seconds_at(3601.0) == 1.0


def test_a_thread_that_runs_only_packages_is_at_its_innermost_line() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        number = pool.submit(threading.get_ident).result()
        (found,) = StackSampler().sample([number], 0.0)
    assert "concurrent/futures/thread.py:" in found.line.replace("\\", "/")
    assert found.function == "_worker"


def test_a_sample_keeps_no_variable_of_a_thread_alive() -> None:
    class Kept:
        pass

    begun, end = threading.Event(), threading.Event()
    alive: list[weakref.ref[Kept]] = []

    def hold() -> None:
        kept = Kept()
        alive.append(weakref.ref(kept))
        begun.set()
        end.wait()

    thread = threading.Thread(target=hold)
    gc.disable()
    try:
        thread.start()
        begun.wait()
        StackSampler().sample([thread.ident or 0, threading.get_ident()], 0.0)
        end.set()
        thread.join()
        assert alive[0]() is None
    finally:
        gc.enable()


def test_a_thread_that_has_ended_is_left_out(waiting: int) -> None:
    thread = threading.Thread(target=int)
    thread.start()
    ended = thread.ident or 0
    thread.join()
    assert ended != waiting
    assert [each.thread for each in StackSampler().sample([ended, waiting], 0.0)] == [waiting]
