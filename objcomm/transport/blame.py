"""Which ranks are at fault for the end of a mesh: those that are gone, or this one.

Reads meshes and verdicts, and ends none.
"""

import time

from objcomm.errors import TransportError, TransportTimeout
from objcomm.history import Entry
from objcomm.transport.bulletin import Board, StoreSilentError
from objcomm.transport.mesh import Mesh
from objcomm.transport.outage import HOST_LOST
from objcomm.transport.verdict import FAREWELLS, Cause, Verdict

_LAST_BYTES_SECONDS = 1.0
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


def in_vain(mesh: Mesh, entry: Entry) -> Verdict | None:
    """What to say of a wait for a process that has ended; None where it is there, or unknown.

    Ranks that meet need all of them. Others need whom they await, and get what it has sent before
    its end first: that is in this host's memory by then, and Gloo's thread takes it out.
    """
    processes, is_meeting = mesh.bulletin.processes, mesh.link is None
    for peer in mesh.others if is_meeting else [entry.awaits] if entry.awaits >= 0 else []:
        reason = processes.end_of(mesh.ranks[peer], 0.0 if is_meeting else _LAST_BYTES_SECONDS)
        if reason:
            return Verdict.of(Cause.LOST, ranks=(peer,), reason=reason)
    return None


def blamed(mesh: Mesh, proposal: Verdict) -> Verdict:
    """``proposal`` of a lost peer, or of this rank if all its connections have ended by itself.

    If others have ended them, their verdict stands already, and this one will not be used. With a
    host its other ranks are lost, though their connections may end a moment later.
    """
    others = len(mesh.others)
    if mesh.verdict is not None or mesh.link is None or others == 1:
        return proposal
    if HOST_LOST in proposal.reason:
        return proposal._replace(ranks=tuple(mesh.link.beside(proposal.ranks)))
    time.sleep(_OTHERS_FIRST_SECONDS)
    if len(mesh.link.closed()) < others:
        return proposal
    try:
        mesh.bulletin.call(lambda board: board.look(mesh.nonce))
    except StoreSilentError:
        return proposal  # then all may have ended because each rank has closed its own
    return proposal._replace(ranks=(mesh.rank,), reason=_ALONE)


def local(mesh: Mesh, verdict: Verdict, error: TransportError) -> Verdict:
    """A verdict that no store confirmed, with what this rank's own connections tell."""
    if not verdict.is_store_silent:
        return verdict
    if isinstance(error, TransportTimeout):
        return verdict._replace(ranks=tuple(sorted({*verdict.ranks, *error.missing})))
    if verdict.cause is Cause.LOST and mesh.link is not None:
        return verdict._replace(ranks=tuple(sorted({*verdict.ranks, *mesh.link.closed_by()})))
    return verdict
