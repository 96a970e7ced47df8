"""Queues that let threads in one after another, and threads that are used again."""

import contextlib
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from objcomm._transport import threads as module
from objcomm._transport.threads import (
    AlarmClock,
    Apart,
    OnceThread,
    SerialQueue,
    ThreadPool,
    Ticket,
    TicketQueue,
)
from tests.waits import PATIENCE_S, wait_until

GIVEN_UP = "before everything sent over them was taken"


class Held:
    """An object that can be weakly referenced."""


def placed(order: TicketQueue) -> Ticket:
    place = Ticket(order)
    place.take()
    return place


def without_threads() -> Any:
    return mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no threads"))


def test_a_place_that_is_left_again_after_an_interrupt_lets_the_next_one_in() -> None:
    order = TicketQueue()
    first, second = placed(order), placed(order)
    interrupted = mock.patch.object(TicketQueue, "admit", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        first.leave()
    first.leave()
    assert second.enter(0)


def test_places_are_entered_in_the_order_in_which_they_were_taken() -> None:
    order = TicketQueue()
    places = [placed(order) for _ in range(20)]
    assert order.waiting == 20
    done: list[int] = []

    def enter(number: int) -> None:
        with places[number] as place:
            assert place.enter(PATIENCE_S)
            done.append(number)

    with ThreadPoolExecutor(20) as pool:
        for number in reversed(range(20)):
            pool.submit(enter, number)
    assert done == list(range(20))
    assert order.waiting == 0
    with placed(order) as place:
        assert place.enter(0)
        assert order.waiting == 1


def test_an_error_inside_lets_the_next_one_in() -> None:
    order = TicketQueue()
    with pytest.raises(KeyError), placed(order):
        raise KeyError
    assert placed(order).enter(0)


def test_a_thread_that_leaves_before_its_turn_blocks_none_and_overtakes_none() -> None:
    order = TicketQueue()
    first, second, third = placed(order), placed(order), placed(order)
    assert first.enter(0)
    assert not second.enter(0.01)
    second.leave()
    assert not third.enter(0.01)  # the first one is inside
    for _ in range(2):
        first.leave()
    assert third.enter(0)
    assert order.waiting == 1


def test_a_place_that_was_never_taken_can_be_left() -> None:
    order = TicketQueue()
    first = placed(order)
    with Ticket(order):
        pass
    assert order.waiting == 1
    first.leave()
    assert placed(order).enter(0)


@pytest.mark.parametrize("has_started", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_thread_is_started_again_only_if_its_start_failed(
    error: BaseException, *, has_started: bool
) -> None:
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if has_started:
            start(thread)
        raise error

    single = OnceThread("of a test")
    done: list[int] = []
    may_end = threading.Event()

    def job() -> None:
        done.append(1)
        may_end.wait(PATIENCE_S)

    with mock.patch.object(threading.Thread, "start", fail), pytest.raises(type(error)):
        single.start(job)
    single.start(job)
    wait_until(lambda: single.is_alive, "its thread")
    single.start(job)
    may_end.set()
    wait_until(lambda: not single.is_alive, "the end of its thread")
    assert done == [1]
    assert single.has_begun


def test_after_a_job_was_done_here_there_is_no_thread_to_wait_for() -> None:
    single, done = OnceThread("of a test"), list[int]()
    single.do_here(lambda: done.append(1))
    single.join(PATIENCE_S)
    assert done == [1]


def test_jobs_that_wait_for_each_other_are_done_at_the_same_time() -> None:
    pool, meeting = ThreadPool(), threading.Barrier(9)

    def meet() -> None:
        meeting.wait(PATIENCE_S)

    for _ in range(8):
        pool.submit(meet)
    assert meeting.wait(PATIENCE_S) in range(9)


def test_idle_threads_are_used_again() -> None:
    pool = ThreadPool()
    threads: set[threading.Thread] = set()  # thread numbers would be reused
    for _ in range(50):
        pool.submit(lambda: threads.add(threading.current_thread()))
        wait_until(lambda: not pool.under_way, "the thread to be idle")
    assert 0 < len(threads) < 10


def test_idle_threads_end_and_no_job_is_lost() -> None:
    before = set(threading.enumerate())
    with mock.patch.object(module, "_IDLE_SECONDS", 0.01):
        pool = ThreadPool()
        for turn in range(60):
            done = threading.Event()
            pool.submit(done.set)
            assert done.wait(PATIENCE_S), turn
            time.sleep(0.0095 + 0.0001 * (turn % 10))
        wait_until(lambda: not set(threading.enumerate()) - before, "the end of its threads")


def test_an_abandoned_wait_raises_and_is_no_longer_counted() -> None:
    apart, begun, may_end = Apart(), threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def wait() -> None:
        threads.append(threading.current_thread())
        begun.set()
        may_end.wait()

    with (
        mock.patch.object(module, "_IDLE_SECONDS", 2 * PATIENCE_S),  # so this does not end them
        mock.patch.object(module, "_LAST_TURN_SECONDS", 0.01),
        ThreadPoolExecutor(1) as pool,
    ):
        caller = pool.submit(apart.do, wait)
        begun.wait()
        apart.do(lambda: threads.append(threading.current_thread()))  # its thread stays, idle
        apart.abandon()
        with pytest.raises(RuntimeError, match=GIVEN_UP):
            caller.result()
        assert not apart._pool.under_way  # noqa: SLF001  # there is no public way
        with pytest.raises(RuntimeError, match=GIVEN_UP):
            apart.do(wait)
        may_end.set()
    wait_until(lambda: not any(each.is_alive() for each in threads), "their end")
    assert not apart._pool.under_way  # noqa: SLF001  # likewise


@pytest.mark.parametrize("error", [None, LookupError("of the wait")])
def test_an_abandoned_wait_that_ends_first_has_its_own_outcome(error: Exception | None) -> None:
    """Its thread finds out when it gets its turn."""
    apart, begun, may_end = Apart(), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert may_end.wait(PATIENCE_S)
        if error is not None:
            raise error

    def let_it_end(futures: Any, _: float) -> Any:
        may_end.set()  # the caller has found that the wait had not ended
        return futures_wait(futures, PATIENCE_S)

    with mock.patch.object(module, "wait", let_it_end), ThreadPoolExecutor(1) as pool:
        caller = pool.submit(apart.do, wait)
        begun.wait()
        apart.abandon()
        assert caller.exception() is error
        assert pool.submit(apart.do, wait).exception() is error  # and so from now on


def test_without_a_spare_thread_the_caller_waits_unless_the_wait_was_abandoned() -> None:
    apart, waited = Apart(), list[threading.Thread]()
    with without_threads():
        apart.do(lambda: waited.append(threading.current_thread()))
        assert waited == [threading.current_thread()]
        apart.abandon()
        with pytest.raises(RuntimeError, match=GIVEN_UP):
            apart.do(lambda: pytest.fail("it may have no end"))


def test_the_error_of_a_wait_is_freed_with_its_last_user() -> None:
    """No cycle may keep what the wait holds, its connections, until the collector runs."""

    def wait(held: object) -> None:
        raise RuntimeError(f"while {type(held).__name__} was held")

    apart, held = Apart(), Held()
    gone = weakref.ref(held)
    gc.disable()
    try:
        with contextlib.suppress(RuntimeError):
            apart.do(partial(wait, held))
        del held
        wait_until(lambda: gone() is None, "what the wait held to be freed")
    finally:
        gc.enable()


def test_thousands_of_places_can_be_left_as_their_turns_come() -> None:
    order, turns = TicketQueue(), list[int]()
    first = placed(order)
    places: list[Ticket] = []

    def begin(number: int) -> None:
        turns.append(number)
        places[number].leave()

    for number in range(5000):
        places.append(Ticket(order, partial(begin, number)))
        places[-1].take()
    assert turns == []
    first.leave()
    assert turns == list(range(5000))
    assert order.waiting == 0


def test_a_callback_may_delay_the_next_turn_but_not_lose_it() -> None:
    order = TicketQueue()
    begun, go_on, called = threading.Event(), threading.Event(), threading.Event()

    def begin_slowly() -> None:
        begun.set()
        go_on.wait(PATIENCE_S)

    slow, next_one = Ticket(order, begin_slowly), Ticket(order, called.set)
    caller = threading.Thread(target=slow.take)
    caller.start()
    begun.wait(PATIENCE_S)
    next_one.take()
    slow.leave()
    assert not called.is_set()
    go_on.set()
    caller.join(PATIENCE_S)
    assert called.is_set()


def test_a_queue_does_its_jobs_in_order_on_a_thread_of_its_pool() -> None:
    pool = ThreadPool()
    line, done, threads = SerialQueue(pool), list[int](), set[threading.Thread]()

    def job(number: int) -> None:
        done.append(number)
        threads.add(threading.current_thread())

    for turn in (0, 100, 200):
        for number in range(turn, turn + 100):
            line.submit(partial(job, number))
        wait_until(lambda: len(done) == number + 1, "all jobs")  # noqa: B023  # called in this turn only
        wait_until(lambda: not pool.under_way, "the thread to be given back")
    assert done == list(range(300))
    assert len(threads) <= 3


def test_a_queue_without_a_thread_refuses_a_job_and_serves_the_next() -> None:
    line, done = SerialQueue(ThreadPool()), threading.Event()
    with without_threads(), pytest.raises(RuntimeError):
        line.submit(pytest.fail)
    line.submit(done.set)
    assert done.wait(PATIENCE_S)


def test_alarms_ring_in_the_order_of_their_times_on_one_thread() -> None:
    clock, rung = AlarmClock("of a test"), list[tuple[int, int]]()

    def ring(number: int) -> None:
        rung.append((number, threading.get_ident()))

    # All alarms are set at the same moment, before the thread looks, however busy the machine is.
    still = SimpleNamespace(monotonic=partial(float, time.monotonic()))
    with clock._changed, mock.patch.object(module, "time", still):  # noqa: SLF001  # there is no public way
        for number in (3, 1, 2):
            clock.set(0.01 * number, partial(ring, number))
    wait_until(lambda: len(rung) == 3, "all alarms")
    assert [number for number, _ in rung] == [1, 2, 3]
    assert len({thread for _, thread in rung}) == 1


def test_a_cancelled_alarm_never_rings_and_holds_nothing() -> None:
    clock, held, rung = AlarmClock("of a test"), Held(), threading.Event()
    gone = weakref.ref(held)
    alarms = [clock.set(1000.0, partial(pytest.fail, str(held))) for _ in range(1000)]
    with clock._changed:  # noqa: SLF001  # otherwise the alarm that is due soon might ring first
        alarms.append(clock.set(0.05, partial(pytest.fail, str(held))))
        alarms.append(clock.set(1000.0, partial(str, held)))
        del held
        for alarm in alarms:
            clock.cancel(alarm)
            clock.cancel(alarm)
    assert gone() is None
    clock.set(0.1, rung.set)  # after the alarm that must not ring
    assert rung.wait(PATIENCE_S)
    assert len(clock._alarms) <= 1  # noqa: SLF001  # there is no public way


def test_a_clock_without_alarms_ends_its_thread_and_gets_another() -> None:
    def names() -> list[str]:
        return [each.name for each in threading.enumerate()]

    with mock.patch.object(module, "_LINGER_SECONDS", 0.01):
        clock = AlarmClock("ending clock")
        for _ in range(3):
            rung = threading.Event()
            clock.set(0.001, rung.set)
            assert rung.wait(PATIENCE_S)
            wait_until(lambda: "ending clock" not in names(), "its thread to end")
