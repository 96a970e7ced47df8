"""A link of the package's whose messages move in the model's time only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from bench.model.world import Receive, World
from objcomm._transport.link import Memory, Pending, Sharing
from objcomm._wire.header import WINDOW_NBYTES


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
    """See ``objcomm._transport.link.Link``; nothing is handed over in memory."""

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
        self.head_max_nbytes = WINDOW_NBYTES  # what is larger is not modelled
        self.needs_last_byte_apart = False  # as that of streams
        self._expected: dict[tuple[int, int], Receive] = {}
        self._world = world
        self._costs = costs

    def sharing_with(self, peer: int) -> Sharing | None:  # noqa: ARG002  # nobody
        """See ``Link``."""
        return None

    def send(self, flat: Memory, peer: int, tag: int) -> Pending:
        """See ``Link``; it has left at once."""
        self._world.spend(self.rank, self._costs.send)
        content = flat.numpy().tobytes() if isinstance(flat, torch.Tensor) else bytes(flat)
        self._world.send(self.rank, peer, tag, len(content), content)

    def recv(self, flat: Memory, peer: int, tag: int) -> Pending:
        """See ``Link``."""
        return self._world.recv(self.rank, peer, tag), flat

    def wait(self, pending: Pending, limit: timedelta) -> None:  # noqa: ARG002  # no real time passes
        """See ``Link``."""
        receive, flat = pending
        content = self._world.wait(self.rank, receive)
        flat[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._world.spend(self.rank, self._costs.recv)

    def expect(self, peers: Sequence[int], tag: int) -> None:
        """See ``Link``."""
        for peer in peers:
            if (peer, tag) not in self._expected:
                self._expected[peer, tag] = self._world.recv(self.rank, peer, tag)

    def take(self, peer: int, tag: int, until: float) -> bytes:  # noqa: ARG002  # no real time passes
        """See ``Link``."""
        self.expect([peer], tag)
        content = self._world.wait(self.rank, self._expected.pop((peer, tag)))
        self._world.spend(self.rank, self._costs.recv)
        return bytes(content)

    def has_come(self, peer: int, tag: int) -> bool:  # noqa: ARG002  # nobody looks
        """See ``Link``."""
        return False

    def came_late(self, peer: int, tag: int) -> bool:  # noqa: ARG002  # nothing does
        """See ``Link``."""
        return False

    def wait_apart(self, wait: Callable[[], None]) -> None:
        """See ``Link``; nothing can be stuck."""
        wait()

    def move(self, *, is_awaited: bool = True) -> None:
        """It moves by itself."""

    def is_interrupted(self) -> bool:
        """See ``Link``."""
        return False

    def abort(self) -> None:
        """Nobody does."""
