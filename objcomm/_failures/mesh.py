"""One mesh of a group: its private connections from the ranks' meeting to the verdict that ends it.

A group has one mesh at a time. After a verdict that all ranks outlive the next call makes a new
one; nothing of the old one can reach it, because each has a name that no other ever had. Which
ranks are at fault for a mesh's end, those that are gone or this one, is found out here, too.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import logging
import math
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from objcomm._failures.deadlock import MEETING
from objcomm._failures.noticeboard import PATIENCE_SECONDS, Board, BoardThread, StoreSilentError
from objcomm._failures.verdict import FAREWELLS, Cause, Verdict, nonce_of, proposal_for, regions
from objcomm._observe.history import CallRecord
from objcomm._observe.log import log
from objcomm._transport.connect import connect
from objcomm._transport.link import HOST_LOST, LinkClosed, LinkUnreachable
from objcomm._transport.rendezvous import FIRST_USE, GivenUpError, LeftError, MeetingState
from objcomm._transport.store import pack_record, reason_of
from objcomm._transport.threads import OnceThread
from objcomm._wire.header import Header, Operation, fingerprint
from objcomm.errors import ObjcommError, TransportError, TransportTimeout, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from objcomm._observe.history import History
    from objcomm._transport.lane import Lane
    from objcomm._transport.link import Connections, Deadline


_REPORT_SECONDS = 5.0
# Others raise 2 s after a death at the latest where they wait.
_LISTENS_SECONDS = 5.0


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
    ) -> None:
        self.name = name
        self.is_world = is_world
        self.ranks = ranks
        self.rank = rank
        self.members = members
        self.whole = whole
        self.is_destroyed = is_destroyed
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

    @property
    def can_be_replaced(self) -> bool:
        """Whether the group's next call may make a new mesh, once there is a verdict."""
        if self.verdict is None:
            return False
        has_not_begun = self.link is None and not self.verdict.is_final
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
        deadline.apply(entry)
        if not math.isinf(entry.report_at):  # most who wait here for long have forgotten a rank
            entry.report_at = min(entry.report_at, entry.waits_since + _REPORT_SECONDS)
        self._meeting.watch(entry)
        entry.regions = regions.get()
        entry.waiter = threading.get_ident()
        lane.begin(entry)  # last: the watchdog reads all the rest of it
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
                self._connector.join(PATIENCE_SECONDS)
            entry.end(error, time.time() - entry.began)
            raise
        finally:
            deadline.pause()
            lane.end(entry)
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
        """What to say of a limit that passes where two ranks could not reach each other."""
        found = None if self.link is not None else self._meeting.unreachable
        if found is None:
            return None
        return Verdict.of(Cause.APART, ranks=found.ranks, reason=found.reason, is_final=True)

    def begin_meeting(self, store: dist.Store, deadline: Deadline) -> None:
        """Let a thread meet the other members, unless one has begun to; returns at once.

        Raises:
            RuntimeError: this process can start no more threads; the next call tries again.
        """
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
        try:
            own = clients.take(store, deadline.settings.lost_after)
            part = dist.PrefixStore(self.name, own)
            link = connect(
                part, self.rank, self.members, deadline, self._meeting, self._learn, self._lose
            )
            clients.give_back(own)
            log.debug(
                "group %r: %d ranks connected over %s, on %d host(s)",
                *(self.name, len(self.members), link.kind, len(set(link.hosts))),
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
        link.abort()  # the verdict came first

    def _learn(self, peers: Sequence[int]) -> None:
        """Take in who the processes of this host are, of which the kernel tells when they end.

        Before all have connected: the store's host may be the next to die.
        """
        with contextlib.suppress(StoreSilentError):
            self.board_thread.call(lambda board: board.learn(self.ranks[peer] for peer in peers))

    def _lose(self, error: BaseException) -> None:
        """End the mesh because its ranks could not all connect."""
        if self.verdict is None:
            unconnected(self, error)

    def listen(self, now: float) -> None:
        """Hear what ends the mesh, for some seconds after this rank has lost a connection.

        A rank that computes asks nobody, and the store may be gone when it makes its next call.
        """
        self._listens_until = self._listens_until or now + _LISTENS_SECONDS
        if self.heard is None and now < self._listens_until:
            self.board_thread.submit(partial(_hear, weakref.ref(self)))

    def settle(self, proposal: Verdict) -> Verdict:
        """End the mesh by ``proposal``, or by whatever another rank has posted before.

        Waits for the store half a second at most. What it returns is what this rank raises.
        """
        if self.verdict is not None:
            return self.stop(self.verdict)
        if not self.nonce:
            return self.stop(proposal)
        return self.stop(self._posted(proposal, lambda board: self.settle_on(board, proposal)))

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

    def absolve(self, thread: threading.Thread) -> None:
        """A thread raises the verdict, for all its lanes."""
        for lane in tuple(self.lanes.values()):
            if lane.is_of(thread):
                lane.owes = False

    def fail(self, key: str, proposal: Verdict) -> Verdict:
        """End the mesh because the block ``key`` failed here, and let it be known there, too."""

        def post(board: Board) -> Verdict:
            winner = board.propose(key, proposal)
            # With a verdict all ranks may have read it, and nobody removes another.
            if self.nonce and self.verdict is None:
                board.propose(self.nonce, winner)
            return winner

        winner = self._posted(proposal, post)
        self.stop(winner)
        return winner

    def _posted(self, proposal: Verdict, post: Callable[[Board], Verdict]) -> Verdict:
        """The verdict that stands once ``post`` was done, or this rank's own without an answer."""
        try:
            return self.board_thread.call(post)
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
                self.verdict = verdict
                if verdict.cause is Cause.DESYNC:  # another limit, or Ctrl-C, is one rank's own
                    self._meeting.parting = pack_record(verdict)
                self._meeting.is_over = True
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
            self.link.abort()
            self.is_closed = True
        if standing is not None:
            return standing
        if self.nonce and board is not None:
            job(board)
        log.log(
            logging.DEBUG if verdict.reason in FAREWELLS else logging.INFO,
            "group %r: its connections were closed, %s: %s",
            self.name,
            "and its next call makes new ones" if self.can_be_replaced else "for good",
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


#: What a process has sent before its end is read by then, also on a busy machine.
LAST_BYTES_SECONDS = 1.0
_CLOSED = "it lives, and has destroyed its process group or given up after an error of its own"
# A rank that loses one peer and a rank that loses all see it at the same time.
_OTHERS_FIRST_SECONDS = 0.02
_ALONE = "all of its connections ended at once: it lost its network, or all others ended"
# For how long a rank that can't connect waits for the word that tells who has died.
_WORD_WITHIN_SECONDS = 1.0
_WORD_PAUSE_SECONDS = 0.05


def missing_members(mesh: Mesh, board: Board) -> tuple[int, ...]:
    """The members that can't come to meet this rank, because the whole group has lost them.

    Args:
        mesh: whose members.
        board: to ask whether the group's connections were closed for another reason.
    """
    whole = None if mesh.whole is None else mesh.whole()
    if mesh.link is not None or whole is None:
        return ()
    call_far(whole, mesh.others)
    gone = lost_ranks(whole, board)
    return tuple(peer for peer in mesh.others if mesh.ranks[peer] in gone)


def call_far(mesh: Mesh, peers: Iterable[int]) -> None:
    """Connect to ranks of other hosts with which this one may have had nothing to do yet.

    The end of a connection tells of theirs. Of those on this host the kernel does.
    """
    if mesh.link is None or mesh.verdict is not None:
        return
    for peer in peers:
        if not mesh.board_thread.processes.is_beside(mesh.ranks[peer]):
            mesh.link.call(peer)


def lost_ranks(mesh: Mesh, board: Board) -> dict[int, bool]:
    """The global ranks whose connections of a mesh ended because they died, left or were cut off.

    Args:
        mesh: which.
        board: to ask whether they were closed for another reason.

    Returns:
        Of each whether it was cut off: its host was out of reach, and may be there again.
    """
    link = mesh.link
    if link is None:
        return {}
    verdict = mesh.verdict
    if verdict is None:
        gone = {
            mesh.ranks[peer]: link.is_out_of_reach(peer)
            for peer in mesh.others
            if link.is_closed(peer)
        }
        verdict = board.look(mesh.nonce) if gone else None
        if verdict is None:
            return gone
    is_loss = verdict.cause is Cause.LOST or verdict.reason in FAREWELLS
    lost = verdict.ranks if is_loss else ()
    return dict.fromkeys((mesh.ranks[peer] for peer in lost), HOST_LOST in verdict.reason)


# Their receivers need the source alone: whoever else dies keeps nobody.
_FROM_ONE = frozenset(
    {
        Operation.BROADCAST,
        Operation.SCATTER,
        Operation.RUN_ON_MAIN,
        Operation.MAIN_PROCESS_ONLY,
        Operation.COMPUTE_AND_BROADCAST,
        Operation.SHARED_SEED,
    }
)
# Their destination needs each rank until it has what that one gives.
_TO_ONE = frozenset({Operation.GATHER, Operation.GATHER_SCALAR})


def needed(mesh: Mesh, lane: Lane, entry: CallRecord) -> Collection[int]:
    """The ranks without which a wait can't end, as ranks within the group.

    Whichever of them dies, the wait is in vain, whomever it awaits just now. All operations need
    all ranks, but for those that one rank gives to others, or others to one, and messages.

    Args:
        mesh: of the call.
        lane: the one that waits.
        entry: the call.
    """
    if mesh.link is None:
        return mesh.others  # they meet
    operation, awaited = entry.header.operation, () if entry.awaits < 0 else (entry.awaits,)
    if mesh.whole is not None:
        return awaited
    if operation not in (_FROM_ONE | _TO_ONE) or entry.is_confirmed:
        return mesh.others
    if operation in _FROM_ONE:
        return awaited
    sequence = entry.header.sequence
    return [
        peer for peer in mesh.others if peer == entry.awaits or not lane.has_head_of(peer, sequence)
    ]


def loss_in(
    mesh: Mesh,
    lane: Lane,
    entry: CallRecord,
    blocks: Mapping[str, tuple[int, ...]],
    patience_seconds: float | None = None,
) -> Verdict | None:
    """What to say of a wait that needs processes which have ended; None if there are none.

    Of a rank that this one awaits just now any end counts, its program's included. Another one may
    have made this call before it came to its end, so there only a death counts. In a
    ``fail_together`` block a wait needs all ranks that are in it: they meet at its end.

    Args:
        mesh: of the call.
        lane: the one that waits.
        entry: the call.
        blocks: the global ranks of the meshes in which the blocks around it began, by nonce.
        patience_seconds: as for ``loss_among``; none where the ranks have yet to meet.
    """
    awaited = () if entry.awaits < 0 else (entry.awaits,)
    needs = needed(mesh, lane, entry)
    if mesh.link is None:
        awaited, needs = (*awaited, *needs), ()
    patience = patience_seconds if mesh.session else 0.0
    found = loss_among(mesh, needs, awaited, patience)
    if found is None and entry.regions:
        inside = {each for key in entry.regions for each in blocks.get(nonce_of(key), ())}
        peers = [peer for peer, rank in enumerate(mesh.ranks) if rank in inside]
        found = loss_among(mesh, peers, patience_seconds=patience_seconds)
    return found


def loss_among(
    mesh: Mesh,
    needs: Iterable[int],
    awaited: Iterable[int] = (),
    patience_seconds: float | None = None,
) -> Verdict | None:
    """What to say of ranks of a mesh whose processes have ended, as the kernel and the cards tell.

    A connected rank gets what another one has sent before its end: that is in this host's memory
    by then, as good as always where it came from another host, and the link takes it out, also
    where the thread that moves it gets no turn for long. Where all have met, the other rank may
    have sent that while this one is about to use its own connections.

    Args:
        mesh: which.
        needs: ranks within the group of which a death counts.
        awaited: those of which any end counts, their program's included; the first is always asked
            after, of many others only some at each look.
        patience_seconds: for how long an end must have been known; as long as it may take to read
            what they have sent if None.
    """
    processes, link = mesh.board_thread.processes, mesh.link
    patience = LAST_BYTES_SECONDS if patience_seconds is None else patience_seconds
    counts: dict[int, Callable[[int], object]] = dict.fromkeys(awaited, processes.end_of)
    counts = counts | {peer: processes.has_died for peer in needs if peer not in counts}
    of = {mesh.ranks[peer]: peer for peer in counts}
    ends = {}
    for rank in processes.some_of(of):
        peer, reason = of[rank], processes.end_of(rank, patience)
        if reason and counts[peer](rank) and not (link is not None and link.has_unread(peer)):
            ends[peer] = reason
    if not ends:
        return None
    return Verdict.of(Cause.LOST, ranks=tuple(sorted(ends)), reason=ends[min(ends)])


def by_name(mesh: Mesh, verdict: Verdict, board: Board | None = None) -> Verdict:
    """A loss, as that of the rank that died, where that is known.

    Who has only raised because of it may have closed connections, and its program may have ended.

    Args:
        mesh: of the call.
        verdict: as the connections or the kernel tell it.
        board: given on the board's own thread.
    """
    # Who ended by itself, or left its world, has left a word.
    killed = mesh.board_thread.processes.killed()
    wanted = {*killed, *(mesh.ranks[rank] for rank in verdict.ranks)}
    if board is not None:
        board.learn(wanted)
    else:
        with contextlib.suppress(StoreSilentError):
            mesh.board_thread.call(lambda board: board.learn(wanted))
    return by_name_here(mesh, verdict)


def by_name_here(mesh: Mesh, verdict: Verdict) -> Verdict:
    """``by_name``, as far as this process knows."""
    processes = mesh.board_thread.processes
    killed = processes.killed()
    died = {rank: killed[each] for rank, each in enumerate(mesh.ranks) if each in killed}
    if died:
        # All that are known, whichever was noticed first: so all ranks name the same.
        named = [rank for rank in verdict.ranks if rank in died]
        why = next(iter(died.values()))
        return verdict._replace(ranks=tuple(sorted(died)), reason=verdict.reason if named else why)
    words = [processes.end_of(mesh.ranks[rank]) for rank in verdict.ranks]
    if any(words):
        return verdict._replace(reason=next(filter(None, words)))
    are_beside = all(processes.is_beside(mesh.ranks[rank]) for rank in verdict.ranks)
    # Who leaves by itself says why; of one whose connections were closed nobody has said it.
    is_said = verdict.cause is Cause.LEFT or verdict.reason.startswith(_CLOSED)
    if not verdict.ranks or not are_beside or is_said:
        return verdict
    return verdict._replace(reason=f"{_CLOSED} ({verdict.reason})")


def unconnected(mesh: Mesh, error: BaseException) -> Verdict:
    """End a mesh whose ranks could not all connect, by those that are to blame.

    A rank that hears of a death closes its connections as a dead one does. So the store and the
    kernel are asked first what another rank has posted and who has died, for a second at most.

    Args:
        mesh: which.
        error: what connecting has raised here.

    Returns:
        What holds.
    """
    if not isinstance(error, LinkClosed | LinkUnreachable):
        reason = f"it could not connect: {reason_of(error)}"
        return mesh.settle(Verdict.of(Cause.LEFT, ranks=(mesh.rank,), reason=reason))
    processes = mesh.board_thread.processes
    apart = error.ranks if isinstance(error, LinkUnreachable) else ()
    question = 0
    answered: set[int] = set()

    def look(board: Board) -> Verdict | None:
        nonlocal question
        board.learn(rank for rank in ranks.values() if not processes.is_beside(rank))
        if apart:
            question = question or board.ask()
            mesh.board_thread.answer(board)  # which it would do only when it has nothing else to do
            answered.update(each for each in apart if board.read(mesh.ranks[each], question))
        return board.look(mesh.nonce)

    ranks = {peer: mesh.ranks[peer] for peer in mesh.others}
    until = time.monotonic() + _WORD_WITHIN_SECONDS
    while mesh.verdict is None and time.monotonic() < until:
        with contextlib.suppress(StoreSilentError):
            standing = mesh.board_thread.call(look)
            if standing is not None:
                return mesh.stop(standing)  # not by ``settle``, see ``end_by_loss``
        killed = processes.killed()
        died = {peer: killed[rank] for peer, rank in ranks.items() if rank in killed}
        if died:
            return _end_by_deaths(mesh, died)
        time.sleep(_WORD_PAUSE_SECONDS)
    silent = tuple(each for each in apart if each not in answered)
    cause, named = Cause.LOST, silent if isinstance(error, LinkUnreachable) else error.peers
    if isinstance(error, LinkUnreachable) and len(silent) != 1:
        cause, named = Cause.APART, apart
    found = Verdict.of(cause, ranks=named, reason=error.reason, is_final=True)
    return mesh.settle(by_name(mesh, found) if cause is Cause.LOST else found)


def _end_by_deaths(mesh: Mesh, died: Mapping[int, str]) -> Verdict:
    """End a mesh by the deaths of which the kernel has told this rank, and tell other hosts."""

    def tell(board: Board) -> None:
        for peer, reason in died.items():
            board.tell_end(mesh.ranks[peer], reason)

    mesh.board_thread.submit(tell)
    reason = next(iter(died.values()))
    return mesh.settle(Verdict.of(Cause.LOST, ranks=tuple(died), reason=reason, is_final=True))


def end_by_loss(mesh: Mesh, proposal: Verdict) -> Verdict:
    """End a mesh that has lost a peer; by that peer's doing, or by this rank's own.

    With a host its other ranks are lost, though their connections may end a moment later. If all of
    this rank's connections have ended, the others may have ended them, and told why.

    Args:
        mesh: which.
        proposal: what this rank's wait has found.

    Returns:
        What holds.
    """
    if mesh.verdict is not None or mesh.link is None:
        return mesh.settle(proposal)
    if HOST_LOST in proposal.reason:
        return mesh.settle(proposal._replace(ranks=tuple(mesh.link.beside(proposal.ranks))))
    if _are_all_closed(mesh):
        try:
            standing = mesh.board_thread.call(lambda board: board.look(mesh.nonce))
        except StoreSilentError:  # then each rank may have closed its own
            return mesh.settle(by_name(mesh, proposal))
        if standing is not None:
            # Not once more by ``settle``: the others may have read it by then, and removed it.
            return mesh.stop(standing)
        if not any(mesh.board_thread.processes.end_of(rank) for rank in mesh.ranks):
            # Nobody is there to be told: the others have told each other, and cleared the store.
            return mesh.stop(proposal._replace(ranks=(mesh.rank,), reason=_ALONE))
    return mesh.settle(by_name(mesh, proposal))


def _are_all_closed(mesh: Mesh) -> bool:
    """Whether all of several connections have ended."""
    if mesh.link is None or len(mesh.others) == 1:
        return False
    time.sleep(_OTHERS_FIRST_SECONDS)
    return mesh.link.has_lost_all()


def local(mesh: Mesh, verdict: Verdict, error: TransportError) -> Verdict:
    """A verdict that no store confirmed, with what this rank's own connections tell."""
    if not verdict.is_store_silent:
        return verdict
    if isinstance(error, TransportTimeout) and not verdict.silent:
        return verdict._replace(ranks=tuple(sorted({*verdict.ranks, *error.missing})))
    if verdict.cause is Cause.LOST and mesh.link is not None:
        ranks = tuple(sorted({*verdict.ranks, *mesh.link.closed_by()}))
        return by_name(mesh, verdict._replace(ranks=ranks))
    return verdict
