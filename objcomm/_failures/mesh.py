"""A mesh: the private connections of a group, from the rendezvous to the verdict that ends them.

A group has one mesh at a time. After a recoverable verdict the next call creates a new one. Each
mesh has a unique nonce, so nothing sent on an old mesh can be taken for a message of the new one.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import hashlib
import logging
import math
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from functools import partial
from secrets import compare_digest
from struct import Struct
from typing import TYPE_CHECKING

import torch.distributed as dist

from objcomm._failures.deadlock import MEETING
from objcomm._failures.noticeboard import PATIENCE_SECONDS, Board, BoardThread, StoreSilentError
from objcomm._failures.verdict import (
    DESTROYED,
    FAREWELLS,
    PROGRAM_ENDED,
    Cause,
    Verdict,
    open_blocks,
    proposal_for,
)
from objcomm._observe.history import CallRecord
from objcomm._observe.log import log
from objcomm._transport.connect import connect
from objcomm._transport.link import HOST_LOST
from objcomm._transport.rendezvous import FIRST_USE, GivenUpError, LeftError, MeetingState
from objcomm._transport.store import StorePart, pack_record, reason_of
from objcomm._transport.threads import OnceThread
from objcomm._wire.header import Header, fingerprint
from objcomm._wire.signing import environment_secret
from objcomm.errors import ObjcommError, Position, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from objcomm._observe.history import History
    from objcomm._transport.lane import Lane
    from objcomm._transport.link import Connections, Deadline


_REPORT_SECONDS = 5.0
# Long enough for the others' verdict: a waiting rank raises within 2 s of a death.
_POLL_SECONDS = 5.0
# Encoding of a rank in a farewell.
_RANK = Struct("<I")
#: Length of the authentication code that ``Mesh.proof`` returns.
PROOF_NBYTES = 16


class Mesh:
    """The connections between some ranks of a group; see the module docstring. Thread-safe.

    Attributes:
        name: the group's name.
        is_world: whether it is the mesh of the default group of all ranks.
        ranks: global ranks of the group.
        rank: this process's group rank.
        members: the ranks that it connects, as group ranks.
        whole: on a mesh of two ranks, returns the whole group's mesh, if there is one; else None.
        is_destroyed: returns whether this process has destroyed the group.
        history: the group's calls on this rank.
        board_thread: the thread that posts verdicts.
        lanes: the lanes by name.
        link: the connections, once the ranks have met.
        verdict: what ended it, as this rank raises it.
        posted_verdict: the verdict as the ranks agreed on it, not as seen by this rank.
        number: a hash of the nonce, carried in headers, once the ranks have met.
        outlives: the name of a verdict that was known before the ranks met, so it does not concern
            the traffic of this mesh.
        failed_meeting: the nonce of the group's last mesh, if that mesh never connected.
        blocks: the keys of the ``fail_together`` blocks that this rank is in.
        is_closed: whether its connections were closed after the verdict.
        died: the verdict for callers that poll in one of these blocks after a rank has died.
        polled_verdict: the verdict that others posted while this rank was not waiting for them.
        at_end: called when the connections are closed; each ends something else that ranks wait
            for.
    """

    def __init__(
        self,
        *,
        name: str,
        is_world: bool,
        ranks: tuple[int, ...],
        rank: int,
        history: History,
        board_thread: BoardThread,
        members: tuple[int, ...],
        whole: Callable[[], Mesh | None] | None,
        is_destroyed: Callable[[], bool],
        end_unconnected: Callable[[Mesh, BaseException], object],
    ) -> None:
        self.name = name
        self.is_world = is_world
        self.ranks = ranks
        self.rank = rank
        self.members = members
        self.whole = whole
        self.is_destroyed = is_destroyed
        self._end_unconnected = end_unconnected  # finds the missing ranks; see ``losses``
        self.history = history
        self.board_thread = board_thread
        self.lanes: dict[str, Lane] = {}
        self.link: Connections | None = None
        self.verdict: Verdict | None = None
        self.number = 0
        self.outlives = ""
        self.failed_meeting = ""
        self.blocks: set[str] = set()
        self.died: Verdict | None = None
        self.polled_verdict: Verdict | None = None
        self.at_end: list[Callable[[], object]] = []
        self._polls_until = 0.0
        self.posted_verdict: Verdict | None = None
        self._secret: bytes | None = None  # derived from the user's key
        self._reported = history.refused[0]
        self.is_closed = False
        self._meeting = MeetingState(rank, members, is_pair=whole is not None)
        self._connector = OnceThread("objcomm-connect")
        self._connected: Future[Connections] = Future()
        self._lock = threading.RLock()

    @property
    def nonce(self) -> str:
        """Its unique identifier and the key of its verdict; empty until this rank knows it."""
        return self._meeting.nonce

    @property
    def session(self) -> str:
        """What the signatures of its messages are bound to, once it is connected."""
        return self._meeting.session

    @property
    def labels(self) -> dict[str, object]:
        """The ``extra`` fields of log records: rank and group."""
        return {"rank": self.ranks[self.rank], "group": self.name}

    @property
    def others(self) -> tuple[int, ...]:
        """The members except this rank."""
        return tuple(member for member in self.members if member != self.rank)

    @property
    def is_meeting(self) -> bool:
        """Whether a thread is still connecting the members."""
        return self._connector.is_alive

    def await_connector(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the thread that connects the members to end."""
        self._connector.join(seconds)

    @property
    def can_be_replaced(self) -> bool:
        """Whether there is a verdict and the group's next call may create a new mesh."""
        if self.verdict is None:
            return False
        has_not_begun = self.link is None and not self.verdict.is_final
        if self.verdict.ranks == (self.rank,) and self.verdict.reason == PROGRAM_ENDED:
            return True  # this rank's exit handlers may still communicate
        return self.verdict.is_recoverable or has_not_begun

    def connect(
        self,
        store: dist.Store,
        deadline: Deadline,
        lane: Lane,
        operation: str,
        call_site: str,
        *,
        caller: CallRecord | None = None,
    ) -> Connections:
        """Meet the other ranks and connect to each; every rank must call this.

        Blocks in Python, so Ctrl-C ends it; calls that may block in C++ run on another thread.

        Args:
            store: the world's store.
            deadline: how long to wait for the last rank.
            lane: the calling thread's lane.
            operation: the operation that needs the connections.
            call_site: the user's line that called it.
            caller: the record of that call, if another thread may wait for it.

        Raises:
            ObjcommError: the verdict, for example that some ranks did not join in time.
        """
        header = Header(sender=self.rank, sequence=MEETING, lane=lane.number, call_site=call_site)
        if self.whole is not None:
            header = header._replace(root=self.others[0])
        entry = CallRecord(header, operation, lane=lane.name)
        entry.caller = caller
        self.history.add_meeting(entry)
        self._meeting.watch(entry)
        entry.blocks = open_blocks.get()
        entry.waiter = threading.get_ident()
        lane.begin(entry, deadline)
        # Warn early: most long waits here are due to a rank that never makes the call.
        if not math.isinf(entry.report_at):
            entry.report_at = min(entry.report_at, entry.waits_since + _REPORT_SECONDS)
        try:
            try:
                self.begin_meeting(store, deadline)
            except RuntimeError:  # no thread could be started; the others must learn of it
                self._connector.do_here(partial(self._meet, store, deadline))
            link = self.connections_for(operation)
            self._raise_failures_of(entry.blocks, operation, is_pair=lane.order is not None)
        except BaseException as error:
            raises_verdict = isinstance(error, ObjcommError)
            if self.verdict is None and self.whole is None:
                # For example after Ctrl-C: otherwise the others would connect to a rank that is no
                # longer in their call. In a pair, the peer has sent nothing yet, and this rank may
                # try again.
                own = proposal_for(error, self.rank)
                raises_verdict = self.settle(own).name == own.name
            if raises_verdict and self.verdict is not None:
                self.mark_raised(lane.owner)
            # Wait until the connector has posted the parting verdict, which is not for the ranks of
            # a later call.
            if self._meeting.parting:
                self.await_connector(PATIENCE_SECONDS)
            entry.end(error, time.time() - entry.began)
            raise
        finally:
            lane.end(entry, deadline)
        entry.header = header._replace(group=self.number)
        entry.end(None, time.time() - entry.began)
        return link

    def connections_for(self, operation: str) -> Connections:
        """Wait until the ranks have met and return the link.

        Args:
            operation: the operation that needs it.

        Raises:
            ObjcommError: the verdict, if they never will.
        """
        if self.link is not None:
            return self.link
        # Not raised by ``result()``: its traceback would keep this mesh alive in a cycle.
        failed = self._connected.exception()
        if failed is None:
            return self._connected.result()
        if self.verdict is None:
            raise failed
        raise self.verdict.error(f"{operation} ({FIRST_USE})")

    def apart(self) -> Verdict | None:
        """Return the verdict for a timeout if two ranks could not reach each other, else None."""
        found = None if self.link is not None else self._meeting.unreachable
        if found is None:
            return None
        return Verdict.of(Cause.APART, ranks=found.ranks, reason=found.reason, is_final=True)

    def begin_meeting(self, store: dist.Store, deadline: Deadline) -> None:
        """Start a thread that meets the other members, unless one has started; return immediately.

        Raises:
            UsageError: the environment sets an unusable transport, port range or key file.
            RuntimeError: this process cannot start more threads. The next call tries again.
        """
        # Read here, so a mistake in the environment raises before any traffic.
        _ = deadline.settings.chosen_transport, deadline.settings.chosen_ports
        environment_secret()
        self._connector.start(partial(self._meet, store, deadline))

    def _raise_failures_of(self, blocks: Sequence[str], operation: str, *, is_pair: bool) -> None:
        """Raise the failure of a block around a call before the call can match one outside it."""
        verdict = self.met_too_late(blocks)
        if verdict is not None:
            raise (verdict if is_pair else self.settle(verdict)).error(operation)

    def met_too_late(self, blocks: Sequence[str]) -> Verdict | None:
        """Return the verdict on these blocks if one had failed before the ranks met.

        The other rank may already have left the block.
        """
        for key in blocks:
            verdict = self.failed(key)
            if verdict is not None:
                self.outlives = verdict.name
                return verdict
        return None

    def _check_blocks(self, blocks: set[str]) -> None:
        verdict = next(filter(None, map(self.failed, sorted(blocks))), None)
        if verdict is not None:
            self.settle(verdict)

    def _meet(self, store: dist.Store, deadline: Deadline) -> None:
        # In a pair, ``met_too_late`` informs the rank that waits, and the other one continues.
        self._meeting.check_blocks = None if self.whole is not None else self._check_blocks
        # Wait until the board's thread has published this process: its peers may rely on that.
        with contextlib.suppress(StoreSilentError):
            self.board_thread.call(lambda _: None)
        self._secret = deadline.settings.secret or environment_secret()
        lost_seconds = deadline.settings.lost_after
        shared = self.board_thread.store
        try:
            shared.open(store, lost_seconds)
            link = connect(
                StorePart(shared, self.name),
                self.board_thread.clients.lent(store, lost_seconds),
                self.rank,
                self.members,
                deadline,
                self._meeting,
                self._secret,
                self._learn,
                self._lose,
                self.history.refuse,
            )
            log.debug(
                "group %r: %d ranks connected over %s, on %d host(s)",
                *(self.name, len(self.members), link.kind, len(set(link.hosts))),
                extra=self.labels,
            )
            if self._meeting.without_streams:
                log.warning(
                    "group %r: its objects travel over Gloo, which is slower and more exposed, "
                    'because %s. To make this an error, set configure(transport="streams"); to '
                    'choose Gloo without this warning, set transport="gloo" on every rank',
                    *(self.name, self._meeting.without_streams),
                    extra=self.labels,
                )
        except GivenUpError:
            return  # because of ``stop``, whose verdict the callers raise
        except LeftError as left:
            message = left.message
            self.board_thread.submit(
                lambda board: self.stop(board.take_in(self.name, message), board)
            )
            return
        except BaseException as error:  # noqa: BLE001  # this thread must not end silently
            if isinstance(error, dist.DistNetworkError):
                killed = self.board_thread.processes.killed()
                died = tuple(rank for rank, each in enumerate(self.ranks) if each in killed)
                reason = f"the store where ranks meet is gone ({reason_of(error)})"
                if not died:  # then only processes outside this group are known to have ended
                    hosts = (f"; rank {rank} of the world: {why}" for rank, why in killed.items())
                    reason += next(hosts, "")
                self.settle(Verdict.of(Cause.LOST, ranks=died, reason=reason))
            else:
                self._lose(error)
            return
        finally:
            self._meeting.check_blocks = None  # breaks a cycle that would keep the connections open
        with self._lock:
            self.number = fingerprint(self.nonce)
            self.link = link
            if self.verdict is None:
                self._connected.set_result(link)
                if self.rank == self.members[0] and self.failed_meeting:
                    self.board_thread.submit(lambda board: board.retract(self.failed_meeting))
                return
        link.abort(self._farewell())  # the verdict came first

    def _learn(self, peers: Sequence[int]) -> None:
        """Read the process records of peers on this host, so the kernel can be asked about them.

        Done before all ranks have connected, because the store's host may be the next to die.
        """
        with contextlib.suppress(StoreSilentError):
            self.board_thread.call(lambda board: board.learn(self.ranks[peer] for peer in peers))

    def _lose(self, error: BaseException) -> None:
        """End the mesh because its ranks could not all connect."""
        if self.verdict is None:
            self._end_unconnected(self, error)

    def poll_for_verdict(self, now: float) -> None:
        """Ask the store for a verdict for some seconds after this rank has lost a connection.

        A rank that is computing would not ask, and the store may be gone by its next call.
        """
        self._polls_until = self._polls_until or now + _POLL_SECONDS
        if self.polled_verdict is None and now < self._polls_until:
            self.board_thread.submit(partial(_poll_verdict, weakref.ref(self)))

    def report_refusals(self) -> None:
        """Log refused connections each time their number has doubled.

        Not logged where they are refused: that thread may hold the link's lock while another thread
        holds a logging handler's.
        """
        count, why = self.history.refused
        if count.bit_length() > self._reported.bit_length():
            self._reported = count
            log.warning(
                "group %r: refused a connection (%d so far): %s",
                *(self.name, count, why),
                extra=self.labels,
            )

    def settle(self, proposal: Verdict, seconds: float = PATIENCE_SECONDS) -> Verdict:
        """End the mesh with ``proposal``, or with a verdict that another rank posted earlier.

        Waits at most ``seconds`` for the store. Returns the verdict that this rank must raise.
        """
        if self.verdict is not None:
            return self.stop(self.verdict)
        if not self.nonce:
            return self.stop(proposal)
        posted = self.posted(proposal, lambda board: self.settle_on(board, proposal), seconds)
        return self.stop(posted)

    def settle_on(self, board: Board, proposal: Verdict) -> Verdict:
        """Do what ``settle`` does, on the board's thread."""
        # Two threads may settle at the same time. The second must neither post nor acknowledge, or
        # its verdict would stay in the store after all ranks have read the first one.
        if self.verdict is not None:
            return self.verdict
        if self.link is not None and not proposal.is_recoverable:
            proposal = proposal._replace(is_final=True)
        return self.stop(board.propose(self.nonce, proposal) if self.nonce else proposal)

    @property
    def is_owed(self) -> bool:
        """Whether a thread has yet to raise the verdict.

        A thread that has ended does not count: no other rank waits for its next call.
        """
        lanes = [lane for lane in tuple(self.lanes.values()) if lane.owes]
        return any(lane.order is not None or lane.owner.is_alive() for lane in lanes)

    def is_owed_by(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` has yet to raise the verdict."""
        lanes = tuple(self.lanes.values())
        return any(lane.owes and lane.is_of(thread) for lane in lanes)

    def last_position(self, thread: threading.Thread) -> Position | None:
        """Return where ``thread`` made its last call on this mesh; None if it made none."""
        lanes = tuple(self.lanes.values())
        past = [lane.past[-1] for lane in lanes if lane.owner is thread and lane.past]
        return max(past, key=lambda call: call.began).position() if past else None

    def destroyed(self) -> Verdict:
        """Return this rank's verdict for a group that its program has destroyed or left."""
        by = filter(None, (each.left_by for each in self.board_thread.processes.own.calls))
        return Verdict.of(Cause.LEFT, ranks=(self.rank,), reason=DESTROYED, left_by=next(by, ""))

    def mark_raised(self, thread: threading.Thread) -> None:
        """Record that ``thread`` raises the verdict, for all its lanes."""
        for lane in tuple(self.lanes.values()):
            if lane.is_of(thread):
                lane.owes = False

    def fail(self, key: str, proposal: Verdict) -> Verdict:
        """End the mesh because block ``key`` failed here; post the verdict for the block, too."""
        standing: list[Verdict] = []

        def post(board: Board) -> Verdict:
            winner = board.propose(key, proposal)
            # All ranks may have read an earlier verdict, and nothing would remove a second one.
            if self.nonce and self.verdict is None:
                standing.append(board.propose(self.nonce, winner))
            return winner

        winner = self.posted(proposal, post)
        # If another rank posted first, its verdict decides whether the next call may reconnect.
        self.stop(standing[0] if standing else winner)
        return winner

    def posted(
        self,
        proposal: Verdict,
        post: Callable[[Board], Verdict],
        seconds: float = PATIENCE_SECONDS,
    ) -> Verdict:
        """Run ``post`` on the board's thread; return its verdict, or ``proposal`` on a timeout."""
        try:
            return self.board_thread.call(post, seconds)
        except StoreSilentError:
            return self.polled_verdict or proposal._replace(is_store_silent=True)

    def failed(self, key: str) -> Verdict | None:
        """Return the verdict posted for the block ``key``; None if there is none or no answer."""
        try:
            return self.board_thread.call(lambda board: board.look(key))
        except StoreSilentError:
            return None

    def enter(self, key: str) -> Verdict | None:
        """Enter the block ``key``; if it has failed elsewhere, return its verdict instead."""
        with self._lock:
            if self.verdict is not None and self.verdict.block == key:
                return self.verdict
            self.blocks.add(key)
            return None

    def end_block(self, key: str) -> None:
        """Leave the block ``key``, however it has ended."""
        self.blocks.discard(key)
        self.board_thread.forget(key)

    def leave(self, key: str) -> None:
        """Acknowledge the verdict by which this rank leaves the block ``key``."""
        self.board_thread.submit(lambda board: board.acknowledge(key, len(self.members)))

    def blamed_by(self, peer: int) -> tuple[int, ...]:
        """Return the lost ranks that a peer's farewell gave as its reason; empty without one.

        The farewell arrives before the store answers, and even if the store never does. It contains
        only ranks; the reason why the mesh ended comes from the store.
        """
        link, others = self.link, {*self.others} - {peer}
        farewell = b"" if link is None else link.farewell_of(peer)
        ranks, proof = farewell[:-PROOF_NBYTES], farewell[-PROOF_NBYTES:]
        if (
            not ranks
            or len(ranks) % _RANK.size
            or not compare_digest(proof, self.proof(peer, ranks))
        ):
            return ()
        named = {rank for (rank,) in _RANK.iter_unpack(ranks)}
        return tuple(sorted(named)) if named <= others else ()

    def _farewell(self) -> bytes:
        """Return this rank's farewell: the ranks whose loss makes it close its connections."""
        verdict = self.posted_verdict
        lost = verdict.ranks if verdict is not None and verdict.cause is Cause.LOST else ()
        # Ranks come from the store, to which other programs may have access.
        if not lost or not {*lost} <= {*self.members}:
            return b""
        ranks = b"".join(map(_RANK.pack, lost))
        return ranks + self.proof(self.rank, ranks)

    def proof(self, sender: int, content: bytes) -> bytes:
        """Return a code that authenticates ``content`` as sent by a rank of this mesh.

        It is keyed with the session, and with the user's key if there is one.
        """
        key = hashlib.blake2b(self.session.encode(), key=self._secret or b"").digest()
        content = _RANK.pack(sender) + content
        return hashlib.blake2b(content, key=key, digest_size=PROOF_NBYTES).digest()

    def adopt(self, standing: Verdict) -> None:
        """Replace a verdict that could not be posted in time with the one that the others posted.

        All ranks must agree on whether the next call may create a new mesh: if only some created
        one, they would wait there for the others. The name under which this rank raises the verdict
        does not change.
        """
        with self._lock:
            if self.verdict is not None:
                self.posted_verdict = standing
                standing = standing.seen_by(self.rank, self.others)
                self.verdict = standing._replace(name=self.verdict.name)

    def stop(self, verdict: Verdict, board: Board | None = None) -> Verdict:
        """Close the connections because of a verdict that is known to the other ranks.

        If there already is a verdict, that one holds. The connections are closed when this returns,
        even if another thread got here first: data that this rank had begun to send must not arrive
        after it has reported its error.

        Args:
            verdict: the reason; known only here if the store did not answer in time.
            board: given on the board's thread, if that may never run another job.

        Returns:
            The verdict that holds, as this rank sees it.
        """
        with self._lock:
            standing = self.verdict
            posted, verdict = verdict, verdict.seen_by(self.rank, self.others)
            if standing is None:
                self.posted_verdict = posted
                self.verdict = verdict
                # Only a desync concerns all ranks; a timeout or Ctrl-C concerns only this one.
                if verdict.cause is Cause.DESYNC:
                    self._meeting.parting = pack_record(verdict)
                self._meeting.end()
                # A strong reference in a queued job would keep the mesh's connections open.
                mesh, blocks = weakref.ref(self), frozenset(self.blocks)
                known = self.nonce, self.rank, self.members, blocks, posted
                job = partial(_acknowledge, mesh, *known)
                if self.nonce and board is None:
                    # Before any call wakes: the next mesh may remove this one's keys.
                    self.board_thread.submit(job)
                if self.link is None:
                    self._connected.set_exception(verdict.error(FIRST_USE))
                    # Retrieved here, because no thread may be waiting for it.
                    self._connected.exception()
        # Not during interpreter shutdown, when a generator may be closed: torch would abort the
        # process. The end of the process closes the connections anyway.
        if self.link is not None and not self.is_closed and not sys.is_finalizing():
            self.link.abort(self._farewell())
            for end in tuple(self.at_end):  # a call on another thread may remove its own
                end()
            self.is_closed = True
        if standing is not None:
            return standing
        if self.nonce and board is not None:
            job(board)
        log.log(
            logging.DEBUG if verdict.reason in FAREWELLS else logging.INFO,
            "group %r: its connections were closed, %s: %s",
            self.name,
            "and its next call opens new ones" if self.can_be_replaced else "for good",
            text_of(verdict.error("a call")),
            extra=self.labels,
        )
        return verdict


def _poll_verdict(of: weakref.ref[Mesh], board: Board) -> None:
    mesh = of()
    if mesh is not None and mesh.polled_verdict is None:
        mesh.polled_verdict = board.look(mesh.nonce)


def _acknowledge(  # noqa: PLR0917  # the arguments of a job
    mesh: weakref.ref[Mesh],
    nonce: str,
    rank: int,
    members: tuple[int, ...],
    blocks: frozenset[str],
    verdict: Verdict,
    board: Board,
) -> None:
    """Acknowledge the verdict on a mesh in the store; the last rank to do so removes it.

    A verdict that could not be posted in time is posted now, unless another rank has posted one:
    ranks in a rendezvous do not have a connection whose end would alert them. A farewell is not
    posted, because no rank waits for one.

    A rank inside the failed block acknowledges the block's verdict when it leaves the block. A rank
    that has not reached the block yet raises it in an earlier call, and acknowledges it here.
    """
    standing: Verdict | None = verdict
    if verdict.is_store_silent and verdict.reason in FAREWELLS:
        standing = board.look(nonce)
    elif verdict.is_store_silent:
        standing = board.propose(nonce, verdict._replace(is_store_silent=False))
    if standing is None:
        return
    ended = mesh()
    if ended is not None and standing.name != verdict.name:
        ended.adopt(standing)
    lost = set(standing.ranks if standing.cause is Cause.LOST else ()).intersection(members)
    # Ranks on an unreachable host may be alive and ask later, so the verdict stays in the store.
    if rank not in lost and HOST_LOST not in standing.reason:
        board.acknowledge(nonce, len(members) - len(lost))
    if standing.block.startswith(nonce) and standing.block not in blocks:
        board.acknowledge(standing.block, len(members))
