"""Which line of the program a thread is on, whatever it has called."""

import concurrent.futures
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from objcomm._observe.stacks import Running, StackSampler

HERE = __file__


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
    while not sampler.sample([number], 0.0)[0].line.endswith(f":{_line_of('end.wait()')}"):
        pass
    yield number
    end.set()
    thread.join()


def _line_of(text: str) -> int:
    lines = Path(HERE).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_a_thread_in_the_library_is_at_the_line_that_called_it(waiting: int) -> None:
    (found,) = StackSampler().sample([waiting], 5.0)
    function = "waiting.<locals>.wait_at_this_line"
    assert found == Running(waiting, f"{HERE}:{_line_of('end.wait()')}", function, 0.0)
    assert found.text == f"{found.line} in {function}"


def test_seconds_are_those_in_which_each_sample_found_the_same_line(waiting: int) -> None:
    sampler = StackSampler()

    def seconds_at(now: float) -> float:
        return sampler.sample([waiting], now)[0].seconds

    assert [seconds_at(now) for now in (5.0, 6.0, 8.5)] == [0.0, 1.0, 3.5]
    assert seconds_at(3600.0) == 0.0  # no sample was taken in between
    assert seconds_at(3601.0) == 1.0


def test_of_a_thread_of_packages_alone_the_innermost_line_is_told() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        number = pool.submit(threading.get_ident).result()
        (found,) = StackSampler().sample([number], 0.0)
    assert "concurrent/futures/thread.py:" in found.line.replace("\\", "/")
    assert found.function == "_worker"


def test_a_sample_keeps_nothing_that_a_thread_has_in_its_variables() -> None:
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


def test_a_thread_that_has_ended_is_nowhere(waiting: int) -> None:
    thread = threading.Thread(target=int)
    thread.start()
    ended = thread.ident or 0
    thread.join()
    assert ended != waiting
    assert [each.thread for each in StackSampler().sample([ended, waiting], 0.0)] == [waiting]
