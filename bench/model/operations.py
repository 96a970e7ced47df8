"""Run objcomm's operations over the model, with the unchanged routes of the package."""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from bench.model.link import Costs, ModelLink
from bench.model.world import Machine, Outcome, World
from objcomm._algorithms import routes
from objcomm._algorithms.device import DevicePath
from objcomm._algorithms.exchange import Exchange
from objcomm._collectives.reduction.folding import Folding
from objcomm._collectives.reduction.operators import Operator
from objcomm._config import Settings
from objcomm._observe.history import CallRecord
from objcomm._transport.lane import Lane
from objcomm._transport.link import Deadline
from objcomm._wire.admission import Gate
from objcomm._wire.header import Header, Operation, Status
from objcomm._wire.message import Message, compose

if TYPE_CHECKING:
    from objcomm._calls.call import Call

_REAL_SECONDS = 3600.0  # a timeout in real time; simulated time is independent of it


class _PricedGate(Gate):
    """Reads each header as the package does, and adds the simulated time for it."""

    def __init__(self, world: World, rank: int, seconds: float) -> None:
        super().__init__(Settings(max_nbytes=1 << 40), "a model", rank)
        self._world = world
        self._at = rank
        self._seconds = seconds

    def header_in(self, raw: bytes | bytearray | memoryview, sender: int | None = None) -> Header:
        """See ``Gate``."""
        self._world.spend(self._at, self._seconds)
        self._world.opened[self._at] += 1
        return super().header_in(raw, sender)


class _ReducingCall:
    """The parts of a call that a reduction uses; every object and each result is the same."""

    def __init__(self, exchange: Exchange, mine: Message) -> None:
        self.exchange = exchange
        self.rank = exchange.rank
        self.size = exchange.size
        self.root = exchange.header.root
        self.is_root = self.rank == self.root
        self._mine = mine

    def message(self, obj: Any, make: Callable[[Any], object] | None = None) -> Message:
        """Compose a message of the same length as any other."""
        if make is not None:
            make(obj)
        return compose(self.exchange.header, bytes(self._mine.body))

    def announcement(self, status: Status) -> Message:
        """See ``Call``."""
        return compose(self.exchange.header, b"", status=status)

    def failures(self, messages: Sequence[Message]) -> None:
        """Return None: no rank fails."""

    def copy(self, obj: object) -> object:
        """See ``Call``."""
        return obj

    def decode(self, message: Message) -> object:
        """See ``Call``."""
        return message.body


def _reduced(exchange: Exchange, mine: Message, root: int | None) -> object:
    """Reduce objects with a user's operator whose result has the same length as its operands."""
    call = cast("Call", _ReducingCall(exchange, mine))
    operator = Operator("the first", combine=_first)
    return Folding(call, operator, mine.body, root).run(exchange)


def _first(left: Any, _right: Any) -> Any:
    return left


#: For each operation, what a rank does with its message; rank 0 is the root.
OPERATIONS: dict[str, tuple[Operation, int, Callable[[Exchange, Message], object]]] = {
    "barrier": (Operation.BARRIER, -1, routes.all_meet),
    "broadcast": (
        Operation.BROADCAST,
        0,
        lambda exchange, mine: routes.broadcast(exchange, None if exchange.rank else mine, 0),
    ),
    "gather": (Operation.GATHER, 0, lambda exchange, mine: routes.gather(exchange, mine, 0)),
    "scatter": (
        Operation.SCATTER,
        0,
        lambda exchange, mine: routes.scatter(
            exchange, None if exchange.rank else [mine] * exchange.size, 0
        ),
    ),
    "all_gather": (Operation.ALL_GATHER, -1, routes.all_gather),
    "all_to_all": (
        Operation.ALL_TO_ALL,
        -1,
        lambda exchange, mine: routes.all_to_all(exchange, [mine] * exchange.size),
    ),
    "reduce": (Operation.REDUCE, 0, lambda exchange, mine: _reduced(exchange, mine, 0)),
    "all_reduce": (Operation.ALL_REDUCE, -1, lambda exchange, mine: _reduced(exchange, mine, None)),
}


def run(
    operation: str, hosts: Sequence[int], nbytes: int, machine: Machine, costs: Costs
) -> Outcome:
    """Run one call of an operation on every rank; all ranks call at the same time.

    Args:
        operation: a name in ``OPERATIONS``.
        hosts: the host of each rank, as a number.
        nbytes: the encoded size of each rank's object.
        machine: the properties of the hosts.
        costs: the costs on a rank's processor.
    """
    number, root, body = OPERATIONS[operation]
    world = World(hosts, machine)

    def on_rank(rank: int) -> int:
        link = ModelLink(world, rank, costs)
        header = Header(operation=number, sender=rank, root=root, codec="pickle")
        exchange = Exchange(
            link=link,
            lane=Lane("", 0, threading.current_thread()),
            entry=CallRecord(header, operation),
            deadline=Deadline(_REAL_SECONDS),
            gate=_PricedGate(world, rank, costs.open),
            device=DevicePath(),
        )
        world.spend(rank, costs.call)
        own = 0 if number == Operation.BARRIER else nbytes
        body(exchange, compose(header, bytes(own)))
        exchange.finish()
        return exchange.entry.rounds

    found = world.run(on_rank)
    if world.left_over():
        raise RuntimeError(f"{operation}: messages that nobody has received")
    return world.outcome(max(found))
