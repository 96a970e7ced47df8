"""Which ranks a wait needs, which of them are gone, and which ranks an error lists as the cause.

There are three kinds of evidence. The kernel reports the end of a process on this host, and the
process records in the store report the others (see ``liveness``); both are certain. A closed
connection proves only that something closed it, so the kernel and the store are asked why. Before
ranks are connected, a rank also counts as gone if its connection in the world has closed and it
does not answer.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import random
import time
from typing import TYPE_CHECKING, TypeVar

from objcomm._failures.noticeboard import StoreSilentError
from objcomm._failures.verdict import DESTROYED, FAREWELLS, Cause, Verdict, nonce_of
from objcomm._transport.link import HOST_LOST, PEER_LOST, LinkClosed, LinkRefused, LinkUnreachable
from objcomm._transport.store import reason_of
from objcomm._wire.header import Operation
from objcomm.errors import CYCLE, TransportError, TransportTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, MutableSet, Sequence

    from objcomm._failures.deadlock import Deadlock
    from objcomm._failures.liveness import GroupCalls
    from objcomm._failures.mesh import Mesh
    from objcomm._failures.noticeboard import Board
    from objcomm._observe.history import CallRecord
    from objcomm._transport.lane import Lane

T = TypeVar("T")

#: Within this time, data that a process sent before its end has been read, even on a busy machine.
LAST_BYTES_SECONDS = 1.0
# How long to wait for further connections to close: they may all close at the same time.
_OTHERS_FIRST_SECONDS = 0.02
# How long a rank that cannot connect waits to learn which rank has died.
_CAUSE_WITHIN_SECONDS = 1.0
_CAUSE_PAUSE_SECONDS = 0.05
# How long to ask the store which rank has died before relying on this rank's own connections.
_NAMED_WITHIN_SECONDS = 1.0
#: A live rank answers within this time. A death is still reported within 2 s.
SURELY_ANSWERED_SECONDS = 1.0
# The store itself may have been silent that long, so this many checks must have found no answer.
_LOOKS_IN_VAIN = 3
# The longest interval after which Linux retransmits unacknowledged data (TCP_RTO_MAX).
_LATE_AFTER_OUTAGE_SECONDS = 120.0
# A rank that uses objcomm publishes its process record before its first call has lasted this long.
_SURELY_PUBLISHED_SECONDS = 1.0
# Limits requests per check: a thousand waiting ranks would overload the store.
_MOST_LEARNED = 8

_CLOSED = "it is alive, but has destroyed its process group or given up after its own error"
_ALONE = "all of its connections ended at the same time: it lost its network, or all others ended"
_REPORTED_BY_PEER = (
    "it died, exited or lost its network, according to a rank that has closed its connections"
)
_NEVER_CAME = "it died, exited or lost its network before it sent to or received from this rank"

# Their receivers need only the source; the death of any other rank does not delay them.
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
# The destination needs each rank until that rank's contribution has arrived.
_TO_ONE = frozenset({Operation.GATHER, Operation.GATHER_SCALAR})


def needed(mesh: Mesh, lane: Lane, entry: CallRecord) -> Collection[int]:
    """Return the group ranks without which a wait cannot succeed.

    If any of them dies, the wait fails, even if it currently awaits another rank. All operations
    need all ranks, except operations from one rank or to one rank, and point-to-point messages.

    Args:
        mesh: the mesh of the call.
        lane: the lane that waits.
        entry: the call.
    """
    if mesh.link is None:
        return mesh.others  # the rendezvous needs all
    operation, awaited = entry.header.operation, () if entry.awaits < 0 else (entry.awaits,)
    if mesh.whole is not None:
        return awaited
    if operation not in (_FROM_ONE | _TO_ONE) or entry.is_confirmed or entry.is_on_devices:
        return mesh.others
    if operation in _FROM_ONE:
        return awaited
    link, sequence = mesh.link, entry.header.sequence
    return [
        peer
        for peer in mesh.others
        if peer == entry.awaits or not lane.has_head_of(link, peer, sequence)
    ]


def loss_in(
    mesh: Mesh,
    lane: Lane,
    entry: CallRecord,
    blocks: Mapping[str, tuple[int, ...]],
    patience_seconds: float | None = None,
) -> Verdict | None:
    """Return the verdict on a wait that needs processes that have ended; None if there are none.

    For a rank that is being awaited, any end counts, including a normal end of its program. Other
    ranks may have made this call before their program ended, so for them only a death counts. In a
    ``fail_together`` block a wait needs all ranks in the block, because they synchronize at its
    end.

    Args:
        mesh: the mesh of the call.
        lane: the lane that waits.
        entry: the call.
        blocks: by nonce, the global ranks of the meshes in which the blocks around it began.
        patience_seconds: as for ``loss_among``; 0 before the ranks have met.
    """
    awaited = () if entry.awaits < 0 else (entry.awaits,)
    needs = needed(mesh, lane, entry)
    if mesh.link is None:
        awaited, needs = (*awaited, *needs), ()
    # Once all have met, a peer may have sent data before this rank has its connections ready.
    patience = patience_seconds if mesh.session else 0.0
    found = loss_among(mesh, needs, awaited, patience)
    if found is None and entry.blocks:
        inside = {each for key in entry.blocks for each in blocks.get(nonce_of(key), ())}
        peers = [peer for peer, rank in enumerate(mesh.ranks) if rank in inside]
        found = loss_among(mesh, peers, patience_seconds=patience_seconds)
    return found


def loss_among(
    mesh: Mesh,
    needs: Iterable[int],
    awaited: Iterable[int] = (),
    patience_seconds: float | None = None,
) -> Verdict | None:
    """Return the verdict on ranks of a mesh whose processes have ended; None if there are none.

    The evidence comes from the kernel and the process records. A connected rank still receives data
    that a peer sent before its end: by then it is in this host's memory (almost always, if it came
    from another host), and the link reads it even if its thread is starved for a long time. So a
    rank with unread data does not count yet.

    Args:
        mesh: the mesh.
        needs: group ranks whose death counts.
        awaited: group ranks for which any end counts, including a normal end of the program. Of
            many processes on this host only some are checked at a time, but always the first.
        patience_seconds: how long an end must have been known; if None, long enough to read the
            data that the ranks had sent.
    """
    processes, link = mesh.board_thread.processes, mesh.link
    patience = LAST_BYTES_SECONDS if patience_seconds is None else patience_seconds
    counts: dict[int, Callable[[int], object]] = dict.fromkeys(awaited, processes.end_of)
    counts = counts | {peer: processes.has_died for peer in needs if peer not in counts}
    of = {mesh.ranks[peer]: peer for peer in counts}
    ends, noticed = {}, []
    for rank in processes.some_of(of):
        peer, reason = of[rank], processes.end_of(rank, patience)
        if not reason and processes.end_of(rank):
            noticed.append(rank)
        if reason and counts[peer](rank) and not (link is not None and link.has_unread(peer)):
            ends[peer] = reason
    if noticed:  # meanwhile, ask the store whether their programs ended normally
        mesh.board_thread.submit(lambda board: board.learn(noticed))
    if not ends:
        return None
    # A rank that has blamed others in its farewell ended because of them.
    ranks = _to_blame(mesh, ends)
    return Verdict.of(Cause.LOST, ranks=ranks, reason=ends.get(ranks[0], _REPORTED_BY_PEER))


def learn_ends(board: Board, mesh: Mesh) -> None:
    """Read from the store whether processes that the kernel reports as ended did so normally."""
    killed = mesh.board_thread.processes.killed()
    board.learn(rank for rank in mesh.ranks if rank in killed)


def by_name(mesh: Mesh, verdict: Verdict, board: Board) -> Verdict:
    """Attribute a loss to the rank that died, if that is known.

    Ranks that merely raised because of the death may have closed their connections as well, and
    their programs may have ended.

    Args:
        mesh: the mesh of the call.
        verdict: the loss as seen by the connections or the kernel.
        board: the store. Must be called on the board's thread.
    """
    # Processes that ended normally or left the world have published a reason.
    killed = mesh.board_thread.processes.killed()
    board.learn({*killed, *(mesh.ranks[rank] for rank in verdict.ranks)})
    return by_name_here(mesh, verdict)


def by_name_here(mesh: Mesh, verdict: Verdict) -> Verdict:
    """Do what ``by_name`` does with what this process knows, without asking the store."""
    processes = mesh.board_thread.processes
    killed = processes.killed()
    # A rank that closed its connections because of another's loss may have ended since.
    died = {
        rank: killed[each]
        for rank, each in enumerate(mesh.ranks)
        if each in killed and not mesh.blamed_by(rank)
    }
    if died and verdict.is_store_silent:  # later ends may be a consequence of the first
        first = processes.noticed_first(mesh.ranks[rank] for rank in died)
        died = {rank: why for rank, why in died.items() if mesh.ranks[rank] in first}
    if died:
        # All known deaths, independent of the order in which they were noticed: then all ranks
        # report the same.
        named = [rank for rank in verdict.ranks if rank in died]
        why = next(iter(died.values()))
        return verdict._replace(ranks=tuple(sorted(died)), reason=verdict.reason if named else why)
    calls = _last_calls(mesh)
    failures = {rank: calls[rank].failure for rank in verdict.ranks if rank in calls}
    failed = tuple(rank for rank, failure in failures.items() if failure)
    ends = map(processes.end_of, (mesh.ranks[rank] for rank in verdict.ranks))
    reason = next(filter(None, (*failures.values(), *ends)), "")
    left = {rank for rank, each in calls.items() if not each.failure}
    ranks = failed or verdict.ranks
    if left and not failed and left.issuperset(verdict.ranks):
        ranks, reason = tuple(sorted(left)), reason or DESTROYED
    if reason:
        # Sequence numbers of different lanes cannot be compared.
        lasts = [calls[rank].last for rank in ranks if rank in calls and len(mesh.lanes) == 1]
        known = [each for rank in ranks if (each := processes.of(mesh.ranks[rank])) is not None]
        groups = [group for each in known for group in each.calls]
        own = mesh.ranks[mesh.rank]
        apart = (each.members for each in groups if each.members and own not in each.members)
        return verdict._replace(
            ranks=ranks,
            reason=reason,
            positions=tuple(filter(None, lasts)),
            left_by="" if failed else next((each.left_by for each in groups if each.left_by), ""),
            elsewhere=next(apart, ()) if mesh.is_world else (),
        )
    are_beside = all(processes.is_beside(mesh.ranks[rank]) for rank in verdict.ranks)
    # A rank that leaves gives its reason; a closed connection comes without one.
    is_explained = verdict.cause is Cause.LEFT or verdict.reason.startswith(_CLOSED)
    if not verdict.ranks or not are_beside or is_explained:
        return verdict
    # PEER_LOST cannot distinguish this from a death; any other reason adds information.
    is_by_connection = verdict.reason.startswith(PEER_LOST)
    return verdict._replace(reason=_CLOSED + f" ({verdict.reason})" * (not is_by_connection))


def _last_calls(mesh: Mesh) -> dict[int, GroupCalls]:
    """Return the calls of the members that have published that they leave."""
    calls_of, number = mesh.board_thread.processes.calls_of, mesh.number
    found = {peer: calls_of(mesh.ranks[peer], number) for peer in mesh.others}
    return {peer: calls for peer, calls in found.items() if calls is not None}


def is_deadlock_of_the_dead(board: Board, meshes: Sequence[Mesh], conflict: Deadlock) -> bool:
    """End the meshes of a deadlock that have lost a rank, and return whether there were any.

    The loss then explains why the others wait.
    """
    groups = {state.group for _, state, _ in conflict.found}
    found = False
    for mesh in meshes:
        if mesh.verdict is None and mesh.name in groups:
            learn_ends(board, mesh)
            died = loss_among(mesh, mesh.others, patience_seconds=0.0)
            whole = None if mesh.whole is None else mesh.whole()
            if died is None and whole is not None and conflict.reason == CYCLE:
                # The other rank has given up the group, for example in ``survivors``.
                ended = whole.verdict or board.look(whole.nonce)
                died = ended if ended is not None and ended.cause is Cause.LOST else None
            found |= died is not None
            if died is not None:
                mesh.settle_on(board, died._replace(is_final=True))
    return found


def end_by_loss(mesh: Mesh, proposal: Verdict) -> Verdict:
    """End a mesh that has lost a peer, and find out which rank is the cause.

    A peer that closes its connections because of a loss lists the lost ranks in its farewell; the
    verdict then lists those ranks instead. When a host is lost, all of its ranks are, even if their
    connections close a moment later. If all of this rank's connections have closed, the others may
    have closed them and posted the reason in the store.

    Args:
        mesh: the mesh.
        proposal: the loss that this rank's wait has seen.

    Returns:
        The verdict that holds.
    """

    def look(board: Board) -> Verdict | None:
        board.learn(mesh.ranks[peer] for peer in mesh.others)  # any of them may have left
        return mesh.polled_verdict or board.look(mesh.nonce)

    link = mesh.link
    if mesh.verdict is not None or link is None:
        return mesh.settle(proposal)
    if HOST_LOST in proposal.reason:
        return mesh.settle(proposal._replace(ranks=tuple(link.beside(proposal.ranks))))
    to_blame = _to_blame(mesh, proposal.ranks)
    if to_blame != tuple(sorted(proposal.ranks)):
        proposal = proposal._replace(ranks=to_blame, reason=_REPORTED_BY_PEER)
    elif _are_all_closed(mesh):
        try:
            standing = mesh.board_thread.call(look)
        except StoreSilentError:  # without the store, each rank may have closed its connections
            return settle_by_name(mesh, proposal)
        if standing is not None:
            # Not by ``settle``, which would post it again after the others have removed it.
            return mesh.stop(standing)
        if not any(map(mesh.board_thread.processes.end_of, mesh.ranks)) and not _last_calls(mesh):
            # The others have agreed on a verdict among themselves and cleared the store.
            return mesh.stop(proposal._replace(ranks=(mesh.rank,), reason=_ALONE))
    return settle_by_name(mesh, proposal)


def end_by_backend(mesh: Mesh, proposal: Verdict) -> Verdict:
    """End a mesh because the backend of this rank's device has failed.

    A backend also fails if a peer has died, which it notices immediately, and it does not say which
    rank failed. So a closed connection is the reason, if there is one.

    Args:
        mesh: the mesh.
        proposal: this rank's failure.

    Returns:
        The verdict that holds.
    """
    if mesh.verdict is None and mesh.link is not None:
        time.sleep(_OTHERS_FIRST_SECONDS)
        closed = mesh.link.closed_by()
        if closed:
            return end_by_loss(mesh, Verdict.of(Cause.LOST, ranks=tuple(closed), reason=PEER_LOST))
    return mesh.settle(proposal)


def _to_blame(mesh: Mesh, closed: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks blamed by peers for closing connections; for others, the peer itself."""
    blamed = {rank for peer in closed for rank in mesh.blamed_by(peer) or (peer,)}
    return tuple(sorted(blamed))


def settle_by_name(mesh: Mesh, loss: Verdict, seconds: float = _NAMED_WITHIN_SECONDS) -> Verdict:
    """Do what ``Mesh.settle`` does, but attribute the loss to the rank that died.

    One job does both. A rank that settles closes its connections, so a rank that did not ask the
    store might see only that, and report a rank that is alive.
    """
    if mesh.verdict is not None:
        return mesh.settle(loss)

    def settle_on(board: Board) -> Verdict:
        return mesh.settle_on(board, by_name(mesh, loss, board))

    posted = mesh.posted(loss, settle_on, seconds)
    return mesh.stop(by_name_here(mesh, posted) if posted.is_store_silent else posted)


def _are_all_closed(mesh: Mesh) -> bool:
    """Whether all connections have closed, if there are several."""
    if mesh.link is None or len(mesh.others) == 1:
        return False
    time.sleep(_OTHERS_FIRST_SECONDS)
    return mesh.link.has_lost_all()


def end_unconnected(mesh: Mesh, error: BaseException) -> None:
    """End a mesh whose ranks could not all connect, and find the ranks that caused it.

    A rank that learns of a death closes its connections just as a dead one does. So the store and
    the kernel are first asked, for at most a second, for a posted verdict and for dead processes.

    Args:
        mesh: the mesh.
        error: the exception raised while connecting.
    """
    if not isinstance(error, LinkClosed | LinkUnreachable):
        reason = f"it could not connect: {reason_of(error)}"
        rank = error.rank if isinstance(error, LinkRefused) else mesh.rank
        mesh.settle(Verdict.of(Cause.LEFT, ranks=(rank,), reason=reason))
        return
    processes = mesh.board_thread.processes
    apart = error.ranks if isinstance(error, LinkUnreachable) else ()
    question = 0
    answered: set[int] = set()

    def look(board: Board) -> Verdict | None:
        nonlocal question
        board.learn(rank for rank in ranks.values() if not processes.is_beside(rank))
        if apart:
            question = question or board.ask()
            mesh.board_thread.answer(board)  # which that thread otherwise does only when idle
            answered.update(each for each in apart if board.read(mesh.ranks[each], question))
        return board.look(mesh.nonce)

    ranks = {peer: mesh.ranks[peer] for peer in mesh.others}
    until = time.monotonic() + _CAUSE_WITHIN_SECONDS
    while mesh.verdict is None and time.monotonic() < until:
        with contextlib.suppress(StoreSilentError):
            standing = mesh.board_thread.call(look)
            if standing is not None:
                mesh.stop(standing)  # not by ``settle``; see ``end_by_loss``
                return
        killed = processes.killed()
        died = {peer: killed[rank] for peer, rank in ranks.items() if rank in killed}
        if died:
            _end_by_deaths(mesh, died)
            return
        time.sleep(_CAUSE_PAUSE_SECONDS)
    silent = tuple(each for each in apart if each not in answered)
    cause, named = Cause.LOST, silent if isinstance(error, LinkUnreachable) else error.peers
    if isinstance(error, LinkUnreachable) and len(silent) != 1:
        cause, named = Cause.APART, apart
    found = Verdict.of(cause, ranks=named, reason=error.reason, is_final=True)
    if cause is Cause.LOST:
        settle_by_name(mesh, found)
    else:
        mesh.settle(found)


def _end_by_deaths(mesh: Mesh, died: Mapping[int, str]) -> None:
    """End a mesh because of deaths that the kernel reported, and publish them for other hosts."""

    def publish(board: Board) -> None:
        for peer, reason in died.items():
            board.publish_end(mesh.ranks[peer], reason)

    mesh.board_thread.submit(publish)
    reason = next(iter(died.values()))
    mesh.settle(Verdict.of(Cause.LOST, ranks=tuple(died), reason=reason, is_final=True))


def local(mesh: Mesh, verdict: Verdict, error: TransportError) -> Verdict:
    """Use this rank's own connections to complete a verdict that the store did not confirm."""
    if not verdict.is_store_silent:
        return verdict
    is_late = verdict.cause is Cause.TIMEOUT and not verdict.silent
    if is_late and isinstance(error, TransportTimeout):
        return verdict._replace(ranks=tuple(sorted({*verdict.ranks, *error.missing})))
    if verdict.cause is Cause.LOST and mesh.link is not None:
        ranks = tuple(sorted({*verdict.ranks, *_to_blame(mesh, mesh.link.closed_by())}))
        return by_name_here(mesh, verdict._replace(ranks=ranks))
    return verdict


def publish_ends_on_own_host(board: Board, mesh: Mesh) -> None:
    """Publish which processes of this host have ended, for ranks on other hosts.

    Those ranks cannot see it themselves: a child may keep the dead process's connections open, and
    ranks on this host may not be waiting for it.
    """
    processes = mesh.board_thread.processes
    ranks = [mesh.ranks[peer] for peer in mesh.others]
    if all(map(processes.is_beside, ranks)):
        return
    for rank in processes.some_of(filter(processes.is_beside, ranks)):
        process, reason = processes.of(rank), processes.end_of(rank)
        if reason and process is not None and not process.end_reason:
            board.publish_end(rank, reason)
            board.learn([rank])


def learn(board: Board, mesh: Mesh, entry: CallRecord) -> None:
    """Read the records of processes that a call waits for; some of them, if there are many.

    For processes on other hosts, the record also shows whether they have ended.
    """
    processes = mesh.board_thread.processes
    unknown = [peer for peer in mesh.others if processes.of(mesh.ranks[peer]) is None]
    awaited = [] if entry.awaits < 0 else [entry.awaits]
    if len(mesh.others) == 1:  # also for a receive from any rank, which awaits none in particular
        awaited = list(mesh.others)
    asked_about = {*awaited, *some(unknown)}
    far = [peer for peer in mesh.others if not processes.is_beside(mesh.ranks[peer])]
    board.learn({mesh.ranks[peer] for peer in {*asked_about, *some(far)}.intersection(far)})
    if time.monotonic() - entry.waits_since > _SURELY_PUBLISHED_SECONDS:
        _note_cut_off(mesh, asked_about)  # a rendezvous needs all of them


def _note_cut_off(mesh: Mesh, awaited: Iterable[int]) -> None:
    """Record the end of ranks that never used objcomm, as torch's own connections show it."""
    processes = mesh.board_thread.processes
    for rank in [mesh.ranks[peer] for peer in awaited if mesh.link is None]:
        if processes.of(rank) is None and mesh.board_thread.is_cut_off(rank):
            processes.note_end(rank, "it died, or left its process group, before it joined")


def some(each: Sequence[T]) -> list[T]:
    """Return a random sample to ask about this time: a thousand would overload the store."""
    return random.sample(each, min(len(each), _MOST_LEARNED))


def is_lost(
    board: Board,
    waiting: tuple[Mesh, Lane, CallRecord],
    meshes: Sequence[Mesh],
    asked: int,
) -> bool:
    """End a mesh if connections and silence show that a rank needed by a wait is lost.

    Args:
        board: the store.
        waiting: a call with its mesh and lane. Findings so far are kept in the call's record.
        meshes: all meshes of this process.
        asked: the number of a question just asked. An older answer may be from a rank now dead.

    Returns:
        Whether the mesh was ended.
    """
    mesh, lane, entry = waiting
    found = _cut_off(board, mesh, lane, entry, asked)
    missing = missing_members(mesh, board) or _dead(board, mesh, meshes, entry, asked)
    if missing:
        found = Verdict.of(Cause.LOST, ranks=missing, reason=_NEVER_CAME, is_final=True)
    if found is not None:
        mesh.settle_on(board, found)
    return found is not None


def _dead(
    board: Board, mesh: Mesh, meshes: Sequence[Mesh], entry: CallRecord, asked: int
) -> tuple[int, ...]:
    """Return members on other hosts that the world's mesh has lost and that do not answer.

    Neither alone is proof: the network may fail for a while, and a rank may be too busy to answer.
    An outage causes both, and the rank's answer may arrive long after it. Processes of this host
    are skipped, because the kernel knows about them.
    """
    if mesh.link is not None:
        return ()
    processes, now = mesh.board_thread.processes, time.monotonic()
    worlds = [world for world in meshes if world.is_world and world is not mesh]
    was_cut_off: dict[int, bool] = {}
    for world in worlds:
        was_cut_off |= lost_ranks(world, board)
    before, entry.unanswered = entry.unanswered or {}, {}
    dead = []
    asked_about = {entry.awaits, *some(mesh.others)}
    for peer, rank in ((peer, mesh.ranks[peer]) for peer in mesh.others):
        if processes.is_beside(rank) or (rank not in was_cut_off and peer not in asked_about):
            continue
        first, since, looks = before.get(rank, (asked, now, 0))
        if board.read(rank, first) is not None:
            continue  # it answered; the next check starts over
        entry.unanswered[rank] = first, since, looks + 1
        if rank not in was_cut_off:
            if looks:  # there may be no connection yet whose end would show the loss
                for world in worlds:
                    call_far(world, [rank])
            continue
        patience = _LATE_AFTER_OUTAGE_SECONDS if was_cut_off[rank] else SURELY_ANSWERED_SECONDS
        if now - since > patience and looks >= _LOOKS_IN_VAIN:
            dead.append(peer)
    return tuple(dead)


def _cut_off(board: Board, mesh: Mesh, lane: Lane, entry: CallRecord, asked: int) -> Verdict | None:
    """Return the verdict on lost ranks of other hosts that a wait needs but does not await.

    The end of a connection wakes only a wait for that rank. The kernel knows about processes of
    this host. A rank of another host may have closed its connections because its program ended
    normally.
    """
    link, processes = mesh.link, mesh.board_thread.processes
    if link is None:
        return None
    others = (peer for peer in needed(mesh, lane, entry) if peer != entry.awaits)
    far = [peer for peer in others if not processes.is_beside(mesh.ranks[peer])]
    entry.unanswered, now = entry.unanswered or {}, time.monotonic()
    lost = []
    for peer in [each for each in some(far) if link.is_closed(each)]:
        rank = mesh.ranks[peer]
        board.learn([rank])
        if processes.end_of(rank) and not processes.has_died(rank):
            continue
        first, since, _ = entry.unanswered.setdefault(rank, (asked, now, 0))
        if board.read(rank, first) is not None:
            continue  # it is alive and has left the group
        if link.is_out_of_reach(peer) or now - since >= LAST_BYTES_SECONDS:
            lost.append(peer)
    if not lost:
        return None
    is_outage = any(map(link.is_out_of_reach, lost))
    ranks = tuple(link.beside(lost) if is_outage else sorted(lost))
    reason = HOST_LOST if is_outage else PEER_LOST
    found = Verdict.of(Cause.LOST, ranks=ranks, reason=reason, is_final=True)
    return by_name(mesh, found, board)


def look_for_senders(meshes: Sequence[Mesh], missed: MutableSet[Mesh], board: Board) -> None:
    """End meshes whose ranks have not met, if one of the ranks can no longer join.

    Args:
        meshes: the meshes, each with a thread that listens for messages.
        missed: the meshes for which the previous check found the same. Data that a rank sent before
            its end may arrive a moment after the end is known.
        board: the store.
    """
    for mesh in some(meshes):
        ranks = [mesh.ranks[peer] for peer in mesh.others]
        board.learn(rank for rank in ranks if not mesh.board_thread.processes.is_beside(rank))
        _note_cut_off(mesh, mesh.others)
    for mesh in meshes:
        missing = missing_members(mesh, board)
        if not missing:
            missed.discard(mesh)
        elif mesh not in missed:
            missed.add(mesh)
        else:
            wanted = [mesh.ranks[peer] for peer in missing]
            board.learn(wanted)
            reasons = filter(None, map(mesh.board_thread.processes.end_of, wanted))
            reason = next(reasons, _NEVER_CAME)
            found = Verdict.of(Cause.LOST, ranks=missing, reason=reason, is_final=True)
            mesh.settle_on(board, found)


def missing_members(mesh: Mesh, board: Board) -> tuple[int, ...]:
    """Return the members that cannot join this mesh because the whole group has lost them.

    Args:
        mesh: the mesh.
        board: the store, to check whether the group's connections were closed for another reason.
    """
    whole = None if mesh.whole is None else mesh.whole()
    if mesh.link is not None or whole is None:
        return ()
    call_far(whole, mesh.others)
    gone = lost_ranks(whole, board)
    return tuple(peer for peer in mesh.others if mesh.ranks[peer] in gone)


def lost_ranks(mesh: Mesh, board: Board) -> dict[int, bool]:
    """Return the global ranks that a mesh has lost because they died, left or were cut off.

    Args:
        mesh: the mesh.
        board: the store, to check whether the connections were closed for another reason.

    Returns:
        For each rank, whether it was cut off: its host was unreachable, and may be reachable again.
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


def call_far(mesh: Mesh, peers: Iterable[int]) -> None:
    """Connect to ranks of other hosts to which there may be no connection yet.

    If such a rank ends, its connection closes and shows that. For ranks of this host the kernel is
    asked.
    """
    if mesh.link is None or mesh.verdict is not None:
        return
    for peer in peers:
        if not mesh.board_thread.processes.is_beside(mesh.ranks[peer]):
            mesh.link.call(peer)
