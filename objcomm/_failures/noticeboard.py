"""Snapshots and verdicts that ranks exchange through the store during a long wait.

If the process that serves the store is stopped, every operation on it blocks. So one thread per
world does nothing but talk to the store, and a caller that needs an answer waits for that thread
with a timeout. A rank writes nothing here while its calls succeed; three times a second it checks
whether another rank has asked for its snapshot.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import functools
import math
import queue
import re
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from objcomm._failures.deadlock import Deadlock, WaitSnapshot
from objcomm._failures.liveness import Process, Processes
from objcomm._failures.verdict import DESTROYED, Cause, Verdict
from objcomm._observe.stacks import StackSampler
from objcomm._transport.store import (
    Clients,
    SharedStore,
    StorePart,
    is_hosted_here,
    pack_record,
    read,
    unpack_record,
)
from objcomm.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch.distributed as dist

    from objcomm._failures.liveness import GroupCalls
    from objcomm._transport.store import AnyStore


R = TypeVar("R")

#: How often an idle rank checks whether its snapshot is wanted. With more than 300 ranks it checks
#: less often, so the store serves at most 1,000 such checks a second.
IDLE_SECONDS = 0.3
_LOOKS_PER_SECOND = 1000
_DEADLOCKS_MAX = 4
# A program that destroys many groups publishes the calls of only the latest ones.
_MOST_GROUPS = 16
#: How long a raising rank waits for the store.
PATIENCE_SECONDS = 0.5

# The maximum age of an answer given to a caller that polls.
_KNOWN_MAX_AGE_SECONDS = 0.5

# The rank that hosts the store, unless a launcher does.
_FIRST = 0
# How long other ranks wait for it to leave; and for its store to close, which takes torch 40 ms
# unless the program keeps it for its next world.
_HOST_SECONDS = 2.0
_CLOSING_SECONDS = 0.1

_PREFIX = "objcomm"
_PROCESS = re.compile(rf"(.*/)?{_PREFIX}/process/([0-9]{{1,7}})", re.DOTALL)


def pause_seconds(size: int) -> float:
    """Return the interval at which each of ``size`` ranks checks whether its snapshot is wanted."""
    return max(IDLE_SECONDS, size / _LOOKS_PER_SECOND)


class StoreSilentError(Exception):
    """The store did not answer in time, or its host is gone."""


class Reader:
    """The store operations that are also open to a process that is not a rank.

    For one thread only, because each operation may block.
    """

    def __init__(self, store: AnyStore) -> None:
        """Create a reader.

        Args:
            store: the world's store, with objcomm's prefix.
        """
        self._store = store

    def ask(self) -> int:
        """Ask every rank for its snapshot; return the question's number."""
        number: int = self._store.add("asked", 1)
        return number

    def processes_of(self, ranks: Iterable[int]) -> dict[int, Process]:
        """Return the process records of some ranks, without those unpublished or unreadable."""
        keys = {rank: f"process/{rank}" for rank in ranks}
        if len(keys) > 1 and self._store.check(list(keys.values())):
            # One request for all; it cannot block, because these keys are never removed.
            records = self._store.multi_get(list(keys.values()))
        else:
            records = [read(self._store, key) for key in keys.values()]
        found = {}
        for rank, raw in zip(keys, records, strict=True):
            if raw is not None:
                with contextlib.suppress(WireError):
                    found[rank] = unpack_record(raw, Process, "a process")
        return found

    def read(self, rank: int, asked: int) -> WaitSnapshot | None:
        """Return a rank's snapshot if it answers question ``asked`` or a later one."""
        if (raw := read(self._store, f"where/{rank}")) is None:
            return None
        try:
            found = unpack_record(raw, WaitSnapshot, "a snapshot")
        except WireError:
            return None
        return found if found.asked >= asked else None


def boards_in(keys: Iterable[str]) -> dict[str, list[int]]:
    """Return the ranks that have published something, by prefix of the noticeboard.

    A store may hold several noticeboards: of earlier torchrun attempts, and of worlds left since.

    Args:
        keys: all keys of a store.
    """
    found: dict[str, list[int]] = {}
    for match in filter(None, map(_PROCESS.fullmatch, keys)):
        found.setdefault(match[1] or "", []).append(int(match[2]))
    return found


def reader_of(store: SharedStore, prefix: str) -> Reader:
    """Return a reader of one of the noticeboards in a store.

    Args:
        store: the store, open.
        prefix: as ``boards_in`` returns it.
    """
    return Reader(StorePart(store, f"{prefix}{_PREFIX}"))


class Board(Reader):
    """All operations of a rank on the store. For the board's thread only.

    Attributes:
        rank: this process's global rank.
    """

    def __init__(self, store: AnyStore, rank: int, processes: Processes) -> None:
        """Publish this process.

        Args:
            store: the world's store, with objcomm's prefix.
            rank: this process's global rank.
            processes: what is known about the world's processes.
        """
        super().__init__(store)
        self._processes = processes
        self._deadlocks: deque[tuple[Deadlock, float]] = deque(maxlen=_DEADLOCKS_MAX)
        self._sampler = StackSampler()
        self.answered = 0
        self.rank = rank
        # First of all, so that ranks that wait for this one can identify its process.
        processes.is_new = not self._store.check([f"process/{rank}"])
        self._store.set(f"process/{rank}", pack_record(processes.own))

    def asked(self) -> int:
        """Return the number of the latest question."""
        # add(key, 0) would return it, too, but a FileStore would write each time.
        return int(read(self._store, "asked") or 0)

    def publish(self, snapshot: WaitSnapshot) -> WaitSnapshot:
        """Publish a snapshot with known deadlocks and the threads' positions added; return it."""
        now = time.monotonic()
        deadlocks = [
            deadlock._replace(known_seconds=now - since, known_since=since)
            for deadlock, since in self._deadlocks
        ]
        threads = {snapshot.main_thread}.union(
            *((lane.thread, lane.waiter) for lane in snapshot.lanes)
        )
        running = self._sampler.sample(threads, now)
        published = snapshot._replace(deadlocks=tuple(deadlocks), running=running)
        self._store.set(f"where/{self.rank}", pack_record(published))
        self.answered = snapshot.asked
        return published

    def publish_deadlock(self, deadlock: Deadlock) -> None:
        """Add a deadlock to the published snapshots: this rank raises because of it."""
        if all(deadlock.waits != known.waits for known, _ in self._deadlocks):
            self._deadlocks.append((deadlock, time.monotonic()))

    def learn(self, ranks: Iterable[int]) -> None:
        """Note the published process records of some ranks."""
        for rank, process in self.processes_of(ranks).items():
            self._processes.note(rank, process)

    def publish_end(self, rank: int, end_reason: str) -> None:
        """Publish why a rank's process has ended, unless a reason or a new process is published."""
        if rank != self.rank:
            self.learn([rank])  # the known record may be out of date
        own = rank == self.rank
        process = self._processes.own if own else self._processes.of(rank)
        if process is not None and not process.end_reason:
            ended = process._replace(end_reason=end_reason)
            self._store.compare_set(f"process/{rank}", pack_record(process), pack_record(ended))

    def leave(self, end_reason: str) -> None:
        """Remove this process's snapshot and publish why it leaves the world."""
        if self.answered:
            self._store.delete_key(f"where/{self.rank}")
        self.publish_end(self.rank, end_reason)

    def forget_address(self, group: str, rank: int) -> None:
        """Remove the address that torch stored for a rank of ``group``, one of our groups."""
        # Torch never removes them, so those of a job that splits often would fill the store.
        self._store.delete_key(f"{group.removeprefix(f'{_PREFIX}/')}//cpu//0/{rank}")

    def propose(self, key: str, verdict: Verdict) -> Verdict:
        """Write a verdict unless there is one; return the one that is in the store."""
        standing = self._store.compare_set(f"verdict/{key}", "", pack_record(verdict))
        return self.take_in(key, standing)

    def revise(self, key: str, before: Verdict, after: Verdict) -> Verdict:
        """Replace a verdict unless another rank has done so; return the one in the store."""
        held = self._store.compare_set(f"verdict/{key}", pack_record(before), pack_record(after))
        return self.take_in(key, held)

    def look(self, key: str) -> Verdict | None:
        """Return the verdict in the store, if there is one."""
        raw = read(self._store, f"verdict/{key}")
        return None if raw is None else self.take_in(key, raw)

    def publish_calls(self, calls: Iterable[GroupCalls]) -> None:
        """Add the calls made over some meshes to this process's record; no more will follow."""
        calls = tuple(calls)  # at the end of the world or program, those of all its groups
        kept = max(_MOST_GROUPS, len(calls))
        all_calls = (*self._processes.own.calls, *calls)[-kept:]
        own = self._processes.own = self._processes.own._replace(calls=all_calls)
        self._store.set(f"process/{self.rank}", pack_record(own))

    def publish_figures(self, figures: bytes) -> None:
        """Add the cost of this process's calls to its record."""
        own = self._processes.own = self._processes.own._replace(figures=figures)
        self._store.set(f"process/{self.rank}", pack_record(own))

    def acknowledge(self, key: str, awaited: int) -> None:
        """Count this rank as having read a verdict; the last of ``awaited`` ranks removes it."""
        if self._store.add(f"known/{key}", 1) >= awaited:
            self.retract(key)

    def retract(self, key: str) -> None:
        """Remove a verdict that no rank will look up any more."""
        self._store.delete_key(f"verdict/{key}")
        self._store.delete_key(f"known/{key}")
        self.end_turns(key)

    def take_turn(self, key: str) -> int:
        """Return this rank's turn, counted from 1, in working out the verdict on ``key``."""
        number: int = self._store.add(f"turns/{key}", 1)
        return number

    def end_turns(self, key: str) -> None:
        """Restart the count of turns, so that the next rank to take one is the first."""
        self._store.delete_key(f"turns/{key}")

    def take_in(self, key: str, raw: bytes) -> Verdict:
        """Decode the verdict on ``key``; a damaged one becomes a verdict without details.

        A deadlock in it is published by this rank, too: a rank that waits for this one may not
        share a mesh with the rank that found the deadlock.
        """
        try:
            verdict = unpack_record(raw, Verdict, "a verdict")
            if verdict.deadlock:
                self.publish_deadlock(unpack_record(verdict.deadlock, Deadlock, "a deadlock"))
        except WireError as error:
            return Verdict(Cause.LEFT, f"unread/{key}", reason=str(error))
        return verdict


def _answer(answer: Future[R], job: Callable[[Board], R], board: Board) -> None:
    """Run a job and pass its result to the waiting thread."""
    try:
        answer.set_result(job(board))
    except Exception as error:  # noqa: BLE001  # raised by the thread that waits
        answer.set_exception(error)
    finally:
        del answer  # as in ``call``


def _let_go(job: Callable[[Board], object]) -> None:
    """Fail the wait for a job's result: the job will not run."""
    if isinstance(job, functools.partial) and job.func is _answer:
        job.args[0].set_exception(StoreSilentError())


class BoardThread:
    """The thread that talks to one world's store.

    Attributes:
        store: the connection to the store, also used by threads that connect a mesh.
        processes: what is known about the world's processes.
        is_cut_off: see ``__init__``.
        clients: further connections to the store, for Gloo.
        clients_of_groups: the same for the user's process groups: torch, or the user, may be
            waiting in a group's store at any time.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        lost_seconds: float,
        describe: Callable[[BoardThread, int], WaitSnapshot],
        is_needed: Callable[[BoardThread], bool],
        is_cut_off: Callable[[int], bool],
    ) -> None:
        """Start the thread.

        Args:
            store: the world's store.
            rank: this process's global rank.
            size: number of ranks in the world.
            lost_seconds: how long the store's host may be out of reach.
            describe: returns a snapshot of this process, given the question's number.
            is_needed: whether the world still exists, or has open connections whose end must still
                be announced. The thread ends when this returns false.
            is_cut_off: whether torch's own connection to a rank of the world is known to be closed.
        """
        self._jobs: queue.SimpleQueue[Callable[[Board], object]] = queue.SimpleQueue()
        self.store = SharedStore()
        self._hosted: dist.Store | None = store
        self._lost_seconds = lost_seconds
        self._rank = rank
        self._pause = pause_seconds(size)
        self._describe = describe
        self._is_needed = is_needed
        self.is_cut_off = is_cut_off
        self.processes = Processes()
        own, is_host = self.processes.own, is_hosted_here(store)
        self.processes.own = own._replace(world_size=size, hosts_store=is_host)
        self._board: Board | None = None
        self._farewell = DESTROYED
        self._is_over = False
        self.clients = Clients()
        self.clients_of_groups = Clients()
        self._known_verdicts: dict[str, tuple[Verdict | None, float]] = {}
        self._thread = threading.Thread(target=self._run, name="objcomm-board", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[Board], object]) -> None:
        """Queue ``job`` for the board's thread; return immediately."""
        self._jobs.put(job)
        self._forget_if_over()

    def call(self, job: Callable[[Board], R], seconds: float = PATIENCE_SECONDS) -> R:
        """Run ``job`` on the board's thread and return its result.

        May be called on the board's thread itself, as finalizers that run there do.

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
            del answer  # breaks a cycle: it holds the error, whose traceback holds this frame

    def known_verdict(self, key: str) -> Verdict | None:
        """Return the verdict on ``key`` that this process knows, without waiting for the store.

        If the last answer is old, the store is asked again in the background, so a caller that
        polls learns of a verdict soon.
        """
        verdict, ask_at = self._known_verdicts.get(key, (None, 0.0))
        if verdict is None and time.monotonic() >= ask_at:
            self._known_verdicts[key] = (None, math.inf)  # until there is an answer
            self.submit(functools.partial(self._ask_for_verdict, key))
        return verdict

    def _ask_for_verdict(self, key: str, board: Board) -> None:
        verdict = None
        try:
            verdict = board.look(key)
        finally:
            if key in self._known_verdicts:
                self._known_verdicts[key] = (verdict, time.monotonic() + _KNOWN_MAX_AGE_SECONDS)

    def forget(self, key: str) -> None:
        """Drop what is known about ``key``; nothing will ask for it any more."""
        self._known_verdicts.pop(key, None)

    def _forget_if_over(self) -> None:
        """Drop jobs queued after the thread has ended: they keep meshes, and so sockets, alive."""
        if self._is_over or not self._thread.is_alive():  # in a forked child the thread is gone
            self._take_all(_let_go)

    def _take_all(self, take: Callable[[Callable[[Board], object]], None]) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                take(self._jobs.get_nowait())

    def await_host(self) -> None:
        """Wait until the rank that hosts the store has left the world, too; but not for long.

        Otherwise this rank could join its next world in the store of this one: programs often give
        both the same address. Of programs that joined four worlds in a row, 3 of 8 failed without
        this wait, and none of 12 with it; without objcomm, 1 of 25 fails.
        """
        until = time.monotonic() + _HOST_SECONDS
        with contextlib.suppress(StoreSilentError):  # the store is closed
            while self._rank != _FIRST and time.monotonic() < until:
                self.call(lambda board: board.learn([_FIRST]))
                host = self.processes.of(_FIRST)
                if host is None or not host.hosts_store or self.store.has_closed(_CLOSING_SECONDS):
                    return
                if host.end_reason:  # it has left, but the program keeps the store
                    return

    def wake(self) -> None:
        """Make the thread check whether it is still needed."""
        self._jobs.put(lambda _: None)

    def close(self, seconds: float, farewell: str) -> bool:
        """End the thread and wait for it; return whether it has ended.

        Args:
            seconds: how long to wait; the store may block the thread for longer.
            farewell: why this process leaves the world.
        """
        self._farewell = farewell
        self._is_needed = lambda _: False
        self.wake()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._is_over, self._board = True, None
            self.store.close()
            self._forget_if_over()

    def _serve(self) -> None:
        hosted, self._hosted = self._hosted, None
        if hosted is None:
            return
        # Raised if the store's host is gone. Pending jobs then fail with StoreSilentError.
        with contextlib.suppress(RuntimeError):
            self.store.open(hosted, self._lost_seconds)
            del hosted
            part = StorePart(self.store, _PREFIX)
            board = self._board = Board(part, self._rank, self.processes)
            while self._is_needed(self):
                try:
                    job = self._jobs.get(timeout=self._pause)
                except queue.Empty:
                    job = self.answer
                self._do(job, board)
            # Jobs queued before the world ended: other ranks may wait for what they post.
            self._take_all(lambda job: self._do(job, board))
            board.leave(self._farewell)

    def _do(self, job: Callable[[Board], object], board: Board) -> None:
        # The store's host may be gone, or a stranger may have written to the store. The thread
        # must keep running, because later jobs may have to inform other ranks.
        with contextlib.suppress(Exception):
            job(board)

    def answer(self, board: Board) -> None:
        """Publish a snapshot of this process if a rank has asked since the last one."""
        asked = board.asked()
        if asked > board.answered:
            board.publish(self._describe(self, asked))
