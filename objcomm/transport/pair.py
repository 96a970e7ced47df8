"""This rank and one other of a group, for messages from rank to rank.

A thread takes in the first part of whatever the other rank sends and puts it into the mailbox, so
a small message never waits for its receiver, and a receiver can wait for any sender. Gloo could
not do that: its receive from any source is woken neither by a death nor by an abort (torch 2.13),
and it has no probe.
"""

from __future__ import annotations  # torch may be built without distributed

import contextvars
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

from objcomm.admission import Gate
from objcomm.config import settings
from objcomm.errors import ObjcommError, TransportError
from objcomm.frames import Header, Operation
from objcomm.transport.base import FOREVER_SECONDS, Deadline, reason_of
from objcomm.transport.mailbox import Arrival, Mailbox
from objcomm.transport.order import Order
from objcomm.transport.proposal import proposal_for
from objcomm.transport.verdict import PROGRAM_ENDED, Cause, Verdict
from objcomm.transport.watch import expect

if TYPE_CHECKING:
    from objcomm.transport.channel import Channel
    from objcomm.transport.lane import Lane
    from objcomm.transport.mesh import Mesh

_LOOK_SECONDS = 0.5


class Pair:
    """See the module.

    Attributes:
        peer: the other rank.
        order: of what this rank sends.
    """

    def __init__(self, channel: Channel, peer: int, rank: int, mailbox: Mailbox) -> None:
        """Begin.

        Args:
            channel: joins the two.
            peer: the other rank, within the group like ``rank``.
            rank: this one.
            mailbox: the group's on this rank.
        """
        self.peer = peer
        self.order = Order()
        self._channel = channel
        self._rank = rank
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._listening: Mesh | None = None

    @property
    def channel(self) -> Channel:
        """What joins the two."""
        return self._channel

    def admit(self, operation: str) -> tuple[Mesh, Lane]:
        """The connection, made or not, for a call that can wait for it elsewhere.

        Raises:
            BrokenGroupError: an earlier error has closed it for good.
            ObjcommError: what has closed it since the last call; the next call is served.
            UsageError: the group is destroyed.
        """
        return self._channel.admit(operation, "", self.order)

    def enter(self, operation: str, deadline: Deadline, call_site: str) -> tuple[Mesh, Lane]:
        """The connection; waits until the other rank has come.

        Raises:
            TransportTimeout: it did not come.
            ObjcommError: as ``admit``.
        """
        mesh, lane = self.admit(operation)
        self.listen(mesh, lane)
        if mesh.link is None:
            self._channel.connect(mesh, lane, operation, deadline, call_site)
        return mesh, lane

    def listen(self, mesh: Mesh, lane: Lane) -> None:
        """See to it that what the other rank sends is taken in, or said to be lost."""
        with self._lock:
            is_new = self._listening is not mesh
            self._listening = mesh
        if is_new:
            mesh.begin_meeting(self._channel.store(), Deadline(FOREVER_SECONDS))
            self._mailbox.expect(self.peer)
            listener = threading.Thread(
                target=contextvars.copy_context().run,  # the options, such as a key
                args=(_listen, mesh, lane, self.peer, self._mailbox),
                name="objcomm-listen",
                daemon=True,
            )
            expect(mesh, listener)
            listener.start()
        elif mesh.verdict is not None:
            _fail(self._mailbox, self.peer, mesh.verdict)

    def absolve(self, verdict: Verdict) -> None:
        """A call has raised a verdict: the next one need not."""
        mesh = self._channel.mesh
        if mesh is not None and mesh.verdict is not None and mesh.verdict.name == verdict.name:
            for lane in tuple(mesh.lanes.values()):
                lane.owes = False

    def close(self) -> None:
        """End what waits: the group is no more."""
        mesh = self._channel.mesh
        if mesh is not None:
            reason = "the process group was destroyed"
            verdict = Verdict.of(Cause.LEFT, ranks=(self._rank,), reason=reason)
            mesh.stop(verdict._replace(is_store_silent=True))


def _listen(mesh: Mesh, lane: Lane, peer: int, mailbox: Mailbox) -> None:
    """Until the connection ends; keeps no group alive."""
    try:
        link = mesh.connections
        standing = lane.standing(link, peer)
        while mesh.verdict is None:
            mailbox.await_room(peer, lambda: mesh.verdict is not None, _LOOK_SECONDS)
            standing.pending.wait(timedelta(seconds=FOREVER_SECONDS))
            header = _judged(mesh, lane, peer, standing.raw)
            raw = bytes(memoryview(standing.raw)[: header.head_nbytes])
            standing.post()
            lane.taken += 1
            nbytes = header.head_nbytes + header.payload_nbytes
            nbytes += 0 if header.is_inline else header.body_nbytes
            mailbox.deliver(Arrival(peer, header.tag, nbytes, header, raw, mesh, lane))
    except ObjcommError as error:
        mesh.settle(proposal_for(error, mesh.rank))
    except RuntimeError as error:
        reason = f"it died, exited or lost its network ({reason_of(error)})"
        mesh.settle(proposal_for(TransportError("recv", (peer,), reason), mesh.rank))
    except BaseException as error:  # noqa: BLE001  # this thread's end must not be silent
        mesh.settle(proposal_for(error, mesh.rank))
    if mesh.verdict is not None:
        _fail(mailbox, peer, mesh.verdict)


def _judged(mesh: Mesh, lane: Lane, peer: int, raw: bytearray) -> Header:
    """The header of what arrived.

    Raises:
        ObjcommError: it is not the peer's next message to this rank.
    """
    gate = Gate(settings(), mesh.nonce, mesh.rank)
    expected = Header(
        operation=Operation.SEND,
        sender=peer,
        root=mesh.rank,
        lane=lane.number,
        group=mesh.number,
        sequence=lane.taken,
    )
    header = gate.header_in(raw)
    gate.check_call(expected, header, peer)
    gate.check_addressed(header)
    return header


def _fail(mailbox: Mailbox, peer: int, verdict: Verdict) -> None:
    """End the requests that wait for a peer that is gone.

    Who waits for any rank can still be served by the others after a program's regular end, and
    after what concerned two ranks only.
    """
    is_for_any = verdict.cause in (Cause.LOST, Cause.LEFT, Cause.FAILED)
    is_for_any = is_for_any and verdict.reason != PROGRAM_ENDED
    mailbox.fail(peer, verdict, is_for_any=is_for_any)
