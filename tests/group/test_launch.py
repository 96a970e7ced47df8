"""launch: results, failures, and that no rank outlives it."""

import functools
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import LaunchError, UsageError
from objcomm._bootstrap import launch, worker
from tests.forked import FORKED
from tests.group.helpers import error_in, is_alive
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


def test_results_are_in_rank_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(THREADS, raising=False)
    factor = 10  # a closure's
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = list(map(signal.getsignal, signals))
    environ = dict(os.environ)

    def work(base: int, note: str) -> dict[str, Any]:
        rank = objcomm.rank()
        (tmp_path / str(rank)).write_text(str(os.getpid()))
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
    for rank, result in enumerate(results):
        assert (result["sum"], result["note"]) == (32 + 10 * rank, "é")
        assert type(result["sample"]) is Sample
        assert torch.equal(result["sample"].value, torch.full((3,), float(rank)))
        assert result["variables"] == [str(rank), str(rank), "2", "2", "127.0.0.1", "yes"]
        assert result["threads"] == str(max(1, len(os.sched_getaffinity(0)) // 2))  # its share
    assert list(map(signal.getsignal, signals)) == handlers
    assert dict(os.environ) == environ
    assert not objcomm.is_initialized()
    assert_ended([int((tmp_path / str(rank)).read_text()) for rank in (0, 1)])


class EvaluationError(Exception):
    def __init__(self, step: int, *, metric: str) -> None:
        super().__init__(f"{metric} at {step}")
        self.step = step


def test_a_result_arrives_exactly_as_it_was() -> None:
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


def test_ranks_that_meet_need_no_name_resolution() -> None:
    """On a dual-stack socket torch would look up the name of ``::ffff:127.0.0.1``."""
    answers = objcomm.launch(_answers_over_ipv6, 1, joined=False, timeout=_DEADLINE_S)
    assert answers == [False]


def test_every_rank_keeps_a_number_of_threads_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS, "17")
    counts = objcomm.launch(lambda: os.environ[THREADS], 1, joined=False, timeout=_DEADLINE_S)
    assert counts == ["17"]


class SlowToReportError(Exception):
    """Takes longer to describe than the others take to notice that its rank has left."""

    def __str__(self) -> str:
        time.sleep(1)
        return "no batches"


@pytest.mark.usefixtures("constant_file_names")
@mock.patch.object(launch, "_GRACE_SECONDS", _DEADLINE_S)  # so no process needs to be killed
def test_all_ranks_failures_are_one_error_that_pickles(tmp_path: Path) -> None:
    def fail() -> object:
        rank = objcomm.rank()
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        objcomm.barrier()
        if rank == 0:
            await_paths(tmp_path / "heard")
            raise SlowToReportError
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            try:
                objcomm.recv(1)
            finally:
                (tmp_path / "heard").touch()
        return threading.Lock()

    with pytest.raises(LaunchError) as caught:
        objcomm.launch(fail, 4)
    error = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  # our own
    assert sorted(error.failures) == [0, 1, 2, 3]
    assert str(error) == str(caught.value)
    assert error.failures[0].type_name.endswith("SlowToReportError")
    assert re.search(rf'"{re.escape(__file__)}", line \d+, in fail', error.failures[0].traceback)
    assert error.failures[1].message.endswith("ended by SIGKILL")
    assert error.failures[2].type_name == "objcomm.TransportError"
    assert "pickle" in error.failures[3].message  # a lock stays where it is
    assert next(iter(error.failures)) == 1  # no rank reported it, so none was earlier
    assert list(error.failures)[-1] == 2  # an error received from another rank is not a cause
    for text in ("SlowToReportError: no batches", "Traceback of rank 0", "Traceback of rank 2"):
        assert text in str(error)
    assert_ended([int((tmp_path / str(rank)).read_text()) for rank in range(4)])


@pytest.mark.long  # the ranks' reports are also sorted above
def test_the_failure_that_caused_others_comes_first() -> None:
    def work() -> None:
        if objcomm.rank() == 1:
            raise SlowToReportError
        dist.barrier()  # torch's own: only its time shows whether it is a cause

    error = error_in(LaunchError, lambda: objcomm.launch(work, 2, timeout=_DEADLINE_S))
    assert list(error.failures) == [1, 0]
    assert error.failures[1].message == "no batches"


@pytest.mark.long
@mock.patch.object(launch, "_GRACE_SECONDS", 1.0)  # counted from the report
def test_a_rank_that_reported_a_failure_comes_before_one_that_was_ended(tmp_path: Path) -> None:
    def work() -> None:
        if int(os.environ["RANK"]) == 0:
            (tmp_path / "waits").touch()
            threading.Event().wait()
        await_paths(tmp_path / "waits")
        threading.Thread(target=time.sleep, args=(1000,)).start()  # keeps the process
        raise LookupError("no batches")

    error = error_in(LaunchError, lambda: objcomm.launch(work, 2, joined=False))
    assert list(error.failures) == [1, 0]
    assert "another rank failed" in error.failures[0].message
    assert "in work" in error.failures[0].traceback  # the line that it was in
    assert "Traceback of rank 0" in str(error)


def test_an_error_received_from_other_ranks_is_not_a_cause() -> None:
    lost = objcomm.TransportError("gather", (1,), "it ended")
    received = [
        lost,
        objcomm.BrokenGroupError("gather", "it ended"),
        objcomm.CollectiveError("gather", {}),
        _chained(LookupError("no result"), lost),
    ]
    assert all(map(worker.is_caused_elsewhere, received))
    own = [
        LookupError("own"),
        objcomm.TransportTimeout("gather", (1,), 3.0),
        _chained(objcomm.CollectiveError("gather", {}), LookupError("own")),
    ]
    assert not any(map(worker.is_caused_elsewhere, own))


@pytest.mark.long
@mock.patch.object(launch, "_GRACE_SECONDS", 1.0)  # counted from the exit
def test_a_rank_may_exit_and_time_may_run_out(tmp_path: Path) -> None:
    def stay() -> None:
        threading.main_thread().join()
        (tmp_path / "left").touch()  # so the result is reported
        time.sleep(1000)

    def leave() -> None:
        assert not objcomm.is_initialized()
        rank = int(os.environ["RANK"])
        if rank == 0:
            threading.Thread(target=stay).start()  # keeps the process alive with its result
        else:
            await_paths(tmp_path / "left")  # else rank 0 might be killed before it finishes
        sys.exit(3 * rank)

    exits = functools.partial(objcomm.launch, leave, 2, joined=False)
    assert list(error_in(LaunchError, exits, "SystemExit: 3").failures) == [1]
    with pytest.raises(LaunchError, match=r"had not ended within 1 s"):
        objcomm.launch(_wait, 1, timeout=1)


def _wait() -> None:
    threading.Event().wait()


@pytest.mark.long
@mock.patch.object(launch, "_GRACE_SECONDS", 0.0)  # for torch as well
def test_a_rank_that_must_be_killed_has_ended_when_the_call_returns(tmp_path: Path) -> None:
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


def test_wrong_arguments_are_refused_immediately() -> None:
    lock = threading.Lock()
    wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
        *((print, nproc, {}, "nproc=") for nproc in (0, -1, 1.5, True, "2")),
        (None, 1, {}, "fn=None must be a function"),
        (print, 1, {"environment": {"PORT": 80}}, "'PORT': 80"),
        (print, 1, {"timeout": 0}, "timeout=0"),
        (lambda: lock, 1, {}, "can't be sent"),
    ]
    for fn, nproc, options, text in wrong:
        with pytest.raises(UsageError, match=text):
            objcomm.launch(fn, nproc, **options)


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
def test_classes_of_main_are_sent_to_the_ranks_and_back() -> None:
    program = f"exec({_SCRIPT!r})"  # its main module has no file
    done = subprocess.run(
        [sys.executable, "-c", program],
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
