"""One mesh of a group: its private connections from the ranks' meeting to the verdict that ends it.

A group has one mesh at a time. After a verdict that all ranks outlive the next call makes a new
one; nothing of the old one can reach it, because each has a name that no other ever had.
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
    proposal_for,
    regions,
)
from objcomm._observe.history import CallRecord
from objcomm._observe.log import log
from objcomm._transport.connect import connect
from objcomm._transport.link import HOST_LOST
from objcomm._transport.rendezvous import FIRST_USE, GivenUpError, LeftError, MeetingState
from objcomm._transport.store import pack_record, reason_of
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
# A rank that waits raises within 2 s of a death.
_LISTENS_SECONDS = 5.0
# How a farewell names a rank.
_RANK = Struct("<I")
#: Length of a proof of who said something; see ``Mesh.proof``.
PROOF_NBYTES = 16


class Mesh:
    """See the module; every method may be called from any thread.

    Attributes:
        name: the group's.
        is_world: whether it joins all ranks, for as long as they are in a world.
        ranks: global ranks of the group.
        rank: this process's rank within the group.
        members: those of the group's ranks that it joins, as ranks within the group.
        whole: gives the whole group's mesh, if there is one, where this one joins two ranks.
        is_destroyed: tells whether this process has destroyed the group.
        history: the group's calls on this rank.
        board_thread: where verdicts are posted.
        lanes: by name.
        link: the connections, once the ranks have met.
        verdict: what ended it.
        number: what headers carry of its nonce, once the ranks have met.
        outlives: the name of a verdict that was known before its ranks met, and so concerns none of
            its traffic.
        failed_meeting: the nonce of the group's last mesh, where not all ranks came to know it.
        blocks: the keys of those in which this rank is.
        is_closed: whether its connections were closed after the verdict.
        died: what to say to who polls in one of them, where a rank has died.
        heard: what others have posted while this rank waited for none of them.
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
        self._end_unconnected = end_unconnected  # names the missing ranks; see ``losses``
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
        self.heard: Verdict | None = None
        self._listens_until = 0.0
        self._told: Verdict | None = None  # the verdict, as all ranks see it
        self._secret: bytes | None = None  # of the user's key
        self._reported = history.refused[0]
        self.is_closed = False
        self._meeting = MeetingState(rank, members, is_pair=whole is not None)
        self._connector = OnceThread("objcomm-connect")
        self._connected: Future[Connections] = Future()
        self._lock = threading.RLock()

    @property
    def nonce(self) -> str:
        """Its name among all meshes, once this rank knows it; the key of its verdict."""
        return self._meeting.nonce

    @property
    def session(self) -> str:
        """What its messages' signatures are bound to, once it is connected."""
        return self._meeting.session

    @property
    def labels(self) -> dict[str, object]:
        """Whom a record in the log concerns."""
        return {"rank": self.ranks[self.rank], "group": self.name}

    @property
    def others(self) -> tuple[int, ...]:
        """The members but this one."""
        return tuple(member for member in self.members if member != self.rank)

    @property
    def is_meeting(self) -> bool:
        """Whether a thread is about to connect the members, or to give up."""
        return self._connector.is_alive

    def await_connector(self, seconds: float) -> None:
        """Wait so long at most until no thread is about to connect the members."""
        self._connector.join(seconds)

    @property
    def can_be_replaced(self) -> bool:
        """Whether the group's next call may make a new mesh, once there is a verdict."""
        if self.verdict is None:
            return False
        has_not_begun = self.link is None and not self.verdict.is_final
        if self.verdict.ranks == (self.rank,) and self.verdict.reason == PROGRAM_ENDED:
            return True  # this rank's exit handlers go on
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

        Blocks in Python, so Ctrl-C ends it; what may block in C++ is done by a thread.

        Args:
            store: the world's.
            deadline: how long to wait for the last rank.
            lane: the calling thread's.
            operation: which call needs the connections.
            call_site: the user's line that made it.
            caller: that call, where another thread may wait for it.

        Raises:
            ObjcommError: the verdict, for instance that some ranks did not come.
        """
        header = Header(sender=self.rank, sequence=MEETING, lane=lane.number, call_site=call_site)
        if self.whole is not None:
            header = header._replace(root=self.others[0])
        entry = CallRecord(header, operation, lane=lane.name)
        entry.caller = caller
        self.history.add_meeting(entry)
        self._meeting.watch(entry)
        entry.regions = regions.get()
        entry.waiter = threading.get_ident()
        lane.begin(entry, deadline)
        if not math.isinf(entry.report_at):  # most that wait here for long have forgotten a rank
            entry.report_at = min(entry.report_at, entry.waits_since + _REPORT_SECONDS)
        try:
            try:
                self.begin_meeting(store, deadline)
            except RuntimeError:  # the others must hear of it, so this thread meets them
                self._connector.do_here(partial(self._meet, store, deadline))
            link = self.connections_for(operation)
            self._raise_failures_of(entry.regions, operation, is_pair=lane.order is not None)
        except BaseException as error:
            is_told = isinstance(error, ObjcommError)
            if self.verdict is None and self.whole is None:
                # By Ctrl-C, for instance: the others would meet who is not in their call. Of a pair
                # the other one has sent nothing yet, and this one may come again.
                own = proposal_for(error, self.rank)
                is_told = self.settle(own).name == own.name
            if is_told and self.verdict is not None:
                self.absolve(lane.owner)
            if self._meeting.parting:  # its word must not reach those that come for the next call
                self.await_connector(PATIENCE_SECONDS)
            entry.end(error, time.time() - entry.began)
            raise
        finally:
            lane.end(entry, deadline)
        entry.header = header._replace(group=self.number)
        entry.end(None, time.time() - entry.began)
        return link

    def connections_for(self, operation: str) -> Connections:
        """The link, once the ranks have met.

        Args:
            operation: which call needs it.

        Raises:
            ObjcommError: the verdict, if they never will.
        """
        if self.link is not None:
            return self.link
        failed = self._connected.exception()  # raised, its frames would hold this mesh in a cycle
        if failed is None:
            return self._connected.result()
        if self.verdict is None:
            raise failed
        raise self.verdict.error(f"{operation} ({FIRST_USE})")

    def apart(self) -> Verdict | None:
        """The verdict for a limit that passed because two ranks could not reach each other."""
        found = None if self.link is not None else self._meeting.unreachable
        if found is None:
            return None
        return Verdict.of(Cause.APART, ranks=found.ranks, reason=found.reason, is_final=True)

    def begin_meeting(self, store: dist.Store, deadline: Deadline) -> None:
        """Let a thread meet the other members, unless one has begun to; returns at once.

        Raises:
            UsageError: the environment names a transport, ports or a key file that do not serve.
            RuntimeError: this process can start no more threads; the next call tries again.
        """
        # Read here, so that a mistake in the environment is an error before any traffic.
        _ = deadline.settings.chosen_transport, deadline.settings.chosen_ports
        environment_secret()
        self._connector.start(partial(self._meet, store, deadline))

    def _raise_failures_of(self, blocks: Sequence[str], operation: str, *, is_pair: bool) -> None:
        """Raise what has failed in blocks around a call, before it can pair with one outside."""
        told = self.met_too_late(blocks)
        if told is not None:
            raise (told if is_pair else self.settle(told)).error(operation)

    def met_too_late(self, blocks: Sequence[str]) -> Verdict | None:
        """What had failed in these blocks when the ranks met; the other rank may be outside."""
        for key in blocks:
            told = self.failed(key)
            if told is not None:
                self.outlives = told.name
                return told
        return None

    def _heed(self, blocks: set[str]) -> None:
        told = next(filter(None, map(self.failed, sorted(blocks))), None)
        if told is not None:
            self.settle(told)

    def _meet(self, store: dist.Store, deadline: Deadline) -> None:
        # For a pair ``met_too_late`` tells the one that waits, and the other goes on.
        self._meeting.heed = None if self.whole is not None else self._heed
        with contextlib.suppress(StoreSilentError):  # who has met has said who it is, before
            self.board_thread.call(lambda _: None)
        clients = self.board_thread.clients
        self._secret = deadline.settings.secret or environment_secret()
        try:
            own = clients.take(store, deadline.settings.lost_after)
            part = dist.PrefixStore(self.name, own)
            link = connect(
                part,
                self.rank,
                self.members,
                deadline,
                self._meeting,
                self._secret,
                self._learn,
                self._lose,
                self.history.refuse,
            )
            clients.give_back(own)
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
            clients.give_back(own)
            return  # by ``stop``, whose verdict the callers raise
        except LeftError as left:
            clients.give_back(own)
            word = left.word
            self.board_thread.submit(lambda board: self.stop(board.take_in(self.name, word), board))
            return
        except BaseException as error:  # noqa: BLE001  # this thread's end must not be silent
            if isinstance(error, dist.DistNetworkError):
                killed = self.board_thread.processes.killed()
                died = tuple(rank for rank, each in enumerate(self.ranks) if each in killed)
                reason = f"the store where ranks meet is gone ({reason_of(error)})"
                if not died:  # of the others nobody is known to be at fault
                    hosts = (f"; rank {rank} of the world: {why}" for rank, why in killed.items())
                    reason += next(hosts, "")
                self.settle(Verdict.of(Cause.LOST, ranks=died, reason=reason))
            else:
                self._lose(error)
            return
        finally:
            self._meeting.heed = None  # it holds this mesh: a cycle would keep connections open
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
        """Take in who the processes of this host are, of which the kernel tells when they end.

        Before all have connected: the store's host may be the next to die.
        """
        with contextlib.suppress(StoreSilentError):
            self.board_thread.call(lambda board: board.learn(self.ranks[peer] for peer in peers))

    def _lose(self, error: BaseException) -> None:
        """End the mesh because its ranks could not all connect."""
        if self.verdict is None:
            self._end_unconnected(self, error)

    def listen(self, now: float) -> None:
        """Hear what ends the mesh, for some seconds after this rank has lost a connection.

        A rank that computes asks nobody, and the store may be gone when it makes its next call.
        """
        self._listens_until = self._listens_until or now + _LISTENS_SECONDS
        if self.heard is None and now < self._listens_until:
            self.board_thread.submit(partial(_hear, weakref.ref(self)))

    def report_refusals(self) -> None:
        """Log that connections were refused, the more rarely the more there are.

        Not where they are: a thread may hold the link's lock there, and another one a handler's.
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
        """End the mesh by ``proposal``, or by whatever another rank has posted before.

        Waits for the store for ``seconds`` at most. What it returns is what this rank raises.
        """
        if self.verdict is not None:
            return self.stop(self.verdict)
        if not self.nonce:
            return self.stop(proposal)
        told = self.posted(proposal, lambda board: self.settle_on(board, proposal), seconds)
        return self.stop(told)

    def settle_on(self, board: Board, proposal: Verdict) -> Verdict:
        """``settle``, by the board's thread."""
        # Two threads may settle at once: who comes second must neither post nor acknowledge, or its
        # word stays in the store when all ranks have read the first one's.
        if self.verdict is not None:
            return self.verdict
        if self.link is not None and not proposal.is_recoverable:
            proposal = proposal._replace(is_final=True)
        return self.stop(board.propose(self.nonce, proposal) if self.nonce else proposal)

    @property
    def is_owed(self) -> bool:
        """Whether a thread has yet to raise the verdict.

        One that has ended is in no sequence of calls that other ranks could be ahead of.
        """
        lanes = [lane for lane in tuple(self.lanes.values()) if lane.owes]
        return any(lane.order is not None or lane.owner.is_alive() for lane in lanes)

    def is_owed_by(self, thread: threading.Thread) -> bool:
        """Whether this thread has."""
        lanes = tuple(self.lanes.values())
        return any(lane.owes and lane.is_of(thread) for lane in lanes)

    def last_position(self, thread: threading.Thread) -> Position | None:
        """Where this thread made its last call over these connections; None if it has made none."""
        lanes = tuple(self.lanes.values())
        past = [lane.past[-1] for lane in lanes if lane.owner is thread and lane.past]
        return max(past, key=lambda call: call.began).position() if past else None

    def destroyed(self) -> Verdict:
        """What this rank says where its program has destroyed the group, or left all."""
        by = filter(None, (each.left_by for each in self.board_thread.processes.own.calls))
        return Verdict.of(Cause.LEFT, ranks=(self.rank,), reason=DESTROYED, left_by=next(by, ""))

    def absolve(self, thread: threading.Thread) -> None:
        """A thread raises the verdict, for all its lanes."""
        for lane in tuple(self.lanes.values()):
            if lane.is_of(thread):
                lane.owes = False

    def fail(self, key: str, proposal: Verdict) -> Verdict:
        """End the mesh because the block ``key`` failed here, and let it be known there, too."""
        standing: list[Verdict] = []

        def post(board: Board) -> Verdict:
            winner = board.propose(key, proposal)
            # With a verdict all ranks may have read it, and nobody removes another.
            if self.nonce and self.verdict is None:
                standing.append(board.propose(self.nonce, winner))
            return winner

        winner = self.posted(proposal, post)
        # Another rank's may have come first: whether a next call may connect is that one's matter.
        self.stop(standing[0] if standing else winner)
        return winner

    def posted(
        self,
        proposal: Verdict,
        post: Callable[[Board], Verdict],
        seconds: float = PATIENCE_SECONDS,
    ) -> Verdict:
        """The verdict that stands once ``post`` was done, or this rank's own without an answer."""
        try:
            return self.board_thread.call(post, seconds)
        except StoreSilentError:
            return self.heard or proposal._replace(is_store_silent=True)

    def failed(self, key: str) -> Verdict | None:
        """What some rank has posted for the block ``key``, as far as the store answers."""
        try:
            return self.board_thread.call(lambda board: board.look(key))
        except StoreSilentError:
            return None

    def enter(self, key: str) -> Verdict | None:
        """Be in the block ``key``, unless another rank has failed in it and this one has heard."""
        with self._lock:
            if self.verdict is not None and self.verdict.block == key:
                return self.verdict
            self.blocks.add(key)
            return None

    def end_block(self, key: str) -> None:
        """Be in the block ``key`` no more, however it has ended."""
        self.blocks.discard(key)
        self.board_thread.forget(key)

    def leave(self, key: str) -> None:
        """Say that this rank leaves the block ``key`` by its verdict."""
        self.board_thread.submit(lambda board: board.acknowledge(key, len(self.members)))

    def blamed_by(self, peer: int) -> tuple[int, ...]:
        """Whose loss has made a peer close its connections, as it said; empty if it said nothing.

        It is here before the store answers, and where the store does not. It names ranks and says
        nothing else: what has ended the mesh, the store tells.
        """
        link, others = self.link, {*self.others} - {peer}
        said = b"" if link is None else link.farewell_of(peer)
        ranks, proof = said[:-PROOF_NBYTES], said[-PROOF_NBYTES:]
        if (
            not ranks
            or len(ranks) % _RANK.size
            or not compare_digest(proof, self.proof(peer, ranks))
        ):
            return ()
        named = {rank for (rank,) in _RANK.iter_unpack(ranks)}
        return tuple(sorted(named)) if named <= others else ()

    def _farewell(self) -> bytes:
        """What this rank says as it closes its connections: whose loss is why."""
        verdict = self._told
        lost = verdict.ranks if verdict is not None and verdict.cause is Cause.LOST else ()
        if not lost or not {*lost} <= {*self.members}:  # from the store, which others may reach
            return b""
        ranks = b"".join(map(_RANK.pack, lost))
        return ranks + self.proof(self.rank, ranks)

    def proof(self, sender: int, said: bytes) -> bytes:
        """Shows that a rank of this mesh, with this rank's key if there is one, has said it."""
        key = hashlib.blake2b(self.session.encode(), key=self._secret or b"").digest()
        said = _RANK.pack(sender) + said
        return hashlib.blake2b(said, key=key, digest_size=PROOF_NBYTES).digest()

    def adopt(self, standing: Verdict) -> None:
        """Take the others' verdict for one that the store was too slow for.

        Whether a next call may make a new mesh must be the same on all ranks: where only some may,
        they would wait there for the others. It keeps the name under which this rank raises it.
        """
        with self._lock:
            if self.verdict is not None:
                standing = standing.seen_by(self.rank, self.others)
                self.verdict = standing._replace(name=self.verdict.name)

    def stop(self, verdict: Verdict, board: Board | None = None) -> Verdict:
        """Close the connections because of a verdict that is known to the other ranks.

        The first one holds; it is returned, as this rank sees it. Whoever returns finds them
        closed, also where another thread has just come first: what this rank then says of its error
        must not be overtaken by what it had begun to send.

        Args:
            verdict: why; one that the store was too slow for is known here only.
            board: given on the board's own thread, where that may do no further job.
        """
        with self._lock:
            standing = self.verdict
            told, verdict = verdict, verdict.seen_by(self.rank, self.others)
            if standing is None:
                self._told = told
                self.verdict = verdict
                if verdict.cause is Cause.DESYNC:  # another limit, or Ctrl-C, is one rank's own
                    self._meeting.parting = pack_record(verdict)
                self._meeting.end()
                # Not the mesh itself: a job that waits would keep its connections open.
                mesh, blocks = weakref.ref(self), frozenset(self.blocks)
                known = self.nonce, self.rank, self.members, blocks, told
                job = partial(_acknowledge, mesh, *known)
                if self.nonce and board is None:
                    # Before a call wakes: the next mesh may remove what it finds of this one.
                    self.board_thread.submit(job)
                if self.link is None:
                    self._connected.set_exception(verdict.error(FIRST_USE))
                    self._connected.exception()  # taken: nobody may be waiting for it
        # A generator may be closed while the interpreter ends: torch would abort the process then,
        # and its end closes the connections.
        if self.link is not None and not self.is_closed and not sys.is_finalizing():
            self.link.abort(self._farewell())
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


def _hear(of: weakref.ref[Mesh], board: Board) -> None:
    mesh = of()
    if mesh is not None and mesh.heard is None:
        mesh.heard = board.look(mesh.nonce)


def _acknowledge(  # noqa: PLR0917  # what a job is given
    mesh: weakref.ref[Mesh],
    nonce: str,
    rank: int,
    members: tuple[int, ...],
    blocks: frozenset[str],
    verdict: Verdict,
    board: Board,
) -> None:
    """Say that this rank knows what ended its mesh, so that the last to do so clears the store.

    One that the store was too slow for is posted now, unless another rank has posted its own: who
    meets has no connection that would tell it. Nobody waits for a farewell.

    Who is in the failed block says so when it leaves; another rank may be on its way there still,
    and hears in the call before.
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
    # Ranks that some can't reach may live, and ask the store later: its word for them stays there.
    if rank not in lost and HOST_LOST not in standing.reason:
        board.acknowledge(nonce, len(members) - len(lost))
    if standing.block.startswith(nonce) and standing.block not in blocks:
        board.acknowledge(standing.block, len(members))
