"""Run many small programs of several ranks to the end, and report their exit statuses.

``python -m tests.endings`` reads them from its standard input, some with each line. It has already
imported torch, and each rank is a fork that continues as a program does: after its last line the
interpreter ends, exit handlers included.
"""

import faulthandler
import gc
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Self

from tests.hosts import free_port

_AT_ONCE = 3
# Only a hang takes this long; its ranks are then ended so that they dump their stacks.
_LIMIT_S = 300.0  # only a hang takes this long
HUNG = -signal.SIGABRT

#: The start of each program.
BEGIN = """
import os, time
import torch.distributed as dist
import objcomm
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
objcomm.init("gloo", timeout=200)
"""


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        ranks: the code after ``BEGIN``, for each rank.
        environment: variables to set.
        begin: replaces ``BEGIN``.
        file: the file name that tracebacks give its lines.
    """

    ranks: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    begin: str = BEGIN
    file: str = "program.py"


@dataclass(frozen=True)
class Ending:
    """How one rank ended.

    Attributes:
        status: its exit status.
        seconds: from its last line to its exit; 0 if it did not reach that line.
        said: its output.
    """

    status: int
    seconds: float
    said: str


class Endings:
    """A process that has imported torch and runs programs while the block lasts."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(  # our own interpreter, our own module
            [sys.executable, "-m", "tests.endings", self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._folder.cleanup()

    def run(self, programs: Sequence[Program]) -> list[list[Ending]]:
        """Return how each rank of each program ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([asdict(each) for each in programs]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process has failed; what it wrote is in the captured stderr"
        return [[Ending(**each) for each in ranks] for ranks in json.loads(line)]


def run_to_the_end(programs: Sequence[Program]) -> list[list[Ending]]:
    """Return how each rank of each program ended."""
    with Endings() as endings:
        return endings.run(programs)


class _Run:
    """One running program."""

    def __init__(self, program: Mapping[str, Any], number: int, port: int) -> None:
        self.program = program
        self.number = number
        self.port = port
        self.pids: list[int] = []
        self.endings: dict[int, tuple[int, float]] = {}
        self.until = 0.0

    def begin(self) -> CodeType | None:
        """Start all ranks; in each rank, return the code to run."""
        self.until = time.monotonic() + _LIMIT_S
        for rank, body in enumerate(self.program["ranks"]):
            pid = os.fork()
            if pid == 0:
                said = os.open(self._path(rank, "said"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(said, 1)
                os.dup2(said, 2)
                faulthandler.enable()
                variables = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(len(self.program["ranks"])),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(self.port),
                }
                os.environ.update({**variables, **self.program["environment"]})
                path = self._path(rank, "last")
                last = f"import time; open({path!r}, 'w').write(str(time.monotonic()))"
                source = f"{self.program['begin']}\n{body}\n{last}\n"
                return compile(source, self.program["file"], "exec")
            self.pids.append(pid)
        return None

    def is_over(self) -> bool:
        """Return whether all ranks have ended; end those that hang."""
        if time.monotonic() > self.until:
            self.until = math.inf  # a second signal would cut off the output of the first
            for pid in set(self.pids) - set(self.endings):
                os.kill(pid, signal.SIGABRT)
        for pid in set(self.pids) - set(self.endings):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.endings[pid] = os.waitstatus_to_exitcode(status), time.monotonic()
        return len(self.endings) == len(self.pids)

    def results(self) -> list[dict[str, Any]]:
        """Return how the ranks ended."""
        return [asdict(self._ending(rank, pid)) for rank, pid in enumerate(self.pids)]

    def _ending(self, rank: int, pid: int) -> Ending:
        status, ended = self.endings[pid]
        last = Path(self._path(rank, "last"))
        seconds = 0.0
        if last.exists():
            seconds = ended - float(last.read_text())
            last.unlink()
        return Ending(status, seconds, Path(self._path(rank, "said")).read_text())

    def _path(self, rank: int, name: str) -> str:
        return f"{sys.argv[1]}/{name}-{self.number}-{rank}"


def _serve() -> CodeType | None:
    """Run each line's programs and write how they ended; in a rank, return the code to run."""
    for line in sys.stdin:
        programs = json.loads(line)
        ports = set[int]()
        while len(ports) < len(programs):  # a port stays free until its program takes it
            ports.add(free_port())
        runs = [_Run(*each) for each in zip(programs, range(len(programs)), ports, strict=True)]
        waiting, under_way = list(runs), list[_Run]()
        while waiting or under_way:
            while waiting and len(under_way) < _AT_ONCE:
                under_way.append(waiting.pop(0))
                if (code := under_way[-1].begin()) is not None:
                    return code
            under_way = [each for each in under_way if not each.is_over()]
            time.sleep(0.005)
        sys.stdout.write(json.dumps([each.results() for each in runs]) + "\n")
        sys.stdout.flush()
    return None


if __name__ == "__main__":
    import torch.distributed  # noqa: F401  # once for all

    import objcomm

    objcomm.is_initialized()
    gc.collect()
    gc.freeze()  # or each rank would scan torch's objects again at its exit
    if (code := _serve()) is not None:
        program = ModuleType("__main__")  # in sys.modules, as a real program is
        program.__file__ = code.co_filename
        sys.modules["__main__"] = program
        exec(code, vars(program))  # noqa: S102  # our own
