"""The traffic of a call, as a context: the time during which ranks wait for each other.

After an error in it no rank knows what the others wait for, so all are told, and every connection
is closed: they raise too, instead of waiting.
"""

import sys
import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from objcomm._algorithms import routes
from objcomm._algorithms.device import DevicePath
from objcomm._algorithms.exchange import Exchange
from objcomm._algorithms.transfers import Meter
from objcomm._failures.losses import end_by_loss, local
from objcomm._failures.mesh import Mesh
from objcomm._failures.verdict import Cause, Verdict, proposal_for, regions
from objcomm._failures.watchdog import (
    check_running,
    end_elsewhere,
    hurry,
    interruptible,
    settle_desync,
)
from objcomm._observe.history import CallRecord
from objcomm._observe.tracing import Span, begun, profiler
from objcomm._transport.lane import Lane
from objcomm._transport.link import Deadline, Link
from objcomm._wire.admission import Gate
from objcomm._wire.failure_message import failure_of
from objcomm._wire.message import compose
from objcomm.errors import DesyncError, TransportError

if TYPE_CHECKING:
    from objcomm._wire.message import Message


class Watched(Exchange):
    """See the module; a context in which Ctrl-C ends a wait, entered again if it is confirmed.

    Attributes:
        mesh: joins the ranks.
        is_confirmed: whether ranks tell each other afterwards how it went, in a turn of its own.
        is_over: whether no other rank waits for this one in this call any more.
    """

    is_confirmed = False
    is_over = False
    _meeting: "Message | None" = None
    _interruptible: AbstractContextManager[None] | None = None
    _span: Span | None = None
    _is_to_hear = False

    def __init__(
        self,
        mesh: Mesh,
        link: Link,
        lane: Lane,
        entry: CallRecord,
        deadline: Deadline,
        *,
        gate: Gate,
        device: DevicePath,
        meter: Meter | None = None,
    ) -> None:
        """Begin.

        Args:
            mesh: joins the ranks.
            link: the mesh's.
            lane: on which the call is made.
            entry: the call.
            deadline: for all waits together; it counts in turns only, because a limit is for
                waiting, not for encoding or callbacks.
            gate: signs this rank's messages and checks the others'.
            device: moves the members that lie on an accelerator.
            meter: counts the bytes that follow heads.
        """
        super().__init__(
            link, lane, entry, deadline, gate, device=device, meter=meter, group=mesh.name
        )
        self.mesh = mesh
        if device.linked or not link.is_interruptible:
            self._interruptible = interruptible(mesh)

    def meet_first(self) -> None:
        """Let all ranks agree on the call before anything else of it; every rank says so."""
        self._meeting = compose(self.header, b"")

    @property
    def place(self) -> str:
        """A name of this call that is the same on every rank and means no other call."""
        header = self.header
        return f"{self.mesh.nonce}/{header.lane}/{header.sequence}"

    def __enter__(self) -> Self:
        entry, deadline, verdict = self.entry, self._deadline, self.mesh.verdict
        if sys.is_finalizing():
            check_running(entry.operation)
        if verdict is not None:  # while this call waited for those before it
            self._absolve()
            self._end_elsewhere(verdict)
            raise verdict.error(entry.operation, self.header.position)
        entry.regions = regions.get()
        try:
            self.lane.begin(entry, deadline)
            hurry(deadline.remaining)
            if self._interruptible is not None:
                self._interruptible.__enter__()
            if profiler._is_profiler_enabled:  # noqa: SLF001  # see ``tracing``
                self._span = begun("transfer")
            if self._meeting is not None:
                routes.all_meet(self, self._meeting)
                self._meeting = None
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait no more, whatever fails meanwhile: Ctrl-C may come at any of these steps."""
        try:
            try:
                if error is None and (self.sends or self.milestones):
                    self.finish()
                self.is_over = error is None and not self.is_confirmed
            except BaseException as failure:
                error = failure
                raise
            finally:
                shown, self._span = self._span, None
                try:
                    if shown is not None:
                        shown.__exit__(None, None, None)
                finally:
                    if self._interruptible is not None:
                        self._interruptible.__exit__(None, None, None)
        finally:
            try:
                if error is not None:
                    self._raise_verdict(error)
            finally:
                self.lane.end(self.entry, self._deadline)
                error = None  # this frame is in its traceback

    def give_up(self, error: BaseException) -> None:
        """Tell the others of an error outside of the traffic, if they wait for this call."""
        if not self.is_over:
            self._absolve()
            # Ctrl-C between two steps: the others wait for a call that this rank has numbered.
            self.mesh.settle(self._proposal(error))

    def _proposal(self, error: BaseException) -> Verdict:
        """What this rank says of an error, with the user's line."""
        rank, proposal = self.mesh.rank, proposal_for(error, self.mesh.rank)
        if not proposal.failures:
            return proposal
        failure = failure_of(error, rank, self.entry.header.call_site)
        return proposal._replace(failures=(failure,))

    def hear(self) -> None:
        """The program takes the error of this call, which another thread has carried out."""
        verdict = self.mesh.verdict
        if self._is_to_hear and verdict is not None:
            self.mesh.absolve(self.lane.owner)
            end_elsewhere(verdict, self.lane.owner)

    @property
    def _is_raised_later(self) -> bool:
        """Whether the thread that called is another one, and hears when it asks the work.

        Until then what it begins belongs to the connections that have ended: on another rank the
        call of the same place may have begun before they did.
        """
        lane = self.lane
        return lane.order is None and lane.owner is not threading.current_thread()

    def _absolve(self) -> None:
        """The thread that called hears of it by this call, on whatever lanes it makes others."""
        self._is_to_hear = self._is_raised_later
        if not self._is_to_hear:
            self.mesh.absolve(self.lane.owner)

    def _end_elsewhere(self, verdict: Verdict) -> None:
        """End what else a verdict names; the thread that called raises it for all of that."""
        owner = None if self.lane.order else self.lane.owner
        end_elsewhere(verdict, owner, is_raised=not self._is_raised_later)

    def _raise_verdict(self, error: BaseException) -> None:
        """Tell all ranks of an error, and raise what they raise; return if it is ``error``."""
        mesh, position, operation = self.mesh, self.header.position, self.entry.operation
        self._absolve()
        proposal = self._proposal(error)
        if proposal.cause is Cause.LOST:
            verdict = end_by_loss(mesh, proposal)
        elif proposal.cause is Cause.DESYNC:
            verdict = settle_desync(mesh, self.lane, proposal)
        else:
            verdict = mesh.settle(proposal)
        self._end_elsewhere(verdict)
        if isinstance(error, TransportError):
            raise local(mesh, verdict, error).error(operation, position) from None
        if isinstance(error, DesyncError) and verdict.cause is Cause.DESYNC:
            raise verdict.error(operation, position) from None  # it knows of more ranks
        if verdict.name != proposal.name and isinstance(error, Exception):
            raise verdict.error(operation, position) from error
