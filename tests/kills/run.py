"""Run a trial on real processes, and report broken promises."""

import contextlib
import os
import signal
import tempfile
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

from objcomm._transport.store import loopback_store
from tests.forked import FORKED
from tests.kills.plan import FAR_SECONDS, PROMISE_SECONDS, Trial
from tests.kills.rank import Seen, take_part
from tests.waits import PATIENCE_S, Slowness

# For a victim that does not reach the call at which it dies: it waits, and is killed there.
_IN_WAIT_SECONDS = 1.0
# The busy rank computes this much longer than was promised; no machine is that slow.
_BUSY_SECONDS = 6.0
_HANG_SECONDS = FAR_SECONDS + 5.0
_STACKS_SECONDS = 0.5
_LOOK_SECONDS = 0.05


def carry_out(trial: Trial) -> list[str]:
    """Run one trial to its end, and clean up.

    Returns:
        One line for each broken promise.
    """
    with tempfile.TemporaryDirectory(prefix="objcomm-kills-") as folder:
        run = _Run(trial, Path(folder))
        try:
            with Slowness() as slowness:
                run.connect()
                run.kill()
                run.call_again()
            run.begin_anew()
            return run.judge(slowness.factor)
        except _BrokenOffError as broken_off:
            return [str(broken_off), *run.judge(1.0)]
        finally:
            run.end()


class _BrokenOffError(Exception):
    """A process does not answer."""


class _Run:
    def __init__(self, trial: Trial, folder: Path) -> None:
        self._trial = trial
        self._logs = [folder / f"{number}.log" for number in range(trial.world_size)]
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []
        for number in range(trial.world_size):
            ours, theirs = FORKED.Pipe()
            process = FORKED.Process(
                target=take_part, args=(trial, number, theirs, self._logs[number]), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._store = loopback_store()
        self._offset = trial.world_size - trial.size
        self._died_at = 0.0
        self._has_returned = False  # the victim, from its call
        self._seen: dict[int, list[Seen]] = {
            number: [] for number in range(trial.world_size) if number != self._number(trial.victim)
        }
        self._anew: dict[int, object] = {}

    def _number(self, rank: int) -> int:
        """Return a rank's number in the world."""
        return rank + self._offset

    def connect(self) -> None:
        """Connect all ranks, up to just before the call."""
        for pipe in self._pipes:
            pipe.send(self._store.port)
        for number in range(self._trial.world_size):
            self._answer(number, PATIENCE_S)  # the first of a run also waits for the fork server

    def kill(self) -> None:
        """Let all but the busy rank call, and that one once the others have raised, or late."""
        trial, victim = self._trial, self._number(self._trial.victim)
        calling = {self._number(rank) for rank in trial.waiting}
        hearing = {self._number(rank) for rank in trial.waiting if trial.must_hear(rank)}
        coming = {self._number(trial.busy)} if trial.busy >= 0 else set()
        for number in [*calling, victim]:
            self._pipes[number].send("call")
        kill_at = time.monotonic() + _IN_WAIT_SECONDS
        come_at, until = kill_at + _HANG_SECONDS, kill_at + 2 * _HANG_SECONDS
        while calling or coming or not self._died_at:
            now = time.monotonic()
            if now >= until:
                self._answer(min(calling))  # reports its position
            if not self._died_at and (now >= kill_at or self._has_returned):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid(victim), signal.SIGKILL)
            if self._died_at:
                come_at = min(come_at, self._died_at + PROMISE_SECONDS + _BUSY_SECONDS)
            if coming and self._died_at and (not hearing or now >= come_at):
                self._pipes[min(coming)].send("call")
                calling, coming = calling | coming, set()
            for number in self._those_with_news(calling):
                self._seen[number].append(self._answer(number))
                calling.discard(number)
                hearing.discard(number)

    def _those_with_news(self, calling: set[int]) -> list[int]:
        """Wait briefly for results of the calling ranks, and for the victim's end."""
        victim = self._number(self._trial.victim)
        sentinel = self._processes[victim].sentinel
        of_victim = [] if self._died_at else [sentinel, self._pipes[victim]]
        ready = connection.wait(
            [*of_victim, *(self._pipes[each] for each in calling)], _LOOK_SECONDS
        )
        if sentinel in ready:
            self._died_at = time.monotonic()
        elif self._pipes[victim] in ready:
            with contextlib.suppress(EOFError, ConnectionResetError):
                self._pipes[victim].recv()
                self._has_returned = True
        return [number for number in calling if self._pipes[number] in ready]

    def call_again(self) -> None:
        """Let the ranks that have not raised so far make their next call."""
        later = {
            number: "call_again" if number >= self._offset else "call_on_the_world"
            for number, seen in self._seen.items()
            if not (seen and seen[-1].error)
        }
        for number, order in later.items():
            self._pipes[number].send(order)
        for number in later:
            self._seen[number].append(self._answer(number))

    def begin_anew(self) -> None:
        """Let all survivors create a group of the ranks that they know to be alive.

        Skipped if one of them names others, because they would wait for each other until a timeout.
        """
        if any(
            seen[-1].peers != (self._number(self._trial.victim),) for seen in self._seen.values()
        ):
            return
        for number in self._seen:
            self._pipes[number].send("begin_anew")
        for number in self._seen:
            self._anew[number] = self._answer(number, PATIENCE_S)

    def judge(self, factor: float) -> list[str]:
        """List the broken promises, on a machine that takes ``factor`` times as long."""
        trial, found = self._trial, []
        victim = self._number(trial.victim)
        allowed = PROMISE_SECONDS * factor
        for number, calls in self._seen.items():
            rank = number - self._offset
            for place, seen in enumerate(calls):
                at = f"rank {number} of the world, call {place}"
                late = seen.ended - max(seen.began, self._died_at)
                must_hear = place > 0 or trial.must_hear(rank)
                may_return = place == 0 and (trial.at > 0 or not must_hear)
                if not seen.error:
                    if not may_return:
                        found.append(f"{at}: it returned, after {late:.1f} s")
                    continue
                if seen.error != "TransportError":
                    found.append(f"{at}: {seen.error} after {late:.1f} s: {seen.text}")
                elif seen.peers != (victim,):
                    found.append(f"{at}: names {seen.peers}, not {victim}: {seen.text}")
                if late > allowed and must_hear and not self._has_returned:
                    found.append(
                        f"{at}: raised after {late:.1f} s; {PROMISE_SECONDS:g} s were promised, "
                        f"on a machine that takes {factor:.1f} times as long"
                    )
        survivors = sorted(self._seen)
        found += [
            f"rank {number} of the world: the new group gave {result!r}"
            for number, result in self._anew.items()
            if result != survivors
        ]
        return found

    def _answer(self, number: int, seconds: float = _HANG_SECONDS) -> Any:
        why = "does not answer"
        try:
            if self._pipes[number].poll(seconds):
                return self._pipes[number].recv()
            os.kill(self._pid(number), signal.SIGUSR1)
            time.sleep(_STACKS_SECONDS)
        except (EOFError, ConnectionResetError):
            self._processes[number].join(PATIENCE_S)
            why = f"has ended with {self._processes[number].exitcode}"
        printed = self._logs[number].read_text(errors="replace")[-3000:]
        raise _BrokenOffError(f"rank {number} of the world {why} {printed}")

    def _pid(self, number: int) -> int:
        pid: int = self._processes[number].pid
        return pid

    def end(self) -> None:
        """End all processes."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
