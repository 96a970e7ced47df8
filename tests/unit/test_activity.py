"""What a monitor concludes from ranks' answers, and from what an attacker left in the store."""

import contextlib
import json
import math
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any
from unittest import mock
from urllib.request import urlopen

import pytest
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families

import objcomm
from objcomm import Activity, RankActivity
from objcomm.__main__ import main
from objcomm._bootstrap import top
from objcomm._failures import activity as monitoring
from objcomm._failures.activity import Monitor
from objcomm._failures.deadlock import LaneWait, Step, WaitSnapshot
from objcomm._failures.liveness import Process
from objcomm._failures.noticeboard import Reader, boards_in
from objcomm._observe.stacks import Running
from objcomm._transport.store import loopback_store, pack_record
from objcomm._wire.header import Operation
from tests.hosts import free_port
from tests.waits import PATIENCE_S, wait_until

MAIN = 11
LATEST = 1 << 40  # an answer to any question
STEP = Step(3, Operation.BARRIER, -1, 0, "train.py:5")


def lane(**fields: Any) -> LaneWait:
    """The main thread's lane, which waits for rank 1."""
    usual = {"group": "g", "nonce": "n", "number": 0, "thread": MAIN, "waiter": MAIN}
    usual |= {"next_sequence": 4, "taken": -1, "now": STEP, "awaits": 1, "since": 1.0}
    return LaneWait(**usual | {"seconds": 2.5, "past": (STEP,), "waits_for": 1} | fields)  # type: ignore[arg-type]  # of many types


def answer(*lanes: LaneWait, **fields: Any) -> WaitSnapshot:
    """A snapshot of a rank with these lanes, in line 9."""
    running = (Running(MAIN, "train.py:9", "step", 0.5),)
    usual = WaitSnapshot(LATEST, MAIN, lanes, running=running, taken_at=10.0, calls=3)
    return usual._replace(**fields)


class Job:
    """A store as the ranks of a job of two leave it, and a monitor of it."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        reader = Reader(self.store)
        self.monitor = Monitor(lambda job: job(reader), 2)
        for rank in range(2):
            self.put(f"process/{rank}", Process.own()._replace(world_size=2))

    def put(self, key: str, record: Any) -> None:
        """Store a record, or bytes."""
        packed: Any = record if type(record) is bytes else pack_record(record)
        self.store.set(key, packed)

    def look(self) -> Activity:
        """Look without waiting for answers."""
        with (
            mock.patch.object(monitoring, "pause_seconds", return_value=0.0),
            mock.patch.object(monitoring, "_LATE_SECONDS", 0.1),
        ):
            return self.monitor.look()


WAITING = ("waiting", "barrier", 3, 1, 2.5)
IN_CALL = ("in call", "barrier", 3, -1, 2.5)
COMPUTING = ("computing", "barrier", 3, -1, 2.5)
BRIEFLY = ("computing", "barrier", 3, -1, 0.5)
IDLE = lane(now=None, waits_for=-1, waiter=0)
OTHERS = lane(thread=5, waiter=5)
ANSWERS: dict[str, tuple[WaitSnapshot, tuple[Any, ...]]] = {
    "a call that waits": (answer(lane()), WAITING),
    "a call that encodes": (answer(IDLE._replace(is_inside=True)), IN_CALL),
    "after a call": (answer(IDLE), COMPUTING),
    "an outstanding asynchronous call": (answer(lane(waiter=0)), COMPUTING),
    "only another thread waits": (answer(OTHERS, IDLE._replace(waits_for=1, seconds=0.5)), BRIEFLY),
    "only another thread uses objcomm": (answer(OTHERS), WAITING),
    "no call yet": (answer(), ("computing", "", -1, -1, 0.0)),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_row_shows_what_the_main_thread_does(name: str) -> None:
    job, (snapshot, wanted) = Job(), ANSWERS[name]
    job.put("where/0", snapshot)
    row = job.look().ranks[0]
    assert (row.state, row.operation, row.call, row.awaits, row.seconds) == wanted


UNSOUND: dict[str, object] = {
    "no record": b"\xc1",
    "another record": Process.own(),
    "too long": bytes((4 << 20) + 1),
    "an infinite wait": answer(lane(seconds=math.inf)),
    "a wait that is not a number": answer(lane(seconds=math.nan)),
    "a time before all times": answer(taken_at=-math.inf),
    "a rank beyond the world": answer(lane(waits_for=2)),
    "fewer calls than none": answer(calls=-1),
    "an inside without a call": answer(lane(now=None, is_inside=True, past=(), seconds=-1.0)),
}


@pytest.mark.parametrize("record", UNSOUND.values(), ids=UNSOUND)
def test_a_record_that_no_rank_wrote_is_not_an_answer(record: object) -> None:
    job = Job()
    job.put("where/0", record)
    job.put("where/1", answer())
    activity = job.look()
    assert [row.state for row in activity.ranks] == ["no answer", "computing"]
    assert activity.slowest == -1


def test_no_text_of_the_store_controls_the_terminal() -> None:
    odd = "\x1b[2J\r\n\x07\udc9b" + "x" * 1000
    job = Job()
    step = STEP._replace(operation=-7, operation_name=odd)
    running = (Running(MAIN, f"{odd}:1", odd, 0.5),)
    job.put("where/0", answer(lane(group=odd, now=step), running=running))
    job.put("process/1", Process.own()._replace(end_reason=odd))
    activity = job.look()
    assert [row.state for row in activity.ranks] == ["waiting", "ended"]
    lines = top._lines(activity, "here:1")  # noqa: SLF001  # what top prints
    assert all(line.isprintable() and len(line) < 1000 for line in lines)
    assert activity.ranks[0].group.isprintable()


def test_rates_are_measured_between_two_answers_by_the_ranks_own_clock() -> None:
    job = Job()
    job.put("where/0", answer(sent_nbytes=100))
    first = job.look().ranks[0]
    assert (first.calls, first.calls_per_second) == (3, None)
    job.put("where/0", answer(taken_at=12.0, calls=13, sent_nbytes=50))
    second = job.look().ranks[0]
    assert (second.calls_per_second, second.sent_nbytes_per_second) == (5.0, 0.0)
    job.store.set("where/0", "")
    third = job.look().ranks[0]
    assert (third.state, third.calls, third.calls_per_second) == ("no answer", 13, None)
    assert third.seconds > 0


def test_answers_in_quick_succession_give_no_infinite_rate() -> None:
    """An attacker may have written them, and JSON has no infinity."""
    job = Job()
    job.put("where/0", answer(taken_at=0.0))
    job.look()
    job.put("where/0", answer(taken_at=5e-324, calls=1 << 62, sent_nbytes=1 << 62))
    text = json.dumps(asdict(job.look()), allow_nan=False)
    assert json.loads(text)["ranks"][0]["calls_per_second"] is None


def test_a_rank_without_a_record_has_not_started() -> None:
    job = Job()
    job.put("process/0", Process.own()._replace(world_size=3))
    assert [row.state for row in job.look().ranks] == ["no answer", "no answer", "not started"]


# By rank, the rank that it waits for; and for how many ranks' waits each one accounts.
CHAINS: dict[str, tuple[list[int], dict[int, int]]] = {
    "none waits": ([-1, -1], {}),
    "a chain": ([1, 2, -1], {2: 2}),
    "two wait for one": ([2, 2, -1], {2: 2}),
    "a cycle": ([1, 0], {}),
    "one waits for any rank": ([1, -2], {}),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_wait_counts_for_the_rank_at_the_end_of_its_chain(name: str) -> None:
    awaits, wanted = CHAINS[name]
    rows = [
        RankActivity(rank, "computing" if of == -1 else "waiting", awaits=max(of, -1))
        for rank, of in enumerate(awaits)
    ]
    awaited = Job().monitor._awaited  # noqa: SLF001  # the look's last step
    assert awaited(rows, 100.0) == {}
    assert awaited(rows, 102.0) == {rank: 2.0 * count for rank, count in wanted.items()}
    awaited([], 103.0)
    assert awaited([], 163.0) == {}  # more than a minute later


@contextlib.contextmanager
def serving(activity: Activity) -> Iterator[str]:
    """Metrics as top serves them; gives the address that it prints."""
    with contextlib.ExitStack() as leaving, mock.patch.object(top, "_say") as said:
        top._export_at(0, leaving)(activity)  # noqa: SLF001  # as top does
        yield str(said.call_args[0][0].split()[-1])


def page_of(url: str) -> str:
    with urlopen(url) as page:  # noqa: S310  # our own
        return str(page.read().decode())


def connected(url: str) -> socket.socket:
    host, _, port = url.split("/")[2].rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def test_prometheus_reads_what_ranks_do() -> None:
    rows = (
        RankActivity(0, "waiting", seconds=2.5, awaits=1, calls=7),
        RankActivity(1, "ended", awaited_seconds=1.5),
    )
    activity = Activity(0.0, rows, 1)
    with serving(activity) as url:
        text = page_of(url)
    assert text == objcomm.exporters.activity_to_prometheus(activity)
    found = {
        (sample.name, sample.labels["rank"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert [found["objcomm_rank_answers", rank] for rank in "01"] == [1, 0]
    assert found["objcomm_rank_waiting_seconds", "0"] == 2.5
    assert found["objcomm_rank_awaits", "0"] == 1
    assert found["objcomm_rank_awaited_seconds", "1"] == 1.5
    assert found["objcomm_rank_calls_total", "0"] == 7


def test_a_client_that_hangs_up_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    many = tuple(RankActivity(rank, "waiting") for rank in range(20_000))
    requests = [b"GET /metrics HTTP/1.1\r\n\r\n", b"GET /met", b"\0\xff\r\n\r\n", b"X / \r\n\r\n"]
    with serving(Activity(0.0, many, 0)) as url:
        for request in requests:
            client = connected(url)
            client.sendall(request)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()  # with a reset
        assert page_of(url).count("\n") == 7 * 20_002
        wait_until(
            lambda: not any("process_request" in each.name for each in threading.enumerate()),
            "all clients to be served",
        )
    assert capsys.readouterr() == ("", "")


def test_a_client_that_asks_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "_CLIENT_SECONDS", 0.1)
    with serving(Activity(0.0, (), 0)) as url, connected(url) as client:
        assert client.recv(1) == b""


@pytest.mark.parametrize(("slowest", "at"), [(1, 3), (5, 7), (6, 7), (40, 7)])
def test_top_shows_as_many_ranks_as_the_terminal_has_room_for(slowest: int, at: int) -> None:
    rows = tuple(RankActivity(rank, "computing", line="x" * 300) for rank in range(50))
    activity = Activity(0.0, rows, slowest)
    lines = top._lines(activity, "here:1")  # noqa: SLF001  # what top prints
    with mock.patch("shutil.get_terminal_size") as size:
        size.return_value.columns, size.return_value.lines = 80, 10
        shown = top._screen(activity, lines).removeprefix("\x1b[H\x1b[J").split("\n")  # noqa: SLF001  # likewise
    assert len(shown) == 9
    assert shown[-1] == "... and 44 more ranks; --json shows all"
    assert [line.startswith("\x1b[1m") for line in shown].index(True) == at
    assert shown[at].removeprefix("\x1b[1m").startswith(f"{slowest} ")
    assert max(map(len, shown)) <= 80 + len("\x1b[1m\x1b[m")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_top_restores_the_terminal_after_a_signal(number: signal.Signals) -> None:
    store = loopback_store()
    alive: Any = pack_record(Process.own()._replace(world_size=1))
    store.set("objcomm/process/0", alive)
    terminal, end = pty.openpty()
    command_line = [sys.executable, "-m", "objcomm", "top", "--store", f"127.0.0.1:{store.port}"]
    with subprocess.Popen(command_line, stdin=end, stdout=end, stderr=end) as process:
        os.close(end)
        shown = b""
        with os.fdopen(terminal, "rb", buffering=0) as screen:
            while b"no answer" not in shown:
                shown += screen.read(1 << 16)
            assert shown.startswith(b"\x1b[?1049h")
            process.send_signal(number)
            with contextlib.suppress(OSError):  # Linux's end of file for a terminal
                while more := screen.read(1 << 16):
                    shown += more
        assert process.wait(PATIENCE_S) == (0 if number == signal.SIGINT else 128 + number)
    assert shown.endswith(b"\x1b[?1049l")


def test_noticeboards_are_found_by_the_prefixes_of_their_keys() -> None:
    keys = ["a/objcomm/process/0", "a/objcomm/process/12", "objcomm/process/1", "objcomm/asked"]
    keys += ["a/objcomm/process/x", "bobjcomm/process/1", "a/objcomm/process/99999999"]
    assert boards_in(keys) == {"a/": [0, 12], "": [1]}
    attempts = [f"/worker/attempt_{number}/" for number in range(12)]
    assert sorted(sorted(attempts), key=top._with_numbers) == attempts  # noqa: SLF001  # of its sort


def test_the_noticeboard_whose_ranks_answer_is_watched() -> None:
    """The store of torchrun keeps those of attempts that have ended."""
    store = loopback_store()
    alive: Any = pack_record(Process.own()._replace(world_size=1))
    for attempt in (9, 10, 11):
        store.set(f"/worker/attempt_{attempt}/objcomm/process/0", alive)
    answered: Any = pack_record(answer(lane(waits_for=-1)))
    store.set("/worker/attempt_10/objcomm/where/0", answered)
    (row,) = top._attached("127.0.0.1", store.port).look().ranks  # noqa: SLF001  # as top does
    assert (row.state, row.operation) == ("waiting", "barrier")


WRONG: dict[str, tuple[list[str], str]] = {
    "no address": ([], "give --store HOST:PORT"),
    "no port": (["--store", "here"], "give --store HOST:PORT"),
    "an interval": (["--store", "here:1", "--interval", "nan"], "--interval must be at least 0.5"),
    "a port": (["--store", "here:1", "--prometheus", "65536"], "--prometheus must be a port"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_of_top_is_refused(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, said = WRONG[name]
    for variable in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(SystemExit, match="2"):
        main(["top", *arguments])
    assert said in capsys.readouterr().err


def test_top_says_that_there_is_no_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = loopback_store()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for port, said in (
        (free_port(), "can't be reached: connection refused"),
        (store.port, "has used objcomm yet"),
    ):
        monkeypatch.setenv("MASTER_PORT", f"{port}")
        assert main(["top", "--once"]) == 1
        assert said in capsys.readouterr().err


def test_a_port_of_another_program_is_not_a_store(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "_CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert main(["top", "--store", f"127.0.0.1:{listening.getsockname()[1]}"]) == 1
    assert "is not the store of a running job" in capsys.readouterr().err
