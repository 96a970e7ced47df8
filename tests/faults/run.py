"""Run a case on real processes, and collect what each rank saw and left behind."""

import contextlib
import os
import re
import signal
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from objcomm._failures.verdict import DESTROYED
from objcomm._transport.store import loopback_store
from tests.faults.plan import STOP_SECONDS, Case, Fault
from tests.faults.rank import Left, Seen, take_part
from tests.forked import FORKED
from tests.waits import PATIENCE_S

if TYPE_CHECKING:
    import torch.distributed as dist

#: A torch rank that has not reported by then hangs; objcomm's ranks get a test's patience.
HANG_SECONDS = 20.0
_TORCHS_END_SECONDS = 5.0
#: The key of a rank's process; one stays for each world.
PROCESS = re.compile(r"objcomm/process/\d+$")
_MADE_GROUP = re.compile(r"objcomm/[0-9a-f]{16}/")
_STACKS_SECONDS = 0.5
# A victim may be delayed between its report and its stop; a wake-up before the stop is lost.
_WAKE_AGAIN_SECONDS = 0.1


@dataclass
class Outcome:
    """The outcome of a case.

    Attributes:
        case: the case.
        fault_at: when the fault happened, on a clock that all processes share.
        seen: by rank, how its call ended; a rank that hangs is missing.
        later: by surviving rank, the error type of a later call and the seconds until it was
            raised.
        anew: by surviving rank, what a new process group of the survivors returned.
        left: by surviving rank, what its process still held.
        exits: by rank, the exit code.
        printed: by rank, its standard output and error.
        keys: the keys left in the store, except torch's own.
    """

    case: Case
    fault_at: float = 0.0
    seen: dict[int, Seen] = field(default_factory=dict)
    later: dict[int, tuple[str, float]] = field(default_factory=dict)
    anew: dict[int, list[Any]] = field(default_factory=dict)
    left: dict[int, Left] = field(default_factory=dict)
    exits: dict[int, int | None] = field(default_factory=dict)
    printed: dict[int, str] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)

    def seconds(self, rank: int) -> float:
        """Return how long after the fault a rank's call ended."""
        return self.seen[rank].at - self.fault_at


def carry_out(case: Case, *, is_patient: bool = False) -> Outcome:
    """Run one case to its end, and clean up.

    Args:
        case: what to run.
        is_patient: wait longer for answers than the package does; durations mean nothing then.
    """
    with tempfile.TemporaryDirectory(prefix="objcomm-faults-") as folder:
        run = _Run(case, Path(folder), is_patient=is_patient)
        try:
            run.connect()
            run.collect()
            if case.library == "objcomm":
                run.continue_with_survivors()
        finally:
            run.end()
    return run.outcome


class _Run:
    def __init__(self, case: Case, folder: Path, *, is_patient: bool) -> None:
        self.outcome = Outcome(case)
        self._case = case
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []
        self._logs = [folder / f"rank{rank}.log" for rank in range(case.world_size)]
        for rank in range(case.world_size):
            ours, theirs = FORKED.Pipe()
            args = (case, rank, theirs, self._logs[rank])
            process = FORKED.Process(
                target=take_part, args=args, kwargs={"is_patient": is_patient}, daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._store: dist.TCPStore | None = None
        self._resume_at = float("inf")
        self._is_told = False
        is_torchs = case.library == "torch"
        self._hang_seconds = HANG_SECONDS if is_torchs else PATIENCE_S
        self._end_seconds = _TORCHS_END_SECONDS if is_torchs else PATIENCE_S

    def connect(self) -> None:
        """Give all ranks the store's port."""
        port = 0
        if self._case.is_stores_host:
            port = self._pipes[self._case.victim].recv()
        else:
            self._store = loopback_store()
            port = self._store.port
        for rank, pipe in enumerate(self._pipes):
            if not (self._case.is_stores_host and rank == self._case.victim):
                pipe.send(port)

    def collect(self) -> None:
        """Receive the reports of all ranks, and resume a stopped victim."""
        waiting = dict(enumerate(self._pipes))
        until = time.monotonic() + self._hang_seconds
        while waiting and (now := time.monotonic()) < until:
            if now >= self._resume_at or self._has_all(self._case.survivors):
                self._release()
            pause = min(until, self._resume_at) - now
            for pipe in connection.wait(list(waiting.values()), max(0.0, min(pause, 0.1))):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]  # no other objects wait
                if not self._take(rank):
                    del waiting[rank]
                    if rank == self._case.victim:
                        self._resume_at = float("inf")

    def _take(self, rank: int) -> bool:
        """Receive one report of a rank; return whether more may follow."""
        try:
            report = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return False
        if isinstance(report, Seen):
            self.outcome.seen[rank] = report
            if self._case.fault is Fault.INTERRUPTED and rank == self._case.victim:
                for peer in self._case.survivors:
                    self._pipes[peer].send("come")
            return False
        what, at = report
        if what == "fault":
            self.outcome.fault_at = at
            if self._case.fault is Fault.RESUMED:
                self._resume_at = at + STOP_SECONDS
        return True

    def _has_all(self, ranks: list[int]) -> bool:
        return all(rank in self.outcome.seen for rank in ranks)

    def _release(self) -> None:
        """Release what keeps the victim from its call."""
        if self._case.fault is Fault.RESUMED:
            self._resume_at = time.monotonic() + _WAKE_AGAIN_SECONDS
        if self._case.fault in {Fault.STOPPED, Fault.RESUMED, Fault.STORE_STOPPED}:
            os.kill(self._pid(self._case.victim), signal.SIGCONT)
        elif self._case.fault is Fault.ABSENT and not self._is_told:
            self._is_told = True
            self._pipes[self._case.victim].send("come")

    def continue_with_survivors(self) -> None:
        """Find out how the group and a new one behave afterwards, and what is left."""
        outcome, case = self.outcome, self._case
        if not self._has_all(case.survivors):
            return  # one hangs: that is the finding
        if case.fault is not Fault.RESUMED:
            outcome.later = self._order("call again", case.survivors)
            outcome.anew = self._order("begin anew", case.survivors)
        outcome.left = self._order("leave", case.living)

    def _order(self, step: str, ranks: list[int]) -> dict[int, Any]:
        for rank in ranks:
            # For a rank that has ended, report its exit code and output.
            with contextlib.suppress(BrokenPipeError):
                self._pipes[rank].send(step)
        answers = {}
        for rank in ranks:
            if self._pipes[rank].poll(self._hang_seconds):
                try:
                    answers[rank] = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    continue
        return answers

    def end(self) -> None:
        """Let the processes end, and kill those that do not."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            if process.exitcode is None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.send(None)
        for rank, process in enumerate(self._processes):
            process.join(self._end_seconds)
            self.outcome.exits[rank] = process.exitcode
            if process.exitcode is None:
                os.kill(self._pid(rank), signal.SIGUSR1)  # makes it dump its stacks
                process.join(_STACKS_SECONDS)
                process.kill()
                process.join()
            self._pipes[rank].close()
            self.outcome.printed[rank] = self._logs[rank].read_text(errors="replace")
        if self._store is not None:
            # torch 2.8 can't list the keys that are left.
            keys: list[str] = getattr(self._store, "list_keys", list)()
            # torch's own keys of a group that objcomm named stay, like those of any group, and so
            # do the keys of the ranks' processes.
            left = [key for key in keys if "objcomm" in key and not _MADE_GROUP.search(key)]
            left = [key for key in left if not PROCESS.search(key)]
            self.outcome.keys = [key for key in left if not self._is_farewell(key)]

    def _is_farewell(self, key: str) -> bool:
        """Return whether a key was left by the last ranks that destroyed their worlds."""
        verdict = key.replace("/known/", "/verdict/")
        is_there = self._store is not None and "/verdict/" in verdict
        if not is_there or self._store is None or not self._store.check([verdict]):
            return False
        return DESTROYED.encode() in self._store.get(verdict)

    def _pid(self, rank: int) -> int:
        pid: int = self._processes[rank].pid
        return pid
