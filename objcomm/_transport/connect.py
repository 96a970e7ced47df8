"""Joins the ranks of a group by the best link there is for them.

They get streams, if the systems of all of them let them connect so; else all get Gloo's.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import errno
import os
import secrets
import select
import socket
import time
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from objcomm._environment import has_own_core
from objcomm._transport.doors import Door, Doors, Place, own_address
from objcomm._transport.gloo import GlooLink, keys_left
from objcomm._transport.link import (
    HOST_LOST,
    PEER_LOST,
    LinkClosed,
    LinkError,
    LinkUnreachable,
)
from objcomm._transport.rendezvous import NO_DOOR, GivenUpError, damaged, forget, meet
from objcomm._transport.sockets import is_outage
from objcomm._transport.store import pack_record, read, unpack_record
from objcomm._transport.streams import SPIN_SECONDS, StreamLink
from objcomm._world import CONNECT_MAX
from objcomm.errors import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from objcomm._transport.link import Connections, Deadline
    from objcomm._transport.rendezvous import MeetingState


# How often a rank that waits for connections looks whether another one has none.
_LOOK_SECONDS = 0.2
# The same, for ranks that are already connected.
_PAUSE_SECONDS = 0.02
_LONG_PAUSE_SECONDS = 0.25

# So many ranks are all connected when they meet. More only make a tree then, which shows that all
# can be; two others are connected when one of them first sends to the other, or waits for it. To
# connect all of 64 ranks of a host took 2 cores 0.5 s.
_AT_ONCE_MAX = 16

# What a rank says after its word, when all others have said theirs.
_COMPLETE = b"!"
# Extra time for ranks that are already connected, so that one still connecting gives up first.
_SAID_LATER_SECONDS = 1.0
# The key that says that ranks can't be connected by streams, and why.
_FAILED = "no streams"
# Counts the ranks that another link has connected, where some could not reach each other.
_CONNECTED = "connected"
# These are this process's own fault, whichever rank it was about to connect to.
_OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


class _Refusal(NamedTuple):
    """Why ranks can't be connected by streams, as the first rank that gave up tells the others.

    Attributes:
        rank: the one that tells.
        peers: to whom it could not connect; none if the reason is its own.
        reason: in words.
    """

    rank: int
    peers: tuple[int, ...] = ()
    reason: str = ""


class _PeerError(OSError):
    """What keeps this rank from a connection to one other.

    Attributes:
        peer: which.
        has_ended: whether the two were connected before.
    """

    def __init__(self, peer: int, error: OSError, *, has_ended: bool) -> None:
        super().__init__(error.errno, error.strerror or "no answer")
        self.peer = peer
        self.has_ended = has_ended


def connect(  # noqa: PLR0917  # what the ranks are, and who is told
    store: dist.Store,
    rank: int,
    members: tuple[int, ...],
    deadline: Deadline,
    meeting: MeetingState,
    on_met: Callable[[Sequence[int]], None],
    on_loss: Callable[[LinkError], None],
) -> Connections:
    """Meet the other ranks, and connect to each; every member must call this.

    May block in C++ up to the limit.

    Args:
        store: a connection to it that no other thread uses, with a prefix that is theirs alone.
        rank: this one, within the group.
        members: those that it joins, as ranks within the group.
        deadline: how long to wait.
        meeting: tells others how far it has come.
        on_met: told which other members are on this host, when all have met and none has connected.
        on_loss: told of a ``LinkError`` before this rank closes its connections: a rank that sees
            them close looks why.

    Raises:
        GivenUpError: ``meeting`` was ended from outside.
        LeftError: as ``meet``.
        WireError: as ``meet``.
        DistNetworkError: the store is gone.
        LinkClosed: another rank was lost, or does not answer.
        LinkUnreachable: two ranks can't connect to each other.
        LinkError: this process can't connect to any.
    """
    place, size = members.index(rank), len(members)
    with contextlib.ExitStack() as open_doors:
        door = Door.opened(size, own_address(store)) if deadline.settings.is_local else None
        if door is not None:
            open_doors.enter_context(door)
        told = NO_DOOR if door is None else door.place.told()
        met = meet(store, place, size, meeting, told)
        hosts = dict(zip(members, met.hosts, strict=True))
        on_met([each for each in members if each != rank and hosts[each] == hosts[rank]])
        named = dist.PrefixStore(f"objcomm/{meeting.nonce}", store)
        link = None
        if door is not None and NO_DOOR not in met.doors:
            places = dict(zip(members, map(Place.of, met.doors), strict=True))
            if len(set(met.hosts)) == 1 or all(each.port for each in places.values()):
                doors = Doors(door, places, hosts, rank, meeting)
                link = _joined(_Joining(doors, named, deadline, meeting), on_loss)
    if link is not None:
        forget(store, meeting.nonce, size, ())
        return link
    unreachable = meeting.unreachable = _unreachable(named, members)
    try:
        far = GlooLink(named, rank, members, met.hosts, deadline)
    except LinkClosed as error:
        if unreachable is None:
            raise
        raise unreachable from error
    if unreachable is not None:
        try:
            _await_all(named, size, meeting)
        except GivenUpError:
            far.abort()
            raise
    left = [_FAILED, _CONNECTED, *keys_left(size)]
    forget(store, meeting.nonce, size, [f"objcomm/{meeting.nonce}/{key}" for key in left])
    return far


def _joined(joining: _Joining, on_loss: Callable[[LinkError], None]) -> StreamLink | None:
    """The link over streams; None if some two ranks can't be connected so."""
    with contextlib.ExitStack() as in_vain:
        in_vain.callback(joining.close)
        try:
            joining.connect()
            link = joining.link()
            joining.complete(link)
        except OSError as error:
            lost = joining.loss(error)
            if lost is None:
                joining.give_up(error)
                return None
            on_loss(lost)
            raise lost from error
        in_vain.pop_all()
    return link


def _unreachable(store: dist.Store, members: Collection[int]) -> LinkUnreachable | None:
    """Which ranks could not connect by streams, where that is why there is no other link either."""
    raw = read(store, _FAILED)
    if raw is None:
        return None
    told = unpack_record(raw, _Refusal, "a refusal")
    if not {told.rank, *told.peers}.issubset(members):
        raise damaged(raw)
    if not told.peers:
        return None
    reason = f"rank {told.rank} could not connect to {ranks_text(told.peers)} ({told.reason})"
    return LinkUnreachable(reason, (told.rank, *(told.peers if len(told.peers) == 1 else ())))


def _await_all(store: dist.Store, size: int, meeting: MeetingState) -> None:
    """Return when Gloo has connected all ranks, and not only this one.

    A rank that fails closes the connections that it has, and may be taken for dead by those that
    use them already. So nobody does before all have theirs.

    Raises:
        GivenUpError: nobody waits for them any more.
    """
    connected, pause = store.add(_CONNECTED, 1), _PAUSE_SECONDS
    while connected < size:
        if meeting.is_over:
            raise GivenUpError
        time.sleep(pause)
        pause = min(2 * pause, _LONG_PAUSE_SECONDS)  # one of a pair may wait for long
        connected = store.add(_CONNECTED, 0)


class _Guest:
    """A connection of which it is not known yet that another rank is at its end.

    Attributes:
        socket: its own end.
        rank: the other one's, or -1 for who has come by itself and has not said it.
        unsaid: what this rank says when it is connected.
        said: what has come of it.
    """

    def __init__(self, end: socket.socket, rank: int, unsaid: bytes = b"") -> None:
        self.socket = end
        self.rank = rank
        self.unsaid = unsaid
        self.said = b""


class _Joining:
    """One rank's way to a socket to each neighbour; a pair's later rank connects to the other.

    Neighbours are all ranks, or those of this one in a tree.
    """

    def __init__(
        self, doors: Doors, store: dist.Store, deadline: Deadline, meeting: MeetingState
    ) -> None:
        """Begin.

        Args:
            doors: of all ranks.
            store: where a rank says that it can't.
            deadline: how long to wait.
            meeting: tells whether to.
        """
        self._doors = doors
        self._store = store
        self._lost_seconds = deadline.settings.lost_after
        # Half of it: Gloo has the other half, if this is in vain.
        limit = min(deadline.left(), CONNECT_MAX) / 2
        self._looked_at = time.monotonic()
        self._until = self._looked_at + limit.total_seconds()
        self._meeting = meeting
        self._guests: dict[int, _Guest] = {}
        self._joined: dict[int, _Guest] = {}
        self._events = select.poll()
        if len(doors.others) < _AT_ONCE_MAX:
            self._neighbours = doors.others
            self._rounds = [(doors.others, doors.others)]
        else:
            parents, children = _in_a_tree(doors)
            self._neighbours = [*parents, *children]
            self._rounds = [([], children), (parents, parents), (children, [])]
        self._awaited = self._neighbours
        self._due_nbytes = Doors.word_nbytes
        self._has_said = False

    def connect(self) -> None:
        """Return when there is a socket to each neighbour; others may not have all of theirs.

        Raises:
            OSError: some two ranks can't be connected.
            GivenUpError: nobody waits for them any more.
        """
        for peer in self._neighbours:
            if peer < self._doors.rank:
                with _naming(peer):
                    end, unsaid = self._doors.call(peer, max(0.1, self._until - time.monotonic()))
                self._add(_Guest(end, peer, unsaid))
        for listener in self._doors.listeners:
            self._events.register(listener, select.POLLIN)
        while self._silent():
            self._look()

    def link(self) -> StreamLink:
        """What it takes to use the sockets, before anybody relies on it.

        Raises:
            OSError: this process has no room for it.
        """
        doors, joined = self._doors, sorted(self._joined.items())
        sockets = {peer: each.socket for peer, each in joined}
        beside = 1 + sum(map(doors.is_near, doors.others))
        is_all = len(sockets) == len(doors.others)
        return StreamLink(
            doors.rank,
            sockets,
            doors.hosts,
            doors=None if is_all else doors,
            listeners=[] if is_all else [each.dup() for each in doors.listeners],
            lost_seconds=self._lost_seconds,
            spin_seconds=SPIN_SECONDS if has_own_core(beside, os.environ) else 0.0,
        )

    def complete(self, link: StreamLink) -> None:
        """Return when all ranks have all of theirs, and what it takes to use them.

        Who can't says nothing and closes its sockets, so that no rank gets the word of all. Who has
        said it can't take it back. In a tree each says it to its parent for all below, and the
        first rank to all.

        Args:
            link: what this rank will use; gets who has called meanwhile.

        Raises:
            OSError: another rank could not, or said nothing; see ``loss``.
            GivenUpError: nobody waits for them any more.
        """
        self._due_nbytes += len(_COMPLETE)
        self._until += _SAID_LATER_SECONDS
        for told, awaited in self._rounds:
            self._awaited = awaited
            for peer in told:
                self._has_said = True
                with _naming(peer, has_ended=True):
                    self._joined[peer].socket.sendall(_COMPLETE)
            while self._silent():
                self._look()
        for each in self._guests.values():
            if each.rank in self._joined:
                continue
            if len(self._neighbours) < len(self._doors.others):  # it may want to use the link
                link.hear(each.socket, each.said)
            else:  # a stranger
                each.socket.close()

    def loss(self, error: OSError) -> LinkError | None:
        """What an error means for all; None if they may still use another link.

        A rank that gives up says so before it closes its sockets. So one that has closed them
        without a word has died, or knows of a death.

        Raises:
            DistNetworkError: the store is gone.
        """
        if self._store.check([_FAILED]):
            return None
        if isinstance(error, _PeerError) and error.has_ended:
            lost = HOST_LOST if is_outage(error.strerror or "") else PEER_LOST
            return LinkClosed(f"{lost} (its connection ended while ranks connected)", (error.peer,))
        if not self._has_said:
            return None
        # Others may have all words by now, and use the link.
        if isinstance(error, TimeoutError):
            return LinkClosed(f"{PEER_LOST} (it did not connect in time)", tuple(self._silent()))
        return LinkError(str(error))

    def give_up(self, error: OSError) -> None:
        """Let the others know that no rank gets all of its connections, before any is closed."""
        peers: tuple[int, ...] = ()
        if isinstance(error, _PeerError) and not error.has_ended:
            peers = (error.peer,)
        elif isinstance(error, TimeoutError):
            peers = tuple(self._silent())
        reason = error.strerror or str(error) or "no answer"
        refusal = _Refusal(self._doors.rank, peers, reason)
        self._store.compare_set(_FAILED, "", pack_record(refusal))  # type: ignore[arg-type]  # bytes will do

    def _silent(self) -> list[int]:
        """The ranks that this one waits for."""
        said = {peer: len(each.said) for peer, each in self._joined.items()}
        return [peer for peer in self._awaited if said.get(peer, 0) < self._due_nbytes]

    def close(self) -> None:
        """Close all that was opened."""
        for each in [*self._guests.values(), *self._joined.values()]:
            each.socket.close()

    def _add(self, guest: _Guest) -> None:
        self._guests[guest.socket.fileno()] = guest
        self._events.register(guest.socket, select.POLLOUT if guest.unsaid else select.POLLIN)

    def _look(self) -> None:
        """Take in what has come, or see that it never will."""
        events = self._events.poll(_LOOK_SECONDS * 1000)
        now = time.monotonic()
        for descriptor, _ in events:
            guest = self._guests.get(descriptor)
            if guest is None:
                self._let_in()
            elif guest.unsaid:
                self._say(guest)
            else:
                self._hear(guest)
        if self._meeting.is_over:
            raise GivenUpError
        if now > self._looked_at + _LOOK_SECONDS:
            self._looked_at = now
            if self._store.check([_FAILED]):
                raise ConnectionAbortedError  # another rank could not
        if now > self._until + (_LOOK_SECONDS if events else 0.0):
            raise TimeoutError

    def _let_in(self) -> None:
        for listener in self._doors.listeners:
            # Nobody else is there, or who was has left again.
            with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                self._add(_Guest(listener.accept()[0], -1))

    def _say(self, guest: _Guest) -> None:
        """Say this rank's word to another host's rank, which is connected now, or could not be."""
        with _naming(guest.rank):
            failed = guest.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed))
            guest.socket.sendall(guest.unsaid)  # the system has room for the first bytes
        guest.unsaid = b""
        self._events.modify(guest.socket, select.POLLIN)

    def _hear(self, guest: _Guest) -> None:
        # Not a byte more than it says now: what follows is the link's.
        due = Doors.word_nbytes + len(_COMPLETE) * (guest.rank in self._joined)
        if len(guest.said) >= due:
            self._events.unregister(guest.socket)
            return
        came = b""
        if guest.rank >= 0:
            with _naming(guest.rank, has_ended=guest.rank in self._joined):
                came = guest.socket.recv(due - len(guest.said))
                if not came:
                    raise ConnectionAbortedError(errno.ECONNABORTED, "it has closed the connection")
        else:
            with contextlib.suppress(OSError):  # a stranger, who has left
                came = guest.socket.recv(due - len(guest.said))
        guest.said += came
        if came and len(guest.said) < due:
            return
        if guest.rank in self._joined:
            self._events.unregister(guest.socket)
        elif guest.rank >= 0:
            with _naming(guest.rank):
                if not secrets.compare_digest(guest.said, self._doors.word_from(guest.rank)):
                    raise PermissionError(errno.EACCES, "another process has answered")
            self._joined[guest.rank] = guest
        elif not came or not self._admits(guest):  # a stranger
            self._events.unregister(guest.socket)
            del self._guests[guest.socket.fileno()]
            guest.socket.close()

    def _admits(self, guest: _Guest) -> bool:
        """Whether a rank of this meeting has called; a neighbour gets an answer."""
        peer = self._doors.caller(guest.socket, guest.said)
        if peer is None or peer in self._joined:
            return False
        if peer not in self._neighbours:  # for it all have met already
            self._events.unregister(guest.socket)
            return True
        if peer < self._doors.rank:
            return False
        guest.rank = peer
        self._joined[peer] = guest
        with _naming(peer, has_ended=True):
            guest.socket.sendall(self._doors.word_to(peer))
        return True


@contextlib.contextmanager
def _naming(peer: int, *, has_ended: bool = False) -> Iterator[None]:
    """A block whose errors concern the connection to one rank, unless this process is at fault."""
    try:
        yield
    except OSError as error:
        if error.errno in _OWN_FAULTS:
            raise
        raise _PeerError(peer, error, has_ended=has_ended) from error


def _in_a_tree(doors: Doors) -> tuple[list[int], list[int]]:
    """The neighbours of a rank in a binomial tree over all ranks: its parent, and its children.

    Those of a host follow each other. If there is one, they are those to which small messages go
    from the first rank, see ``topology.binomial``.
    """
    ranks = sorted(doors.hosts, key=lambda rank: (doors.hosts[rank], rank))
    place = ranks.index(doors.rank)
    lowest = place & -place if place else len(ranks)
    steps = [1 << bit for bit in range(len(ranks).bit_length())]
    children = [
        ranks[place + step] for step in steps if step < lowest and place + step < len(ranks)
    ]
    return [ranks[place - lowest]] if place else [], children
