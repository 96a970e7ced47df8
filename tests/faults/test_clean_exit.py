"""Programs whose calls are over end with exit code 0 and without a word, however they leave."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.exiting import EVENTS, without_gloo

_ROOT = Path(__file__).parents[2]
_TURNS = 1
_LIMIT_SECONDS = 120.0


def test_every_rank_ends_by_itself_and_silently(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.exiting", str(tmp_path), str(_TURNS)]
    ended = subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=True
    )
    printed = without_gloo(ended.stdout), ended.stderr
    assert printed == (f"{_TURNS * len(EVENTS)} jobs ended\n", "")


_NEVER_WAITED_FOR = """
import os, sys
import torch.distributed as dist, objcomm
store = dist.FileStore(sys.argv[1], 2)
child = os.fork()
dist.init_process_group("gloo", store=store, rank=int(child == 0), world_size=2)
objcomm.barrier()
if child:
    {}
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(
    "begin",
    ["work = objcomm.all_gather(1, async_op=True)", "objcomm.all_gather(1, async_op=True)"],
    ids=["kept", "dropped"],
)
def test_what_is_in_flight_at_the_end_is_reported(tmp_path: Path, begin: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(_NEVER_WAITED_FOR.format(begin))
    command = [sys.executable, str(script), str(tmp_path / "store")]
    ended = subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=True
    )
    assert without_gloo(ended.stdout) == "0\n"
    assert f"{script}:9: RuntimeWarning: all_gather was begun here but" in ended.stderr
    assert "Traceback" not in ended.stderr


_ANSWERED_TOO_LATE = """
import os, signal, sys, time
import torch.distributed as dist, objcomm
ours, theirs = os.pipe()
if not (server := os.fork()):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(theirs, str(store.port).encode())
    time.sleep(100)
    os._exit(0)
port = int(os.read(ours, 10))
child = os.fork()
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=int(child == 0), world_size=2)
objcomm.barrier()

class Last:
    "Goes when the interpreter ends, after all that was to be done at the program's end."
    needs = os.kill, (server, signal.SIGCONT), time.sleep, os.write
    def __del__(self):
        kill, resume, sleep, write = self.needs
        kill(*resume)
        sleep(0.5)
        write(1, b"the interpreter ends\\n")

if child:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.kill(server, signal.SIGKILL)
    print(code)
else:
    sys.modules["last"] = Last()
    os.kill(server, signal.SIGSTOP)
    time.sleep(1)  # so that a look at the store is under way
    {}
"""


@pytest.mark.parametrize("ending", ["dist.destroy_process_group()", "pass"])
def test_a_store_may_answer_while_the_interpreter_ends(tmp_path: Path, ending: str) -> None:
    """A thread that came back from it then would abort the process."""
    script = tmp_path / "script.py"
    script.write_text(_ANSWERED_TOO_LATE.format(ending))
    ended = subprocess.run(
        [sys.executable, str(script)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        check=True,
    )
    assert without_gloo(ended.stdout) == "the interpreter ends\n0\n", ended.stderr
