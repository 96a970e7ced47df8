"""Joins the ranks of a group by the best link there is for them.

They get streams, if the systems of all of them let them connect so; else all get Gloo's.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import os
import secrets
import select
import socket
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from objcomm._transport.doors import Door, Doors, Place, own_address
from objcomm._transport.gloo import GlooLink, keys_left
from objcomm._transport.link import HOST_LOST, PEER_LOST, LinkClosed
from objcomm._transport.rendezvous import NO_DOOR, GivenUpError, forget, meet
from objcomm._transport.streams import StreamLink
from objcomm._world import CONNECT_MAX

if TYPE_CHECKING:
    from objcomm._transport.link import Connections, Deadline
    from objcomm._transport.rendezvous import MeetingState


# How often a rank that waits for connections looks whether another one has none.
_LOOK_SECONDS = 0.2

# So many ranks are all connected when they meet. More only make a tree then, which shows that all
# can be; two others are connected when one of them first sends to the other, or waits for it. To
# connect all of 64 ranks of a host took 2 cores 0.5 s.
_AT_ONCE_MAX = 16

# What a rank says after its word, when all others have said theirs.
_COMPLETE = b"!"
# The key that says that ranks can't be connected by streams.
_FAILED = "no streams"


def connect(
    store: dist.Store,
    rank: int,
    members: tuple[int, ...],
    deadline: Deadline,
    meeting: MeetingState,
) -> Connections:
    """Meet the other ranks, and connect to each; every member must call this.

    May block in C++ up to the limit.

    Args:
        store: a connection to it that no other thread uses, with a prefix that is theirs alone.
        rank: this one, within the group.
        members: those that it joins, as ranks within the group.
        deadline: how long to wait.
        meeting: tells others how far it has come.

    Raises:
        GivenUpError: ``meeting`` was ended from outside.
        LeftError: as ``meet``.
        WireError: as ``meet``.
        DistNetworkError: the store is gone.
        LinkClosed: another rank was lost, or does not answer.
        LinkError: this process can't connect to any.
    """
    place, size = members.index(rank), len(members)
    with contextlib.ExitStack() as open_doors:
        door = Door.opened(size, own_address(store)) if deadline.settings.is_local else None
        if door is not None:
            open_doors.enter_context(door)
        told = NO_DOOR if door is None else door.place.told()
        met = meet(store, place, size, meeting, told)
        named = dist.PrefixStore(f"objcomm/{meeting.nonce}", store)
        link = None
        if door is not None and NO_DOOR not in met.doors:
            places = dict(zip(members, map(Place.of, met.doors), strict=True))
            if len(set(met.hosts)) == 1 or all(each.port for each in places.values()):
                hosts = dict(zip(members, met.hosts, strict=True))
                doors = Doors(door, places, hosts, rank, meeting)
                link = _joined(_Joining(doors, named, deadline, meeting))
    if link is not None:
        forget(store, meeting.nonce, size, ())
        return link
    far = GlooLink(named, rank, members, met.hosts, deadline)
    left = [_FAILED, *keys_left(size)]
    forget(store, meeting.nonce, size, [f"objcomm/{meeting.nonce}/{key}" for key in left])
    return far


def _joined(joining: _Joining) -> StreamLink | None:
    """The link over streams; None if some two ranks can't be connected so."""
    try:
        joining.connect()
        link = joining.link()
        joining.complete(link)
    except OSError:
        joining.give_up()
        return None
    except BaseException:
        joining.close()
        raise
    return link


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

    def connect(self) -> None:
        """Return when there is a socket to each neighbour; others may not have all of theirs.

        Raises:
            OSError: some two ranks can't be connected.
            GivenUpError: nobody waits for them any more.
        """
        for peer in self._neighbours:
            if peer < self._doors.rank:
                end, unsaid = self._doors.call(peer, max(0.1, self._until - time.monotonic()))
                self._add(_Guest(end, peer, unsaid))
        for listener in self._doors.listeners:
            self._events.register(listener, select.POLLIN)
        while len(self._joined) < len(self._neighbours):
            self._look()

    def link(self) -> StreamLink:
        """What it takes to use the sockets, before anybody relies on it.

        Raises:
            OSError: this process has no room for it.
        """
        doors, joined = self._doors, sorted(self._joined.items())
        sockets = {peer: each.socket for peer, each in joined}
        is_all = len(sockets) == len(doors.others)
        return StreamLink(
            doors.rank,
            sockets,
            doors.hosts,
            doors=None if is_all else doors,
            listeners=[] if is_all else [each.dup() for each in doors.listeners],
            lost_seconds=self._lost_seconds,
        )

    def complete(self, link: StreamLink) -> None:
        """Return when all ranks have all of theirs, and what it takes to use them.

        Who can't says nothing and closes its sockets, so that no rank gets the word of all. Who has
        said it can't take it back. In a tree each says it to its parent for all below, and the
        first rank to all.

        Args:
            link: what this rank will use; gets who has called meanwhile.

        Raises:
            OSError: another rank could not, so that no rank can.
            LinkClosed: another rank said nothing.
            GivenUpError: nobody waits for them any more.
        """
        has_said = False
        try:
            for told, awaited in self._rounds:
                for peer in told:
                    has_said = True
                    self._joined[peer].socket.sendall(_COMPLETE)
                while any(len(self._joined[peer].said) == Doors.word_nbytes for peer in awaited):
                    self._look()
        except TimeoutError as error:
            why = HOST_LOST if error.errno else PEER_LOST  # the system's own limit
            raise LinkClosed(f"{why} (it did not connect in time)") from error
        except OSError as error:
            if not has_said or self._store.check([_FAILED]):
                raise
            # Others may have all words by now, and use the link.
            raise LinkClosed(f"{PEER_LOST} (its connection ended when all had met)") from error
        for each in self._guests.values():
            if each.rank in self._joined:
                continue
            if len(self._neighbours) < len(self._doors.others):  # it may want to use the link
                link.hear(each.socket, each.said)
            else:  # a stranger
                each.socket.close()

    def give_up(self) -> None:
        """Let the others know that no rank gets all of its connections."""
        try:
            self._store.set(_FAILED, "")  # first: who sees a socket close looks for it
        finally:
            self.close()

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
        try:
            came = guest.socket.recv(due - len(guest.said))
        except OSError:
            if guest.rank >= 0:
                raise
            came = b""  # a stranger, who has left
        guest.said += came
        if came and len(guest.said) < due:
            return
        if guest.rank in self._joined:
            if not came:
                raise ConnectionAbortedError  # it has given up
            self._events.unregister(guest.socket)
        elif guest.rank >= 0:
            if not came or not secrets.compare_digest(
                guest.said, self._doors.word_from(guest.rank)
            ):
                raise ConnectionAbortedError  # it does not answer, or wrongly
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
        guest.socket.sendall(self._doors.word_to(peer))
        return True


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
