"""Which ranks a wait needs, which of them are gone, and whom to name for it.

There are three kinds of evidence. The kernel tells when a process of this host has ended, and the
cards in the store tell of others (see ``liveness``); both are certain. A connection that ended
says only that something has closed it, so the kernel and the store are asked why. Where ranks are
not connected yet, one whose connection in the world has ended and that does not answer is gone as
well.
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
from objcomm.errors import TransportError, TransportTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, MutableSet, Sequence

    from objcomm._failures.deadlock import Deadlock
    from objcomm._failures.liveness import GroupCalls
    from objcomm._failures.mesh import Mesh
    from objcomm._failures.noticeboard import Board
    from objcomm._observe.history import CallRecord
    from objcomm._transport.lane import Lane

T = TypeVar("T")

#: What a process has sent before its end is read by then, also on a busy machine.
LAST_BYTES_SECONDS = 1.0
# A rank that loses one peer and a rank that loses all see it at the same time.
_OTHERS_FIRST_SECONDS = 0.02
# For how long a rank that can't connect waits for the word that tells who has died.
_WORD_WITHIN_SECONDS = 1.0
_WORD_PAUSE_SECONDS = 0.05
# For how long the store is asked who has died, before a rank names what its connections tell.
_NAMED_WITHIN_SECONDS = 1.0
# With this patience, a death is still reported within 2 s.
_SURELY_ANSWERED_SECONDS = 1.0
# The store itself may have been silent that long, so this many looks must also have found nothing.
_LOOKS_IN_VAIN = 3
# Linux waits no longer before it sends something again that was not answered (TCP_RTO_MAX).
_LATE_AFTER_OUTAGE_SECONDS = 120.0
# A rank that uses objcomm has published its card by the time its first call has lasted this long.
_SURELY_TOLD_SECONDS = 1.0
# A thousand ranks that wait would keep the store busy with each other's names.
_MOST_LEARNED = 8

_CLOSED = "it is alive, but has destroyed its process group or given up after its own error"
_ALONE = "all of its connections ended at the same time: it lost its network, or all others ended"
_SAID = "it died, exited or lost its network, according to a rank that has closed its connections"
_NEVER_CAME = "it died, exited or lost its network before it sent to or received from this rank"

# Their receivers need only the source: the death of any other rank delays nobody.
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
# Their destination needs each rank until that rank's contribution has arrived.
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
        patience_seconds: how long an end must have been known; if None, long enough to read what
            the ranks had sent.
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
    if noticed:  # until the patience is over, the store says whether they came to their ends
        mesh.board_thread.submit(lambda board: board.learn(noticed))
    if not ends:
        return None
    return Verdict.of(Cause.LOST, ranks=tuple(sorted(ends)), reason=ends[min(ends)])


def learn_ends(board: Board, mesh: Mesh) -> None:
    """Take in whether the processes that the kernel says have ended came to their ends."""
    killed = mesh.board_thread.processes.killed()
    board.learn(rank for rank in mesh.ranks if rank in killed)


def by_name(mesh: Mesh, verdict: Verdict, board: Board) -> Verdict:
    """A loss, as that of the rank that died, where that is known.

    Who has only raised because of it may have closed connections, and its program may have ended.

    Args:
        mesh: of the call.
        verdict: as the connections or the kernel tell it.
        board: the store; this is called on its thread.
    """
    # Who ended by itself, or left its world, has left a word.
    killed = mesh.board_thread.processes.killed()
    board.learn({*killed, *(mesh.ranks[rank] for rank in verdict.ranks)})
    return by_name_here(mesh, verdict)


def by_name_here(mesh: Mesh, verdict: Verdict) -> Verdict:
    """``by_name``, as far as this process knows."""
    processes = mesh.board_thread.processes
    killed = processes.killed()
    died = {rank: killed[each] for rank, each in enumerate(mesh.ranks) if each in killed}
    if died and verdict.is_store_silent:  # whose end came later may have ended because of the first
        first = processes.noticed_first(mesh.ranks[rank] for rank in died)
        died = {rank: why for rank, why in died.items() if mesh.ranks[rank] in first}
    if died:
        # All that are known, whichever was noticed first: so all ranks name the same.
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
        # On several lanes calls have numbers that can't be compared.
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
    # Who leaves by itself says why; of one whose connections were closed nobody has said it.
    is_said = verdict.cause is Cause.LEFT or verdict.reason.startswith(_CLOSED)
    if not verdict.ranks or not are_beside or is_said:
        return verdict
    # A connection can't tell that from a death; what else was raised says more.
    is_by_connection = verdict.reason.startswith(PEER_LOST)
    return verdict._replace(reason=_CLOSED + f" ({verdict.reason})" * (not is_by_connection))


def _last_calls(mesh: Mesh) -> dict[int, GroupCalls]:
    """The members that have said that they leave, with the calls that they had made."""
    calls_of, number = mesh.board_thread.processes.calls_of, mesh.number
    found = {peer: calls_of(mesh.ranks[peer], number) for peer in mesh.others}
    return {peer: calls for peer, calls in found.items() if calls is not None}


def is_circle_of_the_dead(board: Board, meshes: Sequence[Mesh], conflict: Deadlock) -> bool:
    """End the meshes of a circle that have lost a rank, which explains why others wait."""
    groups = {state.group for _, state, _ in conflict.found}
    found = False
    for mesh in meshes:
        if mesh.verdict is None and mesh.name in groups:
            learn_ends(board, mesh)
            died = loss_among(mesh, mesh.others, patience_seconds=0.0)
            found |= died is not None
            if died is not None:
                mesh.settle_on(board, died._replace(is_final=True))
    return found


def end_by_loss(mesh: Mesh, proposal: Verdict) -> Verdict:
    """End a mesh that has lost a peer; by that peer's doing, or by this rank's own.

    A peer that closes its connections says whose loss is why, and those are named instead. With a
    host its other ranks are lost, though their connections may end a moment later. If all of this
    rank's connections have ended, the others may have ended them, and told why in the store.

    Args:
        mesh: which.
        proposal: what this rank's wait has found.

    Returns:
        What holds.
    """

    def look(board: Board) -> Verdict | None:
        board.learn(mesh.ranks[peer] for peer in mesh.others)  # all may have left
        return mesh.heard or board.look(mesh.nonce)

    link = mesh.link
    if mesh.verdict is not None or link is None:
        return mesh.settle(proposal)
    if HOST_LOST in proposal.reason:
        return mesh.settle(proposal._replace(ranks=tuple(link.beside(proposal.ranks))))
    to_blame = _to_blame(mesh, proposal.ranks)
    is_said = to_blame != tuple(sorted(proposal.ranks))
    if is_said:
        proposal = proposal._replace(ranks=to_blame, reason=_SAID)
    elif _are_all_closed(mesh):
        try:
            standing = mesh.board_thread.call(look)
        except StoreSilentError:  # then each rank may have closed its own
            return settle_by_name(mesh, proposal)
        if standing is not None:
            # Not once more by ``settle``: the others may have read it by then, and removed it.
            return mesh.stop(standing)
        if not any(map(mesh.board_thread.processes.end_of, mesh.ranks)) and not _last_calls(mesh):
            # Nobody is there to be told: the others have told each other, and cleared the store.
            return mesh.stop(proposal._replace(ranks=(mesh.rank,), reason=_ALONE))
    return settle_by_name(mesh, proposal)


def _to_blame(mesh: Mesh, closed: Iterable[int]) -> tuple[int, ...]:
    """The ranks whose loss explains that peers have closed their connections: themselves if not."""
    blamed = {rank for peer in closed for rank in mesh.blamed_by(peer) or (peer,)}
    return tuple(sorted(blamed))


def settle_by_name(mesh: Mesh, loss: Verdict, seconds: float = _NAMED_WITHIN_SECONDS) -> Verdict:
    """``Mesh.settle``, under the name of the rank that died; the store is asked for both at once.

    A rank that settles closes its connections. One that does not wait for the store may see only
    that, and would name a rank that lives.
    """
    if mesh.verdict is not None:
        return mesh.settle(loss)

    def settle_on(board: Board) -> Verdict:
        return mesh.settle_on(board, by_name(mesh, loss, board))

    told = mesh.posted(loss, settle_on, seconds)
    return mesh.stop(by_name_here(mesh, told) if told.is_store_silent else told)


def _are_all_closed(mesh: Mesh) -> bool:
    """Whether all of several connections have ended."""
    if mesh.link is None or len(mesh.others) == 1:
        return False
    time.sleep(_OTHERS_FIRST_SECONDS)
    return mesh.link.has_lost_all()


def end_unconnected(mesh: Mesh, error: BaseException) -> None:
    """End a mesh whose ranks could not all connect, and name the ranks that caused it.

    A rank that hears of a death closes its connections as a dead one does. So the store and the
    kernel are asked first what another rank has posted and who has died, for a second at most.

    Args:
        mesh: which.
        error: what connecting has raised here.
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
            mesh.board_thread.answer(board)  # which it would do only when it has nothing else to do
            answered.update(each for each in apart if board.read(mesh.ranks[each], question))
        return board.look(mesh.nonce)

    ranks = {peer: mesh.ranks[peer] for peer in mesh.others}
    until = time.monotonic() + _WORD_WITHIN_SECONDS
    while mesh.verdict is None and time.monotonic() < until:
        with contextlib.suppress(StoreSilentError):
            standing = mesh.board_thread.call(look)
            if standing is not None:
                mesh.stop(standing)  # not by ``settle``, see ``end_by_loss``
                return
        killed = processes.killed()
        died = {peer: killed[rank] for peer, rank in ranks.items() if rank in killed}
        if died:
            _end_by_deaths(mesh, died)
            return
        time.sleep(_WORD_PAUSE_SECONDS)
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
    """End a mesh by the deaths of which the kernel has told this rank, and tell other hosts."""

    def tell(board: Board) -> None:
        for peer, reason in died.items():
            board.tell_end(mesh.ranks[peer], reason)

    mesh.board_thread.submit(tell)
    reason = next(iter(died.values()))
    mesh.settle(Verdict.of(Cause.LOST, ranks=tuple(died), reason=reason, is_final=True))


def local(mesh: Mesh, verdict: Verdict, error: TransportError) -> Verdict:
    """A verdict that no store confirmed, with what this rank's own connections tell."""
    if not verdict.is_store_silent:
        return verdict
    is_late = verdict.cause is Cause.TIMEOUT and not verdict.silent
    if is_late and isinstance(error, TransportTimeout):
        return verdict._replace(ranks=tuple(sorted({*verdict.ranks, *error.missing})))
    if verdict.cause is Cause.LOST and mesh.link is not None:
        ranks = tuple(sorted({*verdict.ranks, *_to_blame(mesh, mesh.link.closed_by())}))
        return by_name_here(mesh, verdict._replace(ranks=ranks))
    return verdict


def tell_of_own_host(board: Board, mesh: Mesh) -> None:
    """Let ranks of other hosts know which processes of this one have ended.

    They can't see it themselves, a child may keep the dead one's connections open, and who is
    beside it need not await it.
    """
    processes = mesh.board_thread.processes
    ranks = [mesh.ranks[peer] for peer in mesh.others]
    if all(map(processes.is_beside, ranks)):
        return
    for rank in processes.some_of(filter(processes.is_beside, ranks)):
        process, reason = processes.of(rank), processes.end_of(rank)
        if reason and process is not None and not process.word:
            board.tell_end(rank, reason)
            board.learn([rank])


def learn(board: Board, mesh: Mesh, entry: CallRecord) -> None:
    """Ask who the processes are that a call waits for, and whether those elsewhere have ended."""
    processes = mesh.board_thread.processes
    unknown = [peer for peer in mesh.others if processes.of(mesh.ranks[peer]) is None]
    awaited = [] if entry.awaits < 0 else [entry.awaits]
    if len(mesh.others) == 1:  # one that waits for any rank awaits each, too
        awaited = list(mesh.others)
    asked_about = {*awaited, *some(unknown)}
    far = [peer for peer in mesh.others if not processes.is_beside(mesh.ranks[peer])]
    board.learn({mesh.ranks[peer] for peer in {*asked_about, *some(far)}.intersection(far)})
    if time.monotonic() - entry.waits_since > _SURELY_TOLD_SECONDS:
        _note_cut_off(mesh, asked_about)  # who meets needs all of them


def _note_cut_off(mesh: Mesh, awaited: Iterable[int]) -> None:
    """Take in that ranks have ended that had not used objcomm, as torch's own connection tells."""
    processes = mesh.board_thread.processes
    for rank in [mesh.ranks[peer] for peer in awaited if mesh.link is None]:
        if processes.of(rank) is None and mesh.board_thread.is_cut_off(rank):
            processes.note_end(rank, "it died, or left its process group, before it joined")


def some(each: Sequence[T]) -> list[T]:
    """Those to ask about this time: a thousand at a time would keep the store busy."""
    return random.sample(each, min(len(each), _MOST_LEARNED))


def is_lost(
    board: Board,
    waiting: tuple[Mesh, Lane, CallRecord],
    meshes: Sequence[Mesh],
    asked: int,
) -> bool:
    """End a mesh that has lost a rank which a wait needs, as connections and silence tell.

    Args:
        board: to ask.
        waiting: a call with its mesh and lane; it keeps what was found so far.
        meshes: all of this process.
        asked: the number of a question that was just asked: an older answer may be a dead rank's.
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
    """Members whose connections with this rank in the world have ended, and who do not answer.

    Either alone is no proof: a network may fail for a while, and a rank may be too busy to answer.
    An outage does both, and that rank's answer may come long after it. Of a process of this host
    the kernel tells.
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
            continue  # it is asked anew
        entry.unanswered[rank] = first, since, looks + 1
        if rank not in was_cut_off:
            if looks:  # they may have no connection yet, whose end would tell
                for world in worlds:
                    call_far(world, [rank])
            continue
        patience = _LATE_AFTER_OUTAGE_SECONDS if was_cut_off[rank] else _SURELY_ANSWERED_SECONDS
        if now - since > patience and looks >= _LOOKS_IN_VAIN:
            dead.append(peer)
    return tuple(dead)


def _cut_off(board: Board, mesh: Mesh, lane: Lane, entry: CallRecord, asked: int) -> Verdict | None:
    """What to say of ranks of other hosts that a wait needs, but does not await.

    The end of a connection wakes only a wait for that rank. Of this host's processes the kernel
    tells; one of another host may have closed its connections when its program came to its end.
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
            continue  # it lives, and has left the group
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
    """End meshes whose ranks have not met, if one of them can't come any more.

    Args:
        meshes: which; each is listened to.
        missed: those of which the last look has found the same. What a rank sends before its end
            may come a moment later than its end is known.
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
            words = filter(None, map(mesh.board_thread.processes.end_of, wanted))
            reason = next(words, _NEVER_CAME)
            found = Verdict.of(Cause.LOST, ranks=missing, reason=reason, is_final=True)
            mesh.settle_on(board, found)


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


def call_far(mesh: Mesh, peers: Iterable[int]) -> None:
    """Connect to ranks of other hosts with which this one may have had nothing to do yet.

    The end of a connection tells of theirs. Of those on this host the kernel does.
    """
    if mesh.link is None or mesh.verdict is not None:
        return
    for peer in peers:
        if not mesh.board_thread.processes.is_beside(mesh.ranks[peer]):
            mesh.link.call(peer)
