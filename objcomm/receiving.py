"""A message from another rank to this one: ask for it, wait, take it in and decode it."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from objcomm.errand import Errand
from objcomm.errors import UsageError
from objcomm.frames import Operation
from objcomm.outcome import failures_in, raise_together
from objcomm.transport.lane import Lane
from objcomm.transport.mailbox import Arrival, Request
from objcomm.transport.mesh import Mesh
from objcomm.transport.pair import Pair
from objcomm.transport.regions import regions
from objcomm.transport.verdict import Cause, Verdict
from objcomm.transport.watch import died_in, end_elsewhere, hurry
from objcomm.turn import Turn
from objcomm.work import Work

# A limit that is short is for finding a message. What has begun to come, and would take the
# connection with it, gets so much at least.
_TRANSFER_SECONDS = 2.0


class Receive(Errand):
    """See the module; also a probe, which takes nothing in."""

    operation = Operation.RECV

    _lanes: Sequence[Lane] = ()  # on which the watcher sees it wait
    _timer: threading.Timer | None = None
    _is_wait_over = False
    _jobs: list[Callable[[], None]]  # of a work: what is to be done after the wait

    def run(self) -> Any:
        """Wait for a message; returns its object."""
        with self:
            return self.take_in(self.awaited())

    def launch(self) -> Work[Any]:
        """Ask for a message; when it has come another thread takes it in."""
        self.begin()
        work = self.work()
        request = Request(self.peer, self.tag, on_end=self._hand_over)
        self._jobs = [work.job(lambda: self._rest(request))]
        try:
            self._ask(request)
        except BaseException as error:
            if self.claim():
                self.group.mailbox.cancel(request)
                self._finish(error.with_traceback(None))  # it would hold the work, and so itself
            if not isinstance(error, Exception):  # Ctrl-C
                work.disown()
                raise
        try:
            return work
        finally:
            del work  # as in ``Work.carry_out_here``

    def _hand_over(self) -> bool:
        """The wait is over, as some thread knows that must not wait itself: another one goes on.

        Returns:
            False if there can be no more threads: the work has ended so, the message is left.
        """
        try:
            self.group.crew.submit(self._go_on)
        except RuntimeError as error:
            if self.claim():
                self._finish(error.with_traceback(None))  # as in ``launch``
                return False
        return True

    def _go_on(self) -> None:
        if self.claim():
            self._finish(None)

    def _finish(self, error: BaseException | None) -> None:
        """Do the rest on this thread; if there is an error, it is to raise that in the work."""
        self._own_error = error
        del error  # as there
        if self._jobs:
            # In no variable: an error's traceback would hold that, and so the work.
            self._jobs.pop()()

    def _rest(self, request: Request) -> Any:
        with self:
            self._end_wait()
            if self._own_error is not None:
                raise self._own_error
            return self.take_in(self._found(request))

    def awaited(self, *, is_probe: bool = False) -> Arrival:
        """Wait for a message.

        Raises:
            UsageError: this rank waits for itself, which has sent nothing.
            ObjcommError: why nothing will come.
        """
        group = self.group
        is_alone = self.peer == group.rank or group.size == 1
        if is_alone and group.mailbox.look(self.peer, self.tag) is None:
            raise UsageError(
                f"{self._name}: rank {group.rank} waits for a message of its own, but has sent "
                "none; send it first"
            )
        signal = _Signal()
        request = Request(self.peer, self.tag, is_probe=is_probe, on_end=signal.set)
        self.entry.waiter = threading.get_ident()
        try:
            self._ask(request)
            signal.wait()
        except BaseException:  # Ctrl-C, or there can be no more threads
            group.mailbox.cancel(request)
            raise
        finally:
            self._end_wait()
        return self._found(request)

    def peek(self) -> Arrival | None:
        """The message that a receive would take now; without one, listen to who may send it."""
        found = self.group.mailbox.poll(self.peer, self.tag)
        if found is None:
            admitted = self._admitted()
            self._heed(admitted)
            for pair, mesh, lane in admitted:
                pair.listen(mesh, lane)
        return found

    def _heed(self, admitted: Sequence[tuple[Pair, Mesh, Lane]]) -> None:
        """Raise what is known to have failed in a block around this call, or who has died there.

        The watcher tells who waits. Who polls waits too briefly to be told, or not at all.
        """
        for _, mesh, _ in admitted[:1]:  # all are of one world
            for key in regions.get():
                told = mesh.bulletin.heard(key) or died_in(key)
                if told is not None:
                    self._raise(told)

    def _ask(self, request: Request) -> None:
        """Put a request to the mailbox; whoever may serve it is listened to from now on.

        Raises:
            ObjcommError: no message has come, and no rank that may serve it can send any more.
            RuntimeError: this process can start no more threads.
        """
        mailbox = self.group.mailbox
        if mailbox.meet(request):
            return
        admitted = self._admitted()
        self._heed(admitted)
        self._deadline.apply(self.entry)
        self.entry.regions = regions.get()
        self.entry.withdraw = functools.partial(self._withdraw, request)
        self._lanes = [lane for _, _, lane in admitted]
        request.among = frozenset(pair.peer for pair, _, _ in admitted)
        for lane in self._lanes:
            lane.begin(self.entry)
        hurry(self._deadline.seconds)
        mailbox.ask(request)  # from now on the wait may be over, on another thread
        if not admitted:  # from this rank itself: no lane, no watcher
            self._limit(request)
        for pair, mesh, lane in admitted:
            ended = pair.listen(mesh, lane)
            if ended is not None:
                mailbox.withdraw(request, ended)

    def _admitted(self) -> list[tuple[Pair, Mesh, Lane]]:
        """The connections to the ranks that may serve a request."""
        pairs = self._pairs()
        if len(pairs) == 1:
            return [(pairs[0], *pairs[0].admit(self._name))]
        joined = [(pair, pair.admit_among(self._name)) for pair in pairs]
        admitted = [(pair, *each) for pair, each in joined if each is not None]
        if pairs and not admitted:
            pairs[0].admit(self._name)  # raises: nobody is left
        return admitted

    def _pairs(self) -> list[Pair]:
        """This rank and each that may send, itself left out."""
        peers = range(self.group.size) if self.peer is None else [self.peer]
        return [self.group.pair(peer) for peer in peers if peer != self.group.rank]

    def _limit(self, request: Request) -> None:
        seconds = self._deadline.seconds
        late = Verdict.of(Cause.TIMEOUT, ranks=(self.group.rank,), seconds=seconds)
        self._timer = threading.Timer(seconds, self._withdraw, (request, late))
        self._timer.daemon = True
        self._timer.name = "objcomm-limit"
        self._timer.start()
        if self._is_wait_over:
            self._timer.cancel()

    def _withdraw(self, request: Request, verdict: Verdict) -> None:
        if request.src is None and verdict.cause is Cause.TIMEOUT:
            others = tuple(rank for rank in range(self.group.size) if rank != self.group.rank)
            verdict = verdict._replace(ranks=others)
        self.group.mailbox.withdraw(request, verdict)

    def _end_wait(self) -> None:
        self._is_wait_over = True
        if self._timer is not None:
            self._timer.cancel()
        # The history keeps the entry, and this would keep the message.
        self.entry.withdraw = _ignore
        for lane in self._lanes:
            lane.end(self.entry)

    def _found(self, request: Request) -> Arrival:
        """What a request that has ended found.

        Raises:
            ObjcommError: why nothing will come.
        """
        if request.verdict is not None:
            self._raise(request.verdict)
        return cast("Arrival", request.arrival)  # a wait ends by a message or by a verdict

    def _raise(self, verdict: Verdict) -> NoReturn:
        for pair in self._pairs():
            pair.absolve(verdict)
        end_elsewhere(verdict)
        raise verdict.error(self._name, self.entry.header.position)

    def take_in(self, arrival: Arrival) -> Any:
        """The object of a message whose first part is here.

        Raises:
            CollectiveError: its sender could not encode it.
            DecodeError: it can't be rebuilt.
            ObjcommError: the rest of it did not come.
        """
        origin = arrival.origin
        if origin is None:
            return arrival.obj
        header, mesh, lane = origin
        self.entry.header = self.entry.header._replace(root=arrival.peer, tag=arrival.tag)
        exchange = self._joined(mesh, lane, header.sequence)
        exchange.rounds += 1
        exchange.received_nbytes += len(arrival.raw)
        if header.is_all_head:
            message = exchange.adopt(arrival.raw, header)
        else:
            self.entry.is_served = True
            self.entry.withdraw = None  # the sender waits, too: only both can end this
            self._deadline.leave(_TRANSFER_SECONDS)
            with Turn(mesh, lane, exchange, self._deadline):
                message = exchange.adopt(arrival.raw, header)
                exchange.recv_rest([(arrival.peer, message)])
        raise_together(self._name, failures_in([message]), None, self.group.rank)
        return self._coding.decode(message)


class _Signal:
    """Lets one thread wait for what another does; Ctrl-C ends the wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.set: Callable[[], None] = self._lock.release

    def wait(self) -> None:
        """Return when ``set`` was called; once."""
        self._lock.acquire()


def _ignore(_: object) -> None:
    """Withdraws what has ended."""
