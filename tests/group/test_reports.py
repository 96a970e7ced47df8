"""Waits that get long are logged while they last, with what they wait for."""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import objcomm
from objcomm.transport import bulletin
from tests.group.helpers import SOON_S, assert_group_works, subgroup, tell_all
from tests.ranks import ranks
from tests.workers import here

HERE = Path(__file__).name


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collects what objcomm logs as warnings."""
    texts: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.levelno == logging.WARNING
            texts.append(record.getMessage())

    handler, logger = Collecting(), logging.getLogger("objcomm")
    logger.addHandler(handler)
    try:
        logger.propagate = False
        yield texts
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@ranks(3)
def test_the_lowest_rank_that_waits_says_for_whom_and_the_call_completes() -> None:
    with logged() as texts, objcomm.configure(report_after=0.5):
        objcomm.barrier("before")
        if here().rank == 1:
            time.sleep(2.5)
        assert objcomm.all_gather(here().rank) == [0, 1, 2]
    own = rf"rank 0 is in all_gather \(call \d+\) at .*{HERE}:\d+ for [\d.]+ s and waits: "
    other = rf"rank 1 is in no call; its last was barrier \(call \d+\) at .*{HERE}:\d+, "
    if here().rank == 0:
        assert any(re.match(own + other, text) for text in texts)
        assert len(texts) < 5  # after 0.5 s, 1 s, 2 s, not four times a second
    else:  # on a loaded machine rank 0 may be slow to say that it waits as well
        assert all("rank 0: no answer" in text for text in texts)
    assert_group_works()


@ranks(2)
def test_a_rank_in_a_callback_is_in_that_call() -> None:
    def work_slowly() -> str:
        time.sleep(2.0)
        return "done"

    with logged() as texts, objcomm.configure(report_after=0.5):
        objcomm.barrier()
        assert objcomm.run_on_main(work_slowly) == "done"
    if here().rank == 1:
        where = rf"rank 0 is in run_on_main \(call \d+\) .*{HERE}:\d+ for [\d.]+ s"
        assert any(re.search(f"and waits: {where}", text) for text in texts), texts
    assert_group_works()


@ranks(2)
def test_messages_and_works_are_reported_as_well() -> None:
    with logged() as texts, objcomm.configure(report_after=0.3):
        objcomm.barrier()
        if here().rank == 0:
            work = objcomm.all_gather("x", async_op=True)
            assert objcomm.recv(1) == "hello"
            work.wait()
            told = "\n".join(texts)
            assert "rank 0 is in recv" in told
            assert "rank 0 is in all_gather" in told
        else:
            time.sleep(1.2)
            objcomm.send("hello", 0)
            objcomm.all_gather("y")
    assert_group_works()


@ranks(2)
def test_a_store_that_does_not_answer_delays_no_report() -> None:
    go_on = threading.Event()
    with subgroup(0, 1) as group, logged() as texts, objcomm.configure(report_after=0.4):
        objcomm.barrier(group=group)
        if here().rank == 0:

            def answer_late(board: bulletin.Board) -> int:
                go_on.wait(SOON_S)
                return board.asked()

            with mock.patch.object(bulletin.Board, "ask", answer_late):
                work = objcomm.all_gather("x", group=group, async_op=True)
                until(lambda: any("store: no answer" in text for text in texts))
                go_on.set()
        tell_all("seen", "")
        if here().rank == 1:
            assert objcomm.all_gather("y", group=group) == ["x", "y"]
        else:
            assert work.wait() == ["x", "y"]
    assert_group_works()


@ranks(2)
def test_nothing_is_reported_where_nobody_asked_for_it() -> None:
    with logged() as texts, objcomm.configure(report_after=float("inf")):
        if here().rank == 1:
            time.sleep(1.0)
        objcomm.barrier()
    assert texts == []


@pytest.mark.parametrize("option", ["report_after", "lost_after"])
@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_time_that_is_none_is_refused(option: str, seconds: float) -> None:
    options: dict[str, Any] = {option: seconds}
    with pytest.raises(objcomm.UsageError, match=option):
        objcomm.configure(**options)
