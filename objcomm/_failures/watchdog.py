"""The watchdog: one thread per process that makes sure no call of any group hangs silently.

Four times a second it checks the calls that wait. A call that has waited for half a second is
investigated: where are the other ranks, and has one of them ended the call? A call that has waited
for a minute is logged. A call ends when its timeout expires, not at the next check. The watchdog
never talks to the store, which may not answer. It leaves that to the board's thread, and if a job
is not done within a second, it acts without the store.

It also lets Ctrl-C end a wait inside C++. Python runs signal handlers between bytecodes of the main
thread only, and a wait for a peer is one long C++ call. So while the main thread waits, the
interpreter writes each signal's number to a socket on which the watchdog sleeps. The watchdog ends
the mesh, the wait raises, and the handler runs. Only SIGINT has this effect. Its handler usually
raises, so the operation is lost anyway, whereas a SIGTERM handler usually sets a flag ("checkpoint
after this step") and must not cost the connections.

It also cleans up when the program ends: a thread that returns from C++ while the interpreter shuts
down would abort the process, so no thread may be left inside torch by then.
"""

import contextlib
import functools
import os
import random
import selectors
import signal
import socket
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import torch.distributed as dist

from objcomm._config import settings
from objcomm._failures import inquiry, unmatched_calls
from objcomm._failures.deadlock import WaitSnapshot
from objcomm._failures.inquiry import Waiting, investigate, wait_snapshot
from objcomm._failures.losses import (
    by_name,
    by_name_here,
    look_for_senders,
    loss_among,
    loss_in,
    settle_by_name,
)
from objcomm._failures.mesh import Mesh
from objcomm._failures.noticeboard import Board, BoardThread, StoreSilentError
from objcomm._failures.verdict import (
    DESTROYED,
    FAREWELLS,
    PROGRAM_ENDED,
    Cause,
    Verdict,
    nonce_of,
)
from objcomm._observe.history import CallRecord
from objcomm._observe.log import log, logged
from objcomm._observe.terminal import end_badly
from objcomm._transport.gloo import is_cut_off
from objcomm._transport.lane import Lane
from objcomm._transport.threads import Alone, are_workers_busy
from objcomm._world import CONNECT_MAX, store_of
from objcomm.errors import UsageError, brief_text_of

TICK_SECONDS = 0.25
#: A wait of up to this length is normal; a longer one is investigated.
OVERDUE_SECONDS = 0.5
# A wait that has lasted this long will probably continue, so only every fourth check looks into it.
_LONG_SECONDS = 4.0
_LONG_LOOKS = 4
# In a larger group, each rank asks less often. An investigation takes 5 requests to the store, and
# 13 until all processes are known. So the store has to answer at most 13,000 requests a second,
# however many ranks wait.
_RANKS_AT_EACH_LOOK = 250
_EXPIRY_SECONDS = 0.9
_MOST_LOOKED_AT = 4
_INTERRUPT_SECONDS = 0.3
_NUDGE = b"\0"  # not a signal number
# How long to wait for the store when calls are compared. A store that is out of reach delays the
# end of the program by this; if a slow one were given up earlier, a mismatch would go unnoticed.
_COMPARISON_SECONDS = 3.0
# How long to wait at the end for delivery of data sent to other hosts.
_DELIVERY_SECONDS = 0.5


class Watchdog(threading.Thread):
    """The process's watchdog thread, created with its first mesh; see the module docstring."""

    def __init__(self, former: "Watchdog | None" = None) -> None:
        """Create a watchdog that is not started yet.

        Args:
            former: a watchdog whose thread has ended and whose work this one takes over.
        """
        super().__init__(name="objcomm-watch", daemon=True)
        self.pid = os.getpid()
        self.target: Mesh | None = None  # these two are written by the main thread only
        self.forward_to = -1
        self._receiving, self._sending = socket.socketpair()
        self._sending.setblocking(False)  # noqa: FBT003  # socket's own signature
        # Used without a lock: each access is a single dictionary operation; see ``_alive``.
        self._meshes = weakref.WeakKeyDictionary[Mesh, None]()
        self._listeners = weakref.WeakKeyDictionary[Mesh, threading.Thread]()
        # Includes those whose world is gone, until their threads have ended.
        self.board_threads: weakref.WeakSet[BoardThread] = weakref.WeakSet()
        self._fallbacks: list[tuple[float, Callable[[], object]]] = []
        # Weak, because a job submitted just after its world has gone never runs, and so never
        # removes its entry.
        self._investigating: weakref.WeakSet[BoardThread] = weakref.WeakSet()
        self._missed: weakref.WeakSet[Mesh] = weakref.WeakSet()
        # Meshes on which ranks made different calls. The value is False once that is logged or
        # raised.
        self._has_mismatch = weakref.WeakKeyDictionary[Mesh, bool]()
        self._expiring = weakref.WeakKeyDictionary[BoardThread, deque[Waiting]]()
        self._looked_at = 0.0
        self._looks = 0
        self._is_closing = False
        if former is not None:
            self._meshes, self._listeners = former._meshes, former._listeners  # noqa: SLF001  # its own class
            self.board_threads, self._fallbacks = former.board_threads, former._fallbacks  # noqa: SLF001  # likewise

    def begin(self) -> None:
        """Start the thread, once this is known to be the process's watchdog.

        Raises:
            RuntimeError: this process cannot start more threads.
        """
        self.start()

    def add(self, mesh: Mesh) -> None:
        """Watch a mesh while it exists."""
        self._meshes[mesh] = None
        self._nudge()

    def expect(self, mesh: Mesh, listener: threading.Thread) -> None:
        """Make sure that a thread that waits on ``mesh`` ends before the interpreter does."""
        self._listeners[mesh] = listener

    def meshes(self, board_thread: BoardThread) -> list[Mesh]:
        """Return the meshes of one world."""
        return [mesh for mesh in self._all_meshes() if mesh.board_thread is board_thread]

    def has_open(self, board_thread: BoardThread) -> bool:
        """Whether a mesh of that world is connected, so that its end must still be announced."""
        return any(
            mesh.verdict is None and mesh.link is not None for mesh in self.meshes(board_thread)
        )

    def named(self, nonces: Sequence[str]) -> list[Mesh]:
        """Return the meshes with these nonces."""
        return [mesh for mesh in self._all_meshes() if mesh.nonce in nonces]

    def snapshot(self, board_thread: BoardThread, asked: int) -> WaitSnapshot:
        """Return this process's snapshot for one world."""
        return wait_snapshot(self.meshes(board_thread), asked)

    def listen(self) -> None:
        """Make the interpreter write signal numbers to the watchdog's socket."""
        self.forward_to = signal.set_wakeup_fd(self._sending.fileno(), warn_on_full_buffer=False)

    def rest(self) -> None:
        """Restore the previous wake-up descriptor."""
        former, self.forward_to = self.forward_to, -1
        try:
            signal.set_wakeup_fd(former)
        except (OSError, ValueError):  # its owner has closed it
            signal.set_wakeup_fd(-1)

    def run(self) -> None:
        """Check and sleep in turns until closed; no error ends the loop."""
        with selectors.PollSelector() as selector:  # select() fails for descriptors above 1,023
            selector.register(self._receiving, selectors.EVENT_READ)
            while not self._is_closing:
                pause: float | None = TICK_SECONDS
                with logged("the watchdog could not determine how long to sleep"):
                    pause = self._pause()
                if selector.select(pause):
                    self._handle_signals(self._receiving.recv(64))
                with logged("the watchdog could not check the waiting calls"):
                    self._tick(time.monotonic())

    def _pause(self) -> float | None:
        """Return the seconds until the next check or timeout; None without a mesh to check."""
        if not self._meshes and not self._fallbacks:
            return None
        dues = [entry.waits_until for _, _, entry in self._waiting() if not entry.has_expired]
        dues += [due for due, _ in self._fallbacks]
        return max(0.0, min([self._looked_at + TICK_SECONDS, *dues]) - time.monotonic())

    def _handle_signals(self, numbers: bytes) -> None:
        target, forward_to = self.target, self.forward_to
        if signal.SIGINT in numbers and target is not None:
            verdict = Verdict.of(Cause.LEFT, ranks=(target.rank,), reason="it was interrupted")
            self._end(target, verdict)
        if forward_to != -1 and (signals := numbers.replace(_NUDGE, b"")):
            with contextlib.suppress(OSError):  # its owner may have closed it
                os.write(forward_to, signals)  # asyncio finds its signals there

    def _fall_back(self, seconds: float, end: Callable[[], object]) -> None:
        """Schedule ``end``, which ends a mesh or call without the store if that is still needed."""
        self._fallbacks.append((time.monotonic() + seconds, end))

    def _tick(self, now: float) -> None:
        """Do what is due. Polling calls wake the thread often, but not for a full check."""
        is_look = now >= self._looked_at + TICK_SECONDS
        self._looked_at = now if is_look else self._looked_at
        self._looks += is_look
        overdue: defaultdict[BoardThread, list[Waiting]] = defaultdict(list)
        expired: defaultdict[BoardThread, list[Waiting]] = defaultdict(list)
        late: defaultdict[BoardThread, list[Waiting]] = defaultdict(list)
        ended: dict[object, bool] = {}
        for mesh, lane, entry in self._waiting():
            waited = now - entry.waits_since
            if is_look and waited >= OVERDUE_SECONDS and self._is_stuck(mesh, lane, entry, ended):
                continue
            if now >= entry.waits_until:
                expired[mesh.board_thread].append((mesh, lane, entry))
            elif is_look and waited >= OVERDUE_SECONDS and self._is_to_ask(waited, mesh.members):
                overdue[mesh.board_thread].append((mesh, lane, entry))
            if entry.report_at <= now < entry.waits_until:
                entry.report_at = now + waited
                late[mesh.board_thread].append((mesh, lane, entry))
        if is_look:
            self._leave_destroyed()
            self._leave_failed()
            self._look_for_the_dead_in_blocks()
            self._look_for_senders()
            self._move_links()
        for board_thread, waiting in overdue.items():
            self._investigate(board_thread, inquiry.first_of_each_kind(waiting))
        for board_thread, waiting in expired.items():
            self._expire(board_thread, waiting)
        for board_thread, waiting in late.items():
            self._report(board_thread, inquiry.first_of_each_kind(waiting))
        self._end_overdue(now)

    def _end_overdue(self, now: float) -> None:
        """Run the fallbacks that are due."""
        for due, end in self._fallbacks:
            if due <= now:
                with logged("could not end an expired wait"):  # still run the others
                    end()
        self._fallbacks = [each for each in self._fallbacks if each[0] > now]

    def _leave_destroyed(self) -> None:
        """Close the connections of groups that the program has destroyed: other ranks may wait."""
        for mesh in self._all_meshes():
            if mesh.verdict is None and mesh.link is not None and mesh.is_destroyed():
                if mesh.whole is None and not any(lane.is_busy for lane in mesh.lanes.values()):
                    with logged("could not check whether all ranks made the same calls"):
                        unmatched_calls.close_and_check(mesh, DESTROYED)
                else:
                    self._end(mesh, mesh.destroyed())

    def _leave_failed(self) -> None:
        """End the meshes of a main thread that has failed while other threads keep running."""
        main, error = threading.main_thread(), getattr(sys, "last_value", None)
        if main.is_alive() or error is None:
            return
        # Without such a thread the interpreter is about to end, and ``close`` reports the reason.
        if all(each.daemon or each is main for each in threading.enumerate()):
            return
        ended = f"its main thread ended with {brief_text_of(error)}"
        reason = f"{ended}, and another thread is still running"
        for mesh in self._all_meshes():
            is_its = any(lane.owner is main for lane in tuple(mesh.lanes.values()))
            if is_its and mesh.verdict is None and mesh.link is not None:
                self._end(mesh, Verdict.of(Cause.LEFT, ranks=(mesh.rank,), reason=reason))

    def _look_for_the_dead_in_blocks(self) -> None:
        """Record deaths for calls that poll in a block, which are never overdue themselves."""
        for mesh in self._all_meshes():
            if mesh.blocks and mesh.verdict is None:
                with logged("could not check whether a process has ended"):
                    mesh.died = loss_among(mesh, mesh.others)

    def _move_links(self) -> None:
        """Advance transfers on all links while this rank waits elsewhere, such as in another group.

        Some links make progress only while a thread waits on them, and other ranks may need their
        data first.
        """
        meshes = self._all_meshes()
        # A wait on one mesh may depend on a lost host that only another mesh notices.
        is_awaited = any(map(_is_occupied, meshes))
        for mesh in meshes:
            mesh.report_refusals()
            link = mesh.link
            if link is not None and not mesh.is_closed:
                with logged("could not move the pending transfers"):
                    # Ctrl-C may have hit between setting the verdict and closing the connections.
                    if mesh.verdict is None:
                        link.move(is_awaited=is_awaited)
                    else:
                        mesh.stop(mesh.verdict)
                    if mesh.verdict is None and (_has_lost_some(mesh) or link.has_lost_any()):
                        mesh.poll_for_verdict(time.monotonic())
            with logged("could not check whether ranks made other calls"):
                self._look_for_others_calls(mesh)

    def _look_for_others_calls(self, mesh: Mesh) -> None:
        """End a mesh on which a peer has sent a message for a different call than this rank's.

        A rank that only sends would not learn of it otherwise, because it never waits. A call in
        progress may raise the error, so it is logged only if none does.
        """
        if mesh.verdict is None and mesh not in self._has_mismatch:
            found = unmatched_calls.mismatch_in_unread(mesh)
            if found is None:
                return
            lane, verdict = found
            self._has_mismatch[mesh] = True
            self._end(mesh, verdict, lane)
        lanes = tuple(mesh.lanes.values())
        is_quiet = not any(lane.begun_at or lane.is_busy for lane in lanes)
        if self._has_mismatch.get(mesh) and mesh.verdict is not None and is_quiet:
            self._has_mismatch[mesh] = False
            if mesh.is_owed:
                log.error("group %r: %s", mesh.name, mesh.verdict.error(""), extra=mesh.labels)

    def _is_stuck(
        self, mesh: Mesh, lane: Lane, entry: CallRecord, known: dict[object, bool]
    ) -> bool:
        """Run ``_is_call_stuck`` once for all calls of the same kind; there may be a thousand."""
        kind = lane, entry.header.operation, entry.is_confirmed, entry.awaits, entry.blocks
        if kind not in known:
            known[kind] = self._is_call_stuck(mesh, lane, entry)
        return known[kind]

    def _is_call_stuck(self, mesh: Mesh, lane: Lane, entry: CallRecord) -> bool:
        """End a mesh if the call needs a process that has ended; return whether it does."""
        verdict = None
        with logged("could not check whether a process has ended"):  # timeouts still work
            meshes = self._all_meshes() if entry.blocks else []
            blocks = {each.nonce: each.ranks for each in meshes}
            verdict = loss_in(mesh, lane, entry, blocks)
        if verdict is not None:
            self._end(mesh, verdict)
        return verdict is not None

    def _look_for_senders(self) -> None:
        """End meshes that are listened on and whose peer can no longer join.

        A caller that polls never has an overdue call to investigate.
        """
        if self._looks % _LONG_LOOKS:
            return
        unmet: defaultdict[BoardThread, list[Mesh]] = defaultdict(list)
        for mesh, _ in self._all_listeners():
            if mesh.verdict is not None or mesh.link is not None:
                continue
            verdict = None
            with logged("could not check whether a process has ended"):  # check the others
                verdict = loss_among(mesh, (), awaited=mesh.others)
            if verdict is None:
                unmet[mesh.board_thread].append(mesh)
            else:
                self._end(mesh, verdict)
        for board_thread, meshes in unmet.items():
            self._ask(board_thread, functools.partial(look_for_senders, meshes, self._missed))

    def _end(self, mesh: Mesh, verdict: Verdict, lane: Lane | None = None) -> None:
        """End a mesh with a verdict found here, or with one that another rank posted earlier.

        Does not wait for the store; if the store does not answer in time, the mesh ends without it.
        The end of a process is published for all ranks with the best known reason.

        Args:
            mesh: the mesh.
            verdict: the verdict found here.
            lane: for a desync, the lane on which two ranks made different calls.
        """
        is_loss = verdict.cause is Cause.LOST
        verdict = verdict._replace(is_final=is_loss)

        def job(board: Board) -> None:
            named = by_name(mesh, verdict, board) if is_loss else verdict
            if lane is not None:
                meshes = self.meshes(mesh.board_thread)
                named = inquiry.with_all_ranks(board, meshes, mesh, lane.number, verdict)
            for rank in named.ranks if is_loss else ():
                why = mesh.board_thread.processes.end_of(mesh.ranks[rank])
                board.publish_end(mesh.ranks[rank], why or named.reason)
            mesh.settle_on(board, named)

        def end_alone() -> None:
            alone = verdict._replace(is_store_silent=True)
            mesh.stop(by_name_here(mesh, alone) if is_loss else alone)

        mesh.board_thread.submit(job)
        self._fall_back(_INTERRUPT_SECONDS if lane is None else _EXPIRY_SECONDS, end_alone)

    def _is_to_ask(self, waited: float, members: Sequence[int]) -> bool:
        often = _LONG_LOOKS if waited > _LONG_SECONDS else 1
        return self._looks % max(often, -(-len(members) // _RANKS_AT_EACH_LOOK)) == 0

    def _waiting(self) -> list[Waiting]:
        return [
            (mesh, lane, entry)
            for mesh in self._all_meshes()
            if mesh.verdict is None
            for lane in tuple(mesh.lanes.values())
            for entry in lane.waits()
        ]

    def _expire(self, board_thread: BoardThread, waiting: list[Waiting]) -> None:
        """End all calls whose timeouts have expired in one job, because asking ranks takes a while.

        A job that is already running picks up calls that expire meanwhile.
        """
        waiting = [each for each in waiting if not each[2].has_expired]
        if not waiting:
            return
        meshes = self.meshes(board_thread)
        for _, _, entry in waiting:  # before submitting the job, which may end them immediately
            entry.has_expired = True
        expiring = self._expiring.setdefault(board_thread, deque())
        expiring.extend(each for each in waiting if inquiry.patience(each[2]))
        board_thread.submit(lambda board: inquiry.expire(board, meshes, expiring))
        here: WaitSnapshot | None = None
        for mesh, lane, entry in waiting:
            seconds, answers = _EXPIRY_SECONDS, None
            if inquiry.is_brief(entry):  # this rank's own snapshot must be enough
                here = here or wait_snapshot(meshes, 0)
                seconds, answers = inquiry.patience(entry), {mesh.rank: here}
            end = functools.partial(inquiry.end_late, (mesh, lane, entry), meshes, answers)
            self._fall_back(seconds, end)

    def _report(self, board_thread: BoardThread, waiting: list[Waiting]) -> None:
        meshes, answered = self.meshes(board_thread), threading.Event()
        board_thread.submit(lambda board: inquiry.report(board, meshes, waiting, answered))
        silence = functools.partial(inquiry.report_silence, waiting, answered)
        self._fall_back(_EXPIRY_SECONDS, silence)

    def _investigate(self, board_thread: BoardThread, waiting: list[Waiting]) -> None:
        meshes = self.meshes(board_thread)
        self._ask(board_thread, lambda board: investigate(board, meshes, waiting))

    def _ask(self, board_thread: BoardThread, question: Callable[[Board], None]) -> None:
        """Submit a question unless a previous one still waits for the store."""
        if board_thread in self._investigating:
            return
        self._investigating.add(board_thread)

        def job(board: Board) -> None:
            try:
                question(board)
            finally:
                self._investigating.discard(board_thread)

        board_thread.submit(job)

    def _all_meshes(self) -> list[Mesh]:
        return _alive(self._meshes)

    def _all_listeners(self) -> list[tuple[Mesh, threading.Thread]]:
        return [(mesh, self._listeners[mesh]) for mesh in _alive(self._listeners)]

    def _nudge(self) -> None:
        with contextlib.suppress(BlockingIOError):  # if the socket is full, the thread is awake
            self._sending.send(_NUDGE)

    def compare_calls(
        self, left_by: str = "", failure: str = "", *, destroyed_only: bool = False
    ) -> None:
        """Record mismatches between this rank's calls and those of ranks that left before it.

        Args:
            left_by: how this rank leaves, and at which line.
            failure: the error that makes it leave; if not empty, it only publishes its calls.
            destroyed_only: whether to skip groups that the program has not destroyed.
        """
        comparisons = defaultdict[BoardThread, list[unmatched_calls.Comparison]](list)
        for mesh in self._all_meshes():
            with logged("could not check whether all ranks made the same calls"):
                if destroyed_only and not mesh.is_destroyed():
                    continue
                found = unmatched_calls.comparison(mesh, left_by, failure)
                if found is not None:
                    comparisons[mesh.board_thread].append(found)
        for board_thread, each in comparisons.items():
            with contextlib.suppress(StoreSilentError):
                board_thread.call(
                    functools.partial(unmatched_calls.publish_and_compare, each),
                    _COMPARISON_SECONDS,
                )

    def close(self) -> None:
        """Shut down objcomm's threads and connections at the end of the program.

        A thread that is inside torch when the interpreter shuts down would abort the process.
        """
        if self.pid != os.getpid():
            return
        has_ended_well = _ending() == PROGRAM_ENDED
        self.compare_calls(failure="" if has_ended_well else _ending())
        bring_back(lambda: (self._all_meshes(), self._all_listeners()), list(self.board_threads))
        until = time.monotonic() + _DELIVERY_SECONDS
        for mesh, link in [(mesh, mesh.link) for mesh in self._all_meshes()]:
            if link is not None and not mesh.is_closed:  # a later exit handler may still use it
                with logged("could not check whether everything sent has arrived"):
                    link.await_delivery(until)
        self._is_closing = True
        self._nudge()
        self.join(FAREWELL_SECONDS)
        if not self.is_alive():
            self._receiving.close()
            self._sending.close()
        if has_ended_well:
            for mesh in self._all_meshes():
                with logged("could not check whether all ranks made the same calls"):
                    unmatched_calls.close_and_check(mesh, PROGRAM_ENDED)
            error = unmatched_calls.take_mismatch()
            if error is not None:
                end_badly(error)


def _has_lost_some(mesh: Mesh) -> bool:
    """Whether a process of the world has ended. Over Gloo, connections may not show that.

    Checks a few random processes at a time, because each takes 20 to 80 µs.
    """
    if not mesh.is_world:
        return False
    looked_at = random.sample(mesh.others, min(_MOST_LOOKED_AT, len(mesh.others)))
    ends = [mesh.board_thread.processes.end_of(mesh.ranks[peer]) for peer in looked_at]
    return any(ends)  # a list, not a generator: each end found is remembered with its time


def _alive(known: "weakref.WeakKeyDictionary[Mesh, Any]") -> list[Mesh]:
    """Return the meshes still alive; a signal handler or another thread may add one meanwhile."""
    found = [reference() for reference in known.keyrefs()]
    return [mesh for mesh in found if mesh is not None]


class _Watchdogs:
    """The process's watchdog and one board thread per world; a forked child creates its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._board_thread = Alone("a call")
        self._watchdog: Watchdog | None = None
        self._board_threads = weakref.WeakKeyDictionary[dist.ProcessGroup, BoardThread]()

    def watchdog(self) -> Watchdog:
        with self._lock:
            former = self._watchdog
            if former is not None and former.pid == os.getpid():
                # Without an ident: a signal handler interrupted this thread while starting it.
                if former.is_alive() or former.ident is None or sys.is_finalizing():
                    return former
                made = Watchdog(former)
            else:
                made = Watchdog()
            if self._watchdog is not former:  # a signal handler has created one meanwhile
                return self.watchdog()
            self._watchdog = made
            try:
                made.begin()
            except BaseException:
                self._watchdog = former
                raise
            return made

    def board_thread(self, world: dist.ProcessGroup) -> BoardThread:
        watchdog = self.watchdog()
        with self._lock, self._board_thread:
            if world not in self._board_threads:
                is_there, held = weakref.ref(world), [store_of(world)]
                started: list[BoardThread] = []
                # At exit, ``close`` compares.
                weakref.finalize(world, _leave_last, held, started).atexit = False
                found = self._board_threads[world] = BoardThread(
                    held[0],
                    world.rank(),
                    world.size(),
                    lost_seconds=settings().lost_after,
                    describe=watchdog.snapshot,
                    is_needed=lambda own: bool(held) or watchdog.has_open(own),
                    is_cut_off=lambda rank: (at := is_there()) is not None and is_cut_off(at, rank),
                )
                started.append(found)
                watchdog.board_threads.add(found)
            return self._board_threads[world]

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()

    def compare_calls(
        self, left_by: str = "", failure: str = "", *, destroyed_only: bool = False
    ) -> None:
        if self._watchdog is not None and self._watchdog.pid == os.getpid():
            self._watchdog.compare_calls(left_by, failure, destroyed_only=destroyed_only)


_watchdogs = _Watchdogs()


def close() -> None:
    """Shut down objcomm's threads and connections before the interpreter ends."""
    _watchdogs.close()


def compare_destroyed() -> None:
    """Compare the calls on destroyed groups, unless this thread is handling an error."""
    if unmatched_calls.failure_here() is None:
        _watchdogs.compare_calls(destroyed_only=True)


def _leave_last(held: "list[dist.Store]", started: list[BoardThread]) -> None:
    """Compare the calls on destroyed groups when their world is gone; see also ``await_host``.

    Args:
        held: contains the world's store. Until this is emptied, the board's thread keeps running,
            and a store that this process hosts keeps answering.
        started: that thread; empty if Ctrl-C interrupted its start.
    """
    try:
        if unmatched_calls.failure_here() is None:
            compare_destroyed()
            for board_thread in started:
                board_thread.await_host()
    finally:
        held.clear()
        for board_thread in started:
            board_thread.wake()


@contextlib.contextmanager
def audited(left_by: str) -> Iterator[None]:
    """Context in which this rank leaves the world; raises any mismatch that this reveals.

    While another exception is being handled, no mismatch is raised.

    Args:
        left_by: how this rank leaves, and at which line.

    Raises:
        DesyncError: another rank has made different calls.
    """
    failure = unmatched_calls.failure_here()
    _watchdogs.compare_calls(left_by, f"it left after {brief_text_of(failure)}" if failure else "")
    is_failing, failure = failure is not None, None  # keeping it would keep its frames alive
    yield
    error = unmatched_calls.take_mismatch()
    if error is not None and not is_failing:
        raise error


def check_running(operation: str) -> None:
    """Refuse a call during interpreter shutdown, when no watchdog could end it.

    Raises:
        UsageError: the interpreter is shutting down, so other threads no longer run.
    """
    if sys.is_finalizing():
        raise UsageError(
            f"{operation}: the interpreter is shutting down; make the last call before the program "
            "ends, or in an atexit handler"
        )


def board_thread_of(world: dist.ProcessGroup) -> BoardThread:
    """Return the thread that talks to the store of a world, started if necessary."""
    return _watchdogs.board_thread(world)


def watch(mesh: Mesh) -> None:
    """Watch all waits on ``mesh`` while it exists."""
    _watchdogs.watchdog().add(mesh)


def hurry(seconds: float) -> None:
    """Wake the watchdog if a wait of ``seconds`` would end before its next check."""
    if seconds < TICK_SECONDS:
        _watchdogs.watchdog()._nudge()  # noqa: SLF001  # same module


def expect(mesh: Mesh, listener: threading.Thread) -> None:
    """Make sure that a thread that waits on ``mesh`` ends before the interpreter does."""
    _watchdogs.watchdog().expect(mesh, listener)


def died_in(block: str) -> Verdict | None:
    """Return the verdict on a block in which a rank is known to have died, if any."""
    meshes = _watchdogs.watchdog().named((nonce_of(block),))
    return next((mesh.died for mesh in meshes), None)


def end_elsewhere(
    verdict: Verdict, thread: threading.Thread | None = None, *, is_raised: bool = True
) -> None:
    """End the other meshes that a verdict lists.

    Args:
        verdict: the verdict.
        thread: the thread that raises it for all of them; the calling thread if None.
        is_raised: whether the thread raises it now; if not, it still has to raise it on each mesh.
    """
    thread = thread or threading.current_thread()
    for mesh in _watchdogs.watchdog().named(verdict.meshes):
        mesh.settle(verdict)  # posts it, because not every rank of a deadlock has all its meshes
        if is_raised:
            mesh.mark_raised(thread)


def settle_desync(mesh: Mesh, lane: Lane, proposal: Verdict) -> Verdict:
    """Do what ``Mesh.settle`` does, and add the calls of all ranks that answer in time."""
    meshes = _watchdogs.watchdog().meshes(mesh.board_thread)

    def settle_on(board: Board) -> Verdict:
        found = inquiry.with_all_ranks(board, meshes, mesh, lane.number, proposal)
        return mesh.settle_on(board, found)

    if mesh.verdict is not None:
        return mesh.settle(proposal)
    return mesh.stop(mesh.posted(proposal, settle_on, _EXPIRY_SECONDS))


class interruptible:  # noqa: N801  # used like a function, as in contextlib
    """Context manager in which Ctrl-C ends ``mesh`` promptly; no effect outside the main thread.

    Not for waits that Ctrl-C ends anyway: when the watchdog runs, the interrupted thread may
    already be in its next call, on another mesh.

    A wake-up descriptor that was set before, for example by asyncio, still receives signal numbers
    and is restored afterwards.
    """

    __slots__ = ("_mesh", "_outer", "_watchdog")

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._watchdog: Watchdog | None = None
        self._outer: Mesh | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._watchdog = _watchdogs.watchdog()
            self._outer, self._watchdog.target = self._watchdog.target, self._mesh
            if self._outer is None:
                self._watchdog.listen()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._watchdog is not None:
            self._watchdog.target = self._outer  # not None if a callback called on another group
            if self._outer is None:
                self._watchdog.rest()


#: Threads usually end immediately; this allows for a busy machine or a slow store.
FAREWELL_SECONDS = 2.0
_PAUSE_SECONDS = 0.01

# Names of the threads that connect a mesh or listen on one.
_OF_A_MESH = frozenset({"objcomm-connect", "objcomm-listen"})

_Look: TypeAlias = Callable[[], tuple[list[Mesh], list[tuple[Mesh, threading.Thread]]]]


def bring_back(look: _Look, board_threads: Sequence[BoardThread]) -> None:
    """End all waits in C++, and the boards' threads.

    A store that is stopped or unreachable blocks a thread until it answers, and an answer during
    interpreter shutdown would abort the process. So a thread that does not return in time is cut
    off from the store. Gloo's attempt to connect ends only with its own timeout, so the process
    waits for that.

    Args:
        look: as for ``end_waits``.
        board_threads: all board threads of this process.
    """
    if not _are_all_back(look, board_threads):
        for each in board_threads:
            each.store.hang_up()
        if not _are_all_back(look, board_threads):
            for mesh in look()[0]:
                mesh.await_connector(CONNECT_MAX.total_seconds())


def _are_all_back(look: _Look, board_threads: Sequence[BoardThread]) -> bool:
    are_back = [end_waits(look)]
    are_back += [board_thread.close(FAREWELL_SECONDS, _ending()) for board_thread in board_threads]
    return all(are_back)


def end_waits(look: _Look) -> bool:
    """Make threads return from C++: close their connections, and post the reason for other ranks.

    Args:
        look: returns all meshes of this process, and the threads that wait for messages, each with
            its mesh. Called repeatedly, because a thread may be just about to start.

    Returns:
        Whether all have returned in time.
    """
    until = time.monotonic() + FAREWELL_SECONDS
    while True:
        meshes, listeners = look()
        occupied = {mesh for mesh in meshes if _is_occupied(mesh)}
        occupied |= {mesh for mesh, listener in listeners if listener.is_alive()}
        for mesh in occupied:
            leaves = Verdict.of(Cause.LEFT, ranks=(mesh.rank,), reason=_ending())
            # Another job may keep the board's thread busy for 1.2 s. If this program failed because
            # another rank died, that rank must be reported, not this one.
            if leaves.reason in FAREWELLS:
                mesh.settle(leaves, FAREWELL_SECONDS)
            else:
                settle_by_name(mesh, leaves, FAREWELL_SECONDS)
        is_any_away = bool(occupied) or are_workers_busy() or _are_any_leaving()
        if not is_any_away or time.monotonic() > until:
            return not is_any_away
        time.sleep(_PAUSE_SECONDS)


def _are_any_leaving() -> bool:
    """Whether threads that belong to a mesh are alive.

    The mesh itself may be gone: such a thread may be in its destructor, in C++.
    """
    return any(each.name in _OF_A_MESH for each in threading.enumerate())


def _is_occupied(mesh: Mesh) -> bool:
    """Whether a thread is, or soon will be, in C++ on behalf of the mesh."""
    return mesh.is_meeting or any(lane.is_busy for lane in tuple(mesh.lanes.values()))


def _ending() -> str:
    """Return how the program ends; Python keeps an uncaught exception in ``sys.last_value``."""
    failed = getattr(sys, "last_value", None)
    return PROGRAM_ENDED if failed is None else f"its program ended with {brief_text_of(failed)}"
