"""The interface of a transport: links, their errors, tags and time limits.

A *link* transfers bytes in CPU memory between all ranks of a group. Ranks here are ranks within the
group.

The docstrings of ``Link`` and ``Connections`` are a contract. The code above relies on nothing
else, and ``check_link`` in ``tests/contracts.py`` checks each link against it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch

from objcomm._config import FOREVER_SECONDS, Settings, settings
from objcomm._transport.share import Share

# Tags have 31 bits. All first messages of a lane share a tag, so that mismatched operations meet
# instead of waiting for each other. The tags of later messages include the operation's number.
LANE_BITS = 12
_SEQUENCE_BITS = 16
_PAYLOAD = 1 << (LANE_BITS + _SEQUENCE_BITS)
#: Set in all tags of ``receipt_tag``, and in no others.
RECEIPT = _PAYLOAD << 1
_RESULT = _PAYLOAD << 2
#: For the handshake of ranks on a link that has none built in.
HANDSHAKE_TAG = (1 << 31) - 2
_LEAST_SECONDS = 0.01
# The watchdog ends a wait whose limit has passed, and notifies the other ranks before it closes the
# connections. A link's own limit closes them immediately. It is this much longer, in case the
# watchdog's thread is not scheduled in time.
_GRACE_SECONDS = 2.0


def head_tag(lane: int) -> int:
    """Return the tag of a lane's first messages."""
    return lane


def payload_tag(lane: int, sequence: int) -> int:
    """Return the tag of what follows the first messages of an operation."""
    return _PAYLOAD | lane << _SEQUENCE_BITS | sequence % (1 << _SEQUENCE_BITS)


def receipt_tag(lane: int, sequence: int) -> int:
    """Return the tag of the receipts for a payload."""
    return RECEIPT | lane << _SEQUENCE_BITS | sequence % (1 << _SEQUENCE_BITS)


def result_tag(lane: int, sequence: int) -> int:
    """Return the tag of what an owner has combined from the payloads of other ranks."""
    return _RESULT | lane << _SEQUENCE_BITS | sequence % (1 << _SEQUENCE_BITS)


#: How the reason begins if a connection ended because the other end, or its host, is gone.
PEER_LOST = "it died, exited or lost its network"
HOST_LOST = "its host, or the network on the way there, has failed"


class LinkError(Exception):
    """Raised by a link.

    This base class itself means that this process can't create a link, and that no other rank is at
    fault.

    Attributes:
        reason: what happened, and who caused it as far as the link knows.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LinkTimeout(LinkError):
    """The time limit of a wait has passed."""


class LinkClosed(LinkError):
    """The connection has ended or could not be made, and its other end is at fault.

    Also raised after this rank itself aborted the link. The reason begins with ``HOST_LOST`` if the
    other end's whole host is out of reach.

    Attributes:
        peers: the ranks whose connections ended while ranks were connecting, if known. They need
            not have died: a rank that learns of a death closes its connections, too.
    """

    def __init__(self, reason: str, peers: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.peers = peers


class LinkRefused(LinkError):
    """One rank can't connect to any other, or not with the transport that some rank requires.

    Attributes:
        rank: that rank.
    """

    def __init__(self, reason: str, rank: int) -> None:
        super().__init__(reason)
        self.rank = rank


class LinkUnreachable(LinkError):
    """Two ranks can't connect to each other, although both may be healthy.

    Attributes:
        ranks: the two ranks, or only the one that could not connect to several others.
    """

    def __init__(self, reason: str, ranks: tuple[int, ...]) -> None:
        super().__init__(reason)
        self.ranks = ranks


#: A transfer in progress. Its type is private to the link that began it. None means that the
#: transfer is complete.
Pending = Any

#: The memory of a transfer: a flat ``uint8`` tensor, or, to send only, bytes.
Memory = torch.Tensor | bytes | bytearray | memoryview
#: A message in several pieces, to send only.
Pieces = list[bytes | memoryview]


class Awaitable(Protocol):
    """An event that one thread sets, once, and another thread waits for."""

    def set(self) -> None:
        """Wake the waiting thread; any thread or signal handler may call this."""

    def wait(self, seconds: float = -1) -> bool:
        """Wait for at most ``seconds``; negative means no limit. Return whether it was set."""


class Link(Protocol):
    """Point-to-point transfers between CPU memories; any thread may call any method.

    Transfers with the same pair, direction and tag happen in the order in which they were posted,
    and wait for no others. They progress while any thread of this rank waits for a transfer, or
    checks for messages or closed connections; they need not progress at other times. A message that
    is sent before its receive is posted is not lost. A large one stays with its sender until then,
    and the sender's wait fails if the peer ends first. A receive may be longer than the message,
    but not shorter: that may end the process. Messages may be empty.

    When a connection ends, waits for receives that no byte has reached are woken. If
    ``needs_last_byte_apart`` is set, a receive that is being filled is not woken. Waits for sends
    need not be woken. ``abort`` wakes all waits for receives, and waits for sends that run in
    ``wait_apart``.

    Attributes:
        kind: its name in the log.
        rank: this rank.
        size: number of ranks.
        hosts: host number of each rank.
        head_max_nbytes: maximum length of a first message.
        needs_last_byte_apart: whether the last byte that a receiver waits for must be a separate
            transfer, because a receive that is being filled is not woken.
        is_interruptible: whether a signal handler that raises ends a wait of the main thread.
        ahead: how many pieces a receiver posts at a time if it answers each; more would keep the
            answers from being sent.
        shares_memory: whether ranks on one host can exchange large memory; see ``sharing_with``.
    """

    kind: str
    rank: int
    size: int
    hosts: tuple[int, ...]
    head_max_nbytes: int
    needs_last_byte_apart: bool
    is_interruptible: bool
    ahead: int
    shares_memory: bool

    def sharing_with(self, peer: int) -> "Sharing | None":
        """Return how to exchange large memory with a rank without a copy for each receiver.

        None if that is not possible. The two ranks of a pair agree on this, and so do all ranks of
        the link on one host.
        """

    def send(self, flat: Memory | Pieces, peer: int, tag: int) -> Pending:
        """Begin to send; returns immediately, whether or not the peer has posted a receive.

        Args:
            flat: contiguous memory, or pieces that the peer receives as one message. It must stay
                alive and unchanged until the transfer ends.
            peer: the receiver; never this rank.
            tag: 31 bits, from one of the functions of this module.

        Raises:
            LinkClosed: the connection is known to have ended; otherwise the wait raises it.
        """

    def recv(self, flat: Memory, peer: int, tag: int) -> Pending:
        """Begin to receive into ``flat``; returns immediately. See ``send``.

        Raises:
            LinkClosed: as for ``send``.
        """

    def expect(self, peers: Sequence[int], tag: int) -> None:
        """Prepare for the next first messages of some peers, before ``take`` waits for each.

        If that fails, ``take`` raises the error.
        """

    def take(self, peer: int, tag: int, until: float) -> bytes:
        """Wait for a peer's next first message; one thread at a time for each peer and tag.

        A link may reserve memory for it from the first use of a tag.

        Args:
            peer: the sender.
            tag: from ``head_tag``.
            until: when to give up, on the clock of ``time.monotonic``. A message that has arrived
                is returned however late it is.

        Returns:
            The message; a small one may be followed by extra bytes.

        Raises:
            LinkTimeout: as for ``wait``. The next call waits for the same message.
            LinkClosed: as for ``wait``.
        """

    def has_come(self, peer: int, tag: int) -> bool:
        """Return whether ``take`` would return immediately; any thread may ask at any time.

        Moves no bytes. A link may always return False.
        """

    def came_late(self, peer: int, tag: int) -> bool:
        """Return whether a message came after all; for the thread whose wait for it has raised.

        Returns soon. May close the link, and counts as the one wait for the message.
        """

    def wait(self, pending: Pending, limit: timedelta) -> None:
        """Block until the memory of a transfer may be used again; call it once for each transfer.

        A transfer that is complete succeeds even if the connection has ended since. A second wait
        for the same transfer may never return.

        Args:
            pending: what ``send`` or ``recv`` of this link returned.
            limit: how long to wait; at least a millisecond.

        Raises:
            LinkTimeout: the limit passed first. Nothing that has arrived is lost, but the link may
                have closed itself, and then can't be used any more.
            LinkClosed: the connection ended first.
        """

    def wait_apart(self, wait: Callable[[], None]) -> None:
        """Run ``wait``, which waits for sends, so that ``abort`` ends it.

        If the link's own waits for sends may miss an abort, one of the link's threads runs it. For
        sends that the peers have taken, it succeeds as usual before and after an abort.

        Raises:
            LinkClosed: the link was aborted. That thread may still be waiting, and then keeps alive
                what it waits for.
        """

    def is_interrupted(self) -> bool:
        """Return whether the caller is a handler or destructor that interrupted a step of the link.

        Such a caller can't begin a transfer or wait for one until that step continues.
        """

    def move(self, *, is_awaited: bool = True) -> None:
        """Move what can be moved now, and return; for a rank that waits for something else.

        Does nothing if a thread of the link moves the bytes.

        Args:
            is_awaited: whether any thread waits for a rank of the link. Only then are connections
                to a silent host ended: an outage that is over before it matters ends nothing.
        """

    def abort(self) -> None:
        """Close all connections so that all waits raise; any thread may call this repeatedly.

        Waits of peers for this rank raise, too.
        """


class Borrowed(Protocol):
    """What ``Sharing.recv_share`` has begun; wait for it as for any transfer.

    Attributes:
        share: the memory, after the wait; None if its content has to be copied, see
            ``Sharing.recv_instead``.
        peer: the rank that offers it.
        number: private to the link.
    """

    share: Share | None
    peer: int
    number: int


class Sharing(Protocol):
    """Hands memory to ranks of this host, which need not copy it."""

    def send_share(
        self, share: Share | None, flats: Sequence[torch.Tensor], peer: int, tag: int
    ) -> Pending:
        """Begin to hand over some members together; see ``Link.send``.

        Args:
            share: memory with their content; None if the system provides no such memory.
            flats: the members, at least one; as for ``Link.send``, because a receiver may need a
                copy.
            peer: the receiver, which calls ``recv_share``.
            tag: as for ``Link.send``, but not one of first messages.

        Raises:
            LinkClosed: as for ``Link.send``.
        """

    def recv_share(self, nbytes: int, peer: int, tag: int) -> Borrowed:
        """Begin to receive what a peer hands over; see ``Link.recv``.

        Args:
            nbytes: total length of the members.
            peer: the sender, which calls ``send_share``.
            tag: as for ``send_share``.

        Raises:
            LinkClosed: as for ``Link.recv``.
        """

    def recv_instead(self, borrowed: Borrowed, flats: Sequence[torch.Tensor]) -> Pending:
        """Begin to receive a copy of the members if there is no share.

        Args:
            borrowed: what ``recv_share`` returned, after its wait.
            flats: memory for each member.

        Raises:
            LinkClosed: as for ``Link.recv``.
        """


class Connections(Link, Protocol):
    """A link that knows which of its connections have ended; the basis of a mesh.

    It soon notices when the process of a connected peer ends. A peer may not be connected
    until one of the two ranks begins the first transfer, or uses ``call``.
    """

    def call(self, peer: int) -> None:
        """Connect to a peer if necessary, so that its end is noticed; returns soon."""

    def attend(self, peer: int, accepts: Mapping[int, Callable[[bytes], bool]]) -> NoReturn:
        """Take in all first messages of a peer with certain tags until its connection has ended.

        Nothing else may ``take`` them. Any thread of this rank that waits for the link may take
        them in; if there is none, the calling thread does. At most one thread attends to a peer.

        Args:
            peer: the sender.
            accepts: by tag from ``head_tag``, a function that takes in a message, as ``take``
                returns it, or returns False. In that case it is called again with the same message
                after a ``prompt``, and the peer can send only a few more meanwhile. Calls follow
                the order of arrival, are made during a step of the link, and must not wait for
                anything. An exception ends ``attend``.

        Raises:
            LinkClosed: the connection has ended, and all that had arrived was taken in.
        """

    def prompt(self, peer: int) -> None:
        """Make the attending thread retry what was not accepted; never waits."""

    def signal(self) -> Awaitable:
        """Return an event to wait for, once; the waiting thread moves the link's bytes.

        The end of a connection does not end the wait.
        """

    def await_delivery(self, until: float) -> None:
        """Wait until other hosts have received everything, but not longer than ``until``.

        Bytes that they have not received may be lost if this process ends.

        Args:
            until: on the clock of ``time.monotonic``.
        """

    def closed(self) -> Sequence[int]:
        """Return the peers whose connection is closed, whichever side closed it.

        Neither closes nor opens a connection.
        """

    def has_lost_any(self) -> bool:
        """Return whether a connection is known to have ended; does not check, and may miss one."""

    def is_closed(self, peer: int) -> bool:
        """Return whether the connection to a peer is closed."""

    def is_out_of_reach(self, peer: int) -> bool:
        """Return whether it ended because of an outage of the peer's host, which may be over."""

    def has_lost_all(self) -> bool:
        """Return whether this rank was connected to all others, and all connections are closed."""

    def closed_by(self) -> Sequence[int]:
        """Return the peers that closed their connections before this rank; may close the rest."""

    def abort(self, farewell: bytes = b"") -> None:
        """See ``Link``.

        Args:
            farewell: what ``farewell_of`` returns on the peers, if there is room to send it.
        """

    def farewell_of(self, peer: int) -> bytes:
        """Return what a peer sent when it aborted the link; empty if it sent nothing.

        If the peer has closed its connection, this may close this rank's end.
        """

    def has_unread(self, peer: int) -> bool:
        """Return whether bytes from a peer have reached this host but have yet to be read.

        False if one of the link's own threads reads them.
        """

    def unread(self) -> Sequence[bytes]:
        """Return first messages that arrived before their receives, even after ``abort``.

        Those that the link can't see are missing.
        """

    def refuse(self) -> None:
        """Make all further sends to this rank fail, if possible; what has arrived is kept.

        Must be followed by ``abort``.
        """

    def beside(self, peers: Sequence[int]) -> Sequence[int]:
        """Return the other ranks on the hosts of some peers, including those peers, in order."""


class Deadline:
    """A time limit that all waits of an operation share; time between the waits does not count.

    ``Lane.begin`` and ``Lane.end`` start and stop it.

    Attributes:
        seconds: the whole limit.
        settings: the options in force, for connections that the operation has to make.
        remaining: what is left of it between two waits.
        until: when the current wait has to end, on the clock of ``time.monotonic``.
    """

    __slots__ = ("remaining", "seconds", "settings", "until")

    def __init__(self, seconds: float, chosen: Settings | None = None) -> None:
        self.seconds = self.remaining = min(seconds, FOREVER_SECONDS)
        self.settings = settings() if chosen is None else chosen
        self.until = time.monotonic() + self.remaining

    def restart(self) -> None:
        """Start the whole limit again."""
        self.remaining = self.seconds
        self.until = time.monotonic() + self.remaining

    def leave(self, seconds: float) -> None:
        """Leave at least ``seconds`` for the next wait; errors report the longer limit."""
        self.seconds = max(self.seconds, seconds)
        self.remaining = max(self.remaining, seconds)

    @property
    def has_passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self.until

    @property
    def seconds_left(self) -> float:
        """Time left for a part of the operation that has its own limit; never 0."""
        return max(_LEAST_SECONDS, self.until - time.monotonic())

    @property
    def gives_up_at(self) -> float:
        """When a link's own limit ends a wait (``time.monotonic``); see ``_GRACE_SECONDS``."""
        return self.until + _GRACE_SECONDS

    def left(self) -> timedelta:
        """Return how long a link may wait; see ``_GRACE_SECONDS``."""
        return timedelta(seconds=max(0.0, self.until - time.monotonic()) + _GRACE_SECONDS)
