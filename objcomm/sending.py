"""A message from this rank to one other: encode it, queue for the receiver, transmit it."""

import threading

from objcomm.errand import Errand
from objcomm.errors import RankFailure, TransportTimeout, UsageError
from objcomm.frames import Operation
from objcomm.message import Message
from objcomm.outcome import failure_message, failure_of, raise_together
from objcomm.transport.mailbox import Arrival
from objcomm.transport.order import Place
from objcomm.transport.pair import Pair
from objcomm.turn import Turn
from objcomm.work import Work


class Send(Errand):
    """See the module."""

    operation = Operation.SEND

    def run(self, obj: object) -> None:
        """Send, and return when the message was taken."""
        pair = self._pair()
        if pair is None:
            with self:
                self._keep(obj)
            return
        with self, Place(pair.order) as place:
            self.entry.waiter = threading.get_ident()
            message = self._message(obj)
            place.take()
            self._transmit(pair, place, message)

    def launch(self, obj: object) -> Work[None]:
        """Encode, and let another thread do the rest; ``obj`` may not change before its end."""
        pair = self._pair()
        if pair is None:
            return self.work().carry_out_here(lambda: self.run(obj))
        self.begin()
        place = Place(pair.order)
        try:
            message = self._message(obj)
            place.take()
            work = self.work()
            work.carry_out_on(self.group.crew, lambda: self._go_on(pair, place, message))
        except BaseException as error:  # Ctrl-C, or there can be no more threads
            if self.claim():
                place.leave()
                self.conclude(error)
            raise
        return work

    def _go_on(self, pair: Pair, place: Place, message: Message) -> None:
        if self.claim():
            with self, place:
                self._transmit(pair, place, message)

    def _pair(self) -> Pair | None:
        """This rank and the receiver; None if they are the same.

        Raises:
            UsageError: there is no receiver or no tag, which a receive may do without.
        """
        if self.peer is None:
            raise UsageError(f"{self._name}: give dst= or group_dst=")
        if self.tag is None:
            raise UsageError(f"{self._name}: a message has a tag; only a receiver takes any")
        return None if self.peer == self.group.rank else self.group.pair(self.peer)

    def _keep(self, obj: object) -> None:
        """Send to this rank itself; an error has the form that it has between two ranks."""
        tag, rank = self.entry.header.tag, self.group.rank
        try:
            own = self._coding.copy(obj)
        except BaseException as error:
            raise_together(self._name, {rank: self._failure_of(error)}, error, rank)
            raise
        self.group.mailbox.deliver(Arrival(rank, tag, 0, obj=own))

    def _message(self, obj: object) -> Message:
        """Encode; an error becomes a failure message, and is raised when that was sent."""
        try:
            return self._coding.message(self.entry.header, lambda: obj)
        except BaseException as error:  # noqa: BLE001  # raised by ``_transmit``
            self._own_error = error
            return failure_message(self.entry.header, [self._failure_of(error)])

    def _failure_of(self, error: BaseException) -> RankFailure:
        return failure_of(error, self.group.rank, self.entry.header.call_site)

    def _transmit(self, pair: Pair, place: Place, message: Message) -> None:
        """Send, after whatever was to be sent before; leaves the place when the next may begin."""
        self._deadline.restart()
        is_its_turn = place.enter(self._deadline.seconds_left)
        if not is_its_turn or self._deadline.has_passed:  # those before waited for the receiver
            raise TransportTimeout(self._name, (pair.peer,), self._deadline.seconds)
        mesh, lane = pair.enter(self._deadline, self.entry)
        exchange = self._joined(mesh, lane, lane.sequence)
        with Turn(mesh, lane, exchange, self._deadline):
            lane.sequence += 1
            header = exchange.header
            message.header = message.header._replace(
                lane=header.lane, group=header.group, sequence=header.sequence
            )
            exchange.rounds += 1
            exchange.send_head(message, [pair.peer], destination=pair.peer)
            exchange.send_rest(message, [pair.peer])
            place.leave()  # this one ends when it was taken
        if self._own_error is not None:
            rank, own = self.group.rank, self._own_error
            raise_together(self._name, {rank: self._failure_of(own)}, own, rank)
