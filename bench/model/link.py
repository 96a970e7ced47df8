"""A link of the package's whose messages move in the model's time only."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch

from bench.model.world import Receive, World
from objcomm._transport.link import Memory, Pending, Sharing


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor time of one rank, in seconds.

    Attributes:
        call: of a call, but for its messages.
        send: of each message sent.
        recv: of each message received.
        open: of each object that is read out of a message, which may hold many.
    """

    call: float
    send: float
    recv: float
    open: float


class ModelLink:
    """See ``objcomm._transport.link.Link``; nothing is handed over in memory.

    Attributes:
        standing_nbytes: by peer, memory of the receive that stands ready for its first messages.
    """

    kind = "model"
    is_interruptible = True
    ahead = 4

    def __init__(self, world: World, rank: int, costs: Costs) -> None:
        """Begin.

        Args:
            world: joins the ranks.
            rank: this one.
            costs: of its messages.
        """
        self.rank = rank
        self.size = world.size
        self.hosts = world.hosts
        self.needs_last_byte_apart = False  # as that of streams
        self.standing_nbytes: dict[int, int] = {}
        self._world = world
        self._costs = costs

    def sharing_with(self, peer: int) -> Sharing | None:  # noqa: ARG002  # nobody
        """See ``Link``."""
        return None

    def over(self, raw: bytearray) -> Memory:
        """See ``Link``."""
        return memoryview(raw)

    def send(self, flat: Memory, peer: int, tag: int) -> Pending:
        """See ``Link``; it has left at once."""
        self._world.spend(self.rank, self._costs.send)
        content = flat.numpy().tobytes() if isinstance(flat, torch.Tensor) else bytes(flat)
        self._world.send(self.rank, peer, tag, len(content), content)

    def recv(self, flat: Memory, peer: int, tag: int) -> Pending:
        """See ``Link``."""
        if isinstance(flat, memoryview):  # what ``over`` gave: all else are tensors
            self.standing_nbytes[peer] = flat.nbytes
        return self._world.recv(self.rank, peer, tag), flat

    def wait(self, pending: Pending, limit: timedelta) -> None:  # noqa: ARG002  # no real time passes
        """See ``Link``."""
        receive, flat = pending
        content = self._world.wait(self.rank, receive)
        if isinstance(flat, torch.Tensor):
            flat[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        else:
            flat[: len(content)] = content
        self._world.spend(self.rank, self._costs.recv)

    def is_done(self, pending: Pending) -> bool:
        """See ``Link``."""
        receive: Receive = pending[0]
        return 0 <= receive.at <= self._world.clocks[self.rank]

    def has_arrived(self, pending: Pending) -> bool:
        """See ``Link``."""
        return self.is_done(pending)

    def wait_apart(self, wait: Callable[[], None]) -> None:
        """See ``Link``; nothing can be stuck."""
        wait()

    def move(self) -> None:
        """It moves by itself."""

    def is_interrupted(self) -> bool:
        """See ``Link``."""
        return False

    def is_flowing(self) -> bool:
        """See ``Link``."""
        return True

    def abort(self) -> None:
        """Nobody does."""
