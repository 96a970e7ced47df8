"""What a transport offers to the rooms above: links, tags and time limits.

A *link* joins all ranks of a group for bytes in CPU memory; a *device link* does so for memory of
an accelerator. Ranks here are ranks within the group.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch

from objcomm.config import FOREVER_SECONDS, settings
from objcomm.observe.history import Entry

# Tags have 31 bits. First messages of a lane share one tag, so that mismatched operations meet
# instead of waiting for each other; what follows is told apart by its operation's number.
LANE_BITS = 12
_SEQUENCE_BITS = 16
_PAYLOAD = 1 << (LANE_BITS + _SEQUENCE_BITS)
_RECEIPT = _PAYLOAD << 1
_RESULT = _PAYLOAD << 2
POKE_TAG = (1 << 31) - 1  # nothing is ever sent with it
_LEAST_SECONDS = 0.01
_GRACE_SECONDS = 2.0


def head_tag(lane: int) -> int:
    """The tag of a lane's first messages."""
    return lane


def payload_tag(lane: int, sequence: int) -> int:
    """The tag of all that follows one operation's first messages."""
    return _PAYLOAD | lane << _SEQUENCE_BITS | sequence % (1 << _SEQUENCE_BITS)


def receipt_tag(lane: int, sequence: int) -> int:
    """The tag of what says that a payload has arrived."""
    return _RECEIPT | lane << _SEQUENCE_BITS | sequence % (1 << _SEQUENCE_BITS)


def result_tag(lane: int, sequence: int) -> int:
    """The tag of what an owner has combined of other ranks' payloads."""
    return _RESULT | lane << _SEQUENCE_BITS | sequence % (1 << _SEQUENCE_BITS)


def reason_of(error: BaseException) -> str:
    """Gloo's text without its source file and its general advice."""
    text = str(error)
    if text.startswith("["):
        text = text.partition("] ")[2]
    return text.partition(". This is typically")[0]


class Pending(Protocol):
    """A transfer under way; ``torch.distributed.Work`` is one."""

    def wait(self, timeout: timedelta) -> bool:
        """Block until the memory may be used again.

        Raises:
            RuntimeError: the peer is gone or the limit passed; the link is unusable then.
        """


class Link(Protocol):
    """Point-to-point transfers between CPU memories.

    Transfers of one pair, direction and tag happen in the order in which they were posted; a
    receive may be longer than what is sent, never shorter.

    Attributes:
        rank: this one.
        size: number of ranks.
        hosts: of each rank, as a number.
    """

    rank: int
    size: int
    hosts: tuple[int, ...]

    def send(self, flat: torch.Tensor, peer: int, tag: int) -> Pending:
        """Begin to send; ``flat`` may not change before the end."""

    def recv(self, flat: torch.Tensor, peer: int, tag: int) -> Pending:
        """Begin to receive into ``flat``."""

    def abort(self) -> None:
        """Close every connection, from any thread, so that whoever waits raises."""

    def is_flowing(self) -> bool:
        """Whether every connection is known to stand and to take more bytes at once."""

    def wait_apart(self, wait: Callable[[], None]) -> None:
        """Let a thread of the link's do ``wait``, and raise what it raises.

        Raises:
            RuntimeError: the link was aborted; that thread may wait on, with what it waits for.
        """


class Connections(Link, Protocol):
    """A link that knows which of its connections have ended: what a mesh is made of."""

    def closed(self) -> Sequence[int]:
        """The peers to whom the connection is closed, on whichever side it began; closes none."""

    def is_closed(self, peer: int) -> bool:
        """Whether the connection to one peer is."""

    def closed_by(self) -> Sequence[int]:
        """The peers that had closed their connections before this rank did."""

    def beside(self, peers: Sequence[int]) -> Sequence[int]:
        """The other ranks on the hosts of some peers, those included, in order."""


class DeviceLink(Protocol):
    """Transfers between accelerator memories, on the caller's current stream.

    All ranks concerned call in the same order: there are no tags.
    """

    device: torch.device

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Every rank: ``root``'s content into everybody's ``flat``."""

    def send(self, flat: torch.Tensor, peer: int) -> None:
        """To one rank, which receives."""

    def recv(self, flat: torch.Tensor, peer: int) -> None:
        """From one rank, which sends."""

    def all_to_all(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """Every rank: of ``flat``, in as many parts as there are ranks, each rank's to it."""

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """Every rank: all ranks' ``flat`` one after another into ``into``."""


class Deadline:
    """A time limit that all waits of one operation share; between them it does not count.

    Attributes:
        seconds: how long it is.
        lost_seconds: for how long a host may be out of reach, on connections that this operation
            has to make.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = min(seconds, FOREVER_SECONDS)
        self.lost_seconds = settings().lost_after
        self._report_seconds = settings().report_after
        self._left = self._end = 0.0
        self.restart()

    def restart(self) -> None:
        """Count from now, all of it."""
        self._left = self.seconds
        self._end = time.monotonic() + self._left

    def leave(self, seconds: float) -> None:
        """Let the next wait have so much at least, and say so if it does not do."""
        self.seconds = max(self.seconds, seconds)
        self._left = max(self._left, seconds)

    def apply(self, entry: Entry) -> None:
        """Count what is left, and let the watcher know that ``entry`` waits, and until when."""
        now = entry.waits_since = time.monotonic()
        self._end = entry.waits_until = now + self._left
        entry.limit_seconds = self.seconds
        entry.report_at = now + self._report_seconds
        entry.has_expired = False  # that was an earlier wait of the same call

    def pause(self) -> None:
        """End a wait that ``apply`` began; the next one has what is left."""
        self._left = max(0.0, self._end - time.monotonic())

    @property
    def has_passed(self) -> bool:
        """Whether nothing is left."""
        return time.monotonic() >= self._end

    @property
    def seconds_left(self) -> float:
        """How much is left, for a part of the operation that has a limit of its own; never 0."""
        return max(_LEAST_SECONDS, self._end - time.monotonic())

    def left(self) -> timedelta:
        """How long a link may wait.

        Two seconds more than is left: the watcher ends a wait whose limit has passed, and tells
        the other ranks before the connections close. The link's own limit closes them at once, and
        is there for the case that the watcher's thread gets no turn.
        """
        return timedelta(seconds=max(0.0, self._end - time.monotonic()) + _GRACE_SECONDS)
