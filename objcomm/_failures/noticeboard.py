"""What ranks tell each other when waiting gets long: whereabouts and verdicts, in the store.

The store may be served by a process that is stopped, and then each operation on it blocks. So one
thread for each world does nothing but talk to the store, and whoever needs an answer waits for
that thread with a limit. A rank writes nothing here while its calls go well; it looks three
times a second whether somebody asks where it is.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import functools
import math
import queue
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from objcomm._failures.deadlock import Deadlock, WaitSnapshot
from objcomm._failures.liveness import Process, Processes
from objcomm._failures.verdict import DESTROYED, Cause, Verdict
from objcomm._observe.stacks import StackSampler
from objcomm._transport.sockets import connected, open_sockets, other_ends
from objcomm._transport.store import Clients, UntilLost, pack_record, read, unpack_record
from objcomm._world import bare
from objcomm.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from objcomm._failures.liveness import GroupCalls


R = TypeVar("R")

#: How often a rank that nobody waits for looks whether it is asked; for more than 300 ranks
#: less often, so that the store serves 1,000 such looks a second at most.
IDLE_SECONDS = 0.3
_LOOKS_PER_SECOND = 1000
_CIRCLES = 4
# A program that destroys groups one after another tells of the latest only.
_MOST_GROUPS = 16
#: How long a raising rank waits for the store.
PATIENCE_SECONDS = 0.5

# How old an answer may be that who polls is given.
_HEARD_SECONDS = 0.5

_PREFIX = "objcomm"


class StoreSilentError(Exception):
    """The store did not answer in time, or its host is gone."""


class Board:
    """The store's operations; used by the board's thread only, because each may block.

    Attributes:
        rank: this process's global rank.
        addresses: where the store is, if it is on a network.
    """

    def __init__(self, store: dist.Store, rank: int, processes: Processes) -> None:
        before = open_sockets()
        own = store.clone()  # type: ignore[attr-defined]  # torch's stubs leave it out
        self.addresses = _addresses_of(own, before)
        port = end.port if isinstance(end := bare(own), dist.TCPStore) else 0
        ends = connected(before, port) if port else {}
        self._store = UntilLost(dist.PrefixStore(_PREFIX, own), ends)
        self._processes = processes
        self._circles: deque[tuple[Deadlock, float]] = deque(maxlen=_CIRCLES)
        self._sampler = StackSampler()
        self.answered = 0
        self.rank = rank
        # Before all else, so that whoever waits for this rank finds out who it is.
        processes.is_new = not self._store.check([f"process/{rank}"])
        self._store.set(f"process/{rank}", pack_record(processes.own))

    def ask(self) -> int:
        """Ask every rank where it is; returns the question's number."""
        number: int = self._store.add("asked", 1)
        return number

    def asked(self) -> int:
        """The number of the latest question."""
        # add(key, 0) would do, but a FileStore would write each time.
        return int(read(self._store, "asked") or 0)

    def publish(self, snapshot: WaitSnapshot) -> WaitSnapshot:
        """Tell where this process is; returns that with its circles, and where its threads are."""
        now = time.monotonic()
        circles = [
            circle._replace(told_seconds=now - since, told_at=since)
            for circle, since in self._circles
        ]
        threads = {snapshot.main_thread, *(lane.thread for lane in snapshot.lanes)}
        running = self._sampler.sample(threads, now)
        told = snapshot._replace(circles=tuple(circles), running=running)
        self._store.set(f"where/{self.rank}", pack_record(told))
        self.answered = snapshot.asked
        return told

    def tell_circle(self, circle: Deadlock) -> None:
        """Add to what is published: this rank raises because of ``circle``."""
        if all(circle.waits != known.waits for known, _ in self._circles):
            self._circles.append((circle, time.monotonic()))

    def learn(self, ranks: Iterable[int]) -> None:
        """Take in who some ranks' processes are, or that they have ended, where that was told."""
        keys = {rank: f"process/{rank}" for rank in ranks}
        if len(keys) > 1 and self._store.check(list(keys.values())):
            told = self._store.multi_get(list(keys.values()))  # one question: nobody removes them
        else:
            told = [read(self._store, key) for key in keys.values()]
        for rank, raw in zip(keys, told, strict=True):
            if raw is not None:
                with contextlib.suppress(WireError):
                    self._processes.note(rank, unpack_record(raw, Process, "a process"))

    def tell_end(self, rank: int, word: str) -> None:
        """Say why a rank's process has ended, unless it was said or the rank has another one."""
        if rank != self.rank:
            self.learn([rank])  # it may have added to what is known here
        own = rank == self.rank
        process = self._processes.own if own else self._processes.of(rank)
        if process is not None and not process.word:
            told = process._replace(word=word)
            self._store.compare_set(f"process/{rank}", pack_record(process), pack_record(told))

    def leave(self, word: str) -> None:
        """Take back what this process has told, and say why it leaves the world."""
        if self.answered:
            self._store.delete_key(f"where/{self.rank}")
        self.tell_end(self.rank, word)

    def read(self, rank: int, asked: int) -> WaitSnapshot | None:
        """Where another process is, if it has answered question ``asked`` or a later one."""
        if (raw := read(self._store, f"where/{rank}")) is None:
            return None
        try:
            found = unpack_record(raw, WaitSnapshot, "whereabouts")
        except WireError:
            return None
        return found if found.asked >= asked else None

    def forget_address(self, group: str, rank: int) -> None:
        """Remove where torch wrote how to reach a rank of ``group``, a process group of ours."""
        # The addresses of a job that splits often would fill the store: torch removes none.
        self._store.delete_key(f"{group.removeprefix(f'{_PREFIX}/')}//cpu//0/{rank}")

    def propose(self, key: str, verdict: Verdict) -> Verdict:
        """Write a verdict unless there is one; returns the one that stands."""
        standing = self._store.compare_set(f"verdict/{key}", "", pack_record(verdict))
        return self.take_in(key, standing)

    def look(self, key: str) -> Verdict | None:
        """The verdict that stands, if there is one."""
        raw = read(self._store, f"verdict/{key}")
        return None if raw is None else self.take_in(key, raw)

    def tell_calls(self, calls: Iterable[GroupCalls]) -> None:
        """Add to who this process is what calls it has made, now that it makes no more."""
        told = (*self._processes.own.calls, *calls)[-_MOST_GROUPS:]
        own = self._processes.own = self._processes.own._replace(calls=told)
        self._store.set(f"process/{self.rank}", pack_record(own))

    def tell_figures(self, figures: bytes) -> None:
        """Add to who this process is what its calls have cost."""
        own = self._processes.own = self._processes.own._replace(figures=figures)
        self._store.set(f"process/{self.rank}", pack_record(own))

    def acknowledge(self, key: str, awaited: int) -> None:
        """Say that this rank knows a verdict; the last of ``awaited`` ranks removes it."""
        if self._store.add(f"known/{key}", 1) >= awaited:
            self.retract(key)

    def retract(self, key: str) -> None:
        """Remove a verdict that no rank will look for."""
        self._store.delete_key(f"verdict/{key}")
        self._store.delete_key(f"known/{key}")
        self.end_turns(key)

    def take_turn(self, key: str) -> int:
        """Which turn this rank has to find out what shall be the verdict on ``key``, from 1."""
        number: int = self._store.add(f"turns/{key}", 1)
        return number

    def end_turns(self, key: str) -> None:
        """Let the next rank that takes a turn be the first."""
        self._store.delete_key(f"turns/{key}")

    def take_in(self, key: str, raw: bytes) -> Verdict:
        """The verdict on ``key``; one that can't be read says no more than that there is one.

        A circle is passed on: whoever awaits this rank in it looks here, and may share no mesh with
        the rank that has found it.
        """
        try:
            verdict = unpack_record(raw, Verdict, "a verdict")
            if verdict.circle:
                self.tell_circle(unpack_record(verdict.circle, Deadlock, "a circle"))
        except WireError as error:
            return Verdict(Cause.LEFT, f"unread/{key}", reason=str(error))
        return verdict


def _answer(answer: Future[R], job: Callable[[Board], R], board: Board) -> None:
    """Do a job for the thread that waits for its answer."""
    try:
        answer.set_result(job(board))
    except Exception as error:  # noqa: BLE001  # raised by the thread that waits
        answer.set_exception(error)
    finally:
        del answer  # as in ``call``


def _let_go(job: Callable[[Board], object]) -> None:
    """Tell who waits for a job's answer that there will be none."""
    if isinstance(job, functools.partial) and job.func is _answer:
        job.args[0].set_exception(StoreSilentError())


def _addresses_of(store: dist.Store, before: dict[int, int]) -> set[Any]:
    """Where a store is to which this process has just connected."""
    end = bare(store)
    return other_ends(before, end.port) if isinstance(end, dist.TCPStore) else set()


class BoardThread:
    """The thread that talks to one world's store.

    Attributes:
        addresses: where the store is, once the thread is connected to it over a network.
        processes: those of the world.
        is_cut_off: see ``__init__``.
        clients: other connections to it, for threads that connect a mesh.
        clients_of_groups: the same for process groups of the user's: torch, or the user, may wait
            in a group's store at any time.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        describe: Callable[[BoardThread, int], WaitSnapshot],
        is_needed: Callable[[BoardThread], bool],
        is_cut_off: Callable[[int], bool],
    ) -> None:
        """Begin.

        Args:
            store: the world's.
            rank: this process's global rank.
            size: number of ranks in the world.
            describe: tells where this process is, given the number of the question.
            is_needed: whether the world still exists, or has left connections of which the others
                have yet to be told that they end; the thread ends when nobody needs it.
            is_cut_off: whether a connection of the world's own to a rank is known to have closed.
        """
        self._jobs: queue.SimpleQueue[Callable[[Board], object]] = queue.SimpleQueue()
        self._store: dist.Store | None = store
        self._rank = rank
        self._pause = max(IDLE_SECONDS, size / _LOOKS_PER_SECOND)
        self._describe = describe
        self._is_needed = is_needed
        self.is_cut_off = is_cut_off
        self.addresses: set[Any] = set()
        self.processes = Processes()
        self._board: Board | None = None
        self._farewell = DESTROYED
        self._is_over = False
        self.clients = Clients()
        self.clients_of_groups = Clients()
        self._heard: dict[str, tuple[Verdict | None, float]] = {}
        self._thread = threading.Thread(target=self._run, name="objcomm-board", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[Board], object]) -> None:
        """Have ``job`` done soon, on the board's thread."""
        self._jobs.put(job)
        self._forget_if_over()

    def call(self, job: Callable[[Board], R], seconds: float = PATIENCE_SECONDS) -> R:
        """What ``job`` returns on the board's thread, which may ask itself: so do finalizers there.

        Raises:
            StoreSilentError: the store did not answer within ``seconds``.
        """
        if self._board is not None and threading.current_thread() is self._thread:
            return job(self._board)
        if not self._thread.is_alive():
            raise StoreSilentError
        answer: Future[R] = Future()
        self._jobs.put(functools.partial(_answer, answer, job))
        self._forget_if_over()
        try:
            return answer.result(seconds)
        except (TimeoutError, RuntimeError) as error:
            raise StoreSilentError from error
        finally:
            del answer  # it holds the error, whose traceback holds this frame

    def heard(self, key: str) -> Verdict | None:
        """The verdict on ``key``, as far as this process has heard; does not wait for the store.

        Asks the store again where the last answer is old, so who calls this often hears soon.
        """
        told, ask_at = self._heard.get(key, (None, 0.0))
        if told is None and time.monotonic() >= ask_at:
            self._heard[key] = (None, math.inf)  # until there is an answer
            self.submit(functools.partial(self._hear, key))
        return told

    def _hear(self, key: str, board: Board) -> None:
        told = None
        try:
            told = board.look(key)
        finally:
            if key in self._heard:
                self._heard[key] = (told, time.monotonic() + _HEARD_SECONDS)

    def forget(self, key: str) -> None:
        """Nobody will ask any more what was heard of ``key``."""
        self._heard.pop(key, None)

    def _forget_if_over(self) -> None:
        """Let go of jobs that came when the last was done: they hold meshes, and so sockets."""
        if self._is_over or not self._thread.is_alive():  # a forked child has no such thread
            self._take_all(_let_go)

    def _take_all(self, take: Callable[[Callable[[Board], object]], None]) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                take(self._jobs.get_nowait())

    def close(self, seconds: float, farewell: str) -> bool:
        """End the thread, and wait for it so long; whether it has ended, or still is blocked.

        Args:
            seconds: how long to wait.
            farewell: why this process leaves the world.
        """
        self._farewell = farewell
        self._is_needed = lambda _: False
        self._jobs.put(lambda _: None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._is_over, self._board = True, None
            self._forget_if_over()

    def _serve(self) -> None:
        store, self._store = self._store, None
        if store is None:
            return
        # A store whose host is gone raises; then nobody can be told, and each job says so.
        with contextlib.suppress(RuntimeError):
            board = self._board = Board(store, self._rank, self.processes)
            self.addresses = board.addresses
            del store
            while self._is_needed(self):
                try:
                    job = self._jobs.get(timeout=self._pause)
                except queue.Empty:
                    job = self.answer
                self._do(job, board)
            # What was to be told or taken back when the world ended: others may wait for it.
            self._take_all(lambda job: self._do(job, board))
            board.leave(self._farewell)

    def _do(self, job: Callable[[Board], object], board: Board) -> None:
        # The store's host is gone, or a stranger wrote to it: the thread must go on, because an
        # error here may not keep others from being told.
        with contextlib.suppress(Exception):
            job(board)

    def answer(self, board: Board) -> None:
        """Tell where this process is, if somebody has asked since it last did."""
        asked = board.asked()
        if asked > board.answered:
            board.publish(self._describe(self, asked))
