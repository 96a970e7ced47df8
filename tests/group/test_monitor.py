"""What ``objcomm.monitor`` and ``python -m objcomm top`` show of jobs that run."""

import contextlib
import ctypes
import gc
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import Activity, RankActivity
from objcomm.__main__ import main
from objcomm._observe.stats import totals
from objcomm._transport.store import loopback_store
from tests.group.helpers import hear, over_tcp, say
from tests.ranks import ranks
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here

Seen = Callable[[Activity], bool]


def watch(is_seen: Seen) -> Activity:
    """Look twice a second until something is seen."""
    looks = objcomm.monitor(interval=0.5)
    last = next(looks)
    for _ in range(int(2 * PATIENCE_S)):
        if is_seen(last):
            return last
        last = next(looks)
    raise AssertionError(f"waited in vain for {is_seen.__name__}; the last was {last}")


class Watching:
    """A thread of rank 0 that watches, while its main thread does something else.

    Attributes:
        seen: what it has seen; available after ``join``.
    """

    def __init__(self, is_seen: Seen) -> None:
        self.seen: Activity | None = None
        self._thread = threading.Thread(target=self._run, args=(is_seen,), daemon=True)
        self._thread.start()

    def _run(self, is_seen: Seen) -> None:
        try:
            self.seen = watch(is_seen)
        finally:
            say("seen")

    def join(self) -> Activity:
        """Return what the thread has seen."""
        self._thread.join()
        assert self.seen is not None
        return self.seen


def states(activity: Activity) -> list[str]:
    """By rank, what it does."""
    return [row.state for row in activity.ranks]


CALLS: dict[str, Callable[[int], object]] = {
    "barrier": lambda _: objcomm.barrier(),
    "recv": lambda last: (
        objcomm.recv(last)
        if objcomm.rank() < last
        else [objcomm.send("x", rank) for rank in range(last)]
    ),
    "recv with a limit": lambda last: (
        objcomm.recv(last, timeout=PATIENCE_S)
        if objcomm.rank() < last
        else [objcomm.send("x", rank) for rank in range(last)]
    ),
}


@ranks(2, 3, 4)
@pytest.mark.parametrize("call", CALLS)
def test_the_rank_for_which_the_others_wait_is_seen_with_its_line(call: str) -> None:
    objcomm.barrier()
    last = objcomm.world_size() - 1
    wanted = ["waiting"] * last + ["computing"]

    def is_late(activity: Activity) -> bool:
        return states(activity) == wanted and activity.slowest == last

    if objcomm.rank() == last:
        hear("seen")
        CALLS[call](last)
        return
    watching = Watching(is_late) if objcomm.rank() == 0 else None
    CALLS[call](last)
    if watching is not None:
        rows = watching.join().ranks
        assert {row.operation for row in rows[:last]} == {call.partition(" ")[0]}
        assert all(row.awaits >= 0 and "test_monitor.py:" in row.line for row in rows[:last])
        if call != "barrier":
            assert {row.awaits for row in rows[:last]} == {last}
        assert rows[last].awaits == -1
        assert " in hear" in rows[last].line
        assert rows[last].awaited_seconds > 0
        assert all(row.group for row in rows)


@ranks(1, 2, 3)
def test_calls_and_bytes_are_counted_exactly() -> None:
    """While all others wait in a call, nothing is added to what they have counted."""
    gc.collect()  # groups of earlier tests take their counters along
    before = objcomm.all_gather(totals())
    if objcomm.rank() == 0:
        wanted = ["computing"] + ["waiting"] * (len(before) - 1)
        rows = watch(lambda activity: states(activity) == wanted).ranks
        assert [row.calls for row in rows] == [each.calls + 1 for each in before]
        assert all(
            row.sent_nbytes >= each.sent_nbytes for row, each in zip(rows, before, strict=True)
        )
        assert "test_monitor.py:" in rows[0].line
    objcomm.barrier()


@ranks(2, 3)
def test_rates_are_those_of_the_job() -> None:
    def is_busy(activity: Activity) -> bool:
        rates = [row.received_nbytes_per_second or 0 for row in activity.ranks[1:]]
        sent = activity.ranks[0].sent_nbytes_per_second or 0
        return min(rates) > 10_000 and sent > 10_000

    watching = Watching(is_busy) if objcomm.rank() == 0 else None
    is_going = True
    while is_going:
        is_going = watching is not None and watching.seen is None
        is_going, _ = objcomm.broadcast((is_going, bytes(20_000)))
    if watching is not None:
        for row in watching.join().ranks:
            assert row.calls_per_second


@ranks(3, expect_dead=(1,))
def test_a_rank_that_is_stopped_or_killed_is_seen() -> None:
    pids = objcomm.all_gather(os.getpid())
    if objcomm.rank() == 0:
        watch(lambda activity: states(activity) == ["computing"] * 3)
        os.kill(pids[1], signal.SIGSTOP)
        watch(lambda activity: activity.ranks[1].state == "stopped")
        os.kill(pids[1], signal.SIGCONT)
        watch(lambda activity: activity.ranks[1].state == "computing")
        os.kill(pids[1], signal.SIGKILL)
        dead = watch(lambda activity: activity.ranks[1].state == "ended").ranks[1]
        assert dead.reason == f"its process, {pids[1]}, has ended"
        say("seen")
    hear("seen")


@ranks(2)
def test_a_rank_that_holds_pythons_lock_gives_no_answer() -> None:
    """As in a call of C code that does not release it."""
    objcomm.barrier()
    if objcomm.rank() == 0:
        watch(lambda activity: activity.ranks[1].state == "no answer")
        Path(here().folder / "go").touch()
    else:
        # ``PyDLL`` keeps the lock; sleeping through it, the process answers nobody.
        sleep = ctypes.PyDLL(None).usleep
        while not Path(here().folder / "go").exists():
            sleep(900_000)
    objcomm.barrier()


@ranks(2, joined=False)
def test_the_iterator_ends_with_the_world() -> None:
    with over_tcp():
        objcomm.barrier()
        looks = objcomm.monitor(interval=0.1)
        assert len(next(looks).ranks) == 2
        objcomm.barrier()
    assert list(looks) == []


def top(*arguments: str) -> list[str]:
    """The lines that ``python -m objcomm top`` prints until it ends."""
    path = here().folder / f"out{here().rank}"
    with path.open("w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
        assert main(["top", *arguments]) == 0
    return path.read_text(encoding="utf-8").splitlines()


@ranks(2, 4, joined=False)
def test_top_shows_a_job_once_as_json_and_as_text() -> None:
    with over_tcp() as port:
        objcomm.barrier()
        last = objcomm.world_size() - 1
        if objcomm.rank() == last:
            at = ("--once", "--store", f"127.0.0.1:{port}")
            (line,) = top(*at, "--json")
            told = json.loads(line)
            assert list(told) == [field.name for field in fields(Activity)]
            for rank, row in enumerate(told["ranks"]):
                assert list(row) == [field.name for field in fields(RankActivity)]
                assert row["rank"] == rank
            assert [row["state"] for row in told["ranks"]] == ["waiting"] * last + ["computing"]
            assert told["slowest"] == last
            head, titles, *rows = top(*at)
            assert f"slowest in the last minute: rank {last}, awaited for " in head
            assert titles.split()[:3] == ["rank", "doing", "for"]
            assert [row.split()[:2] for row in rows if row] == [
                [f"{rank}", "computing" if rank == last else "waiting"] for rank in range(last + 1)
            ]
        objcomm.barrier()


@ranks(3, joined=False)
def test_top_ends_when_the_job_ends() -> None:
    _watch_to_the_end(dist.destroy_process_group)


@ranks(3, joined=False, expect_dead=(0,))
def test_top_ends_when_the_process_that_hosts_the_store_is_killed() -> None:
    def end() -> None:
        if here().rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    _watch_to_the_end(end)


def _watch_to_the_end(end: Callable[[], Any]) -> None:
    """Run a job of ranks 0 and 1 until the third process, which is not a rank, has seen it."""
    if here().rank == 2:
        (*_, last) = top("--json", "--interval", "0.5", "--store", f"127.0.0.1:{hear('a job')}")
        assert len(json.loads(last)["ranks"]) == 2
        return
    if here().rank == 0:
        store = loopback_store()
        say("port", f"{store.port}")
    else:
        store = dist.TCPStore("127.0.0.1", int(hear("port")), is_master=False)
    dist.init_process_group("gloo", store=store, rank=here().rank, world_size=2)
    objcomm.barrier()  # before it meets others, a rank publishes its process
    if here().rank == 0:
        say("a job", f"{store.port}")
    out = here().folder / "out2"
    wait_until(lambda: out.exists() and out.read_text(), "the first looks")
    end()
