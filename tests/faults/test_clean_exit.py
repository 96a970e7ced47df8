"""Programs whose calls are over exit silently with code 0, however they end."""

from pathlib import Path

import pytest

from tests.faults.exiting import EVENTS
from tests.printed import without_gloo
from tests.under_run import python

# Each job has two to four processes, which take most of a second to end.
_QUICK = ["traffic", "large work in flight", "works", "lane"]
_LONG = [event for event in EVENTS if event not in _QUICK]


@pytest.mark.parametrize(
    "events",
    [pytest.param(_QUICK, id="some"), pytest.param(_LONG, id="others", marks=pytest.mark.long)],
)
def test_every_rank_ends_by_itself_and_silently(events: list[str], tmp_path: Path) -> None:
    ended = python("-m", "tests.faults.exiting", str(tmp_path), "1", *events)
    assert (without_gloo(ended.out), ended.err) == (f"{len(events)} jobs ended\n", "")
    assert ended.status == 0


# Importing torch takes longest by far, so a program imports it once and forks its jobs.
_NEVER_WAITED_FOR = """
import os, sys
import torch.distributed as dist, objcomm
jobs = ["kept", "dropped"]
while jobs and (job := os.fork()):
    assert os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]) in {0, 120}  # see below
    print(jobs.pop(0), "ended", flush=True)
if jobs:
    store = dist.FileStore(sys.argv[1] + jobs[0], 2)
    child = os.fork()
    dist.init_process_group("gloo", store=store, rank=int(child == 0), world_size=2)
    objcomm.barrier()
    if child and jobs[0] == "kept":
        work = objcomm.all_gather(1, async_op=True)
    elif child:
        objcomm.all_gather(2, async_op=True)
    if child:  # either rank may say that only one has made that call
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in {0, 120}, flush=True)
"""


def test_outstanding_work_at_exit_is_reported(tmp_path: Path) -> None:
    """The program may have kept the work or not."""
    script = tmp_path / "script.py"
    script.write_text(_NEVER_WAITED_FOR)
    ended = python(str(script), str(tmp_path / "store"))
    assert ended.status == 0, ended.err
    assert without_gloo(ended.out) == "True\nkept ended\nTrue\ndropped ended\n"
    lines = [line for line, text in enumerate(_NEVER_WAITED_FOR.splitlines(), 1) if "async" in text]
    for line in lines:
        warning = f"{script}:{line}: RuntimeWarning: all_gather was started here but"
        assert ended.err.count(warning) == 1, ended.err
    assert "Traceback" not in ended.err


_ANSWERED_TOO_LATE = """
import os, signal, sys, time
import torch.distributed as dist, objcomm
from objcomm._transport.store import loopback_store
jobs = ["destroyed", "abandoned"]
while jobs and (job := os.fork()):
    assert os.waitpid(job, 0)[1] == 0
    print(jobs.pop(0), "ended", flush=True)

class Last:
    "Goes when the interpreter ends, after all that was to be done at the program's end."
    needs = os.kill, signal.SIGCONT, time.sleep, os.write
    def __init__(self, server):
        self.server = server
    def __del__(self):
        kill, resume, sleep, write = self.needs
        kill(self.server, resume)
        sleep(0.5)
        write(1, b"the interpreter ends\\n")

if jobs:
    ours, theirs = os.pipe()
    if not (server := os.fork()):
        store = loopback_store()
        os.write(theirs, str(store.port).encode())
        signal.alarm(300)
        signal.pause()
    port = int(os.read(ours, 10))
    child = os.fork()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=int(child == 0), world_size=2)
    objcomm.barrier()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.kill(server, signal.SIGKILL)
        print(code, flush=True)
    else:
        sys.modules["last"] = Last(server)
        os.kill(server, signal.SIGSTOP)
        time.sleep(1)  # so that a look at the store is under way
        if jobs[0] == "destroyed":
            dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_store_may_answer_while_the_interpreter_ends(tmp_path: Path) -> None:
    """A thread that returned from it then would abort the process."""
    script = tmp_path / "script.py"
    script.write_text(_ANSWERED_TOO_LATE)
    ended = python(str(script))
    assert ended.status == 0, ended.err
    each = "the interpreter ends\n0\n"
    assert without_gloo(ended.out) == f"{each}destroyed ended\n{each}abandoned ended\n", ended.err
