"""The traffic of a call as a context manager: the phase in which ranks wait for each other.

After an error in this phase, no rank knows what the others wait for. So the error is posted for all
ranks, and all connections of the mesh are closed: the others raise, too, instead of waiting.
"""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from objcomm._algorithms import routes
from objcomm._algorithms.device import DevicePath
from objcomm._algorithms.exchange import Exchange
from objcomm._algorithms.transfers import Meter
from objcomm._failures.losses import end_by_backend, end_by_loss, local
from objcomm._failures.mesh import Mesh
from objcomm._failures.verdict import Cause, Verdict, open_blocks, proposal_for
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
from objcomm._transport.threads import Signal, carried_out, done_within
from objcomm._wire.admission import Gate
from objcomm._wire.failure_message import failure_of
from objcomm._wire.message import compose
from objcomm.errors import DesyncError, TransportError

if TYPE_CHECKING:
    from objcomm._wire.message import Message

T = TypeVar("T")


class Watched(Exchange):
    """The traffic of one call; see the module docstring. Ctrl-C ends its waits.

    It is entered a second time if the call is confirmed.

    Attributes:
        mesh: the mesh that connects the ranks.
        is_confirmed: whether the ranks exchange their outcomes afterwards, in a separate round.
        is_over: whether no other rank still waits for this one in this call.
    """

    is_confirmed = False
    is_over = False
    _meeting: "Message | None" = None
    _interruptible: AbstractContextManager[None] | None = None
    _span: Span | None = None
    _is_unretrieved = False

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
        """Create the context without entering it.

        Args:
            mesh: the mesh that connects the ranks.
            link: the link of the mesh.
            lane: the lane on which the call is made.
            entry: the call.
            deadline: for all waits together. It runs only while the context is entered, because a
                timeout limits waiting, not encoding or callbacks.
            gate: signs this rank's messages and checks the others'.
            device: moves members that are on an accelerator.
            meter: counts the bytes that follow heads.
        """
        super().__init__(
            link, lane, entry, deadline, gate, device=device, meter=meter, group=mesh.name
        )
        self.mesh = mesh
        if not link.is_interruptible:
            self._interruptible = interruptible(mesh)

    def meet_first(self) -> None:
        """Make all ranks agree on the call before its traffic; every rank must call this."""
        self._meeting = compose(self.header, b"")

    @property
    def place(self) -> str:
        """An identifier of this call that is unique and the same on every rank."""
        header = self.header
        return f"{self.mesh.nonce}/{header.lane}/{header.sequence}"

    def __enter__(self) -> Self:
        entry, deadline, verdict = self.entry, self._deadline, self.mesh.verdict
        if sys.is_finalizing():
            check_running(entry.operation)
        if verdict is not None:  # the mesh ended while this call waited for earlier ones
            self._mark_raised()
            self._end_elsewhere(verdict)
            raise verdict.error(entry.operation, self.header.position)
        entry.blocks = open_blocks.get()
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

    def apart(
        self, seconds: float, job: Callable[[], T], undo: Callable[[T], object]
    ) -> "Future[T]":
        """Run ``job``, which may wait in C++ for any of the other ranks, and return its outcome.

        An error of ``job`` closes no connections; the caller reports it to the other ranks. If a
        verdict ends the wait, it is raised, and ``job`` is left to its thread.

        Args:
            seconds: how long to wait for it; past that, the outcome is a TimeoutError.
            job: runs on another thread.
            undo: called with the job's result if this rank has stopped waiting.
        """
        mesh, is_woken, outcome = self.mesh, Signal(), Future[T]()
        with self:
            self.entry.awaits = -1
            mesh.at_end.append(is_woken.set)
            if mesh.verdict is not None:  # it may have ended before that
                is_woken.set()
            try:
                carried_out(partial(done_within, seconds, job, undo, is_woken), outcome)
                error = outcome.exception()
                if error is None or mesh.verdict is None:
                    return outcome
                if isinstance(error, Exception):  # whatever it is, the verdict is the reason
                    raise TransportError(self.entry.operation, (), str(error))
                raise error
            finally:
                mesh.at_end.remove(is_woken.set)
                error = None
                del outcome  # a traceback refers to this frame, and its outcome to the error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the context, whatever fails meanwhile: Ctrl-C may hit at any of these steps."""
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
                error = None  # breaks a cycle: its traceback holds this frame

    def give_up(self, error: BaseException) -> None:
        """Report an error outside the traffic to the other ranks, if they wait for this call."""
        if not self.is_over:
            self._mark_raised()
            # Ctrl-C between two steps: this call has its number, so the others wait for it.
            self.mesh.settle(self._proposal(error))

    def _proposal(self, error: BaseException) -> Verdict:
        """Return this rank's verdict for an error; a failure in it gets the user's line."""
        rank, proposal = self.mesh.rank, proposal_for(error, self.mesh.rank)
        if not proposal.failures:
            return proposal
        failure = failure_of(error, rank, self.entry.header.call_site)
        return proposal._replace(failures=(failure,))

    def mark_retrieved(self) -> None:
        """Record that the program retrieves this call's error, which another thread hit."""
        verdict = self.mesh.verdict
        if self._is_unretrieved and verdict is not None:
            self.mesh.mark_raised(self.lane.owner)
            end_elsewhere(verdict, self.lane.owner)

    @property
    def _is_raised_later(self) -> bool:
        """Whether another thread made the call, and raises the error when it asks the ``Work``.

        Until then, calls that the thread begins belong to the closed connections: another rank may
        have begun the matching call before they were closed.
        """
        lane = self.lane
        return lane.order is None and lane.owner is not threading.current_thread()

    def _mark_raised(self) -> None:
        """Record that the thread that made the call raises the verdict, for all its lanes."""
        self._is_unretrieved = self._is_raised_later
        if not self._is_unretrieved:
            self.mesh.mark_raised(self.lane.owner)

    def _end_elsewhere(self, verdict: Verdict) -> None:
        """End a verdict's other meshes; the thread that made the call raises it for all of them."""
        owner = None if self.lane.order else self.lane.owner
        end_elsewhere(verdict, owner, is_raised=not self._is_raised_later)

    def _raise_verdict(self, error: BaseException) -> None:
        """Report an error to all ranks and raise what they raise; return if that is ``error``."""
        mesh, position, operation = self.mesh, self.header.position, self.entry.operation
        self._mark_raised()
        proposal = self._proposal(error)
        if proposal.cause is Cause.LOST:
            verdict = end_by_loss(mesh, proposal)
        elif proposal.cause is Cause.DESYNC:
            verdict = settle_desync(mesh, self.lane, proposal)
        elif isinstance(error, TransportError) and not error.peers:
            verdict = end_by_backend(mesh, proposal)
        else:
            verdict = mesh.settle(proposal)
        self._end_elsewhere(verdict)
        is_own_failure = proposal.cause is Cause.REFUSED and verdict.name == proposal.name
        if isinstance(error, TransportError) and not is_own_failure:
            raise local(mesh, verdict, error).error(operation, position) from None
        if isinstance(error, DesyncError) and verdict.cause is Cause.DESYNC:
            raise verdict.error(operation, position) from None  # the verdict covers more ranks
        if verdict.name != proposal.name and isinstance(error, Exception):
            raise verdict.error(operation, position) from error
