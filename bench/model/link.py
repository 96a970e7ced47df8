"""An implementation of the package's link whose messages move only in simulated time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from bench.model.world import Receive, World
from objcomm._transport.link import Memory, Pending, Pieces, Sharing
from objcomm._wire.header import WINDOW_NBYTES


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor time of one rank, in seconds.

    Attributes:
        call: for a call, without its messages.
        send: for each message sent.
        recv: for each message received.
        open: for each object read out of a message, which may contain many.
    """

    call: float
    send: float
    recv: float
    open: float


class ModelLink:
    """See ``objcomm._transport.link.Link``; does not share memory."""

    kind = "model"
    is_interruptible = True
    ahead = 4
    shares_memory = False

    def __init__(self, world: World, rank: int, costs: Costs) -> None:
        """Create the link.

        Args:
            world: connects the ranks.
            rank: this rank.
            costs: the costs of its messages.
        """
        self.rank = rank
        self.size = world.size
        self.hosts = world.hosts
        self.head_max_nbytes = WINDOW_NBYTES  # larger messages are not modeled
        self.needs_last_byte_apart = False  # as with streams
        self._expected: dict[tuple[int, int], Receive] = {}
        self._world = world
        self._costs = costs

    def sharing_with(self, peer: int) -> Sharing | None:  # noqa: ARG002  # with no peer
        """See ``Link``."""
        return None

    def send(self, flat: Memory | Pieces, peer: int, tag: int) -> Pending:
        """See ``Link``; completes immediately."""
        self._world.spend(self.rank, self._costs.send)
        if isinstance(flat, torch.Tensor):
            content = flat.numpy().tobytes()
        else:
            content = b"".join(flat) if isinstance(flat, list) else bytes(flat)
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

    def has_come(self, peer: int, tag: int) -> bool:  # noqa: ARG002  # unused
        """See ``Link``."""
        return False

    def came_late(self, peer: int, tag: int) -> bool:  # noqa: ARG002  # no message is late
        """See ``Link``."""
        return False

    def wait_apart(self, wait: Callable[[], None]) -> None:
        """See ``Link``; nothing can hang."""
        wait()

    def move(self, *, is_awaited: bool = True) -> None:
        """Do nothing: messages move on their own."""

    def is_interrupted(self) -> bool:
        """See ``Link``."""
        return False

    def abort(self) -> None:
        """Do nothing: it is never called."""
