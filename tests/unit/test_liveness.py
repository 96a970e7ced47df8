"""What a process knows about the others of its world."""

import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import pytest

from objcomm._failures import liveness
from objcomm._failures.liveness import Process, Processes
from objcomm._transport.store import pack_record, unpack_record
from objcomm.errors import WireError
from tests.waits import wait_until

Program = subprocess.Popen[bytes]


@pytest.fixture
def program() -> Iterator[Program]:
    """Start a program that runs until it is killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


def process_of(program: Program) -> Process:
    """Return what the program would publish about itself."""
    return Process.own()._replace(pid=program.pid, born=liveness._born(program.pid))  # noqa: SLF001  # as own() does


def test_the_kernel_reports_a_process_that_ends(program: Program) -> None:
    processes = Processes()
    processes.note(1, process_of(program))
    assert processes.is_beside(1)
    assert processes.end_of(1) == ""
    program.kill()
    program.wait()
    assert str(program.pid) in processes.end_of(1)


def test_each_look_asks_about_some_ranks_and_all_looks_about_each(program: Program) -> None:
    processes, here = Processes(), process_of(program)
    for rank in range(64):
        processes.note(rank, here._replace(name=f"rank {rank}"))
    processes.note(64, here._replace(place="another host"))
    processes.note_end(65, "it left")
    looks = [processes.some_of([*range(64), 64, 65, 66]) for _ in range(500)]
    assert {len(look) for look in looks} == {17}  # 64 cannot be looked at, and 66 is unknown
    assert all(look == sorted(look) and look[-1] == 65 for look in looks)
    assert {rank for look in looks for rank in look} == {*range(64), 65}
    # A process found dead is looked at again, because a later look asks how long ago that was.
    program.kill()
    program.wait()
    assert str(program.pid) in processes.end_of(3)
    assert all(3 in processes.some_of(range(64)) for _ in range(50))


def test_a_zombie_has_ended(program: Program) -> None:
    process = process_of(program)
    assert not process.has_ended()
    program.kill()
    with open(f"/proc/{program.pid}/stat") as file:  # noqa: PTH123  # a file that changes
        while " Z " not in file.read():
            file.seek(0)
    assert process.has_ended()


def test_a_pid_that_is_used_again_is_another_process() -> None:
    own = Process.own()
    assert not own.has_ended()
    assert own._replace(born=own.born - 1).has_ended()


def test_an_unreadable_start_time_is_not_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Process.own()
    assert not own._replace(born=0).has_ended()  # the process could not read it itself
    monkeypatch.setattr(liveness, "_stat", lambda _: [])  # no descriptor is left
    assert not own.has_ended()


@pytest.mark.parametrize("lacking", [AttributeError, OSError(24, "Too many open files")])
def test_a_process_without_a_descriptor_is_watched_by_its_pid(
    monkeypatch: pytest.MonkeyPatch, program: Program, lacking: Exception
) -> None:
    monkeypatch.setattr("os.pidfd_open", mock.Mock(side_effect=lacking))
    process = process_of(program)
    assert not process.has_ended()
    program.kill()
    program.wait()
    assert process.has_ended()


def test_the_end_of_a_process_on_another_host_is_known_only_from_its_record() -> None:
    processes, away = Processes(), Process.own()._replace(place="elsewhere", pid=1 << 22)
    processes.note(1, away)
    assert not processes.is_beside(1)
    assert processes.end_of(1) == ""
    processes.note(1, away._replace(end_reason="its program has ended"))
    assert processes.end_of(1) == "its program has ended"


def test_an_end_counts_after_it_was_noticed_long_enough_ago() -> None:
    processes = Processes()
    processes.note_end(1, "it left")
    assert processes.end_of(1, for_seconds=1000.0) == ""
    assert processes.end_of(1) == "it left"
    assert processes.end_of(2) == ""


def test_an_ended_process_in_a_reused_store_is_of_the_earlier_world() -> None:
    processes = Processes()
    processes.is_new = False
    left = Process.own()._replace(end_reason="its program has ended")
    processes.note(1, left)
    assert processes.end_of(1) == ""
    processes.note(1, left._replace(name="another", end_reason=""))
    processes.note(1, left._replace(name="another"))
    assert processes.end_of(1) == "its program has ended"


def test_a_record_of_another_program_is_refused() -> None:
    own = Process.own()
    assert unpack_record(pack_record(own), Process, "a process").place == own.place
    no_numbers = [math.inf, -1, 0, 1 << 31, 1 << 40, 1 << 63, "1", True, None]
    others = [pack_record(own._replace(pid=pid)) for pid in no_numbers]  # type: ignore[arg-type]  # the wrong type is the point
    for raw in (b"", b"\xc1", b"\x91\x01", pack_record(own)[:-1], *others):
        with pytest.raises(WireError):
            unpack_record(raw, Process, "a process")


def test_a_stopped_process_is_known_only_on_its_own_host(program: Program) -> None:
    processes, process = Processes(), process_of(program)
    processes.note(1, process)
    processes.note(2, process._replace(name="of another host", place="elsewhere"))
    assert processes.stopped() == set()
    program.send_signal(signal.SIGSTOP)
    wait_until(lambda: processes.stopped() == {1}, "the kernel to stop it")
    program.send_signal(signal.SIGCONT)
    wait_until(lambda: processes.stopped() == set(), "it to go on")
