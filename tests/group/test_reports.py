"""Long waits are logged while they last, with what they wait for."""

import re
import threading
from functools import partial
from pathlib import Path
from unittest import mock

import torch.distributed as dist

import objcomm
from objcomm._failures import mesh, noticeboard
from tests.group.helpers import assert_group_works, hear, is_waiting, say, subgroup, tell_all
from tests.group.reports import logged, told_when
from tests.group.watched import after_looks, patiently
from tests.ranks import ranks
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here

HERE = Path(__file__).name


@ranks(3)
def test_the_lowest_waiting_rank_reports_what_it_waits_for_and_the_call_completes() -> None:
    own = rf"rank 0 is in all_gather \(call \d+\) at .*{HERE}:\d+ for ([\d.]+) s and waits: "
    other = (
        r"rank 1 is in no call, now at .*helpers\.py:\d+ in hear( \(seen there for [\d.]+ s\))?; "
        rf"its last was barrier 'before' \(call \d+\) at .*{HERE}:\d+, "
    )
    objcomm.barrier("before")  # also reported if it takes that long
    with logged() as texts, objcomm.configure(report_after=0.3), patiently():
        if here().rank == 0:
            told_when(is_waiting, "rank 0 waits")
            told_when(lambda: len(texts) == 3, "three reports")
        else:
            hear("three reports" if here().rank == 1 else "rank 0 waits")
        assert objcomm.all_gather(here().rank) == [0, 1, 2]
    if here().rank == 0:
        seconds = [float(found[1]) for text in texts if (found := re.match(own + other, text))]
        assert len(seconds) == len(texts)
        # Each report comes after twice the time, not every 0.25 s; the text rounds.
        assert all(each > 0.3 * 2**turn - 0.06 for turn, each in enumerate(seconds))
    else:  # rank 0 reports for all
        assert texts == []
    assert_group_works()


@ranks(2)
def test_a_rank_in_a_callback_is_in_that_call() -> None:
    where = (
        rf"and waits: rank 0 is in run_on_main \(call \d+\) .*{HERE}:\d+ for [\d.]+ s"
        r", now at .*helpers\.py:\d+ in hear"
    )

    def work_slowly() -> str:
        return hear("reported")

    with logged() as texts, objcomm.configure(report_after=0.1), patiently():
        objcomm.barrier()
        if here().rank == 1:
            told_when(lambda: any(re.search(where, text) for text in texts), "reported")
        assert objcomm.run_on_main(work_slowly) == ""
    assert_group_works()


@ranks(2)
def test_messages_and_works_are_reported_as_well() -> None:
    with logged() as texts, objcomm.configure(report_after=0.1), patiently():
        objcomm.barrier()
        if here().rank == 0:

            def has_both() -> bool:
                reports = "\n".join(texts)
                return "rank 0 is in recv" in reports and "rank 0 is in all_gather" in reports

            work = objcomm.all_gather("x", async_op=True)
            told_when(has_both, "reported")
            assert objcomm.recv(1) == "hello"
            work.wait()
        else:
            hear("reported")
            objcomm.send("hello", 0)
            objcomm.all_gather("y")
    assert_group_works()


@ranks(2)
def test_a_store_that_does_not_answer_delays_no_report() -> None:
    go_on = threading.Event()
    with subgroup(0, 1) as group, logged() as texts, objcomm.configure(report_after=0.1):
        objcomm.barrier(group=group)
        if here().rank == 0:

            def answer_late(board: noticeboard.Board) -> int:
                assert go_on.wait(PATIENCE_S)
                return board.asked()

            with mock.patch.object(noticeboard.Board, "ask", answer_late):
                work = objcomm.all_gather("x", group=group, async_op=True)
                wait_until(lambda: any("store: no answer" in text for text in texts), "the report")
                go_on.set()
        tell_all("seen", "")
        if here().rank == 1:
            assert objcomm.all_gather("y", group=group) == ["x", "y"]
        else:
            assert work.wait() == ["x", "y"]
    assert_group_works()


@ranks(2)
def test_a_first_call_soon_reports_its_operation_and_the_rank_it_waits_for() -> None:
    objcomm.barrier()  # only ranks that have used objcomm answer
    group = dist.new_group([0, 1])
    if here().rank == 0:
        with mock.patch.object(mesh, "_REPORT_SECONDS", 0.1), logged() as texts, patiently():
            told_when(lambda: texts, "it was reported")
            objcomm.gather("a", group=group)
        assert re.match(r"rank 0 is in gather \(call 0\) at .* and waits: rank 1", texts[0]), texts
    else:
        hear("it was reported")
        objcomm.gather("b", group=group)


@ranks(2)
def test_nothing_is_reported_if_reports_are_off() -> None:
    with logged() as texts, objcomm.configure(report_after=float("inf")):
        if here().rank == 1:
            hear("rank 0 has looked")
        with after_looks(20, partial(say, f"rank {here().rank} has looked")):
            objcomm.barrier()
    assert texts == []
