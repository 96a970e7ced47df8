"""launch: results, failures, and that no rank outlives it."""

import functools
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import LaunchError, UsageError
from objcomm._bootstrap import launch, worker
from tests.forked import FORKED
from tests.group.helpers import is_alive
from tests.printed import without_gloo
from tests.waits import wait_until

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MINE")
THREADS = "OMP_NUM_THREADS"
_DEADLINE_S = 300.0


class Sample:
    """A class that parent and rank import."""

    def __init__(self, value: Any) -> None:
        self.value = value


def assert_ended(pids: list[int]) -> None:
    """Wait until the processes are gone; the kernel ends them only after their parent."""
    wait_until(lambda: not any(map(is_alive, pids)), f"the end of processes {pids}")


def await_paths(*paths: Path) -> None:
    """Wait until other ranks have created all of these."""
    wait_until(lambda: all(path.exists() for path in paths), "other ranks", _DEADLINE_S)


def _chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def test_what_each_rank_returns_comes_back_in_rank_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(THREADS, raising=False)
    factor = 10  # a closure's
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    environ = dict(os.environ)

    def work(base: int, note: str) -> dict[str, Any]:
        (tmp_path / str(objcomm.rank())).write_text(str(os.getpid()))
        rank = objcomm.rank()
        assert objcomm.all_gather(rank) == [0, 1]
        return {
            "sum": base + factor * rank,
            "note": note,
            "sample": Sample(torch.full((3,), float(rank))),
            "variables": [os.environ[name] for name in VARIABLES],
            "threads": os.environ[THREADS],
        }

    fn = functools.partial(work, note="é")
    results = objcomm.launch(fn, 2, 32, environment={"MINE": "yes"}, timeout=_DEADLINE_S)
    assert [each["sum"] for each in results] == [32, 42]
    assert [each["note"] for each in results] == ["é", "é"]
    for rank, result in enumerate(results):
        assert type(result["sample"]) is Sample
        assert torch.equal(result["sample"].value, torch.full((3,), float(rank)))
        assert result["variables"] == [str(rank), str(rank), "2", "2", "127.0.0.1", "yes"]
        assert result["threads"] == str(max(1, len(os.sched_getaffinity(0)) // 2))  # its share
    now = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert now == handlers
    assert dict(os.environ) == environ
    assert not objcomm.is_initialized()
    assert_ended([int((tmp_path / str(rank)).read_text()) for rank in (0, 1)])


class EvaluationError(Exception):
    def __init__(self, step: int, *, metric: str) -> None:
        super().__init__(f"{metric} at {step}")
        self.step = step


def test_what_a_rank_returns_comes_back_exactly() -> None:
    count = 10

    def increment() -> int:
        nonlocal count
        count += 1
        return count

    def get() -> int:
        return count

    def work(increment: Any, get: Any) -> Any:
        increment()
        assert get() == 11
        error = EvaluationError(3, metric="loss")
        error.__cause__ = KeyError("loss")
        return increment, get, error

    ((increment_there, get_there, error),) = objcomm.launch(work, 1, increment, get, joined=False)
    increment_there()
    assert (get_there(), count) == (12, 10)
    assert (str(error), error.step, repr(error.__cause__)) == ("loss at 3", 3, "KeyError('loss')")


def _answers_over_ipv6() -> bool:
    try:
        socket.create_connection(("::1", int(os.environ["MASTER_PORT"]))).close()
    except OSError:
        return False
    return True


def test_no_name_has_to_be_looked_up_of_ranks_that_meet() -> None:
    """On a dual-stack socket torch would look up the name of ``::ffff:127.0.0.1``."""
    answers = objcomm.launch(_answers_over_ipv6, 1, joined=False, timeout=_DEADLINE_S)
    assert answers == [False]


def _threads() -> str:
    return os.environ[THREADS]


def test_a_number_of_threads_that_is_set_is_every_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS, "17")
    assert objcomm.launch(_threads, 1, joined=False, timeout=_DEADLINE_S) == ["17"]


class SlowToTellError(Exception):
    """Takes longer to describe than the others take to notice that its rank has left."""

    def __str__(self) -> str:
        time.sleep(1)
        return "no batches"


@pytest.mark.usefixtures("constant_file_names")
def test_all_ranks_failures_are_one_error_that_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> object:
        rank = objcomm.rank()
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        objcomm.barrier()
        if rank == 0:
            await_paths(tmp_path / "heard")
            raise SlowToTellError
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            try:
                objcomm.recv(1)
            finally:
                (tmp_path / "heard").touch()
        return threading.Lock()

    # No process needs to be killed here, however slow the machine is.
    monkeypatch.setattr(launch, "_GRACE_SECONDS", _DEADLINE_S)
    with pytest.raises(LaunchError) as caught:
        objcomm.launch(fail, 4)
    error = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  # our own
    assert sorted(error.failures) == [0, 1, 2, 3]
    assert str(error) == str(caught.value)
    assert error.failures[0].type_name.endswith("SlowToTellError")
    assert re.search(rf'"{re.escape(__file__)}", line \d+, in fail', error.failures[0].traceback)
    assert error.failures[1].message.endswith("ended by SIGKILL")
    assert error.failures[2].type_name == "objcomm.TransportError"
    assert "pickle" in error.failures[3].message  # a lock stays where it is
    assert next(iter(error.failures)) == 1  # no rank reported it, so none was earlier
    assert list(error.failures)[-1] == 2  # an error received from another rank is not a cause
    for told in ("SlowToTellError: no batches", "Traceback of rank 0", "Traceback of rank 2"):
        assert told in str(error)
    assert_ended([int((tmp_path / str(rank)).read_text()) for rank in range(4)])


@pytest.mark.long  # the ranks' reports are also sorted above
def test_the_failure_that_caused_others_comes_first() -> None:
    def work() -> None:
        if objcomm.rank() == 1:
            raise SlowToTellError
        dist.barrier()  # torch's own: only its time shows whether it is a cause

    with pytest.raises(LaunchError) as caught:
        objcomm.launch(work, 2, timeout=_DEADLINE_S)
    assert list(caught.value.failures) == [1, 0]
    assert caught.value.failures[1].message == "no batches"


@pytest.mark.long
def test_who_has_told_and_is_slow_to_end_comes_before_who_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 1.0)  # counted from the report

    def work() -> None:
        if int(os.environ["RANK"]) == 0:
            (tmp_path / "waits").touch()
            threading.Event().wait()
        await_paths(tmp_path / "waits")
        threading.Thread(target=time.sleep, args=(1000,)).start()  # keeps the process
        raise LookupError("no batches")

    with pytest.raises(LaunchError) as caught:
        objcomm.launch(work, 2, joined=False)
    assert list(caught.value.failures) == [1, 0]
    ended = caught.value.failures[0]
    assert "another rank failed" in ended.message
    assert "in work" in ended.traceback  # where it stood
    assert "Traceback of rank 0" in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        LookupError("own"),
        objcomm.TransportTimeout("gather", (1,), 3.0),
        _chained(objcomm.CollectiveError("gather", {}), LookupError("own")),
    ],
)
def test_what_may_be_a_cause(error: BaseException) -> None:
    assert not worker.is_caused_elsewhere(error)


@pytest.mark.parametrize(
    "error",
    [
        objcomm.TransportError("gather", (1,), "it ended"),
        objcomm.BrokenGroupError("gather", "it ended"),
        objcomm.CollectiveError("gather", {}),
        _chained(LookupError("no result"), objcomm.TransportError("gather", (1,), "it ended")),
    ],
)
def test_what_a_rank_heard_of_others_is_no_cause(error: BaseException) -> None:
    assert worker.is_caused_elsewhere(error)


@pytest.mark.long
def test_a_rank_may_exit_and_time_may_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 1.0)  # counted from the exit

    def stay() -> None:
        threading.main_thread().join()
        (tmp_path / "left").touch()  # so the result is reported
        time.sleep(1000)

    def leave() -> None:
        assert not objcomm.is_initialized()
        rank = int(os.environ["RANK"])
        if rank == 0:
            thread = threading.Thread(target=stay)
            thread.start()  # keeps the process alive without losing the result
        else:
            await_paths(tmp_path / "left")  # else rank 0 might be killed before it finishes
        sys.exit(3 * rank)

    with pytest.raises(LaunchError, match="SystemExit: 3") as caught:
        objcomm.launch(leave, 2, joined=False)
    assert list(caught.value.failures) == [1]
    with pytest.raises(LaunchError, match=r"had not ended within 1 s"):
        objcomm.launch(_wait, 1, timeout=1)


def _wait() -> None:
    threading.Event().wait()


@pytest.mark.long
def test_who_must_be_killed_has_ended_when_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.0)  # for torch as well

    def work() -> None:
        if os.environ["RANK"] == "0":
            (tmp_path / "pid.new").write_text(str(os.getpid()))
            (tmp_path / "pid.new").rename(tmp_path / "pid")
            _wait()
        await_paths(tmp_path / "pid")
        raise ValueError("the other must be ended")

    with pytest.raises(LaunchError, match="the other must be ended"):
        objcomm.launch(work, 2, joined=False)
    with pytest.raises(ChildProcessError):  # its exit status was taken
        os.waitpid(int((tmp_path / "pid").read_text()), os.WNOHANG)


def test_what_cannot_start_is_refused_at_once() -> None:
    wrong: Any = None
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(UsageError, match="nproc="):
            objcomm.launch(print, wrong)
    wrong = None
    with pytest.raises(UsageError, match="fn=None must be a function"):
        objcomm.launch(wrong, 1)
    wrong = 80
    with pytest.raises(UsageError, match="'PORT': 80"):
        objcomm.launch(print, 1, environment={"PORT": wrong})
    with pytest.raises(UsageError, match="timeout=0"):
        objcomm.launch(print, 1, timeout=0)
    lock = threading.Lock()
    with pytest.raises(UsageError, match="can't be sent"):
        objcomm.launch(lambda: lock, 1)


_SCRIPT = """
import objcomm

class Own:
    def __init__(self, value): self.value = value

def work():
    arrived = objcomm.all_gather(Own(objcomm.rank()))
    assert all(type(each) is Own for each in arrived)
    return arrived[-1]

results = objcomm.launch(work, 2)
print([type(each) is Own and each.value for each in results])
"""


@pytest.mark.long  # an example in the documentation also launches a function of ``__main__``
def test_what_stands_in_main_goes_to_the_ranks_and_back() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"exec({textwrap.dedent(_SCRIPT)!r})",
        ],  # its main module has no file
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    assert without_gloo(done.stdout).split("\n")[0] == "[1, 1]", done.stderr


def _launch_and_wait(folder: Path) -> None:
    """Run a program that is killed while its rank waits; forked to avoid importing torch."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def work() -> None:
        (folder / "unfinished").write_text(str(os.getpid()))
        (folder / "unfinished").rename(folder / "rank")
        threading.Event().wait()

    try:
        objcomm.launch(work, 1)
    except KeyboardInterrupt:
        (folder / "interrupted").touch()


def test_whatever_ends_the_program_ends_its_ranks(tmp_path: Path) -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    folders = [tmp_path / sent.name for sent in signals]
    programs = []
    for folder in folders:
        folder.mkdir()
        programs.append(FORKED.Process(target=_launch_and_wait, args=(folder,)))
        programs[-1].start()
    await_paths(*(folder / "rank" for folder in folders))
    pids = [int((folder / "rank").read_text()) for folder in folders]
    assert all(map(is_alive, pids))
    for program, sent in zip(programs, signals, strict=True):
        os.kill(program.pid or 0, sent)
    for program in programs:
        program.join(_DEADLINE_S)
    assert_ended(pids)
    assert [program.exitcode for program in programs] == [0, -signal.SIGTERM, -signal.SIGKILL]
    assert [(folder / "interrupted").exists() for folder in folders] == [True, False, False]
