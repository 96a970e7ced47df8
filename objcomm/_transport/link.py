"""What a transport offers to the rooms above: links, their errors, tags and time limits.

A *link* joins all ranks of a group for bytes in CPU memory. Ranks here are ranks within the group.

What stands at the methods of ``Link`` and ``Connections`` is a contract: the rooms above rely on
that and on nothing else, and ``check_link`` of ``tests/contracts.py`` holds each link to it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch

from objcomm._config import FOREVER_SECONDS, Settings, settings
from objcomm._transport.share import Share

# Tags have 31 bits. First messages of a lane share one tag, so that mismatched operations meet
# instead of waiting for each other; what follows is told apart by its operation's number.
LANE_BITS = 12
_SEQUENCE_BITS = 16
_PAYLOAD = 1 << (LANE_BITS + _SEQUENCE_BITS)
#: All of ``receipt_tag``'s have this bit, and no others.
RECEIPT = _PAYLOAD << 1
_RESULT = _PAYLOAD << 2
#: What ranks say to each other before all else, where a link does not say it by itself.
WORD_TAG = (1 << 31) - 2
_LEAST_SECONDS = 0.01
# The watchdog ends a wait whose limit has passed, and tells the other ranks before the connections
# close. A link's own limit closes them at once: it comes so much later, for the case that the
# watchdog's thread gets no turn.
_GRACE_SECONDS = 2.0


def head_tag(lane: int) -> int:
    """The tag of a lane's first messages."""
    return lane


def payload_tag(lane: int, sequence: int) -> int:
    """The tag of all that follows one operation's first messages."""
    return _PAYLOAD | lane << _SEQUENCE_BITS | sequence % (1 << _SEQUENCE_BITS)


def receipt_tag(lane: int, sequence: int) -> int:
    """The tag of what says that a payload has arrived."""
    return RECEIPT | lane << _SEQUENCE_BITS | sequence % (1 << _SEQUENCE_BITS)


def result_tag(lane: int, sequence: int) -> int:
    """The tag of what an owner has combined of other ranks' payloads."""
    return _RESULT | lane << _SEQUENCE_BITS | sequence % (1 << _SEQUENCE_BITS)


#: How the reason of a connection's end begins where its other end, or all its host, is gone.
PEER_LOST = "it died, exited or lost its network"
HOST_LOST = "its host, or the network on the way there, has failed"


class LinkError(Exception):
    """What a link raises; itself where this process can't make one, and nobody else is at fault.

    Attributes:
        reason: what happened, and whose doing it was as far as the link knows.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LinkTimeout(LinkError):
    """The limit of a wait has passed."""


class LinkClosed(LinkError):
    """The connection has ended, or could not be made, and its other end is at fault.

    Or this rank has aborted the link; why, it knows itself. The reason begins with ``HOST_LOST``
    where the other end's whole host is out of reach.

    Attributes:
        peers: whose connections ended while ranks connect, as far as that is known. Such a rank
            need not have died: one that hears of a death closes its connections, too.
    """

    def __init__(self, reason: str, peers: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.peers = peers


class LinkRefused(LinkError):
    """One rank can't connect to any other, or not by the transport that it or another one wants.

    Attributes:
        rank: which.
    """

    def __init__(self, reason: str, rank: int) -> None:
        super().__init__(reason)
        self.rank = rank


class LinkUnreachable(LinkError):
    """Two ranks can't connect to each other, though both may be well.

    Attributes:
        ranks: the two ranks; or only the one that could not connect to several others.
    """

    def __init__(self, reason: str, ranks: tuple[int, ...]) -> None:
        super().__init__(reason)
        self.ranks = ranks


#: A transfer under way. What it is, only the link knows that began it: each gives its own. None is
#: one that is over.
Pending = Any

#: What a link moves: a flat ``uint8`` tensor; or, out only, bytes.
Memory = torch.Tensor | bytes | bytearray | memoryview


class Awaitable(Protocol):
    """What some thread sets, once, and another one waits for."""

    def set(self) -> None:
        """Let the waiting thread go on; any thread may call this, and a signal handler."""

    def wait(self, seconds: float = -1) -> bool:
        """Wait so long, or without end; returns whether it was set."""


class Link(Protocol):
    """Point-to-point transfers between CPU memories; any thread may call any method.

    Transfers of one pair, direction and tag happen in the order in which they were posted, and wait
    for no others. They move while any thread of this rank waits for one, or asks what is done or
    closed, and need not at other times. What is sent before its receive is posted is not lost; what
    is large stays with its sender until then, whose wait ends by an error if the peer ends first. A
    receive may be longer than what is sent, never shorter: that may end the process. Nothing is a
    message, too.

    The end of a connection wakes who waits for a receive that no byte has reached yet. Whether it
    wakes who waits for one that is being filled tells ``needs_last_byte_apart``. It need not wake
    who waits for a send; ``abort`` wakes all who wait for a receive, or for a send by
    ``wait_apart``.

    Attributes:
        kind: what the log calls it.
        rank: this one.
        size: number of ranks.
        hosts: of each rank, as a number.
        head_max_nbytes: no first message may be longer.
        needs_last_byte_apart: whether the last byte of what a receiver waits for must be a transfer
            of its own, because a receive that is being filled is not woken.
        is_interruptible: whether a signal ends a wait of the main thread by itself, by what its
            handler raises.
        ahead: so many pieces a receiver posts at a time where it answers each; more would keep the
            answers from leaving.
    """

    kind: str
    rank: int
    size: int
    hosts: tuple[int, ...]
    head_max_nbytes: int
    needs_last_byte_apart: bool
    is_interruptible: bool
    ahead: int

    def sharing_with(self, peer: int) -> "Sharing | None":
        """How large memory is handed over to a rank, and by it, without a copy for each receiver.

        None where it is not; a pair's two ranks, and all that a link joins on one host, say alike.
        """

    def send(self, flat: Memory, peer: int, tag: int) -> Pending:
        """Begin to send; returns at once, whether or not the peer has asked for it.

        Args:
            flat: contiguous; it must live, and may not change, before the end.
            peer: to whom; never this rank.
            tag: 31 bits, of those that the functions of this module give.

        Raises:
            LinkClosed: the connection is known to have ended; else the wait says so.
        """

    def recv(self, flat: Memory, peer: int, tag: int) -> Pending:
        """Begin to receive into ``flat``; returns at once. As ``send``.

        Raises:
            LinkClosed: as ``send``.
        """

    def expect(self, peers: Sequence[int], tag: int) -> None:
        """Be ready for some peers' next first messages, before ``take`` waits for them in turn.

        What can't be is left for ``take`` to raise.
        """

    def take(self, peer: int, tag: int, until: float) -> bytes:
        """Wait for a peer's next first message; by one thread at a time for each peer and tag.

        A link may keep memory ready for it from the first use of a tag on.

        Args:
            peer: who sends it.
            tag: of ``head_tag``.
            until: when to give up, in seconds of ``time.monotonic``; what has come is given out
                however late it is.

        Returns:
            The message; there may be bytes behind the end of a small one.

        Raises:
            LinkTimeout: as ``wait``. The next call goes on waiting for the same message.
            LinkClosed: as ``wait``.
        """

    def has_come(self, peer: int, tag: int) -> bool:
        """Whether ``take`` would not wait, as any thread may ask at any time; moves nothing.

        False is always right.
        """

    def came_late(self, peer: int, tag: int) -> bool:
        """The same, for the thread that takes them after a wait has raised; returns soon.

        To ask may close the link, and counts as the one wait.
        """

    def wait(self, pending: Pending, limit: timedelta) -> None:
        """Block until the memory of a transfer may be used again; once for each transfer.

        What has arrived whole is given out also when the connection has ended since. A second wait
        for the same transfer may have no end.

        Args:
            pending: what ``send`` or ``recv`` of this link has returned.
            limit: how long; a millisecond at least.

        Raises:
            LinkTimeout: the limit passed first. Nothing that has arrived is lost; but the link may
                have closed itself, and is of no more use.
            LinkClosed: the connection ended first.
        """

    def wait_apart(self, wait: Callable[[], None]) -> None:
        """Do ``wait``, which waits for sends, so that ``abort`` ends it.

        Where the link's own waits for sends may miss that, a thread of the link's does it. Of sends
        that the peers have taken it ends as ever, before an abort and after.

        Raises:
            LinkClosed: the link was aborted; that thread may wait on, with what it waits for.
        """

    def is_interrupted(self) -> bool:
        """Whether a handler or a destructor asks that has interrupted a step of the link.

        It can begin no transfer, and wait for none, before that goes on.
        """

    def move(self, *, is_awaited: bool = True) -> None:
        """Move what can be moved just now, and return; for a rank that waits elsewhere.

        Nothing is to be done where a thread of the link's own does so.

        Args:
            is_awaited: whether any thread waits for one of its ranks. A silent host ends its
                connections then only: an outage that is over before it matters ends nothing.
        """

    def abort(self) -> None:
        """Close every connection, from any thread, so that every wait raises; also once more.

        So do those of peers that wait for this rank.
        """


class Borrowed(Protocol):
    """What ``Sharing.recv_share`` has begun; to be waited for like any transfer.

    Attributes:
        share: the memory, once the wait has ended; None where its content has to be copied, see
            ``Sharing.recv_instead``.
        peer: whose it is.
        number: the link's own.
    """

    share: Share | None
    peer: int
    number: int


class Sharing(Protocol):
    """Hands memory over to ranks of this host, which do not copy it."""

    def send_share(
        self, share: Share | None, flats: Sequence[torch.Tensor], peer: int, tag: int
    ) -> Pending:
        """Begin to hand some members over together; as ``Link.send``.

        Args:
            share: has their content; None where the system gives no such memory.
            flats: the members, at least one; as for ``Link.send``: a receiver may need a copy.
            peer: to whom; it calls ``recv_share``.
            tag: as for ``Link.send``, but none of first messages.

        Raises:
            LinkClosed: as ``Link.send``.
        """

    def recv_share(self, nbytes: int, peer: int, tag: int) -> Borrowed:
        """Begin to receive what a peer hands over; as ``Link.recv``.

        Args:
            nbytes: how long the members are together.
            peer: who calls ``send_share``.
            tag: as for ``send_share``.

        Raises:
            LinkClosed: as ``Link.recv``.
        """

    def recv_instead(self, borrowed: Borrowed, flats: Sequence[torch.Tensor]) -> Pending:
        """Begin to receive the members' content where there is no share.

        Args:
            borrowed: what ``recv_share`` gave; its wait has ended.
            flats: room for each of them.

        Raises:
            LinkClosed: as ``Link.recv``.
        """


class Connections(Link, Protocol):
    """A link that knows which of its connections have ended: what a mesh is made of.

    It notices by itself, and soon, that a peer's process has ended to which it is connected. It may
    be connected to a peer only from the first transfer on that either of the two begins, or from a
    ``call``.
    """

    def call(self, peer: int) -> None:
        """Connect to a peer where that was not done, so that its end is noticed; returns soon."""

    def attend(self, peer: int, accepts: Mapping[int, Callable[[bytes], bool]]) -> NoReturn:
        """Have all first messages of a peer with some tags taken in until its connection has ended.

        Nobody takes them by ``take``. Any thread of this rank that waits for the link may take them
        in; where none does, the calling one. A peer has one thread that attends to it.

        Args:
            peer: who sends them.
            accepts: by tag, of ``head_tag``: takes one in, as ``take`` gives it, or returns False:
                then it is asked again after a ``prompt``, and the peer can send no more than a few
                meanwhile. Called in order, in a step of the link: it may not wait for anything.
                What it raises ends this.

        Raises:
            LinkClosed: the connection has ended, and what had come before was given out.
        """

    def prompt(self, peer: int) -> None:
        """Let the attending thread ask again what was not accepted; never waits."""

    def signal(self) -> Awaitable:
        """Something to wait for, once, while the calling thread moves the link.

        It waits on where the connection ends, until it is set.
        """

    def await_delivery(self, until: float) -> None:
        """Return when other hosts have what was sent to them, or when ``time.monotonic`` is there.

        What this process has sent, and they don't have yet, may be lost if it ends.
        """

    def closed(self) -> Sequence[int]:
        """The peers to whom the connection is closed, on whichever side it began.

        Closes none, and makes none.
        """

    def has_lost_any(self) -> bool:
        """Whether some connection is known here to have ended; asks nobody, and may know none."""

    def is_closed(self, peer: int) -> bool:
        """Whether the connection to one peer is."""

    def is_out_of_reach(self, peer: int) -> bool:
        """Whether it has ended by an outage of the peer's host, which may be over by now."""

    def has_lost_all(self) -> bool:
        """Whether it is connected to all others, and all of that is closed."""

    def closed_by(self) -> Sequence[int]:
        """The peers that had closed their connections before this rank did; may close the rest."""

    def abort(self, farewell: bytes = b"") -> None:
        """See ``Link``.

        Args:
            farewell: what ``farewell_of`` gives on the peers, where there is room for it.
        """

    def farewell_of(self, peer: int) -> bytes:
        """What a peer has said as it aborted the link; empty where it has said nothing."""

    def has_unread(self, peer: int) -> bool:
        """Whether bytes of a peer are in this host's memory, and the thread that moves is late.

        False where a thread of the link's own takes them in.
        """

    def unread(self) -> Sequence[bytes]:
        """First messages that have come before their receives were posted, also after ``abort``.

        Those that the link can't see are left out.
        """

    def refuse(self) -> None:
        """Let every send to this rank fail from now on, where that can be; what came stays here.

        To be followed by ``abort``.
        """

    def beside(self, peers: Sequence[int]) -> Sequence[int]:
        """The other ranks on the hosts of some peers, those included, in order."""


class Deadline:
    """A time limit that all waits of one operation share; between them it does not count.

    ``Lane.begin`` and ``Lane.end`` say when it does.

    Attributes:
        seconds: how long it is.
        settings: the options in force, for the connections that this operation has to make.
        remaining: how much of it is left between two waits.
        until: when the wait that counts now has to end, in seconds of ``time.monotonic``.
    """

    __slots__ = ("remaining", "seconds", "settings", "until")

    def __init__(self, seconds: float, chosen: Settings | None = None) -> None:
        self.seconds = self.remaining = min(seconds, FOREVER_SECONDS)
        self.settings = settings() if chosen is None else chosen
        self.until = time.monotonic() + self.remaining

    def restart(self) -> None:
        """Count from now, all of it."""
        self.remaining = self.seconds
        self.until = time.monotonic() + self.remaining

    def leave(self, seconds: float) -> None:
        """Let the next wait have so much at least, and say so if it does not do."""
        self.seconds = max(self.seconds, seconds)
        self.remaining = max(self.remaining, seconds)

    @property
    def has_passed(self) -> bool:
        """Whether nothing is left."""
        return time.monotonic() >= self.until

    @property
    def seconds_left(self) -> float:
        """How much is left, for a part of the operation that has a limit of its own; never 0."""
        return max(_LEAST_SECONDS, self.until - time.monotonic())

    @property
    def gives_up_at(self) -> float:
        """When a link ends a wait by itself (``time.monotonic``); see ``_GRACE_SECONDS``."""
        return self.until + _GRACE_SECONDS

    def left(self) -> timedelta:
        """How long a link may wait: see ``_GRACE_SECONDS``."""
        return timedelta(seconds=max(0.0, self.until - time.monotonic()) + _GRACE_SECONDS)
