"""What ``objcomm.monitor`` and ``python -m objcomm top`` show of jobs that run."""

import contextlib
import ctypes
import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
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
from tests.group.in_flight import meanwhile
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


@contextlib.contextmanager
def watching(is_seen: Seen) -> Iterator[list[Activity]]:
    """On rank 0, a thread watches during the block; the list then has what it has seen."""
    seen: list[Activity] = []

    def run() -> None:
        try:
            seen.append(watch(is_seen))
        finally:
            say("seen")

    with meanwhile(run) if objcomm.rank() == 0 else contextlib.nullcontext():
        yield seen


def states(activity: Activity) -> list[str]:
    """By rank, what it does."""
    return [row.state for row in activity.ranks]


def recv_from_the_last(last: int, **options: Any) -> None:
    if objcomm.rank() < last:
        objcomm.recv(last, **options)
    else:
        for rank in range(last):
            objcomm.send("x", rank)


CALLS: dict[str, Callable[[int], object]] = {
    "barrier": lambda _: objcomm.barrier(),
    "recv": recv_from_the_last,
    "recv with a limit": partial(recv_from_the_last, timeout=PATIENCE_S),
}


@ranks(2, 3, 4)
@pytest.mark.parametrize("call", CALLS)
def test_the_rank_for_which_the_others_wait_is_seen_with_its_line(call: str) -> None:
    objcomm.barrier()
    last = objcomm.world_size() - 1

    def is_late(activity: Activity) -> bool:
        wanted = ["waiting"] * last + ["computing"]
        return states(activity) == wanted and activity.slowest == last

    if objcomm.rank() == last:
        hear("seen")
        CALLS[call](last)
        return
    with watching(is_late) as seen:
        CALLS[call](last)
    if objcomm.rank() == 0:
        rows = seen[0].ranks
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

    with watching(is_busy) as seen:
        is_over = False
        while not is_over:
            is_over, _ = objcomm.broadcast((bool(seen), bytes(20_000)))
    if objcomm.rank() == 0:
        assert all(row.calls_per_second for row in seen[0].ranks)


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
            shown, wanted = json.loads(line), ["waiting"] * last + ["computing"]
            assert list(shown) == [field.name for field in fields(Activity)]
            for rank, row in enumerate(shown["ranks"]):
                assert list(row) == [field.name for field in fields(RankActivity)]
                assert (row["rank"], row["state"]) == (rank, wanted[rank])
            assert len(shown["ranks"]) == last + 1
            assert shown["slowest"] == last
            head, titles, *rows = top(*at)
            assert f"slowest in the last minute: rank {last}, awaited for " in head
            assert titles.split()[:3] == ["rank", "doing", "for"]
            words = [row.split()[:2] for row in rows if row]
            assert words == [[f"{rank}", state] for rank, state in enumerate(wanted)]
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
