"""Threads one after another, and threads that are used again."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from objcomm.transport import order as module
from objcomm.transport.order import Crew, Order

_PATIENCE_S = 20.0


def test_places_are_entered_in_the_order_in_which_they_were_taken() -> None:
    order = Order()
    places = [order.take() for _ in range(20)]
    assert order.waiting == 20
    done: list[int] = []

    def enter(number: int) -> None:
        with places[number]:
            done.append(number)

    with ThreadPoolExecutor(20) as pool:
        for number in reversed(range(20)):
            pool.submit(enter, number)
    assert done == list(range(20))
    assert order.waiting == 0
    with order.take():
        assert order.waiting == 1


def test_only_one_thread_at_a_time_is_inside() -> None:
    order = Order()
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        with order.take():
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.001)
            inside.remove(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(50)))
    assert max(most) == 1
    assert len(most) == 50


def test_an_error_inside_lets_the_next_one_in() -> None:
    order = Order()
    with pytest.raises(KeyError), order.take():
        raise KeyError
    with order.take():
        pass
    assert order.waiting == 0


class InterruptedEvent(threading.Event):
    """Ctrl-C comes as soon as anybody waits."""

    def wait(self, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return super().wait(timeout)


def test_an_interrupted_wait_keeps_nobody_behind_it_and_overtakes_nobody() -> None:
    with mock.patch("threading.Event", InterruptedEvent):
        order = Order()
        first, second, third = order.take(), order.take(), order.take()
    is_in = threading.Event()
    may_leave = threading.Event()

    def hold() -> None:
        with first:
            is_in.set()
            may_leave.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    is_in.wait()
    with pytest.raises(KeyboardInterrupt), second:
        pass
    entered = threading.Event()

    def follow() -> None:
        with third:
            entered.set()

    follower = threading.Thread(target=follow)
    follower.start()
    assert not entered.wait(0.1)  # the first one is inside
    may_leave.set()
    follower.join(_PATIENCE_S)
    holder.join(_PATIENCE_S)
    assert entered.is_set()
    assert order.waiting == 0


def test_jobs_that_wait_for_each_other_are_done_at_the_same_time() -> None:
    crew = Crew()
    meeting = threading.Barrier(9)

    def meet() -> None:
        meeting.wait(_PATIENCE_S)

    for _ in range(8):
        crew.submit(meet)
    assert meeting.wait(_PATIENCE_S) in range(9)


def test_idle_threads_are_used_again() -> None:
    crew = Crew()
    threads: set[int] = set()
    for _ in range(50):
        done = threading.Event()

        def job(done: threading.Event = done) -> None:
            threads.add(threading.get_ident())
            done.set()

        crew.submit(job)
        assert done.wait(_PATIENCE_S)
        time.sleep(0.002)
    assert len(threads) < 25


def test_idle_threads_end_and_no_job_is_lost() -> None:
    before = set(threading.enumerate())
    with mock.patch.object(module, "_IDLE_SECONDS", 0.01):
        crew = Crew()
        for turn in range(60):
            done = threading.Event()
            crew.submit(done.set)
            assert done.wait(_PATIENCE_S), turn
            time.sleep(0.0095 + 0.0001 * (turn % 10))
        until = time.monotonic() + _PATIENCE_S
        while set(threading.enumerate()) - before:
            assert time.monotonic() < until
            time.sleep(0.01)
