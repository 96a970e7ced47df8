"""Which ranks are at fault for the end of a mesh: those that are gone, or this one.

Reads meshes and verdicts, and ends none but by ``end_by_loss``.
"""

import contextlib
import time
from collections.abc import Collection, Mapping

from objcomm.errors import TransportError, TransportTimeout
from objcomm.history import Entry
from objcomm.transport.bulletin import Board, StoreSilentError
from objcomm.transport.liveness import KILLED
from objcomm.transport.mesh import Mesh
from objcomm.transport.outage import HOST_LOST
from objcomm.transport.regions import nonce_of
from objcomm.transport.verdict import FAREWELLS, Cause, Verdict

# What a process has sent before its end is read by then, also on a busy machine.
_LAST_BYTES_SECONDS = 1.0
_CLOSED = "it lives, and has destroyed its process group or given up after an error of its own"
# A rank that loses one peer and a rank that loses all see it at the same time.
_OTHERS_FIRST_SECONDS = 0.02
_ALONE = "all of its connections ended at once: it lost its network, or all others ended"


def missing(mesh: Mesh, board: Board) -> tuple[int, ...]:
    """The members that can't come to meet this rank, because the whole group has lost them.

    Args:
        mesh: whose members.
        board: to ask whether the group's connections were closed for another reason.
    """
    whole = None if mesh.whole is None else mesh.whole()
    if mesh.link is not None or whole is None:
        return ()
    gone = lost(whole, board)
    return tuple(peer for peer in mesh.others if mesh.ranks[peer] in gone)


def lost(mesh: Mesh, board: Board) -> set[int]:
    """The global ranks whose connections of a mesh ended because they died or left.

    Args:
        mesh: which.
        board: to ask whether they were closed for another reason.
    """
    if mesh.link is None:
        return set()
    verdict = mesh.verdict
    if verdict is None:
        gone = {mesh.ranks[peer] for peer in mesh.others if mesh.link.is_closed(peer)}
        verdict = board.look(mesh.nonce) if gone else None
        if verdict is None:
            return gone
    is_loss = verdict.cause is Cause.LOST or verdict.reason in FAREWELLS
    return {mesh.ranks[peer] for peer in verdict.ranks} if is_loss else set()


def in_vain(mesh: Mesh, entry: Entry, blocks: Mapping[str, tuple[int, ...]]) -> Verdict | None:
    """What to say of a wait for a process that has ended; None where it is there, or unknown.

    Ranks that meet need all of them. Others need whom they await, and get what it has sent before
    its end first: that is in this host's memory by then, and Gloo's thread takes it out. In a
    ``fail_together`` block they need all who are in it, because these meet at its end.

    Args:
        mesh: of the call.
        entry: the call.
        blocks: the global ranks of the meshes in which the blocks around it began, by nonce.
    """
    processes, is_meeting = mesh.bulletin.processes, mesh.link is None
    for peer in mesh.others if is_meeting else [entry.awaits] if entry.awaits >= 0 else []:
        reason = processes.end_of(mesh.ranks[peer], 0.0 if is_meeting else _LAST_BYTES_SECONDS)
        if reason:
            return Verdict.of(Cause.LOST, ranks=(peer,), reason=reason)
    inside = {each for key in entry.regions for each in blocks.get(nonce_of(key), ())}
    return death_among(mesh, inside)


def death_among(mesh: Mesh, inside: Collection[int]) -> Verdict | None:
    """What to say of a process of ``mesh`` that died a while ago, where it was in the same block.

    Args:
        mesh: which.
        inside: the global ranks of those in the block.
    """
    for peer, each in enumerate(mesh.ranks):
        reason = mesh.bulletin.processes.end_of(each, _LAST_BYTES_SECONDS) if each in inside else ""
        if reason.startswith(KILLED):
            return Verdict.of(Cause.LOST, ranks=(peer,), reason=reason)
    return None


def never_comes(mesh: Mesh) -> Verdict | None:
    """What to say of a mesh whose ranks have not met, where one ended a while ago; None if not.

    A while, because one that has met this rank, and has ended after its message, may be told of
    sooner than that both have met.

    Args:
        mesh: which.
    """
    for peer in mesh.others if mesh.link is None else ():
        reason = mesh.bulletin.processes.end_of(mesh.ranks[peer], _LAST_BYTES_SECONDS)
        if reason:
            return Verdict.of(Cause.LOST, ranks=(peer,), reason=reason)
    return None


def by_name(mesh: Mesh, verdict: Verdict, board: Board | None = None) -> Verdict:
    """A loss, as that of the rank that died, where that is known.

    Who has only raised because of it may have closed connections, and its program may have ended.

    Args:
        mesh: of the call.
        verdict: as the connections or the kernel tell it.
        board: given on the bulletin's own thread.
    """
    processes = mesh.bulletin.processes
    # Who ended by itself, or left its world, has left a word.
    wanted = {*processes.killed(), *(mesh.ranks[rank] for rank in verdict.ranks)}
    if board is not None:
        board.learn(wanted)
    else:
        with contextlib.suppress(StoreSilentError):
            mesh.bulletin.call(lambda board: board.learn(wanted))
    killed = processes.killed()
    died = {rank: killed[each] for rank, each in enumerate(mesh.ranks) if each in killed}
    if died:
        named = tuple(rank for rank in verdict.ranks if rank in died)
        why = next(iter(died.values()))
        return verdict._replace(ranks=named or tuple(died), reason=verdict.reason if named else why)
    words = [processes.end_of(mesh.ranks[rank]) for rank in verdict.ranks]
    if any(words):
        return verdict._replace(reason=next(filter(None, words)))
    are_beside = all(processes.is_beside(mesh.ranks[rank]) for rank in verdict.ranks)
    # Who leaves by itself says why; of one whose connections were closed nobody has said it.
    if not are_beside or verdict.cause is Cause.LEFT or verdict.reason.startswith(_CLOSED):
        return verdict
    return verdict._replace(reason=f"{_CLOSED} ({verdict.reason})")


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
            standing = mesh.bulletin.call(lambda board: board.look(mesh.nonce))
        except StoreSilentError:  # then each rank may have closed its own
            return mesh.settle(by_name(mesh, proposal))
        if standing is not None:
            # Not once more by ``settle``: the others may have read it by then, and removed it.
            return mesh.stop(standing)
        if not any(mesh.bulletin.processes.end_of(rank) for rank in mesh.ranks):
            # Nobody is there to be told: the others have told each other, and cleared the store.
            return mesh.stop(proposal._replace(ranks=(mesh.rank,), reason=_ALONE))
    return mesh.settle(by_name(mesh, proposal))


def _are_all_closed(mesh: Mesh) -> bool:
    """Whether all of several connections have ended."""
    if mesh.link is None or len(mesh.others) == 1:
        return False
    time.sleep(_OTHERS_FIRST_SECONDS)
    return len(mesh.link.closed()) == len(mesh.others)


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
